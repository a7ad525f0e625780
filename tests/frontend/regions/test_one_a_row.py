"""Writes at indices as comparisons: which writes are, and that they make what eager's make."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.regions.one_a_row import one_a_row
from tilefold.frontend.regions.partition import partition

aten = torch.ops.aten
N, M, C = 5, 7, 3


def each(n: int) -> torch.Tensor:
    return torch.arange(n)


def traced(fn, *args):
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        return make_fx(fn)(*(mode.from_tensor(a) for a in args))


def given():
    gen = torch.Generator().manual_seed(0)
    x, wide = torch.randn(N, M, generator=gen), torch.randn(N, M, C, generator=gen)
    return x, wide, torch.tensor([0, 6, 6, -1, -7]), torch.randn(N, generator=gen), torch.randn(N, C, generator=gen)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, at, v, u: aten.index_put(x, [each(N), at], v),
        lambda x, w, at, v, u: aten.index_put(x, [each(N), at], v, True),
        lambda x, w, at, v, u: aten.index_put(x.t(), [at, each(N)], v),
        lambda x, w, at, v, u: aten.index_put(w, [each(N), at], u, True),
        lambda x, w, at, v, u: aten.index_put(w, [each(N), at.int()], u.select(0, 0)),  # the same for all rows
        lambda x, w, at, v, u: aten.index_put(x, [each(N), at], v.sum()),
        lambda x, w, at, v, u: aten.index_put(x.narrow(1, 0, N), [each(N), each(N)], v),  # a diagonal
        lambda x, w, at, v, u: aten.index_put(x, [each(N), at], x[torch.arange(N), at] - 0.35).softmax(1),
        lambda x, w, at, v, u: aten.index_put(x.t(), [at, each(N)], v.sum()),
        lambda x, w, at, v, u: aten.index_put(w, [None, at[2:3]], u.unsqueeze(1)),  # at one place
        lambda x, w, at, v, u: aten.index_put(w, [None, at[4]], u, True),
        lambda x, w, at, v, u: aten.index_put(w, [None, at[1:2], at[3:4] % C], v.unsqueeze(1)),
        lambda x, w, at, v, u: aten.index_put(w, [at[0]], u[0]),
        lambda x, w, at, v, u: aten.index_put(x, [None, at], v.sum()),  # one number
        lambda x, w, at, v, u: aten.index_put(x, [None, at], v.sum().expand(N, N)),
        lambda x, w, at, v, u: aten.index_put(w, [None, at.reshape(1, N)], v.sum()).softmax(1),
    ],
)
def test_they_are_maps(fn):
    args = given()
    gm = traced(fn, *args)
    assert one_a_row(gm) == 1
    parts = partition(gm)
    assert [g.covered for g in parts.groups] == [True] and not parts.fallbacks
    torch.testing.assert_close(gm(*args), fn(*args))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, at, v, u: aten.index_put(x, [at % N, at], v),  # rows may be the same
        lambda x, w, at, v, u: aten.index_put(x, [each(4), at[:4]], v[:4]),  # not all rows
        lambda x, w, at, v, u: aten.index_put(x, [None, at], v.unsqueeze(1)),
        lambda x, w, at, v, u: aten.index_put(w, [each(N), at, at % C], v),
        lambda x, w, at, v, u: aten.index_put(x, [each(N).unsqueeze(1), at.unsqueeze(0)], v),  # all pairs
        lambda x, w, at, v, u: aten.index_put(w, [at[:1], None, at[:1] % C], v[:1].expand(1, M)),  # axes apart
        lambda x, w, at, v, u: aten.index_put(x, [None, at.repeat(2)], v.sum()),  # more comparisons than elements
        lambda x, w, at, v, u: aten.index_put(x, [None, at], v.sum(), True),  # added as often as it is named
    ],
)
def test_others_are_not(fn):
    assert one_a_row(traced(fn, *given())) == 0


@pytest.mark.parametrize("wrong", [M, -M - 1])
def test_an_index_that_does_not_exist_is_an_error(wrong):
    args = given()
    gm = traced(lambda x, w, at, v, u: aten.index_put(x, [each(N), at], v), *args)
    assert one_a_row(gm) == 1
    args[2][1] = wrong
    with pytest.raises(IndexError):
        gm(*args)
