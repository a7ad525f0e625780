"""Which results a kernel may write over what it reads.

Law: a kernel that reads a tensor only at the element that it writes, and writes each element once, does not read what
it has written. If nothing reads the tensor afterwards, the result needs no memory of its own.
"""

from __future__ import annotations

from tilefold.algebra.expr import Index, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Store, Update, exprs_of, walk


def overwritable(b: Block) -> tuple[tuple[str, str], ...]:
    """(result, input) pairs: the one result of a block of maps, and the inputs of its type that it may be written over.

    All loops are parallel and over dims of the result, so that no element is computed twice.
    """
    nodes = list(walk(b.body))
    stores = [n for n in nodes if isinstance(n, Store)]
    if len(stores) != 1 or len(b.results) != 1:
        return ()
    (store,), (result,) = stores, b.results
    own = {i.dim for i in store.index if isinstance(i, Index)}
    if len(own) != len(store.index) or any(isinstance(n, Accumulate | Init | Update) for n in nodes):
        return ()
    if any(isinstance(n, Let) and n.rdims for n in nodes):
        return ()
    if any(isinstance(n, Loop) and (n.kind != "forall" or n.dim not in own) for n in nodes):
        return ()
    reads = [ld for n in nodes if not isinstance(n, Loop) for e in exprs_of(n) for ld in loads(e)]
    same = {i.name for i in b.inputs if i.dtype is result.dtype and len(i.shape) == len(store.index)}
    elsewhere = {ld.tensor for ld in reads if ld.index != store.index}
    return tuple((result.name, t) for t in dict.fromkeys(ld.tensor for ld in reads) if t in same - elsewhere)
