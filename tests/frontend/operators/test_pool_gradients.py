"""Gradients of pooling against eager's: overlapping, dilated, ragged and uneven windows; ties."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, check_backward, lowered, randn

aten = torch.ops.aten


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, (1, 2), 1, dilation=(2, 1)),
        lambda x: F.max_pool2d(x, 7, 1, 3),
        lambda x: F.adaptive_max_pool2d(x, (4, 13)),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda x: F.adaptive_avg_pool2d(x, (4, 13)),
        lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    ],
)
def test_gradients_of_windows(pool):
    x = randn(2, 3, 9, 10).round()  # ties: the gradient goes to the first
    check_backward(pool, x.contiguous(memory_format=torch.channels_last))


def test_other_numbers_of_axes():
    check_backward(lambda x: F.max_pool1d(x, 3, 2, 1), randn(2, 5, 17))
    check_backward(lambda x: F.avg_pool1d(x, 3, 2, 1), randn(2, 5, 17))
    for pool in (
        lambda x: F.max_pool3d(x, 2),
        lambda x: F.avg_pool3d(x, 2, 1),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
        lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)),
    ):
        check_backward(pool, randn(1, 2, 5, 6, 4))


@pytest.mark.parametrize(
    "given",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 4, "stride": 2, "padding": 1},
        {"kernel_size": (2, 4), "stride": (2, 4)},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (2, 3)},
        {"kernel_size": 7, "padding": 3},
    ],
)
@pytest.mark.parametrize("batch", [(2,), ()])
def test_windows_that_are_added_up(given, batch):
    """No place is written twice: a map of few terms, a sum over what an element of the image is in."""
    columns = F.unfold(randn(2, 3, 8, 12), **given)[(0,) * (1 - len(batch))]
    fold = functools.partial(F.fold, output_size=(8, 12), **given)
    check(fold, columns)
    check_backward(lambda x: F.unfold(x, **given), randn(*batch, 3, 8, 12))
    assert len(lowered(fold, columns).program.body) <= 2


def test_symbolic_extents():
    check(lambda dy, x: aten.avg_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], False, True, None), *_given(2))


def test_windows_that_do_not_overlap_give_one_term():
    """Each place reads one gradient: a map, without conditions but the edge's."""

    def backward(dy, x):
        return aten.avg_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], False, True, None)

    (alone,) = lowered(backward, *_given(2)).program.body
    assert alone.reducer is None and str(alone.body).count("Load") == 1
    (wide,) = lowered(
        lambda dy, x: aten._adaptive_avg_pool2d_backward(dy, x), randn(2, 3, 8, 8), *_given(2)[1:]
    ).program.body
    assert wide.reducer is None


def _given(by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of windows of `by` x `by` places, and what they are of."""
    return randn(2, 3, 8 // by, 10 // by), randn(2, 3, 8, 10)
