"""Scatters of few elements a row are maps; others are left. Gradients that are such scatters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, check_backward, lowered, randn
from tilefold.errors import UnsupportedError

PLACES = torch.tensor([[2], [0], [5]])


def test_one_element_a_row():
    x = randn(3, 6)
    check(lambda x, i, y: x.scatter(1, i, y), x, PLACES, randn(3, 1))
    check(lambda x, i: x.scatter(1, i, 2.5), x, PLACES)
    check(lambda x, i, y: x.scatter_add(-1, i, y), x.bfloat16(), PLACES, randn(3, 1).bfloat16(), tol=1e-2)
    check(lambda x, i, y: x.scatter_add(0, i, y), randn(6, 3), PLACES.mT, randn(1, 3))
    (alone,) = lowered(lambda x, i: x.scatter(1, i, 2.5), x, PLACES).program.body
    assert alone.reducer is None


def test_a_place_that_does_not_exist_is_an_error():
    with pytest.raises((IndexError, RuntimeError)):
        check(lambda x, i: x.scatter(1, i, 2.5), randn(3, 6), PLACES + 4, modes=(False,))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_few_elements_a_row(count):
    """Of those at the same place the last stands; an index of one row of places says them for itself."""
    places = torch.randint(0, 9, (4, count))
    x, y = randn(4, 9), randn(4, count)
    check(lambda x, i, y: x.scatter(1, i, y) * 2, x, places, y, modes=(False,))
    check(lambda x, i: x.scatter(1, i, -torch.inf).softmax(1), x, places, modes=(False,))
    check(lambda x, i, y: x.scatter(0, i, y), randn(9, 4), places.mT, y.mT, modes=(False,))
    check(lambda x, i: torch.zeros_like(x).scatter(1, i, 1) * x, x.bfloat16(), places, modes=(False,))
    (alone,) = lowered(lambda x, i, y: x.scatter(1, i, y) * 2, x, places, y).program.body
    assert alone.reducer is None


def test_the_best_few_of_a_row_are_marked_in_training():
    def routed(x):
        p = x.softmax(-1)
        return p * torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0)

    check_backward(routed, randn(6, 5))


@pytest.mark.parametrize("index", [torch.randint(0, 6, (3, 9)), torch.tensor([[1]])])
def test_others_are_left(index):
    with pytest.raises(UnsupportedError, match=r"many elements a row|a part of a tensor"):
        lowered(lambda x, i: x.scatter(1, i, 2.5), randn(3, 6), index)


@pytest.mark.parametrize("dim", [0, 2])
def test_gradients_of_picked_elements(dim):
    x = randn(3, 4, 5).round()
    check_backward(lambda x: torch.max(x, dim).values, x)
    check_backward(lambda x: torch.min(x, dim, keepdim=True)[0], x)


def test_gradients_of_labels_of_images():
    target = torch.tensor([[[0, 2], [1, 1]], [[2, 2], [0, 1]]])
    check_backward(lambda x, t: F.cross_entropy(x, t, ignore_index=2), randn(2, 3, 2, 2), target)


@pytest.mark.parametrize("offset", [0, 2, -1])
def test_diagonals(offset):
    x = randn(4, 5, 6)
    y = torch.diagonal(x, offset, 0, 2)
    check(lambda x, y: x.diagonal_scatter(y, offset, 0, 2), x, y.clone())
    check_backward(lambda x: torch.diagonal(x, offset).square(), x)


def test_slices_with_a_step():
    """Rotary embeddings of neighbours take every second element: their gradients put them back."""
    x = randn(3, 11)
    check(lambda x, y: x.slice_scatter(y, 1, 1, 9, 3), x, randn(3, 3))
    check(lambda x, y: x.slice_scatter(y, 1, -5, None, 2), x, randn(3, 3))

    def turned(x):
        return torch.stack((-x[..., 1::2] * 3, x[..., ::2]), -1).flatten(-2)

    check_backward(turned, randn(3, 8))


def test_bilinear_is_products():
    x, y, w = randn(4, 5), randn(4, 6), randn(3, 5, 6)
    check(lambda x, y, w: F.bilinear(x, y, w), x, y, w)
    check_backward(lambda w, x, y: F.bilinear(x, y, w), w, x, y)
    check_backward(lambda x, y, w: F.bilinear(x, y, w), x, y, w)
