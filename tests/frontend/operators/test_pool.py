"""Pooling against eager: values, positions, layouts, ragged edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, lowered, randn

IMAGE = (2, 6, 13, 15)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2),
        lambda x: F.max_pool2d(x, 7, 1, 3),
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda x: F.avg_pool2d(x, 7, 1, 3),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.adaptive_avg_pool2d(x, (13, 5)),
        lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, (4, 5), return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, (13, 5)),
    ],
)
def test_windows(pool):
    check(pool, randn(*IMAGE), modes=(False,))
    check(pool, randn(*IMAGE).contiguous(memory_format=torch.channels_last), modes=(False,))


def test_other_numbers_of_axes():
    check(lambda x: F.max_pool1d(x, 3, 2, 1), randn(2, 5, 17), modes=(False,))
    check(lambda x: F.avg_pool1d(x, 3, 2, 1), randn(2, 5, 17), modes=(False,))
    check(lambda x: F.max_pool3d(x, 2), randn(2, 5, 6, 7, 8), modes=(False,))
    check(lambda x: F.avg_pool3d(x, 2), randn(2, 5, 6, 7, 8), modes=(False,))
    check(lambda x: F.max_pool2d(x, 3), randn(5, 6, 7), modes=(False,))


def test_hostile_values():
    x = randn(1, 2, 6, 6)
    x[0, 0, 0, 0], x[0, 0, 3, 3], x[0, 1] = float("nan"), float("inf"), -float("inf")
    check(lambda x: F.max_pool2d(x, 3, 2, 1), x, modes=(False,))
    check(lambda x: F.avg_pool2d(x, 3, 2, 1), x, modes=(False,))


@pytest.mark.parametrize("settings", [(2,), (3, 2, 1), (3, 1, 1, 2), (3, 2, 1, 1, True), "adaptive"])
def test_positions_of_hostile_values(settings):
    """Ties go to the first, NaN to the last one, and what is nowhere above -inf to the first place that counts."""

    def pool(x):
        if settings == "adaptive":
            return F.adaptive_max_pool2d(x, (4, 3), return_indices=True)
        return F.max_pool2d(x, *settings, return_indices=True)

    x = randn(1, 3, 9, 10).round()  # ties
    x[0, 1] = -float("inf")
    x[0, 2, 2:5, 3:7], x[0, 2, 3, 4] = float("nan"), float("inf")
    check(pool, x, modes=(False,))
    program = lowered(pool, x).program
    assert all(c.reducer is None for c in program.body)


def test_small_windows_are_maps_and_large_ones_reductions():
    (small,) = lowered(lambda x: F.max_pool2d(x, 5, 1, 2), randn(*IMAGE)).program.body
    assert small.reducer is None
    (large,) = lowered(lambda x: F.max_pool2d(x, 7, 1, 3), randn(*IMAGE)).program.body
    assert large.reducer == "max"
