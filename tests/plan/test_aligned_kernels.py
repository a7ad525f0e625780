"""Products of our kernels with rows of odd lengths are of operands with zeros behind them, where that pays."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import linear

from tilefold.frontend.fuse import trace
from tilefold.plan import aligned_kernels as module
from tilefold.plan.aligned import slowed
from tilefold.plan.aligned_kernels import aligned_kernels
from tilefold.plan.hardware import H100
from tilefold.tensor.interp import run

B = torch.bfloat16


def layer(x, w, b):
    return torch.relu(linear(x, w, b))


def skip(h, d, w, b):
    return torch.relu(linear(torch.cat([h, d], -1), w, b))


def saved(h, d, w, b):
    x = torch.cat([h, d], -1)
    return x, torch.relu(linear(x, w, b))


def chain(x, v, w):
    return torch.relu(linear(torch.relu(x @ v), w))


def traced(fn, *shapes):
    torch._dynamo.reset()
    return trace(fn, *(torch.empty(s, dtype=B, device="meta") for s in shapes)).program


def made(fn, *shapes, called=()):
    """The program before and after, all products ours but those called; and copies that are kernels."""
    p = traced(fn, *shapes)
    own = frozenset(c.name for c in p.body if c.reducer == "sum") - {*called}
    return p, *aligned_kernels(p, own, called, H100)


def depths(p):
    return [int(p.sizes[d].value) for c in p.body for d in c.rdims]


N = 65536


def test_weights_and_rows_of_a_caller_are_copied_first():
    _, p, copies = made(layer, (N, 39), (256, 39), (256,))
    assert depths(p) == [40]
    shapes = {tuple(int(p.sizes[d].value) for d in c.dims) for c in p.body if c.name in copies}
    assert shapes == {(N, 40), (256, 40)}


@pytest.mark.parametrize("fn", [skip, saved], ids=["in the kernel", "also a result"])
def test_a_concatenation_has_its_zeros_where_it_is_computed(fn):
    """Only the weight is copied: that of a result too is cheaper computed again than read."""
    _, p, copies = made(fn, (N, 256), (N, 3), (128, 259), (128,))
    assert depths(p) == [264] and len(copies) == 1
    (copy,) = (c for c in p.body if c.name in copies)
    assert [int(p.sizes[d].value) for d in copy.dims] == [128, 264]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (layer, ((N, 40), (256, 40), (256,))),
        (layer, ((N, 38), (256, 38), (256,))),  # pairs are copied while others are multiplied
        (layer, ((64, 39), (256, 39), (256,))),  # a copy costs more
        (layer, ((N, 7), (256, 7), (256,))),  # summed one by one
    ],
    ids=["whole rows", "pairs", "few rows", "few sums"],
)
def test_other_products_stay(fn, shapes):
    before, p, copies = made(fn, *shapes)
    assert p is before and not copies


def test_what_another_sum_of_ours_makes_stays():
    """It may be in the same kernel; what the library makes is in memory."""
    p = traced(chain, (N, 256), (256, 257), (128, 257))
    first, second = (c.name for c in p.body if c.reducer == "sum")
    assert aligned_kernels(p, {second}, (), H100)[0] is p
    assert depths(aligned_kernels(p, {second}, {first}, H100)[0]) == [256, 264]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (layer, ((40, 39), (24, 39), (24,))),
        (skip, ((40, 16), (40, 3), (24, 19), (24,))),
        (saved, ((40, 16), (40, 3), (24, 19), (24,))),
        (lambda x, w: torch.relu(x @ w), ((40, 33), (33, 24))),  # the weight's copy is of other rows
        (lambda x, w, v: (torch.relu(x @ w), torch.relu(x @ v)), ((40, 33), (33, 24), (33, 16))),
    ],
)
def test_results_are_those_of_the_operands(fn, shapes, monkeypatch):
    monkeypatch.setattr(module, "_gain", lambda *_: 1.0)
    before, after, _ = made(fn, *shapes)
    assert after is not before
    gen = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=gen).to(B) for s in shapes]
    args[0][0, 0] = torch.inf
    values = dict(zip(inspect.signature(fn).parameters, args, strict=True))
    found, want = (run(p, values) for p in (after, before))
    for name in before.outputs:
        torch.testing.assert_close(found[name], want[name], equal_nan=True, rtol=0.02, atol=0.1)


def test_the_library_is_slower_where_rows_are_odd():
    """As it is, or by the copies that it then is of."""

    def more(fn, *shapes):
        p = traced(fn, *shapes)
        (c,) = (c for c in p.body if c.reducer == "sum")
        return slowed(p, c, H100)

    assert more(layer, (N, 264), (256, 264), (256,)) == 0
    copied, made = (N, 259), ((N, 256), (N, 3))
    assert 0 < more(skip, *made, (256, 259), (256,)) < more(layer, copied, (256, 259), (256,))
