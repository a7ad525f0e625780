"""Bytes that a program moves to and from memory, before and after fusion, tensor by tensor.

The rule, for both sides: whoever runs as one piece (an operator before, a kernel after) reads every
element that it touches of each tensor once, and writes each of its results once. What a kernel
touches again is taken to come from cache. Nothing here is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from tilefold.algebra.expr import Expr, Load, dims_used, tensors_read, walk
from tilefold.block.ir import Block, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import shape_function

Role = Literal["input", "intermediate", "output"]


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """One tensor: `before` and `after` are bytes read plus bytes written. A `part` exists only after fusion."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows in program order. All counts are bytes."""

    rows: tuple[TensorTraffic, ...]

    @property
    def before(self) -> int:
        return sum(r.before for r in self.rows)

    @property
    def after(self) -> int:
        return sum(r.after for r in self.rows)

    @property
    def saved(self) -> float:
        """Share of the bytes before that fusion avoids (negative where it moves more)."""
        return 1 - self.after / self.before if self.before else 0.0

    @property
    def change(self) -> str:
        """`33% less`, `4% more` or `the same`."""
        if abs(self.saved) < 0.005:
            return "the same"
        return f"{abs(self.saved):.0%} {'less' if self.saved > 0 else 'more'}"


@dataclass(frozen=True, slots=True)
class Operator:
    """What eager runs as one piece: the statements of one ATen call, or one statement without an origin."""

    name: str
    title: str
    members: tuple[Compute, ...]

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(r for c in self.members for r in c.results)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that one piece reads and writes, by tensor."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Sizes:
    """Extents of dims and sizes of tensors (of `p` and of the blocks made from it) for given symbol values."""

    def __init__(self, p: Program, syms: Mapping[str, int], blocks: Iterable[Block] = ()):
        dims: dict[str, Expr] = dict(p.sizes)
        shapes = {i.name: (i.dtype, i.shape) for i in p.inputs}
        shapes |= {r: (p.dtype_of(r), p.shape_of(r)) for c in p.body for r in c.results}
        for b in blocks:
            dims |= b.sizes
            shapes |= {i.name: (i.dtype, i.shape) for i in b.inputs if i.name not in shapes}
            shapes |= {r.name: (r.dtype, tuple(b.sizes[d] for d in r.dims)) for r in b.results if r.name not in shapes}
        self.dims = dict(zip(dims, shape_function(tuple(dims.values()))(syms), strict=True))
        self.shape = {t: tuple(shape_function(s)(syms)) for t, (_, s) in shapes.items()}
        self.dtype = {t: d for t, (d, _) in shapes.items()}

    def nbytes(self, tensor: str) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape[tensor]) * self.dtype[tensor].nbytes

    def touched(self, tensor: str, found: Iterable[Load]) -> int:
        """Bytes of the elements that these loads of a tensor can touch: at most all of it."""
        points = 0
        for ld in dict.fromkeys(found):
            inner = frozenset().union(*(dims_used(ix) for ix in ld.index)) if ld.index else frozenset()
            points += prod(self.dims[d] for d in inner)
        return min(self.nbytes(tensor), points * self.dtype[tensor].nbytes)


def operators(p: Program) -> tuple[Operator, ...]:
    """The statements of a program grouped by the ATen call that they came from; views go to what they look at."""
    out: list[Operator] = []
    for c in p.body:
        made = next((n for n, op in enumerate(out) if _is_view(c) and tensors_read(c.body) <= set(op.results)), None)
        if made is not None:
            out[made] = Operator(out[made].name, out[made].title, (*out[made].members, c))
            continue
        base = _node_name(c)
        if base is not None and out and out[-1].name == base and out[-1].members[0].loc == c.loc:
            out[-1] = Operator(base, out[-1].title, (*out[-1].members, c))
        else:
            out.append(Operator(base or c.name, operator_title(c), (c,)))
    return tuple(out)


_VIEW_LIST = """
view reshape unsafe_view permute transpose t expand squeeze unsqueeze select slice alias detach unbind split
split_with_sizes unfold as_strided
"""
_VIEWS = frozenset(_VIEW_LIST.split())


def _is_view(c: Compute) -> bool:
    """A statement that only renames elements for an operator that moves nothing when it runs eagerly."""
    return c.reducer is None and isinstance(c.body, Load) and _aten_name(c.origin) in _VIEWS


def operator_title(c: Compute) -> str:
    """`softmax` for `aten._softmax.default`; the reducer, or `map`, of a statement without an origin."""
    return _aten_name(c.origin) if c.origin else (c.reducer or "map")


def _aten_name(origin: str) -> str:
    parts = origin.removeprefix("torch.ops.").split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def _node_name(c: Compute) -> str | None:
    """FX node that a statement belongs to: its name starts with the node's (`softmax_1` of `softmax_1_max`)."""
    if not c.origin:
        return None
    m = re.match(rf"_*{re.escape(_aten_name(c.origin))}(?:_\d+)?(?=_|$)", c.name)
    return m[0] if m else None


def operator_access(op: Operator, p: Program, sizes: Sizes) -> Access:
    """What one operator moves when it runs alone."""
    mine = set(op.results)
    found = [n for c in op.members for n in walk(c.body) if isinstance(n, Load) and n.tensor not in mine]
    inside = {c.name for c in op.members}
    used = {n.tensor for c in p.body if c.name not in inside for n in walk(c.body) if isinstance(n, Load)}
    kept = [r for r in op.results if r in used or r in p.outputs]
    return Access(_reads(found, sizes), {r: sizes.nbytes(r) for r in kept})


def block_access(b: Block, sizes: Sizes) -> Access:
    """What one kernel moves."""
    tensors = {i.name for i in b.inputs}
    exprs = [e for n in walk_nodes(b.body) for e in exprs_of(n)]
    found = [n for e in exprs for n in walk(e) if isinstance(n, Load) and n.tensor in tensors]
    return Access(_reads(found, sizes), {r.name: sizes.nbytes(r.name) for r in b.results})


def _reads(found: Iterable[Load], sizes: Sizes) -> dict[str, int]:
    by_tensor: dict[str, list[Load]] = {}
    for ld in found:
        by_tensor.setdefault(ld.tensor, []).append(ld)
    return {t: sizes.touched(t, ls) for t, ls in by_tensor.items()}


def compare(p: Program, before: Iterable[Access], after: Iterable[Access], sizes: Sizes) -> Traffic:
    """The table of all tensors that either side moves."""
    sums: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for side, accesses in zip(sums, (before, after), strict=True):
        for a in accesses:
            for table in (a.reads, a.writes):
                for t, n in table.items():
                    side[t] = side.get(t, 0) + n
    known = [*(i.name for i in p.inputs), *(r for c in p.body for r in c.results)]
    names = [*known, *(t for t in sums[1] if t not in set(known))]
    inputs = {i.name for i in p.inputs}
    rows = []
    for t in names:
        if t in sums[0] or t in sums[1]:
            role: Role = "input" if t in inputs else "output" if t in p.outputs else "intermediate"
            dtype = sizes.dtype[t].value
            rows.append(TensorTraffic(t, role, dtype, sizes.shape[t], sums[0].get(t, 0), sums[1].get(t, 0)))
    return Traffic(tuple(rows))


def human_time(seconds: float) -> str:
    """Seconds for people: `12.3 us`."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def human(n: float) -> str:
    """Bytes for people: `1.5 MB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or abs(n) >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
