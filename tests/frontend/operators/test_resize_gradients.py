"""Gradients of resized images, and of images padded by their edges, against eager's; how many taps they have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, compiled, lowered, randn
from tilefold.algebra.expr import loads
from tilefold.errors import UnsupportedError

aten = torch.ops.aten
LINEAR, CUBIC, NEAREST, EXACT = (
    aten.upsample_bilinear2d_backward,
    aten.upsample_bicubic2d_backward,
    aten.upsample_nearest2d_backward,
    aten._upsample_nearest_exact2d_backward,
)


def gradient(op, made, extents, *settings):
    """The operator as a function of dy, for images of 2 x 3 x extents."""
    return lambda dy: op(dy, list(made), [2, 3, *extents], *settings)


@pytest.mark.parametrize("op", [LINEAR, CUBIC])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(
    ("extents", "made", "scales"),
    [
        ((5, 6), (10, 12), (2.0, 2.0)),
        ((5, 6), (20, 24), (None, None)),
        ((9, 14), (15, 23), (1.7, 1.7)),
        ((5, 11), (13, 7), (None, None)),
        ((15, 29), (4, 8), (0.3, 0.3)),
        ((1, 6), (9, 1), (None, None)),
        ((3, 4), (120, 36), (None, None)),
    ],
)
def test_weighted(op, corners, extents, made, scales):
    tol = 2e-5 if op is LINEAR else 1e-4
    check(gradient(op, made, extents, corners, *scales), randn(2, 3, *made), modes=(False,), tol=tol)


@pytest.mark.parametrize("op", [NEAREST, EXACT])
@pytest.mark.parametrize(
    ("extents", "made", "scales"),
    [
        ((5, 6), (10, 18), (2.0, 3.0)),
        ((9, 14), (15, 23), (1.7, 1.7)),
        ((9, 14), (13, 5), (None, None)),
        ((1, 6), (9, 1), (None, None)),
        ((3, 4), (120, 36), (None, None)),
    ],
)
def test_nearest(op, extents, made, scales):
    check(gradient(op, made, extents, *scales), randn(2, 3, *made), modes=(False,))


@pytest.mark.parametrize("padding", [(1, 2, 3, 1), (-1, 2, 0, 1), (9, 0, 0, 40)])
def test_edges(padding):
    x = randn(2, 3, 9, 7)
    dy = randn(*F.pad(x, padding, mode="replicate").shape)
    check(lambda dy, x: aten.replication_pad2d_backward(dy, x, list(padding)), dy, x, modes=(False,))


def test_other_numbers_of_axes():
    for dy, f in (
        (randn(2, 3, 17), lambda dy: aten.upsample_linear1d_backward(dy, [17], [2, 3, 10], False, 1.7)),
        (randn(2, 3, 17), lambda dy: aten.upsample_nearest1d_backward(dy, [17], [2, 3, 10], 1.7)),
        (randn(1, 2, 6, 8, 5), lambda dy: aten.upsample_trilinear3d_backward(dy, [6, 8, 5], [1, 2, 3, 4, 5], True)),
        (randn(1, 2, 6, 8, 5), lambda dy: aten._upsample_nearest_exact3d_backward(dy, [6, 8, 5], [1, 2, 4, 4, 3])),
        (randn(2, 3, 9), lambda dy: aten.replication_pad1d_backward(dy, dy[..., :5], [3, 1])),
    ):
        check(f, dy, modes=(False,))


@pytest.mark.parametrize("op", [LINEAR, CUBIC])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_types_and_memory_formats(op, dtype):
    f = gradient(op, (14, 13), (7, 5), False, None, None)
    dy = randn(2, 3, 14, 13, dtype=dtype).to(memory_format=torch.channels_last)
    got, eager, exact = compiled(f, False, [])(dy), f(dy), f(dy.double())
    assert got.dtype is dtype and got.stride() == eager.stride()

    def error(x):
        return float((x.double() - exact).abs().max())

    assert error(got) <= 2 * error(eager) + 1e-14


def test_places_read_few():
    """Twice the size: a sum of 4 x 4 for linear, of 2 x 2 without conditions for nearest, as of copies."""
    (linear,) = lowered(gradient(LINEAR, (10, 12), (5, 6), False, 2.0, 2.0), randn(2, 3, 10, 12)).program.body
    assert linear.reducer is None and len(loads(linear.body)) == 16
    (nearest,) = lowered(gradient(NEAREST, (10, 12), (5, 6), 2.0, 2.0), randn(2, 3, 10, 12)).program.body
    assert nearest.reducer is None and len(loads(nearest.body)) == 4 and "where" not in str(nearest.body)


def test_many_taps_are_summed_an_axis_at_a_time():
    large = lowered(gradient(LINEAR, (160, 96), (5, 6), False, None, None), randn(2, 3, 160, 96)).program.body
    assert [c.reducer for c in large] == ["sum", "sum"]


def test_symbolic_extents_are_left_to_others():
    def f(dy):
        return NEAREST(dy, dy.shape[2:], [2, 3, 5, 6])

    lowered(f, randn(2, 3, 10, 12))
    with pytest.raises(UnsupportedError, match="symbolic extents"):
        lowered(f, randn(2, 3, 10, 12), symbolic=True)
