"""Masks that data gives bound loops: lengths, beginnings, tables by blocks of rows, lists of blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilefold
from tilefold.algebra.text import show
from tilefold.block.ir import Loop, walk
from tilefold.frontend.regions.assemble import compilations
from tilefold.tensor import hulls

B, H, S, D = 3, 2, 600, 16


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads() -> list[torch.Tensor]:
    return [rand(B, H, S, D, seed=n) for n in range(3)]


def _each(x):
    return x[:, None, None, None]


#: Masks of rows i, columns j and data.
MASKS = {
    "lengths": lambda i, j, n, w: j < _each(n),
    "from and to": lambda i, j, n, w: (j >= _each(n)) & (j < _each(n) + 40),
    "queries and keys": lambda i, j, n, w: (i < _each(n)) & (j < _each(n)) & (j <= i),
    "aligned at the end": lambda i, j, n, w: j <= i + (_each(n) - S),
    "by rows": lambda i, j, n, w: j < w.repeat_interleave(150, 1)[:, None, :, None],
}
LENGTHS = ([300, 7, 599], [0, 1, S], [-4, 1 << 40, 33])


def attention(mask):
    def attend(q, k, v, n, w):
        i, j = torch.arange(S)[:, None], torch.arange(S)
        seen = mask(i, j, n, w)
        seen = seen if seen.dim() == 4 else seen.expand(B, H, S, S)
        scores = torch.where(seen, q @ k.mT * D**-0.5, -math.inf)
        return torch.where(seen.any(-1, keepdim=True), torch.softmax(scores, -1) @ v, 0.0)

    return attend


@pytest.mark.parametrize("name", MASKS)
def test_they_are_right_whatever_the_data(name):
    attend = attention(MASKS[name])
    fast, q, k, v = tilefold.fuse(attend), *heads()
    for n in LENGTHS:
        data = torch.tensor(n), torch.randint(-9, 2 * S, (B, 4), generator=torch.Generator().manual_seed(1))
        want = attend(q.double(), k.double(), v.double(), *data)
        torch.testing.assert_close(fast(q, k, v, *data).double(), want, rtol=2e-5, atol=2e-5)


def test_keys_beyond_are_not_read():
    """What is not a number there does not matter: 0 times it is not formed."""
    attend = attention(MASKS["from and to"])
    (q, k, v), n = heads(), torch.tensor([0, 10, 60])
    want = attend(q, k, v, n, None)
    for x in (k, v):
        x[:, :, -30:] = math.nan
    got = tilefold.fuse(attend)(q, k, v, n, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert tilefold.fuse(attend)(q, k, v, n + 530, None).isnan().any()


def test_documents_as_people_write_them(monkeypatch):
    """A mask of equal numbers in plain PyTorch bounds the loop too."""
    monkeypatch.setattr(hulls, "LEAST", S)
    ids = torch.randint(0, 4, (B, S), generator=torch.Generator().manual_seed(3)).sort(-1).values

    def attend(q, k, v, d):
        i, j = torch.arange(S)[:, None], torch.arange(S)
        seen = (d[:, None, :, None] == d[:, None, None, :]) & (i >= j)
        return torch.softmax((q @ k.mT * D**-0.5).masked_fill(~seen, -math.inf), -1) @ v

    q, k, v = heads()
    got = tilefold.fuse(attend)(q, k, v, ids)
    torch.testing.assert_close(got.double(), attend(q.double(), k.double(), v.double(), ids), rtol=2e-5, atol=2e-5)
    assert _bounded()


def _bounded() -> bool:
    """Whether a loop of the last program is bounded by data on both sides."""
    steps = compilations[-1].regions[0].runner.steps
    loops = [n for s in steps for n in walk(s.fused.block.body) if isinstance(n, Loop) and n.start and n.stop]
    return any("tile_min" in show(n.start) and "tile_max" in show(n.stop) for n in loops)


#: Masks of torch's form that lists of blocks bound.
LISTED = {
    "documents": lambda d: lambda b, h, i, j: (d[b, i] == d[b, j]) & (i >= j),
    "two windows": lambda d: lambda b, h, i, j: ((i - j).abs() < 9) | (i == j + 20),
    "prefix": lambda d: lambda b, h, i, j: (j < 20) | (i >= j),
    "some rows": lambda d: lambda b, h, i, j: (d[b, i] == 2) & (d[b, j] == 2),
}


@pytest.mark.parametrize("name", LISTED)
def test_lists_of_blocks_bound_loops(name):
    ids = torch.randint(0, 4, (B, S), generator=torch.Generator().manual_seed(3)).sort(-1).values
    mask = LISTED[name](ids)
    lists = create_block_mask(mask, B, None, S, S, device="cpu", BLOCK_SIZE=32)
    q, k, v = heads()
    got = tilefold.flex_attention(q, k, v, None, lists)
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = torch.stack([mask(b, 0, i, j) for b in range(B)])[:, None]
    scores = torch.where(seen, q.double() @ k.double().mT * D**-0.5, -math.inf)
    want = torch.where(seen.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0) @ v.double()
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
    assert _bounded()


def test_a_list_that_names_no_more_bounds():
    """The lists are believed: of lists without the last blocks, the last keys are not seen."""
    mask = LISTED["prefix"](None)
    lists = create_block_mask(mask, None, None, S, S, device="cpu", BLOCK_SIZE=32)
    q, k, v = heads()
    whole = tilefold.flex_attention(q, k, v, None, lists)
    lists.kv_num_blocks.clamp_(max=1)
    lists.full_kv_num_blocks.clamp_(max=1)
    less = tilefold.flex_attention(q, k, v, None, lists)
    assert torch.allclose(whole[:, :, :20], less[:, :, :20]) and not torch.allclose(whole, less)
