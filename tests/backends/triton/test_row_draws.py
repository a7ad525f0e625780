"""The numbers that a thread of a product's result draws: those of the definition, by rows and turned."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, Load, call
from tilefold.algebra.philox import random16
from tilefold.backends.triton.row_draws import DRAWS, drawn_by_threads, draws_numbers
from tilefold.tile import ir


class Words(np.ndarray):
    """What the function asks of a tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, kind):
        return self.astype(kind)

    def reshape(self, shape):
        return np.ndarray.reshape(self, shape)

    def permute(self, order):
        return self.transpose(order)


def words(x) -> Words:
    return np.asarray(x, dtype=np.int64).view(Words)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", [32, 128])
def test_numbers_of_a_tile_are_the_definitions(columns, turned):
    seed, batch = -123456789012345, 5
    one, other = 64 * 7 + np.arange(64)[:, None], 32 * 5 + np.arange(columns)[None]
    row, column = (other, one) if turned else (one, other)
    found = tile(seed, batch, row, column)
    want = random16(*(torch.as_tensor(x) for x in (seed, batch, row, column)))
    assert np.array_equal(found, want.numpy())


def tile(seed: int, batch: int, row, column):
    gl = SimpleNamespace(
        constexpr=None, int32=np.int32, uint32=np.uint32, uint64=np.uint64, static_range=range,
        where=lambda c, a, b: np.where(c, a, b).view(Words), convert_layout=lambda x, layout: x,
        split=lambda x: (x[..., 0], x[..., 1]), join=lambda a, b: np.stack((a, b), -1).view(Words),
    )  # fmt: skip
    space = {"gl": gl, "tl": gl, "gluon": SimpleNamespace(jit=lambda fn: fn), "uint64": np.uint64}
    exec(DRAWS, space)
    with np.errstate(over="ignore"):
        return space["tf_random16"](words(seed), words(batch), words(row), words(column))


def test_places_are_a_tiles_own_or_turned():
    seed, batch = Load("seed", (Const(0, DType.I64),)), Index("h")

    def loop(op, *place, start=None):
        return ir.For("l", 64, (ir.Map("p", call(op, seed, *place)),), start)

    def drawn(*place, start=None):
        return drawn_by_threads(loop("random16", batch, *place, start=start), "j")

    assert drawn(Index("j"), Index("l")) and drawn(Index("l"), Index("j"))
    assert not drawn(Index("j"), Index("l") + 1) and not drawn(Index("j"), Index("j"))
    first = call("tile_start", Index("j"))
    assert drawn(Index("j"), Index("l"), start=call("maximum", Const(0, DType.I64), first))
    assert drawn(Index("j"), Index("l"), start=first - 32) and not drawn(Index("j"), Index("l"), start=first - 100)
    assert not drawn(Index("j"), Index("l"), start=call("tile_start", Index("m")))
    more = loop("random", Index("j"), Index("l"))
    assert draws_numbers(more.body) and not drawn_by_threads(more, "j")
    assert drawn_by_threads(ir.For("l", 64, ()), "j")
