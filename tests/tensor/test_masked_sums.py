"""Rows of which a mask leaves nothing sum up to 0, whatever a fold divides them by."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.frontend.fuse import fuse, trace

H, D = 2, 16
AFTER = {
    "where": lambda p, seen: torch.where(seen, p, 0.0),
    "masked_fill": lambda p, seen: p.masked_fill(~seen, 0.0),
    "any": lambda p, seen: torch.where(seen.any(-1, keepdim=True), p, 0.0),
    "not any": lambda p, seen: torch.where((~seen).all(-1, keepdim=True), 0.0, p),
}


def attention(after):
    def attend(q, k, v, n):
        seen = (torch.arange(k.shape[-2]) < n[:, None, None]).expand(*q.shape[:-1], k.shape[-2])
        scores = torch.where(seen, q @ k.mT * D**-0.5, -math.inf)
        return after(torch.softmax(scores, -1), seen) @ v

    return attend


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("keys", [40, 700])
def test_queries_without_keys(name, keys):
    fn = attention(AFTER[name])
    args = (*(torch.randn(H, keys, D) for _ in range(3)), torch.tensor([0, keys // 2]))
    found = fuse(fn)(*args)
    torch.testing.assert_close(found, fn(*args), rtol=1e-5, atol=1e-5)
    assert found[0].count_nonzero() == 0


def test_nan_that_the_mask_leaves_stays():
    """Every key is hidden from the scores, one is left afterwards: eager's probabilities are nan there."""

    def fn(q, k, v, n):
        seen = (torch.arange(k.shape[-2]) < n[:, None, None]).expand(*q.shape[:-1], k.shape[-2])
        p = torch.softmax(torch.where(seen, q @ k.mT, -math.inf), -1)
        return torch.where(torch.arange(k.shape[-2]) < 1, p, 0.0) @ v

    args = (*(torch.randn(H, 40, D) for _ in range(3)), torch.tensor([0, 20]))
    found, want = fuse(fn)(*args), fn(*args)
    assert want[0].isnan().all() and found[0].isnan().all() and not found[1].isnan().any()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: (torch.where(m, x, 0.0) * 2.0).sum(-1),
        lambda x, m: (torch.where(m, x, 1.0) / x.sum(-1, keepdim=True)).sum(-1),
        lambda x, m: torch.where(m, x / 3.0, 0.0).sum(-1),
    ],
)
def test_sums_that_nothing_divides_are_left(fn):
    program = trace(fn, torch.randn(4, 9), torch.rand(4, 9) > 0.5).program
    assert not any(c.reducer == "any" for c in program.body)
