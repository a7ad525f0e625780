"""The data of an explanation: what `explain` collects, and the terminal and the page show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilefold.algebra.fold import Check, Fold, Step
from tilefold.errors import SourceLoc
from tilefold.explanation.names import ranked
from tilefold.explanation.rules import Rules
from tilefold.explanation.traffic import Traffic
from tilefold.tensor.ir import Compute

Kind = Literal["fused", "library"]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch. `bytes` is what it is predicted to read and write.

    `predicted`: seconds that `bytes` take at the memory's bandwidth, the least time of a kernel that reads them from
    memory; None without a machine. `seconds`: measured, None where nothing was. `calls`: operators of a library call.
    `members`: the statements of the program (after simplification) that it computes. `grid`: tiles
    of its parallel dims, `i:64`. `listing`, `tile`, `source`: its block program, tile kernel and code
    (in `language`), empty for a library call. `signature`: equal for kernels that differ in names only.
    """

    name: str
    members: tuple[str, ...]
    kind: Kind
    grid: str
    bytes: int
    listing: str
    tile: str
    source: str
    signature: str
    renaming: Mapping[str, str]
    language: str = "C++"
    calls: tuple[str, ...] = ()
    predicted: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class FoldReport:
    """One pass over shared axes. `cascade`: its reductions as the program has them, maps substituted.

    `fold` is what runs, with guards; `delayed` the same without guards, and `paper` the form in which
    no factor is moved to the end (RedFuser eq. 16): both are for reading. `parallel`: dims for each
    of whose values the fold is computed.
    """

    kernel: str
    cascade: tuple[Compute, ...]
    parallel: tuple[str, ...]
    fold: Fold
    delayed: Fold
    paper: Fold

    @property
    def derivation(self) -> tuple[Step, ...]:
        return self.fold.derivation

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.fold.checks

    @property
    def trivial(self) -> bool:
        """A single reduction, or several independent ones: nothing has to be repaired."""
        return all(v.repair is None for v in self.fold.state)


@dataclass(frozen=True, slots=True)
class RejectionReport:
    """Something that was not fused or not compiled. `kind` says at which step."""

    kind: Literal["pass", "kernel", "fallback", "earlier"]
    subject: str
    reason: str
    loc: SourceLoc | None = None


#: A rejection's kind in words.
WHERE = {
    "pass": "one more pass",
    "kernel": "separate kernels",
    "fallback": "left to PyTorch",
    "earlier": "compiled by an earlier process",
}


@dataclass(frozen=True, slots=True)
class Node:
    """A box of a dataflow: an operator or statement. `group`: the kernel or the repeated sequence around it, if any."""

    name: str
    title: str
    text: str
    role: Literal["input", "op", "kernel", "output"]
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor from one box to another. `via`: "memory", "chip", or "boundary" (an argument or result)."""

    source: str
    target: str
    tensor: str
    via: Literal["memory", "chip", "boundary"]
    bytes: int


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Boxes and edges of a drawing; `groups`: caption by group. `omitted` says what is not drawn. `repeated`: the group
    that is no kernel but a sequence of boxes that stands for several equal ones."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    groups: Mapping[str, str]
    omitted: str = ""
    repeated: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """A program compiled as a whole. `operators`: pieces that eager runs. `program`: its index notation.

    `syms`: the values of its symbols that byte counts are for. `rules`: its block program, rule by rule.
    """

    name: str
    program: str
    operators: int
    kernels: tuple[KernelReport, ...]
    folds: tuple[FoldReport, ...]
    rejections: tuple[RejectionReport, ...]
    traffic: Traffic
    before: Dataflow
    after: Dataflow
    syms: Mapping[str, int]
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True)
class Alike:
    """Kernels that differ in names only: the first of them, and how many there are. `seconds`: of all, if measured."""

    first: KernelReport
    count: int
    region: Region
    seconds: float | None = None


def alike(regions: tuple[Region, ...]) -> tuple[Alike, ...]:
    """All kernels, those with equal signatures together, in order of first appearance."""
    found: dict[tuple[str, str], Alike] = {}
    for region, k in _kernels(regions):
        key = (k.kind, k.signature)
        old = found.get(key)
        total = k.seconds if old is None or old.seconds is None or k.seconds is None else old.seconds + k.seconds
        found[key] = Alike(k, 1, region, total) if old is None else Alike(old.first, old.count + 1, old.region, total)
    return tuple(found.values())


def same_reason(found: Sequence[RejectionReport], *, lines: bool) -> tuple[tuple[RejectionReport, ...], ...]:
    """Rejections whose reasons differ in the numbers of names only (`mm_9`, `j1`), as those of equal layers do.

    lines: only those of one line of the user's.
    """
    together: dict[tuple[str, str, str], list[RejectionReport]] = {}
    for r in found:
        numbered = {w for w in re.findall(r"\w+", r.reason) if re.search(r"[a-z]_?\d+$", w) or len(w) == 1}
        together.setdefault((r.kind, ranked(r.reason, numbered), str(r.loc) if lines else ""), []).append(r)
    return tuple(map(tuple, together.values()))


def _kernels(regions: tuple[Region, ...]) -> Iterator[tuple[Region, KernelReport]]:
    for r in regions:
        for k in r.kernels:
            yield r, k
