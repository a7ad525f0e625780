"""Axes of two indices joined with the axis beside them: the same values on views of the same memory, or left apart."""

from __future__ import annotations

import pytest
import torch

from tests.block.test_collapse import blocks, tensors
from tilefold.backends.triton.views import merged, neighbours
from tilefold.block import interp
from tilefold.block.pairs import paired
from tilefold.block.verify import verify


def turned(x, c):
    """Neighbours exchange places, one with its sign turned."""
    return torch.stack((-x[..., 1::2] * c, x[..., ::2]), -1).flatten(-2)


def of_points(x, c):
    return x[..., 0] * c - x[..., 1]


def _near(b, x, c):
    given = {i.name: y.view(*[int(e.value) for e in i.shape]) for i, y in zip(b.inputs, (x, c), strict=True)}
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    xs = tensors(b, given)
    return given, names, xs, {n: neighbours(t) for n, t in zip(names, xs, strict=True)}


@pytest.mark.parametrize(("fn", "whose"), [(turned, "result"), (of_points, "input")])
def test_the_same_on_joined_views(fn, whose):
    gen = torch.Generator().manual_seed(0)
    shape = (5, 14) if fn is turned else (5, 7, 2)
    x, c = (torch.randn(*s, generator=gen, dtype=torch.float64) for s in (shape, (5, 7)))
    (b,) = blocks(fn, x.float(), c.float())
    given, names, xs, near = _near(b, x, c)
    after, (merge,) = paired(b, near)
    verify(after)
    assert merge.axes.keys() == ({b.results[0].name} if whose == "result" else {b.inputs[0].name})
    views = dict(zip(names, merged(xs, names, [merge]), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    mine = {i.name: views[i.name] for i in after.inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 4), exact=True)
    for r in b.results:
        torch.testing.assert_close(now[r.name].reshape(before[r.name].shape), before[r.name])


def test_what_is_not_beside_another_axis_is_left():
    x, c = torch.zeros(5, 14), torch.zeros(5, 7)
    (b,) = blocks(turned, x, c)
    near = _near(b, x, c)[3]
    assert not paired(b, {n: frozenset() for n in near})[1]


def test_axes_of_three_are_left():
    (b,) = blocks(lambda x: torch.stack((x, x + 1, -x), -1), torch.zeros(5, 7))
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    xs = tensors(b, {b.inputs[0].name: torch.zeros(5, 7)})
    assert not paired(b, {n: neighbours(t) for n, t in zip(names, xs, strict=True)})[1]
