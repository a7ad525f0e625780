"""Which results a kernel may write over what it reads.

Law: a kernel that reads a tensor only at elements that the same thread block writes, each for the last time before it
writes it, and writes each element once, does not read what it has written. If nothing reads the tensor afterwards, the
result needs no memory of its own. Maps are such kernels, and so are rows that are reduced and then written again (the
gradient of logits, from their log-sum-exp).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from tilefold.algebra.expr import Const, Expr, Index, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk
from tilefold.tensor.index_simplify import is_one

#: Elements of a row from which on no two threads of a block read the same one: as many as a block has threads at most.
#: Where several do, one may read what another has written already.
THREADS = 1024


def overwritable(b: Block) -> tuple[tuple[str, str], ...]:
    """(result, input) pairs: a result that is written once, and an input of its type that it may be written over.

    Parallel loops are over dims of the result, so that no element is computed twice. Of pairs with one input, one may
    be taken.
    """
    nodes = list(walk(b.body))
    written = {r.name: r for r in b.results}
    found: list[tuple[str, str]] = []
    for at, store in enumerate(nodes):
        if (
            not isinstance(store, Store)
            or store.added
            or sum(isinstance(n, Store) and n.tensor == store.tensor for n in nodes) > 1
        ):
            continue
        own = {i.dim for i in store.index if isinstance(i, Index)}
        around = {n.dim for n in nodes if isinstance(n, Loop) and (n.kind == "forall" or _within(store, n))}
        if len(own) != len(store.index) or not around <= own:
            continue
        if not _maps(nodes) and not _wide(
            b, own - {n.dim for n in nodes if isinstance(n, Loop) and n.kind == "forall"}
        ):
            continue
        dtype = written[store.tensor].dtype
        same = {i.name for i in b.inputs if i.dtype is dtype and len(i.shape) == len(store.index)}
        here, after = _reads(nodes[: at + 1], ()), _reads(nodes[at + 1 :], nodes)
        elsewhere = {t for t, index in here | after if index != store.index} | {t for t, _ in after}
        found += [
            (store.tensor, i.name) for i in b.inputs if i.name in same - elsewhere and (i.name, store.index) in here
        ]
    return tuple(found)


def replaceable(b: Block) -> tuple[tuple[str, str], ...]:
    """(result, input) pairs of a kernel that computes every element by itself, and evaluates each of its maps once.

    Law: if every read of an input is at the element that a result has, and in what that result is computed from, all of
    it comes before the store, in whatever order a back end has the kernel's stores: the result may take the input's
    place. Of pairs with one result or one input, one may be taken.

    Side conditions: every dim is a parallel loop's, so that maps are not computed again (`tile.again`) nor elements
    twice; both have one type; no index is data, so that the kernel cannot fail after it has written.
    """
    nodes = [n for n in walk(b.body) if not isinstance(n, Loop)]
    dims = {n.dim for n in walk(b.body) if isinstance(n, Loop)}
    if not _maps(list(walk(b.body))) or any(isinstance(n, Let) and not dims.issuperset(n.dims) for n in nodes):
        return ()
    reads = [(ld, n) for n in nodes for e in exprs_of(n) for ld in loads(e)]
    if any(True for ld, _ in reads for e in ld.index for _ in loads(e)):
        return ()
    shapes = {i.name: tuple(i.shape) for i in b.inputs}
    shapes |= {r.name: tuple(b.sizes[d] for d in r.dims) for r in b.results}
    maps = {n.name: n for n in nodes if isinstance(n, Let)}
    dtypes = {r.name: r.dtype for r in b.results}
    long = {d for d in dims if not is_one(b.sizes[d])}
    stores = [n for n in nodes if isinstance(n, Store)]
    written = Counter(n.tensor for n in stores)
    found: list[tuple[str, str]] = []
    for store in stores:
        place = _place(store.index, shapes[store.tensor])
        own = [i.dim for i in place if isinstance(i, Index)]
        if (
            store.added
            or written[store.tensor] > 1
            or len(own) != len(place)
            or len(set(own)) != len(own)
            or set(own) != long
        ):
            continue
        needed = {id(n) for n in (store, *_needed(store, maps))}
        for i in b.inputs:
            mine = [(_place(ld.index, shapes[i.name]), id(n)) for ld, n in reads if ld.tensor == i.name]
            same = i.dtype is dtypes[store.tensor] and shapes[i.name] == shapes[store.tensor]
            if mine and same and all(index == place and n in needed for index, n in mine):
                found.append((store.tensor, i.name))
    return tuple(found)


def _place(index: Sequence[Expr], shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """An index without the axes that have one place."""
    return tuple(e for e, n in zip(index, shape, strict=True) if not is_one(n))


def _needed(n: Node, maps: Mapping[str, Let]) -> list[Let]:
    """The maps that a statement is computed from."""
    found: dict[str, Let] = {}
    todo = [n]
    while todo:
        read = (ld.tensor for e in exprs_of(todo.pop()) for ld in loads(e))
        new = {t: maps[t] for t in read if t in maps and t not in found}
        found |= new
        todo += new.values()
    return list(found.values())


def _within(n: Node, loop: Loop) -> bool:
    return any(x is n for x in walk(loop.body))


def _maps(nodes: Sequence[Node]) -> bool:
    """Whether every element is computed by itself."""
    reduces = any(isinstance(n, Accumulate | Init | Update) or (isinstance(n, Let) and n.rdims) for n in nodes)
    return not reduces and all(n.kind == "forall" for n in nodes if isinstance(n, Loop))


def _wide(b: Block, local: Iterable[str]) -> bool:
    """Whether what a thread block has of one index of the parallel dims is more than its threads."""
    extents = [int(e.value) if isinstance(e, Const) else 0 for e in (b.sizes[d] for d in local)]
    return prod(extents) >= THREADS


def _reads(nodes: Sequence[Node], before: Sequence[Node]) -> set[tuple[str, tuple[Expr, ...]]]:
    """What nodes read, and where; of maps among those before them, which a back end may compute where they are used,
    what these read."""
    maps = {n.name: n for n in before if isinstance(n, Let) and not n.rdims}
    found: set[tuple[str, tuple[Expr, ...]]] = set()
    todo = [e for n in nodes if not isinstance(n, Loop) for e in exprs_of(n)]
    seen: set[str] = set()
    while todo:
        for ld in _loads(todo.pop()):
            found.add((ld[0], ld[1]))
            if ld[0] in maps and ld[0] not in seen:
                seen.add(ld[0])
                todo += exprs_of(maps[ld[0]])
    return found


def _loads(e: Expr) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    for ld in loads(e):
        yield ld.tensor, ld.index
