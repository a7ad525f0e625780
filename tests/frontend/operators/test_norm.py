"""Softmax and normalisations, forward and backward, on ordinary and hostile rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, check_backward, lowered, randn

ROWS = torch.tensor(
    [
        [1.0, 2.0, 3.0],
        [-math.inf, 0.0, -math.inf],
        [-math.inf] * 3,
        [math.inf, 1.0, 2.0],
        [math.nan, 1.0, 2.0],
        [1e4, 1e4, -1e4],
    ]
)


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax, torch.ops.aten._safe_softmax])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmaxes(fn, dim):
    check(lambda x: fn(x, dim), ROWS, modes=(False,))
    check(lambda x: fn(x, dim), randn(4, 5))


def test_softmax_is_four_statements():
    low = lowered(lambda x: torch.softmax(x, -1), randn(4, 5))
    assert [c.reducer for c in low.program.body] == ["max", None, "sum", None]


def test_softmax_of_a_scalar_and_of_narrow_types():
    check(lambda x: torch.softmax(x, 0), torch.tensor(3.0), modes=(False,))
    check(lambda x: torch.softmax(x, -1), randn(3, 7, dtype=torch.bfloat16), tol=1e-2)
    check(lambda x: torch.softmax(x, -1, dtype=torch.float32), randn(3, 7, dtype=torch.bfloat16))
    check(lambda x: torch.log_softmax(x, -1), randn(3, 7, dtype=torch.float64), tol=1e-12)


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine):
    x, w, b = randn(2, 3, 8), randn(8), randn(8, seed=1)
    if affine:
        check(lambda a, c, d: F.layer_norm(a, (8,), c, d), x, w, b)
    else:
        check(lambda a: F.layer_norm(a, (3, 8)), x, modes=(False,))
    check(lambda a: F.layer_norm(a, (8,), eps=1e-3), x + 1000, tol=1e-3)


def test_rms_norm():
    check(lambda a, c: F.rms_norm(a, (8,), c, eps=1e-6), randn(2, 3, 8), randn(8))
    check(lambda a: F.rms_norm(a, (8,)), randn(2, 3, 8))
    check(lambda a: torch.ops.aten._fused_rms_norm(a, [8], None, 1e-5), randn(2, 3, 8), modes=(False,))


def test_group_and_instance_norm():
    x, w, b = randn(2, 6, 4, 5), randn(6), randn(6, seed=1)
    check(lambda a, c, d: F.group_norm(a, 3, c, d), x, w, b, modes=(False,))
    check(lambda a: F.instance_norm(a), x, modes=(False,), tol=1e-4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.softmax(x, -1),
        lambda x: torch.log_softmax(x, 0),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: F.rms_norm(x, (5,)),
        lambda x: F.group_norm(x[:, :, None], 5)[:, :, 0],
        lambda x: torch.logsumexp(x, 1),
        lambda x: torch.var(x, 1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.amax(1),
    ],
)
def test_backward(fn):
    check_backward(fn, randn(4, 5), tol=1e-4)


@pytest.mark.parametrize("dim", [0, 2])
def test_gradients_of_weights_with_a_norm(dim):
    """Of the direction, of the length."""
    v, g = randn(4, 3, 5), randn(*(n if d == dim else 1 for d, n in enumerate((4, 3, 5))))
    check_backward(lambda v, g: torch._weight_norm(v, g, dim), v, g)
    check_backward(lambda g, v: torch._weight_norm(v, g, dim), g, v)
