"""Several kernels as one block program, in execution order."""

from __future__ import annotations

from tilefold.algebra.expr import Expr
from tilefold.block.canonical import Renamer
from tilefold.block.ir import Block, Init, Let, Node, walk
from tilefold.block.verify import verify
from tilefold.names import fresh
from tilefold.tensor.ir import Input


def join(name: str, inputs: tuple[Input, ...], outputs: tuple[str, ...], kernels: tuple[Block, ...]) -> Block:
    """One program with the bodies of `kernels` after each other.

    What one kernel writes is read by later ones as a tensor. Block values that are called like one
    of those tensors get another name.
    """
    sizes: dict[str, Expr] = {}
    for k in kernels:
        sizes |= k.sizes
    results = tuple(r for k in kernels for r in k.results)
    tensors = {i.name for i in inputs} | {r.name for r in results}
    syms = kernels[0].syms if kernels else ()
    body = tuple(n for k in kernels for n in _apart(k, tensors))
    return verify(Block(name, syms, sizes, inputs, results, outputs, body))


def _apart(k: Block, tensors: set[str]) -> tuple[Node, ...]:
    """The body of a kernel with no value named like a tensor."""
    values = [v for n in walk(k.body) if isinstance(n, Let | Init) for v in (n.name, n.index_name) if v]
    names: dict[str, str] = {t: t for t in tensors}
    taken = tensors | set(values)
    for v in dict.fromkeys(values):
        names[v] = fresh(f"{v}_b", taken) if v in tensors else v
    if all(old == new for old, new in names.items()):
        return k.body
    return Renamer({d: d for d in k.sizes}, {s: s for s in k.syms}, names).nodes(k.body)
