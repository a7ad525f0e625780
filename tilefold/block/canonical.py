"""Canonical names, so that the same computation is the same program wherever it stands.

The layers of a model give kernels that differ only in the numbers in their names; with dims
called i, j, k ... and values after the operator alone, they become equal: one source, one cache
entry, one compilation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Expr, Index, Load, Size, Sym, transform, walk
from tilefold.algebra.ops import OPS, REDUCERS
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Result, Store, Update, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.block.text import show
from tilefold.names import fresh
from tilefold.tensor.ir import Input

_DIMS = "ijklmnpqrstuvxyz"  # w names a vector width in generated code
#: Words of the text form: a value of such a name could not be read back.
RESERVED = frozenset({*REDUCERS, *OPS, "size", "inf", "nan", "true", "false"})
_NUMBERS = re.compile(r"_?\d+(?=_|$)")


@dataclass(frozen=True, slots=True)
class Canonical:
    """The renamed program; `tensors` and `syms` lead from its names to the original ones, `dims` to its names."""

    block: Block
    tensors: Mapping[str, str]
    syms: Mapping[str, str]
    dims: Mapping[str, str]


def canonical(b: Block) -> Canonical:
    """Rename dims, symbols, tensors and values; drop sizes that nothing uses."""
    if "canonical" not in b._known:
        b._known["canonical"] = _made(b)  # neither ever changes
    found: Canonical = b._known["canonical"]
    return found


def _made(b: Block) -> Canonical:
    dims = _dim_names(b)
    syms = {s: f"n{k}" for k, s in enumerate(_used_syms(b, dims))}
    names: dict[str, str] = {}
    taken = {*dims.values(), *syms.values(), *RESERVED}
    for name in (*(i.name for i in b.inputs), *(r.name for r in b.results), *_value_names(b)):
        names[name] = fresh(_NUMBERS.sub("", name).strip("_") or "value", taken)
    name = names[b.results[-1].name] if b.results else b.name
    block = _renamed(b, name, Renamer(dims, syms, names))
    tensors = {names[t]: t for t in (*(i.name for i in b.inputs), *(x.name for x in b.results))}
    return Canonical(block, tensors, {new: old for old, new in syms.items()}, dims)


def nameless(b: Block) -> Block:
    """A canonical program with its tensors and values numbered, so that those are equal which differ in names alone;
    its own name stays, for it is the kernel's."""
    tensors = (*(i.name for i in b.inputs), *(r.name for r in b.results), *_value_names(b))
    names = {name: f"t{k}" for k, name in enumerate(dict.fromkeys(tensors))}
    return _renamed(b, b.name, Renamer({d: d for d in b.sizes}, {s: s for s in b.syms}, names))


def nameless_text(b: Block) -> str:
    """The text of `nameless(b)`, which is a key of what is decided about kernels."""
    if "nameless" not in b._known:
        b._known["nameless"] = show(nameless(b))
    found: str = b._known["nameless"]
    return found


def _renamed(b: Block, name: str, r: Renamer) -> Block:
    """Without sizes of dims that have no new name."""
    names, dims = r.names, r.dims
    return Block(
        name,
        tuple(r.syms.values()),
        {dims[d]: r.expr(e) for d, e in b.sizes.items() if d in dims},
        tuple(Input(names[i.name], i.dtype, tuple(map(r.expr, i.shape))) for i in b.inputs),
        tuple(Result(names[x.name], tuple(dims[d] for d in x.dims), x.dtype) for x in b.results),
        tuple(names[o] for o in b.outputs),
        r.nodes(b.body),
    )


def _dim_names(b: Block) -> dict[str, str]:
    """Dims in order of appearance: those of the results first, so that rows come before what is reduced."""
    seen: dict[str, None] = {}
    for r in b.results:
        seen |= dict.fromkeys(r.dims)
    for n in walk_nodes(b.body):
        match n:
            case Loop(_, dim):
                seen[dim] = None
            case Let(dims=dims, rdims=rdims):
                seen |= dict.fromkeys((*dims, *rdims))
            case Init(dims=dims) | Store(dims=dims):
                seen |= dict.fromkeys(dims)
            case Accumulate(rdims=rdims):
                seen |= dict.fromkeys(rdims)
            case Update():
                pass
        for e in exprs_of(n):
            seen |= dict.fromkeys(x.dim for x in walk(e) if isinstance(x, Index | Size))
    letters = [*_DIMS, *(f"d{n}" for n in range(len(seen)))]
    return dict(zip(seen, letters, strict=False))


def _used_syms(b: Block, dims: Mapping[str, str]) -> list[str]:
    exprs = [e for i in b.inputs for e in i.shape] + [e for d, e in b.sizes.items() if d in dims]
    exprs += [e for n in walk_nodes(b.body) for e in exprs_of(n)]
    return list(dict.fromkeys(x.name for e in exprs for x in walk(e) if isinstance(x, Sym)))


def _value_names(b: Block) -> list[str]:
    found: list[str] = []
    for n in walk_nodes(b.body):
        if isinstance(n, Let | Init):
            found += [n.name] + ([n.index_name] if n.index_name else [])
    return found


class Renamer:
    """Rewrites nodes and expressions by tables of dims, symbols and names of tensors and values."""

    def __init__(self, dims: Mapping[str, str], syms: Mapping[str, str], names: Mapping[str, str]):
        self.dims, self.syms, self.names = dims, syms, names

    def expr(self, e: Expr) -> Expr:
        def one(x: Expr) -> Expr | None:
            match x:
                case Index(d):
                    return Index(self.dims[d])
                case Size(d):
                    return Size(self.dims[d])
                case Sym(s):
                    return Sym(self.syms[s])
                case Load(t, index):
                    return Load(self.names[t], index)
            return None

        return transform(e, one)

    def some(self, e: Expr | None) -> Expr | None:
        return None if e is None else self.expr(e)

    def all(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.dims[d] for d in dims)

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.node(n) for n in nodes)

    def node(self, n: Node) -> Node:
        names = self.names
        match n:
            case Loop():
                body, ends = self.nodes(n.body), (self.some(n.start), self.some(n.stop))
                return replace(n, dim=self.dims[n.dim], body=body, start=ends[0], stop=ends[1])
            case Let():
                return replace(
                    n,
                    name=names[n.name],
                    dims=self.all(n.dims),
                    expr=self.expr(n.expr),
                    rdims=self.all(n.rdims),
                    index_name=names[n.index_name] if n.index_name else None,
                    payload=self.some(n.payload),
                )
            case Init():
                index = names[n.index_name] if n.index_name else None
                return replace(n, name=names[n.name], dims=self.all(n.dims), index_name=index)
            case Update():
                return replace(n, name=names[n.name], expr=self.expr(n.expr))
            case Accumulate():
                name, rdims = names[n.name], self.all(n.rdims)
                return replace(n, name=name, rdims=rdims, expr=self.expr(n.expr), payload=self.some(n.payload))
            case Store():
                index_exprs = tuple(map(self.expr, n.index))
                return replace(
                    n, tensor=names[n.tensor], index=index_exprs, dims=self.all(n.dims), expr=self.expr(n.expr)
                )
        raise AssertionError(n)
