"""Values of whole rows that a block program has on both sides of a reduction of them.

Between two reductions a compiler computes a row element by element, and no value needs more registers than an element
of it. What was read or computed in front of a reduction and is used behind it is there for all of the row at once:

    m = max x;  e = exp(x - m);  s = sum e;  y = e / s        x crosses the maximum, e the sum: one at a time
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Load, dims_used, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of

#: Bytes of a register.
REGISTER = 4


@dataclass(slots=True)
class _Value:
    registers: float
    first: int
    last: int


def crossing(
    b: Block, d: str, lanes: Mapping[str, int], *, whole: bool = True, apart: Collection[str] = frozenset()
) -> float:
    """Registers of a thread block for what crosses reductions of d, at the worst of them. lanes: elements of each dim
    that a block has at a time (absent: one). whole: of all of the program, as for rows that are held; else of each loop
    over d. apart: dims of which each index is reduced by itself, one after the other: what the last of these
    reductions reads crosses the first."""
    kinds = {i.name: i.dtype for i in b.inputs}
    bodies = [list(_statements(b.body))] if whole else [list(_statements(x.body)) for x in _loops(b.body, d)]
    return max((_most(body, d, lanes, kinds, frozenset(apart)) for body in bodies), default=0.0)


def _most(
    body: Sequence[Node], d: str, lanes: Mapping[str, int], kinds: Mapping[str, DType], apart: frozenset[str]
) -> float:
    """See `crossing`."""
    values = _values(body, lanes, kinds, d)
    ends = {  # and whether it is several
        at: not apart.isdisjoint(dims_used(n.expr) - {*n.rdims})
        for at, n in enumerate(body)
        if isinstance(n, Let | Accumulate) and d in n.rdims
    }
    crossed = (sum(v.registers for v in values if v.first <= at < v.last + several) for at, several in ends.items())
    return max(crossed, default=0.0)


def between(b: Block, lanes: Mapping[str, int], least: int) -> float:
    """Registers of a thread block for what statements leave to later ones, where that is the most, of `least` values or
    more: of so many statements a compiler does not compute one element after the other, as of few. lanes: as of
    `crossing`."""
    body = list(_statements(b.body))
    values = _values(body, lanes, {i.name: i.dtype for i in b.inputs})
    kept, held, most = 0, 0.0, 0.0
    changes: dict[int, list[tuple[int, float]]] = {}
    for v in values:
        changes.setdefault(v.first, []).append((1, v.registers))
        changes.setdefault(v.last, []).append((-1, -v.registers))
    for at in sorted(changes):
        for one, registers in changes[at]:
            kept, held = kept + one, held + registers
        if kept >= least:
            most = max(most, held)
    return most


def _values(
    body: Sequence[Node], lanes: Mapping[str, int], kinds: Mapping[str, DType], along: str | None = None
) -> Collection[_Value]:
    """What statements read of inputs, and compute for later ones; along: what varies with this dim alone, and is no
    reduction."""
    values: dict[object, _Value] = {}

    def registers(dims: Collection[str], nbytes: int = REGISTER) -> float:
        return min(1.0, nbytes / REGISTER) * math.prod(lanes.get(x, 1) for x in dims)

    for at, n in enumerate(body):
        for ld in _read(n):
            if ld.tensor in kinds and (along is None or along in dims_used(ld)):
                values.setdefault(ld, _Value(registers(dims_used(ld), kinds[ld.tensor].nbytes), at, at)).last = at
            elif ld.tensor in values:
                values[ld.tensor].last = at
        if isinstance(n, Let) and (along is None or (along in n.dims and not n.rdims)):
            values[n.name] = _Value(registers(n.dims), at, at)
    return values.values()


def _read(n: Node) -> Iterator[Load]:
    exprs: Collection[Expr] = (n.expr,) if isinstance(n, Store) else exprs_of(n)
    for e in exprs:
        yield from loads(e)


def _statements(nodes: Iterable[Node]) -> Iterator[Node]:
    for n in nodes:
        if isinstance(n, Loop):
            yield from _statements(n.body)
        elif isinstance(n, Let | Accumulate | Update | Store | Init):
            yield n


def _loops(nodes: Iterable[Node], d: str) -> Iterator[Loop]:
    for n in nodes:
        if isinstance(n, Loop):
            yield from (n,) if n.kind == "for" and n.dim == d else _loops(n.body, d)
