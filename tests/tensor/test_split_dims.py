"""Which axes are cut into digits, and which stay whole: those that convolutions read through windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, lowered, randn
from tilefold.algebra.expr import loads
from tilefold.algebra.text import Names, parse
from tilefold.frontend.fuse import trace
from tilefold.tensor import split_dims
from tilefold.tensor.convolution import convolution
from tilefold.tensor.convolution_gradients import gradient
from tilefold.tensor.index_simplify import const
from tilefold.tensor.passes import normalise
from tilefold.tensor.product import library_product


def skipped(x, w, up, back):
    """A level of a U-Net: what went down comes up as blocks of 2 x 2, beside what it came from."""
    y = F.conv2d(x, w, padding=1).relu()
    return F.conv2d(torch.cat([F.conv_transpose2d(F.max_pool2d(y, 2), up, stride=2), y], 1), back, padding=1)


def patches(x, w):
    return F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2)


LEVEL = (randn(2, 3, 8, 12), 0.2 * randn(4, 3, 3, 3), 0.3 * randn(4, 5, 2, 2), 0.1 * randn(6, 9, 3, 3))


def test_convolutions_beside_blocks_stay_convolutions():
    p, layouts = normalise(trace(skipped, *LEVEL).program)
    found = [c for c in p.body if convolution(c, p) is not None and not convolution(c, p).pointwise]
    assert len(found) == 2 and all(len(c.dims) == 4 for c in found)
    assert all(len(parts) == 1 for parts in layouts["x"])
    check(skipped, *LEVEL, modes=(False,))  # blocks of symbolic sizes are left to others


def test_patches_that_touch_are_cut_into_a_product():
    x, w = randn(2, 3, 8, 12), randn(5, 3, 4, 4)
    p, layouts = normalise(trace(patches, x, w).program)
    assert any(library_product(c, p.sizes) is not None for c in p.body)
    assert sum(len(parts) for parts in layouts["x"]) == 6
    check(patches, x, w)


def shuffled(x, first, deep, last):
    """Channels in three groups, shuffled between them: their digits are not those of the next groups."""
    y = F.conv2d(x, first, groups=3)
    y = y.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2).relu()
    y = F.conv2d(y, deep, padding=1, groups=y.shape[1]) * 0.5
    return F.conv2d(y, last, groups=3).relu()


def test_groups_of_channels_are_cut_before_other_digits():
    args = (randn(2, 12, 5, 6), randn(15, 4, 1, 1), randn(15, 1, 3, 3), randn(9, 5, 1, 1))
    p, _ = normalise(trace(shuffled, *args).program)
    sums = [c for c in p.body if c.reducer == "sum"]
    assert len(sums) == 3 and all(convolution(c, p) is not None for c in sums)
    check(shuffled, *args, modes=(False,))


def paged(q, k, v, table):
    """Attention to keys in pages, [pages, size, heads, E]."""
    at = torch.arange(table.shape[1] * k.shape[1])
    keys, values = (x[table[:, at // x.shape[1]], at % x.shape[1]].transpose(1, 2) for x in (k, v))
    return torch.softmax(q @ keys.mT, -1) @ values


def test_keys_in_pages_are_one_stream():
    pools = randn(7, 4, 2, 8), randn(7, 4, 2, 8)
    table = torch.tensor([[3, 0, 6], [1, 2, 5]])
    args = (randn(2, 2, 5, 8), *pools, table)
    p, layouts = normalise(trace(paged, *args).program)
    (scores,) = (c for c in p.body if c.reducer == "sum" and "k" in {ld.tensor for ld in loads(c.body)})
    assert len(scores.dims) == 4 and all(len(parts) == 1 for parts in layouts["k"])
    check(paged, *args)


def test_digits_that_both_are_places_are_cut():
    def blocks(x, of):
        at = torch.arange(24)
        return x[of[at // 4, at % 4]]

    p, _ = normalise(trace(blocks, randn(9, 5), torch.arange(24).view(6, 4) % 9).program)
    (only,) = p.body
    assert len(only.dims) == 3


def beside(dy, x, w):
    """The gradients of the parts of a concatenation that a convolution reads, alike in size."""
    dx = torch.ops.aten.convolution_backward(
        dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] + [False] * 2
    )
    return dx[0][:, :4].exp() + 1, dx[0][:, 4:].sin() * 2


def test_the_gradient_of_a_concatenation_stays_one_of_a_convolution():
    given = randn(2, 5, 6, 7), randn(2, 8, 6, 7), 0.2 * randn(5, 8, 3, 3)
    p = normalise(lowered(beside, *given).program)[0]
    assert [gradient(c, p).of for c in p.body if gradient(c, p) is not None] == ["image"]
    check(beside, *given, modes=(False,))


@pytest.mark.parametrize(
    ("index", "by"),
    [
        ("h * 8 + b", 8),
        ("h // 3 * 8 + b", 8),  # heads that share keys
        ("h % 3 * 8 + b", None),
        ("(h + a) // 3 * 8 + b", None),
        ("h // a * 8 + b", None),
        ("h * 7 + b", None),  # digits that overlap
    ],
)
def test_what_stands_before_a_digit_is_a_dim_or_the_head_that_some_share(index, by):
    sizes = {"h": const(6), "a": const(5), "b": const(8)}
    found, firm = split_dims._radix(parse(index, Names(dims=set(sizes))), const(48), sizes)
    assert (found, firm) == ((None, False) if by is None else (const(by), True))
