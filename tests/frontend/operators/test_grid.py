"""Images at the places of a grid, against eager: every mode, ragged sizes, places far outside, and none."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, lowered, randn
from tilefold import fuse
from tilefold.algebra.expr import Call, Load, walk
from tilefold.errors import UnsupportedError

MODES = [*itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True))]


def sampled(mode, padding, corners):
    return lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=corners)


@pytest.mark.parametrize(("mode", "padding", "corners"), MODES)
def test_lowering(mode, padding, corners):
    """With known and with symbolic sizes; one statement, whose positions exist and are not asked for."""
    fn = sampled(mode, padding, corners)
    for size in ((1, 1), (1, 6)):
        check(fn, randn(2, 3, *size), randn(2, 4, 9, 2) * 2, modes=(False,))
    low = check(fn, randn(2, 3, 5, 7), randn(2, 4, 9, 2) * 2, modes=(False, True))
    assert len(low.program.body) == 1
    assert not any(isinstance(n, Call) and n.op == "within" for c in low.program.body for n in walk(c.body))
    found = {n for c in low.program.body for n in walk(c.body) if isinstance(n, Load) and n.tensor == "x"}
    assert len(found) <= {"bilinear": 4, "nearest": 1}[mode]


@pytest.mark.parametrize(("mode", "padding", "corners"), MODES[1::4])
def test_kernels(mode, padding, corners):
    fn = sampled(mode, padding, corners)
    x, g = randn(2, 3, 5, 17), randn(2, 6, 13, 2, seed=1) * 1.5
    want, eager = fn(x.double(), g.double()), fn(x, g)
    if mode == "nearest":  # which of two is nearest may be a matter of the last place
        torch.testing.assert_close(fuse(fn)(x, g), eager)
        return
    error = (fuse(fn)(x, g) - want).abs().max()
    assert error <= max(2 * (eager - want).abs().max(), 1e-6)


@pytest.mark.parametrize(("mode", "padding", "corners"), MODES[::4])
def test_places_that_are_none_read_what_eager_reads(mode, padding, corners):
    """Far outside, infinite or no number: nothing outside of memory, and elements that do not count may be infinite."""
    fn = sampled(mode, padding, corners)
    x = torch.arange(1.0, 17).view(1, 1, 4, 4)
    x[0, 0, 0, 0] = x[0, 0, -1, -1] = math.inf
    far = [0.0, -0.9, 0.9, -1.0, 1.0, 5.0, 1e10, -1e30, math.inf, -math.inf, math.nan]
    g = torch.tensor(list(itertools.product(far, far))).view(1, 1, -1, 2)
    torch.testing.assert_close(fuse(fn)(x, g), fn(x, g), equal_nan=True)


def test_cubics_are_left_to_others():
    with pytest.raises(UnsupportedError, match="16 elements"):
        lowered(sampled("bicubic", "zeros", True), randn(2, 3, 5, 7), randn(2, 4, 9, 2))


def test_none_and_half():
    fn = sampled("bilinear", "zeros", False)
    assert fuse(fn)(randn(0, 3, 4, 4), randn(0, 2, 2, 2)).shape == (0, 3, 2, 2)
    assert fuse(fn)(randn(2, 3, 4, 4), randn(2, 0, 2, 2)).shape == (2, 3, 0, 2)
    x, g = randn(2, 3, 8, 8), randn(2, 5, 5, 2)
    for dtype in (torch.bfloat16, torch.float16):
        want = fn(x.to(dtype).double(), g.to(dtype).double())
        torch.testing.assert_close(fuse(fn)(x.to(dtype), g.to(dtype)).double(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(fuse(fn)(x.double(), g.double()), fn(x.double(), g.double()), rtol=1e-12, atol=1e-12)


def test_what_follows_is_in_the_same_kernel_and_the_gradient_is_eagers():
    def warped(x, g, b):
        return (F.grid_sample(x.sin(), g + 0.1, align_corners=True) + b).relu()

    x, g, b = randn(2, 3, 8, 8), randn(2, 5, 5, 2), randn(3, 1, 1)
    run = torch.compile(warped, backend="tilefold")
    grads = []
    for f in (warped, run):
        leaves = [v.clone().requires_grad_() for v in (x, g, b)]
        f(*leaves).square().sum().backward()
        grads.append([v.grad for v in leaves])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
