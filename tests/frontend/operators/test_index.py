"""Indexing by tensors and label losses against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tilefold
from tests.frontend.check import check, check_backward, lowered, randn
from tilefold.errors import UnsupportedError

IDS = torch.tensor([[0, 3, 1], [2, 2, 0]])


def test_embedding_gather_and_select():
    check(lambda w, i: F.embedding(i, w), randn(4, 5), IDS)
    check(lambda x, i: torch.gather(x, 1, i), randn(2, 4), IDS)
    check(lambda x, i: torch.gather(x, 0, i), randn(4, 3), IDS)
    check(lambda x, i: torch.index_select(x, 1, i[0]), randn(2, 4, 3), IDS)
    check(lambda x, i: torch.take_along_dim(x, i, 1), randn(2, 4), IDS)


def test_advanced_indexing():
    i, j = torch.tensor([0, -1, 2]), torch.tensor([1, 1, -2])
    check(lambda x, a: x[a], randn(4, 5), i)
    check(lambda x, a: x[:, a], randn(4, 5), i)
    check(lambda x, a, b: x[a, b], randn(4, 5, 6), i, j)
    check(lambda x, a, b: x[:, a, b], randn(3, 4, 5), i, j)
    check(lambda x, a, b: x[a, :, b], randn(4, 3, 5), i, j)
    check(lambda x, a, b: x[a[:, None], b], randn(4, 5), i, j)


def test_a_mask_as_index_is_refused():
    with pytest.raises(UnsupportedError, match="data"):
        lowered(lambda x, m: x * x[m].sum(), randn(4), torch.tensor([True, False, True, True]), symbolic=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(reduction, weighted):
    x, y, w = randn(6, 5), torch.tensor([0, 4, 2, -100, 1, 1]), randn(5).abs()
    if weighted:
        check(lambda a, t, c: F.cross_entropy(a, t, c, reduction=reduction), x, y, w)
    else:
        check(lambda a, t: F.cross_entropy(a, t, reduction=reduction), x, y)


def test_cross_entropy_options():
    x, y = randn(6, 5), torch.tensor([0, 4, 2, 3, 1, 1])
    check(lambda a, t: F.cross_entropy(a, t, ignore_index=1), x, y)
    check(lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1), x, y)
    check(lambda a, t: F.nll_loss(torch.log_softmax(a, 1), t), x, y)


def test_all_labels_ignored_is_nan_as_in_torch():
    check(lambda a, t: F.cross_entropy(a, t), randn(3, 5), torch.full((3,), -100))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_backward(reduction):
    y = torch.tensor([0, 4, 2, -100, 1, 1])
    check_backward(lambda x, t: F.cross_entropy(x, t, reduction=reduction), randn(6, 5), y)


def test_creation_operators():
    check(lambda x: x + torch.arange(5), randn(3, 5))
    check(lambda x: x * torch.arange(1, 11, 2), randn(3, 5), modes=(False,))
    check(lambda x: x + torch.arange(0, 1, 0.2), randn(3, 5), modes=(False,))
    check(lambda x: x @ torch.eye(5, 4), randn(3, 5), modes=(False,))
    check(lambda x: x + torch.linspace(0, 1, 5), randn(3, 5), modes=(False,))
    check(
        lambda x: (torch.zeros_like(x), torch.full_like(x, 3), torch.ones(2, 3), x.new_full((2,), 7)),
        randn(3, 5),
        modes=(False,),
    )


def test_index_masks():
    def alibi(s):
        n, m = s.shape[-2:]
        i, j = torch.arange(n)[:, None], torch.arange(m)
        s = s - (i - j).abs() * 0.5
        return torch.softmax(s.masked_fill((j > i) | (i - j >= 3), float("-inf")), -1)

    low = check(alibi, randn(2, 6, 6))
    assert len(low.program.body) == 5


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_elements_anywhere_of_every_width(kind):
    """Whole registers and what is left over: rows of one element to several registers."""
    table = randn(3, 150).mul(50).abs().to(kind)
    fast = torch.compile(lambda x, i: torch.gather(x, 1, i) + 0, backend="tilefold", dynamic=True)
    for n in (1, 7, 8, 16, 33, 64, 131):
        at = torch.randint(0, 150, (3, n))
        at[0, 0], at[-1, -1] = 149, 0
        assert torch.equal(fast(table, at), torch.gather(table, 1, at)), n


@pytest.mark.parametrize("place", [0, 9, 31, 70])
@pytest.mark.parametrize("wrong", [-1, 150])
def test_an_element_that_does_not_exist_is_found_in_every_lane(place, wrong):
    at = torch.zeros(2, 71, dtype=torch.int64)
    at[1, place] = wrong
    fast = tilefold.fuse(lambda x, i: torch.gather(x, 1, i) * 2)
    with pytest.raises(IndexError, match="out of range"):
        fast(randn(2, 150), at)
    at[1, place] = 149
    fast(randn(2, 150), at)
