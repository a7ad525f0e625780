"""Random numbers: operators of a seed and a shape, which give the same numbers whenever they run.

`tilefold::seed` draws a seed from torch's generator, once a call of the graph: two int64, of which the first is used
(kernels take addresses of 16 bytes for aligned). `tilefold::random` makes numbers of 24 bits out of one
(`algebra.philox`): of an element by its place in the last axis and its place among the rows before;
`tilefold::random16` numbers of 16 bits, by the places in the last two axes and among the matrices before. What draws
them again (a backward, a checkpoint, another kernel, operator by operator) has the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilefold.algebra import philox
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const

#: Numbers are below this.
LIMIT = 1 << philox.BITS
#: Those of 16 bits are below this.
FEW_LIMIT = 1 << philox.FEW_BITS
#: Seeds are from this to below that.
SEEDS = (-(2**63), 2**63 - 1)
#: In the meta of nodes that draw seeds.
MARK = "draws_seeds"
_WORD = 1 << 31  # rows and columns are below
_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_PURE, _DRAWS = (torch.Tag.pt2_compliant_tag,), (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)


def _define(schema: str, tags: tuple[torch.Tag, ...]) -> None:
    _LIBRARY.define(schema, tags=tags)


_define("seed(Device device) -> Tensor", _DRAWS)
_define("random(Tensor seed, SymInt[] size) -> Tensor", _PURE)
_define("random16(Tensor seed, SymInt[] size) -> Tensor", _PURE)


@torch.library.impl(_LIBRARY, "seed", "CompositeExplicitAutograd")
def _seed(device: torch.device) -> torch.Tensor:
    return torch.randint(*SEEDS, (2,), dtype=torch.int64, device=device)


@torch.library.impl(_LIBRARY, "random", "CompositeExplicitAutograd")
def _random(seed: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The definition, by torch's integers: slow."""
    *rows, columns = (1, *size)
    row = torch.arange(math.prod(rows), device=seed.device)[:, None]
    column = torch.arange(columns, device=seed.device)
    return philox.random(seed[0], row, column).reshape(tuple(size))


@torch.library.impl(_LIBRARY, "random16", "CompositeExplicitAutograd")
def _random16(seed: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    *batch, rows, columns = size
    place = [torch.arange(n, device=seed.device) for n in (math.prod(batch), rows, columns)]
    return philox.random16(seed[0], place[0][:, None, None], place[1][:, None], place[2]).reshape(tuple(size))


torch.library.register_fake(
    "tilefold::seed", lambda device: torch.empty(2, dtype=torch.int64, device=device), lib=_LIBRARY
)


def _numbers(seed: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    torch._check(seed.dim() == 1, lambda: f"a seed is a tensor of one axis, not of shape {tuple(seed.shape)}")
    return torch.empty(size, dtype=torch.int64, device=seed.device)


for _name in ("random", "random16"):
    torch.library.register_fake(f"tilefold::{_name}", _numbers, lib=_LIBRARY)

seed_op = torch.ops.tilefold.seed.default
random_op = torch.ops.tilefold.random.default
random16_op = torch.ops.tilefold.random16.default


def draws_seeds(node: torch.fx.Node) -> bool:
    """Whether a node draws the seeds of a graph, or tells them apart: no region does, so that each is a tensor of its
    own and kernels that differ in nothing else are one."""
    return bool(node.meta.get(MARK))


def random(ctx: Context, node: torch.fx.Node) -> Value:
    """The numbers of a seed; rows are counted over all axes but the last."""
    shape, _ = meta_of(node)
    seed = ctx.value(attrs(node)["seed"])
    *leading, columns = (const(1), *shape)
    _check(leading, columns)

    def at(i: Indices) -> Expr:
        row = ctx.simplify(_place(shape[:-1], i[:-1]))
        return call("random", seed.at((const(0),)), row, i[-1] if i else const(0))

    return ctx.map(shape, DType.I64, at)


def random16(ctx: Context, node: torch.fx.Node) -> Value:
    """The numbers of 16 bits of a seed; matrices are counted over all axes but the last two."""
    shape, _ = meta_of(node)
    seed = ctx.value(attrs(node)["seed"])
    _check(shape[:-2], *shape[-2:])

    def at(i: Indices) -> Expr:
        return call("random16", seed.at((const(0),)), ctx.simplify(_place(shape[:-2], i[:-2])), *i[-2:])

    return ctx.map(shape, DType.I64, at)


def _place(shape: Sequence[Expr], i: Sequence[Expr]) -> Expr:
    """The number of an index among all of a shape."""
    place: Expr = const(0)
    for s, k in zip(shape, i, strict=True):
        place = place * s + k
    return place


def _check(leading: Sequence[Expr], *axes: Expr) -> None:
    known = [int(s.value) if isinstance(s, Const) else 1 for s in leading]
    if math.prod(known) >= _WORD or any(isinstance(n, Const) and int(n.value) >= _WORD for n in axes):
        raise UnsupportedError(f"random numbers for {_WORD} rows or columns")


TABLE: dict[torch._ops.OpOverload, Lowerer] = {random_op: random, random16_op: random16}
