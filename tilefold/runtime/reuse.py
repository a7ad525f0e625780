"""Which results a kernel may write over what it reads.

Law: a kernel that reads a tensor only at elements that the same thread block writes, each for the last time before it
writes it, and writes each element once, does not read what it has written. If nothing reads the tensor afterwards, the
result needs no memory of its own. Maps are such kernels, and so are rows that are reduced and then written again (the
gradient of logits, from their log-sum-exp).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from tilefold.algebra.expr import Const, Expr, Index, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk

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
        if not isinstance(store, Store) or sum(isinstance(n, Store) and n.tensor == store.tensor for n in nodes) > 1:
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
