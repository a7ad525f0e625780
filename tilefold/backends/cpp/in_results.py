"""Tiles that live in the result that is made of them.

Law: a tile that one map writes, that reductions and maps read at their own element, and that one store of the same
statement list turns into a result of its type, element by element, may be kept where that result will be: nothing else
reads or writes the result. The memory of a result that does not fit the caches is then fetched while the map computes
(a softmax's exponentials), and the tile needs none of its own.

Side conditions: the result is no other statement's; the store's index is the tile's dims, so that each element has its
own place; a reduction reads the tile (else the map is computed together with the store, and kept nowhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.expr import Expr, Index, Load, loads, substitute
from tilefold.tile.ir import Alloc, Buffer, For, Kernel, Map, Reduce, Stmt, Store, TensorParam
from tilefold.tile.uses import count_writes, every, expressions


def in_results(kernel: Kernel) -> Kernel:
    """`kernel` with such tiles written to and read from their results."""
    outs = {t.name: t for t in kernel.tensors if t.role == "out"}
    return replace(kernel, body=_kept(kernel.body, kernel.body, outs))


def _kept(body: tuple[Stmt, ...], whole: Sequence[Stmt], outs: dict[str, TensorParam]) -> tuple[Stmt, ...]:
    body = tuple(replace(s, body=_kept(s.body, whole, outs)) if isinstance(s, For) else s for s in body)
    for alloc in [s for s in body if isinstance(s, Alloc)]:
        store = _place(alloc.buffer, body, whole, outs)
        if store is not None:
            body = tuple(_moved(s, alloc.buffer, store) for s in body if s != alloc)
            outs = {name: t for name, t in outs.items() if name != store.tensor}  # it has room for one tile
    return body


def _place(b: Buffer, body: Sequence[Stmt], whole: Sequence[Stmt], outs: dict[str, TensorParam]) -> Store | None:
    """The store whose result may hold `b`; None where there is none."""
    own = Load(b.name, tuple(map(Index, b.dims)))
    uses = [s for s in body if not isinstance(s, Alloc | For) and _reads(s, b.name)]
    if not uses or not b.dims or any(not isinstance(s, Map | Reduce | Store) for s in uses):
        return None
    store = uses[-1]
    makers = [s for s in body if isinstance(s, Map) and s.buf == b.name]
    if not isinstance(store, Store) or len(makers) != 1 or count_writes(whole)[b.name] != 1 or makers[0] in uses:
        return None
    nested = [e for s in body if isinstance(s, For) for e in expressions((s,))]
    if any(x.tensor == b.name for e in nested for x in loads(e)) or body.index(makers[0]) > body.index(uses[0]):
        return None
    if any(x != own for s in uses for e in expressions((s,)) for x in loads(e) if x.tensor == b.name):
        return None
    result = outs.get(store.tensor)
    if result is None or result.dtype is not b.dtype or result.unit_axis is None or not _alone(store, whole):
        return None
    plain = all(isinstance(e, Index) for e in store.index) and len(store.index) == len(b.dims)
    if not plain or set(store.index) != set(own.index) or store.index[result.unit_axis] != own.index[-1]:
        return None
    return store if any(isinstance(s, Reduce) for s in uses) else None


def _reads(s: Stmt, name: str) -> bool:
    return any(x.tensor == name for e in expressions((s,)) for x in loads(e))


def _alone(store: Store, whole: Sequence[Stmt]) -> bool:
    """Whether `store` is the only statement that touches its tensor."""
    touched = [x.tensor for e in expressions(whole) for x in loads(e)]
    stored = [s.tensor for s in every(whole) if isinstance(s, Store)]
    return store.tensor not in touched and stored.count(store.tensor) == 1


def _moved(s: Stmt, b: Buffer, store: Store) -> Stmt:
    table: dict[Expr, Expr] = {Load(b.name, tuple(map(Index, b.dims))): Load(store.tensor, store.index)}
    match s:
        case Map(buf, expr) if buf == b.name:
            return Store(store.tensor, store.index, b.dims, expr)
        case Map() | Reduce() | Store():
            return replace(s, expr=substitute(s.expr, table))
    return s
