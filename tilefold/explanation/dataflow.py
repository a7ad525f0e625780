"""The two drawings of a program: its operators before fusion, its kernels after.

Before, every operator is a box and every tensor between two operators goes through memory. After,
every statement is a box, kernels are frames, and only tensors between frames go through memory
(Blockbuster's buffered and unbuffered edges). Of equal layers one is drawn: each drawing is searched for a sequence
of boxes that repeats itself, each round reading what the one before it made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Load, tensors_read, walk
from tilefold.block.fuse import FusedKernel
from tilefold.explanation.model import Dataflow, Edge, Node
from tilefold.explanation.names import cascade_signature, repeats
from tilefold.explanation.traffic import Operator, Sizes, operators
from tilefold.tensor.ir import Compute, Program

_TIGHT = re.compile(r", (?=[^\[\]]*\])")
#: Drawings of more kernels, or operators, than this are searched for a repeated sequence.
LONG = 6
#: The group of the boxes of a repeated sequence; no tensor has this name.
REPEATED = "×"
#: Of programs of more statements than this, kernels are drawn as boxes, not as frames.
MANY = 24
#: Of more arguments than this, those that a single box reads are not drawn.
ARGUMENTS = 6


#: Name, title, statements and group of a box.
Boxed = tuple[str, str, tuple[Compute, ...], str | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel or an operator. `signature`: equal for pieces that differ in names only; `results` of such pieces
    correspond in order."""

    signature: str
    results: tuple[str, ...]
    reads: frozenset[str]


@dataclass(frozen=True, slots=True)
class Shown:
    """Which pieces are drawn. `alias`: tensor of a piece left out -> its counterpart in a drawn one. `rounds`: how
    often the drawn pieces `repeated` follow each other."""

    kept: tuple[int, ...]
    alias: Mapping[str, str]
    repeated: range = range(0)
    rounds: int = 1


def choose(pieces: Sequence[Piece]) -> Shown:
    """All pieces, or of many that repeat themselves one round and what is around it."""
    found = repeats([p.signature for p in pieces]) if len(pieces) > LONG else []
    for start, period, times in found:
        rounds = [pieces[k : k + period] for k in range(start, start + times * period, period)]
        if all(_feeds(a, b) for a, b in pairwise(rounds)):
            break
    else:
        return Shown(tuple(range(len(pieces))), {})
    alias = {
        mine: first
        for later in rounds[1:]
        for p, twin in zip(later, rounds[0], strict=True)
        for mine, first in zip(p.results, twin.results, strict=True)
    }
    one = range(start, start + period)
    kept = (*range(one.stop), *range(start + times * period, len(pieces)))
    return Shown(kept, alias, one, times)


def _feeds(one: Sequence[Piece], following: Sequence[Piece]) -> bool:
    """Whether a round reads what the one before it made: layers do, equal branches beside each other do not."""
    made = {r for p in one for r in p.results}
    return any(made & p.reads for p in following)


def kernel_pieces(kernels: Sequence[FusedKernel], signed: Sequence[tuple[str, Mapping[str, str]]]) -> list[Piece]:
    """The kernels, with what `names.signature` says of each."""
    out = []
    for k, (text, names) in zip(kernels, signed, strict=True):
        results = sorted((r.name for r in k.block.results), key=lambda n: int(names[n][1:]))
        out.append(Piece(text, tuple(results), frozenset(i.name for i in k.block.inputs)))
    return out


def operator_piece(op: Operator, sizes: Sizes) -> Piece:
    """An operator; equal ones have equal statements and shapes."""
    shapes = ", ".join(_shape(sizes, r) for r in op.results)
    return Piece(f"{op.title} {shapes} {cascade_signature(op.members)}", op.results, frozenset(_read(op.members)))


def after(p: Program, kernels: Sequence[FusedKernel], sizes: Sizes, shown: Shown) -> Dataflow:
    """Statements in frames, a frame for each kernel (one for both kernels of a split fold); of many statements a box
    for each kernel."""
    groups: dict[str, str] = {}
    of: dict[str, str] = {}
    again = set[str]()
    for k in shown.kept:
        members = kernels[k].plan.group.members
        group = members[-1]
        groups[group] = kernels[k].block.name if group not in groups else f"{groups[group]} + {kernels[k].block.name}"
        of.update(dict.fromkeys(members, group))
        again |= {group} if k in shown.repeated else set()
    drawn = [c for c in p.body if c.name in of]
    if len(drawn) > MANY:
        whole = [
            (g, caption, tuple(c for c in drawn if of[c.name] == g), REPEATED if g in again else None)
            for g, caption in groups.items()
        ]
        return _flow(p, whole, _caption(shown), sizes, shown, "kernel", "kernels")
    boxes = [(c.name, c.reducer or "map", (c,), of[c.name]) for c in drawn]
    return _flow(p, boxes, groups, sizes, shown, what="kernels")


def before(p: Program, sizes: Sizes) -> Dataflow:
    """The operators of the program as it was given, one box each."""
    found = operators(p)
    shown = choose([operator_piece(op, sizes) for op in found])
    boxes = [
        (found[k].name, found[k].title, found[k].members, REPEATED if k in shown.repeated else None) for k in shown.kept
    ]
    return _flow(p, boxes, _caption(shown), sizes, shown)


def _caption(shown: Shown) -> dict[str, str]:
    return {REPEATED: f"×{shown.rounds}"} if shown.repeated else {}


def _flow(
    p: Program,
    boxes: Sequence[Boxed],
    groups: Mapping[str, str],
    sizes: Sizes,
    shown: Shown,
    role: Literal["op", "kernel"] = "op",
    what: str = "operators",
) -> Dataflow:
    owner = {r: name for name, _, members, _ in boxes for c in members for r in c.results}
    group = {name: g for name, _, _, g in boxes}
    inputs = {i.name for i in p.inputs}
    hidden = _private(inputs, boxes)
    nodes = [
        Node(name, title, _text(p, members, role == "kernel" or g not in (None, REPEATED), sizes), role, g)
        for name, title, members, g in boxes
    ]
    used: dict[str, None] = {}
    edges: dict[tuple[str, str, str], Edge] = {}
    for name, _, members, g in boxes:
        for t in _read(members):
            source = shown.alias.get(t, t) if t not in owner and t not in inputs else t
            if source in hidden:
                continue
            if source in inputs:
                used[source] = None
                edges[(f"in {source}", name, source)] = Edge(
                    f"in {source}", name, source, "boundary", sizes.nbytes(source)
                )
            elif source in owner and owner[source] != name:
                inside = g not in (None, REPEATED) and group[owner[source]] == g
                key = (owner[source], name, source)
                edges[key] = Edge(*key, "chip" if inside else "memory", sizes.nbytes(source))
    nodes = [Node(f"in {i}", i, _shape(sizes, i), "input") for i in used] + nodes
    for t in p.outputs:
        if t in owner:
            nodes.append(Node(f"out {t}", t, _shape(sizes, t), "output"))
            edges[(owner[t], f"out {t}", t)] = Edge(owner[t], f"out {t}", t, "boundary", sizes.nbytes(t))
    kept = _acyclic([n.name for n in nodes], list(edges.values()))
    count = f"{len(hidden)} arguments that a single box reads are not drawn" if hidden else ""
    one = shown.repeated
    folded = f"{what} {one.start + 1} to {one.stop} are repeated ×{shown.rounds}, drawn once" if one else ""
    omitted = "; ".join(x for x in (folded, count) if x)
    return Dataflow(tuple(nodes), kept, dict(groups), omitted, REPEATED if REPEATED in groups else "")


def _private(inputs: set[str], boxes: Sequence[Boxed]) -> set[str]:
    """Arguments left out of a drawing of many: weights, mostly."""
    readers = Counter(t for _, _, members, _ in boxes for t in _read(members) if t in inputs)
    return {t for t, n in readers.items() if n == 1} if len(readers) > ARGUMENTS else set()


def _acyclic(order: Sequence[str], edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Edges that go forward in program order: those from an earlier round of a repeated sequence do not."""
    at = {n: i for i, n in enumerate(order)}
    return tuple(e for e in edges if at[e.source] < at[e.target])


def _read(members: Iterable[Compute]) -> tuple[str, ...]:
    members = tuple(members)
    mine = {r for c in members for r in c.results}
    found = (n.tensor for c in members for n in walk(c.body) if isinstance(n, Load))
    return tuple(dict.fromkeys(t for t in found if t not in mine))


def _shape(sizes: Sizes, tensor: str) -> str:
    extents = "×".join(map(str, sizes.shape[tensor])) or "scalar"
    return f"{sizes.dtype[tensor].value} {extents}"


def _text(p: Program, members: Sequence[Compute], inside_kernel: bool, sizes: Sizes) -> str:
    """In a kernel the statement; of an ATen operator the tensors that it leaves in memory."""
    if inside_kernel or not members[0].origin:
        return "\n".join(map(statement, members))
    inside = {c.name for c in members}
    used = {t for c in p.body if c.name not in inside for t in tensors_read(c.body)} | set(p.outputs)
    kept = [r for c in members for r in c.results if r in used]
    return "\n".join(f"{r}: {_shape(sizes, r)}" for r in kept)


def statement(c: Compute) -> str:
    """`m[i] = max[j] x[i,j]`, indices without spaces."""
    head = f"{c.reducer}[{', '.join(c.rdims)}] " if c.reducer else ""
    dims = f"[{','.join(c.dims)}]" if c.dims else ""
    return f"{c.name}{dims} = {head}{_TIGHT.sub(',', expr_text.show(c.body))}"
