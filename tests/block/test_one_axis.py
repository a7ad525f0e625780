"""Maps over dims that lie side by side as maps over one axis: the same values, at digits of its positions."""

from __future__ import annotations

import pytest
import torch

from tests.block.test_collapse import blocks, tensors
from tilefold.backends.triton import one_axis as choice
from tilefold.backends.triton.views import merged, neighbours
from tilefold.block import interp
from tilefold.block.ir import Loop, walk
from tilefold.block.one_axis import on_one_axis
from tilefold.block.verify import verify


def shuffled(x, b):
    return torch.tanh(torch.nn.functional.pixel_shuffle(x, 3) + b[:, None, None])


def scaled(x, b):
    return x * b[:, None, None], x + b[:, None, None]


SHUFFLED, SCALED = (torch.randn(2, 18, 4, 5), torch.randn(2)), (torch.randn(3, 2, 5, 7), torch.randn(2))


@pytest.mark.parametrize(("fn", "args", "most"), [(shuffled, SHUFFLED, 5), (scaled, SCALED, 3)])
def test_the_same_values_over_every_number_of_dims(fn, args, most):
    (b,) = blocks(fn, *args)
    by_name = dict(zip("xb", args, strict=True))
    given = {i.name: by_name[i.name].reshape([int(e.value) for e in i.shape]) for i in b.inputs}
    names, xs = [*given, *(r.name for r in b.results)], tensors(b, given)
    found = list(on_one_axis(b, {n: neighbours(x) for n, x in zip(names, xs, strict=True)}))
    assert len(found) == most
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    for after, merges in found:
        views = dict(zip(names, merged(xs, names, merges), strict=True))
        mine = {i.name: views[i.name] for i in verify(after).inputs}
        now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)
        for r in b.results:
            torch.testing.assert_close(now[r.name].reshape(before[r.name].shape), before[r.name])
    assert sum(isinstance(n, Loop) for n in walk(found[-1][0].body)) == 1


def test_what_reduces_keeps_its_dims():
    (b,) = blocks(lambda x: x / x.abs().sum(-1, keepdim=True), torch.randn(3, 5, 7))
    near = {t.name: frozenset({(0, 1), (1, 2)}) for t in (*b.inputs, *b.results)}
    assert not list(on_one_axis(b, near))


def test_the_price_decides():
    """More dims are one only where that takes less time, by more than forecasts are off."""
    (b,) = blocks(scaled, *SCALED)
    near = {t.name: frozenset({(0, 1), (1, 2), (2, 3)}) for t in (*b.inputs, *b.results) if t.name != "b"} | {
        "b": frozenset()
    }
    for seconds, joined in (([1.0, 0.9, 0.85, 1.2], 0), ([1.0, 0.7, 0.69, 1.2], 1), ([1.0, 0.7, 0.6, 1.2], 2)):
        said = iter(seconds)
        assert len(choice.best_axes(b, near, lambda b, merges, said=said: next(said))[1]) == joined


def test_rows_that_begin_between_vectors_need_not_save_more_than_time():
    """Images of 112 x 112 between zeros, in rows of 228 bytes, took 45 us on an H100 over their dims and Inductor's one
    axis 40; images of 56 x 56, whose rows are whole vectors, take longer over one axis."""
    (b,) = blocks(scaled, *SCALED)
    near = {t.name: frozenset({(0, 1), (1, 2), (2, 3)}) for t in (*b.inputs, *b.results) if t.name != "b"} | {
        "b": frozenset()
    }
    for columns, joined in ((114, 1), (112, 0)):
        said = iter([1.0, 0.95, 1.2, 1.2])
        worth = choice.worth_of([torch.empty(2, 3, 8, columns, dtype=torch.bfloat16)])
        assert len(choice.best_axes(b, near, lambda b, merges: next(said), worth)[1]) == joined  # noqa: B023
