"""Reductions along whose result nothing varies, computed once for all of it.

Law: y[i, l] = reducer over k of f(i, k)  is  y'[i], which is read wherever y[i, l] is, for every l.

How many elements a mean by keys has at a place is the same for all of its channels, and so is a sum of a row's weights
that is kept for each of them. Side conditions: the program gives nobody y, and it has several l.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.expr import Const, Expr, Load, dims_used, tensors_read
from tilefold.tensor.ir import Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import rename_loads


def same_sums(p: Program) -> Program:
    """The program in which no such reduction has a dim that its elements do not vary with."""
    kept: dict[str, tuple[int, ...]] = {}
    for c in p.body:
        if c.reducer is None or c.index_name is not None or c.name in p.outputs or c.reducer == "topk":
            continue
        if not tensors_read(c.body):  # numbers alone: a kernel for their sum costs more than to add them again
            continue
        if product_of(c) is not None:  # of rows that are repeated: matrix units multiply them as they are given
            continue
        axes = tuple(n for n, d in enumerate(c.dims) if d in dims_used(c.body) or not _some(p, d))
        if len(axes) < len(c.dims):
            kept[c.name] = axes

    def one(ld: Load) -> Expr | None:
        axes = kept.get(ld.tensor)
        return None if axes is None else Load(ld.tensor, tuple(ld.index[n] for n in axes))

    if not kept:
        return p
    body = [replace(c, body=rename_loads(c.body, one)) for c in p.body]
    return replace(
        p, body=tuple(replace(c, dims=tuple(c.dims[n] for n in kept[c.name])) if c.name in kept else c for c in body)
    )


def _some(p: Program, d: str) -> bool:
    n = p.sizes[d]
    return isinstance(n, Const) and int(n.value) > 1
