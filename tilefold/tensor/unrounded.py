"""Differences of sums that have an operand in common: neither is rounded before it is subtracted.

    p (dp - t),  dp = sum[e] A_ie C_ke,  t = sum[e] A_ie O_ie

In the gradient of a softmax t is the mean of dp (`frontend.training.reassociate`), so that of a row with one key, or
with one that has nearly all of the weight, next to nothing is left of both. PyTorch rounds dp, and takes the mean of
what it has rounded; a kernel of all of it rounds neither. But a dp that a library's call makes is in memory: rounded to
16 bits there, its difference to t is what the rounding left (one query for each of some sequences, one of which has one
key: 5 times the other sequences' gradients). So it has float32 there.

Side conditions: t is float32; dp is no result of the program, and maps alone read it. On a GPU it is asked when it is
known which products the library makes: a kernel that streams dp rounds nothing, and is planned by operands of 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Expr, loads, walk
from tilefold.tensor.analysis import is_map
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of


def unrounded(p: Program, products: Collection[str] | None = None) -> Program:
    """The program with such products in float32, of these alone if some are given."""
    by_name = {c.name: c for c in p.body}
    found = {name for c in p.body for name in _subtracted_from(c.body, by_name)} - {*p.outputs}
    found &= found if products is None else {*products}
    found -= {ld.tensor for c in p.body if not is_map(c) for ld in loads(c.body)}
    if not found:
        return p
    return replace(p, body=tuple(replace(c, dtype=DType.F32) if c.name in found else c for c in p.body))


def _subtracted_from(e: Expr, by_name: Mapping[str, Compute]) -> Iterator[str]:
    """Products of 16 bits that a sum with one of their operands is subtracted from."""
    for n in walk(e):
        if isinstance(n, Call) and n.op == "sub":
            large, small = ({by_name[ld.tensor] for ld in loads(x) if ld.tensor in by_name} for x in n.args)
            yield from (a.name for a in large if _is_narrow(a) and any(_share(a, b) for b in small))


def _is_narrow(c: Compute) -> bool:
    return c.dtype.is_float and c.dtype.nbytes == 2 and product_of(c) is not None


def _share(a: Compute, b: Compute) -> bool:
    """Whether a sum of float32 is over what another sums of an operand that both have."""
    same = b.reducer == "sum" and b.dtype is DType.F32 and b.rdims == a.rdims
    return same and not {*loads(a.body)}.isdisjoint(loads(b.body))
