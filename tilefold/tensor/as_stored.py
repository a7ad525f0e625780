"""Values of 16 bits that a kernel reads as it stores them.

A kernel has more digits of what it computes than it stores, and what reads a value there mostly takes all of them.
Where a result x of 16 bits leaves the program beside a sum of it in float32, the two meet elsewhere, and have to fit:
with s = mean x^2, the gradient of a norm for g = x is

    r x - r^3 x mean x^2 = r x (1 - (mean x^2) / (s + eps)),        r = 1 / sqrt(s + eps)

which is nothing but eps where s is of the x that was stored. A mean square of unrounded products was off by
2^-9 / sqrt(n), and gradients of a loss of normalised attention by 34 times what they are (eager: 0.015). Sums of 16
bits have that error themselves, and products round their operands.

So it is where a map is put into what reads it (`tensor.inline`): a convolution's bias, added in front of a batch norm
and once more for the backward, which takes the mean's and the norm's directions out of what reads the rounded sum. The
gradients of what is in front were off by 2%, ten times eager's error.
"""

from __future__ import annotations

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, Index, Load
from tilefold.tensor.analysis import Graph, is_map
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import product_of


def as_stored(g: Graph, c: Compute) -> bool:
    """Whether what reads a statement's value, wherever that is, reads it rounded to its type."""
    if c.dtype not in (DType.F16, DType.BF16) or not _leaves(g, c):
        return False
    return any(_keeps_more(r) for r in g.reached(c.name, g.consumers, is_map))


def rounded(g: Graph, c: Compute) -> Expr:
    """The body of a map with the rounding that storing it in its dtype would do, where that matters."""
    if c.reducer is not None or (isinstance(c.body, Cast) and c.body.dtype is c.dtype):
        return c.body
    return Cast(c.body, c.dtype) if (c.dtype.rounds and c.dtype.is_float) or as_stored(g, c) else c.body


def _copies(r: Compute, c: Compute) -> bool:
    """Whether a statement has the elements of another, in some order, and nothing is computed."""
    match r.body:
        case Load(tensor, index) if r.reducer is None and r.dtype is c.dtype and tensor == c.name:
            return all(isinstance(ix, Index) for ix in index) and len(set(index)) == len(index) == len(r.dims)
    return False


def _leaves(g: Graph, c: Compute) -> bool:
    outputs = g.program.outputs
    return c.name in outputs or any(u in outputs and _copies(g.by_name[u], c) for u in g.consumers[c.name])


def _keeps_more(r: Compute) -> bool:
    """Whether a statement sums in more digits than 16 bits have what it does not round before."""
    p = product_of(r)
    return r.reducer is not None and r.dtype in (DType.F32, DType.F64) and (p is None or not p.is_matrix())
