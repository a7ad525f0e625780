"""A softmax over a row and a constant behind it is one over the row, where the constant's share is not read."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.frontend.fuse import fuse, trace
from tilefold.tensor.ir import Program

H, S, D = 3, 70, 16


def sinks(q, k, v, sink, count: int = 1, kept: int = -1):
    """As GPT-OSS has it: each head's logit takes part in the softmax and has no value."""
    n = torch.arange(q.shape[-2])
    s = (q @ k.mT * D**-0.5).masked_fill(n[:, None] < n[None], -math.inf)
    s = torch.cat((s, sink[:, None, None].expand(*s.shape[:-1], count)), -1)
    return s.softmax(-1)[..., :kept] @ v


def arguments(dtype: torch.dtype = torch.float32):
    gen = torch.Generator().manual_seed(0)
    return (*(torch.randn(2, H, S, D, generator=gen).to(dtype) for _ in range(3)), torch.randn(H, generator=gen))


def longer(p: Program) -> bool:
    """Whether anything is longer than the row."""
    return any(p.sizes[d].value > S for c in p.body for d in (*c.dims, *c.rdims))


def right(fn, *args):
    want = fn(*(a.double() for a in args))
    torch.testing.assert_close(fuse(fn)(*args).double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("count", [1, 4])
def test_a_sink_is_no_column(count):
    def fn(*args):
        return sinks(*args, count=count, kept=-count)

    assert not longer(trace(fn, *arguments()).program)
    right(fn, *arguments())


def test_a_maximum_that_was_subtracted_before_goes():
    """As transformers has it."""

    def fn(q, k, v, sink):
        s = q @ k.mT * D**-0.5
        s = torch.cat((s, sink[:, None, None].expand(*s.shape[:-1], 1)), -1)
        s = s - s.max(-1, keepdim=True).values
        return s.softmax(-1)[..., :-1] @ v

    assert not longer(trace(fn, *arguments()).program)
    right(fn, *arguments())


@pytest.mark.parametrize("level", [-math.inf, -1e4, -100.0, 0.0, 100.0, 1e4, math.inf], ids=str)
def test_sinks_of_any_size(level):
    q, k, v, _ = arguments()
    right(sinks, q, k, v, torch.tensor([level, 0.0, -level]))


@pytest.mark.parametrize("sink", [-math.inf, -1e3, 0.0, 1e3])
def test_rows_of_which_a_mask_leaves_nothing(sink):
    def fn(q, k, v, b, seen):
        s = torch.where(seen > 0, q @ k.mT, -math.inf)
        return torch.cat((s, b[:, None, None].expand(*s.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v

    q, k, v, _ = arguments()
    seen = torch.ones(S, S)
    seen[3], seen[5, 7:] = 0, 0
    right(fn, q, k, v, torch.full((H,), sink), seen)


def test_half_precision_rounds_as_the_row_did():
    args = arguments(torch.bfloat16)
    args = (*args[:3], args[3].bfloat16())
    want = sinks(*(a.double() for a in args))
    torch.testing.assert_close(fuse(sinks)(*args).double(), want, rtol=2e-2, atol=2e-2)
    assert not longer(trace(sinks, *args).program)


REFUSED = {
    "read": lambda s: s.softmax(-1).sum(-1),
    "a part of it": lambda s: s.softmax(-1)[..., 1:],
    "the sum read": lambda s: s.softmax(-1)[..., :-1] + s.exp().sum(-1, keepdim=True),
    "a result": lambda s: (s.softmax(-1), s.softmax(-1)[..., :-1].sum(-1)),
    "less something else": lambda s: (s - s.min(-1, keepdim=True).values).softmax(-1)[..., :-1],
    "the maximum read": lambda s: (s - s.amax(-1, keepdim=True)).softmax(-1)[..., :-1] * s.amax(-1, keepdim=True),
    "no softmax": lambda s: s.sigmoid()[..., :-1] + s.amax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_more_keeps_it(name):
    def fn(x, b):
        found = REFUSED[name](torch.cat((x, b.expand(x.shape[0], 1)), -1))
        return found if isinstance(found, tuple) else (found,)

    args = (torch.randn(5, S), torch.randn(1, 1))
    assert longer(trace(fn, *args).program)
    for x, y in zip(fuse(fn)(*args), fn(*args), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_what_varies_along_the_tail_stays():
    def fn(x, y):
        return torch.cat((x, y), -1).softmax(-1)[..., : x.shape[-1]]

    x, y = torch.randn(5, S), torch.randn(5, 3)
    assert longer(trace(fn, x, y).program)
    torch.testing.assert_close(fuse(fn)(x, y), fn(x, y), rtol=2e-5, atol=2e-5)
