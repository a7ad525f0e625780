"""The closed table of scalar operations and of reducers.

One row an operation: arity, result type and its meaning as a torch function (which
*defines* it: NaN, infinities and rounding behave as torch's). Every back end and
every interpreter covers exactly these names; an unknown name raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tilefold.algebra.philox import random, random16

Result = Literal["same", "float", "bool", "int"]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """A scalar operation. `result`: "same" promotes the arguments, "float" promotes them to at least f32."""

    name: str
    arity: int
    result: Result
    torch: Callable[..., torch.Tensor]
    infix: str | None = None


def _where(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(c.bool(), a, b)


def _within(i: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.minimum(i, n - 1).clamp(min=0)


def _floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _divided(lambda a, b: torch.div(a, b, rounding_mode="floor"), a, b)


def _mod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _divided(torch.remainder, a, b)


def _divided(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Integers divided by zero are zero, as in kernels: a size that is divided may be none of a trial's few rows."""
    if b.is_floating_point() or a.is_floating_point() or bool((b != 0).all()):
        return op(a, b)
    return torch.where(b == 0, torch.zeros_like(b), op(a, torch.where(b == 0, torch.ones_like(b), b)))


_TABLE = (
    OpSpec("add", 2, "same", torch.add, "+"),
    OpSpec("sub", 2, "same", torch.sub, "-"),
    OpSpec("mul", 2, "same", torch.mul, "*"),
    OpSpec("div", 2, "float", torch.true_divide, "/"),
    OpSpec("floordiv", 2, "same", _floordiv, "//"),
    OpSpec("mod", 2, "same", _mod, "%"),
    OpSpec("pow", 2, "same", torch.pow, "**"),
    OpSpec("neg", 1, "same", torch.neg),
    OpSpec("abs", 1, "same", torch.abs),
    OpSpec("sign", 1, "same", torch.sign),
    OpSpec("maximum", 2, "same", torch.maximum),  # NaN propagates
    OpSpec("minimum", 2, "same", torch.minimum),  # NaN propagates
    OpSpec("exp", 1, "float", torch.exp),
    OpSpec("exp2", 1, "float", torch.exp2),
    OpSpec("expm1", 1, "float", torch.expm1),
    OpSpec("log", 1, "float", torch.log),
    OpSpec("log2", 1, "float", torch.log2),
    OpSpec("log1p", 1, "float", torch.log1p),
    OpSpec("sqrt", 1, "float", torch.sqrt),
    OpSpec("rsqrt", 1, "float", torch.rsqrt),
    OpSpec("sin", 1, "float", torch.sin),
    OpSpec("cos", 1, "float", torch.cos),
    OpSpec("tanh", 1, "float", torch.tanh),
    OpSpec("sigmoid", 1, "float", torch.sigmoid),
    OpSpec("erf", 1, "float", torch.erf),
    OpSpec("erfinv", 1, "float", torch.erfinv),
    OpSpec("lgamma", 1, "float", torch.lgamma),
    OpSpec("floor", 1, "same", torch.floor),
    OpSpec("ceil", 1, "same", torch.ceil),
    OpSpec("trunc", 1, "same", torch.trunc),
    OpSpec("round", 1, "same", torch.round),  # half to even
    OpSpec("lt", 2, "bool", torch.lt, "<"),
    OpSpec("le", 2, "bool", torch.le, "<="),
    OpSpec("gt", 2, "bool", torch.gt, ">"),
    OpSpec("ge", 2, "bool", torch.ge, ">="),
    OpSpec("eq", 2, "bool", torch.eq, "=="),
    OpSpec("ne", 2, "bool", torch.ne, "!="),
    OpSpec("and", 2, "bool", torch.logical_and, "&"),
    OpSpec("or", 2, "bool", torch.logical_or, "|"),
    OpSpec("not", 1, "bool", torch.logical_not),
    OpSpec("bits_and", 2, "same", torch.bitwise_and),  # of integers
    OpSpec("bits_or", 2, "same", torch.bitwise_or),
    OpSpec("bits_xor", 2, "same", torch.bitwise_xor),
    OpSpec("bits_up", 2, "same", torch.bitwise_left_shift),  # by 0 and more, below the bits of the type
    OpSpec("bits_down", 2, "same", torch.bitwise_right_shift),
    OpSpec("isnan", 1, "bool", torch.isnan),
    OpSpec("isinf", 1, "bool", torch.isinf),
    OpSpec("where", 3, "same", _where),  # where(cond, a, b); type from a and b
    # within(i, n): an index that data chose, i where 0 <= i < n. Elsewhere it is an error, which compiled CPU kernels
    # report after the launch (IndexError); the value is then the nearest index that exists.
    OpSpec("within", 2, "same", _within),
    # random(seed, row, column): a number of 24 bits, the same for the same three (`algebra.philox`). All are integers.
    OpSpec("random", 3, "same", random),
    OpSpec("random16", 4, "same", random16),  # (seed, batch, row, column), of 16 bits
    # Bounds of the tile of a dim that the enclosing loop is at (its whole range where no loop
    # encloses). Argument: Index(dim). Only legal in loop bounds of block and tile programs.
    OpSpec("tile_start", 1, "int", lambda x: x),
    OpSpec("tile_stop", 1, "int", lambda x: x),
    # The least and greatest value of an integer expression over the tiles of the dims it has, as legal there: what
    # data bounds a loop by (`minimum(size(k), tile_max(length[b]))`). Loads are of arguments of the kernel.
    OpSpec("tile_min", 1, "int", lambda x: x),
    OpSpec("tile_max", 1, "int", lambda x: x),
)
OPS: dict[str, OpSpec] = {spec.name: spec for spec in _TABLE}
BY_INFIX: dict[str, str] = {spec.infix: spec.name for spec in _TABLE if spec.infix}

#: Operations that draw numbers.
RANDOM = ("random", "random16")
#: Operations that name the tile that an enclosing loop is at.
TILE_BOUNDS = ("tile_start", "tile_stop")
#: Operations on the values that an expression has there.
TILE_EXTREMES = ("tile_min", "tile_max")

#: Reducers with one value; their neutral element in arithmetic type f32/f64 (ints: see `identity_of`).
VALUE_REDUCERS = ("sum", "prod", "max", "min", "any", "all")
#: Reducers that carry an index beside the value; ties break to the lowest index, NaN wins (torch).
INDEX_REDUCERS = ("argmax", "argmin", "topk")
REDUCERS = VALUE_REDUCERS + INDEX_REDUCERS
