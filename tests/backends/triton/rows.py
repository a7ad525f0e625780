"""Streamed folds whose rows groups of warps own, at hostile sizes, and configurations that share them out so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tilefold.backends.triton import tiles
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Block
from tilefold.frontend.operators.random import random16_op
from tilefold.suites.gpu import operators as o
from tilefold.tile.pieces import power_of_two

H, B = torch.float16, torch.bfloat16
_default = tiles.default_config


def _positions(q, k):
    return torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)


def alibi(q, k, v, slopes):
    """A slope a head, of the queries' type; causal."""
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes.view(-1, 1, 1) * (j - i)
    return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1) @ v


def biased(q, k, v, bias):
    """A bias of queries and keys."""
    return torch.softmax(q @ k.mT * 0.1 + bias, -1) @ v


def evoformer(q, k, v, mask, pair, gate):
    """A bias of a batch's keys, one of queries and keys that all batches share; results are gated."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + mask + pair
    return torch.sigmoid(gate) * (torch.softmax(scores, -1).to(v.dtype) @ v)


def windows(q, k, v, table, mask, blind):
    """A bias a head, one a window, both of queries and keys; some rows see nothing and are 0."""
    hidden = torch.where(blind.unsqueeze(-1) > 1.0, float("-inf"), table)
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5 + mask + hidden
    return torch.ops.aten._safe_softmax(scores, -1).to(v.dtype) @ v


def shifted(q, k, v, table, row):
    """Causal, with a bias whose columns begin later, and one of rows alone."""
    i, j = _positions(q, k)
    scores = (q @ k.mT).float() * 0.1 + table[:, :, 3 : 3 + k.shape[-2]] + row
    return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1).to(v.dtype) @ v


def documents(q, k, v, doc):
    """Tokens see those of their own document."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    same = doc.unsqueeze(-1) == doc.unsqueeze(-2)
    return torch.softmax(torch.where(same, scores, float("-inf")), -1) @ v


def lengths(q, k, v, n):
    """Each head sees as many keys as data says, those before the first of which are none."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (
        torch.softmax(
            torch.where(torch.arange(k.shape[-2], device=q.device) <= 100 * n.view(-1, 1, 1), scores, float("-inf")), -1
        )
        @ v
    )


def sequences(q, k, v, queries, keys):
    """Each head has as many queries and keys as data says, which may be none; rows that see no key are 0."""
    i, j = _positions(q, k)
    seen = (i < 150 * queries.view(-1, 1, 1)) & (j < 180 * keys.view(-1, 1, 1)) & (j <= i + 40)
    scores = torch.where(seen, (q @ k.mT).float() * q.shape[-1] ** -0.5, float("-inf"))
    return torch.ops.aten._safe_softmax(scores, -1).to(v.dtype) @ v


def listed(q, k, v, first, last):
    """Blocks of 128 queries see keys from one position to another, by tables."""
    i, j = _positions(q, k)
    seen = (j >= 60 * first[:, i // 128]) & (j <= 150 * last[:, i // 128])
    return torch.where(seen, torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5), 0.0) @ v


def sinks(q, k, v, sink):
    """A logit a head that takes probability and has no value."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    taken = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sink.float().view(-1, 1, 1))
    return ((torch.softmax(scores, -1).to(v.dtype) @ v).float() * taken).to(v.dtype)


def sigmoid(q, k, v):
    """No softmax: nothing is rescaled."""
    return torch.sigmoid(q @ k.mT * 0.1 - 3.0) @ v


def scaled_before(q, k, v):
    """Queries are scaled, not scores."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v


def two_softmaxes(q, k, q2, k2, v):
    """The difference of two attentions over the same values."""
    one, other = (torch.softmax(a @ b.mT * a.shape[-1] ** -0.5, -1) @ v for a, b in ((q, k), (q2, k2)))
    return one - 0.3 * other


def retention(q, k, v, decay):
    """Scores that decay with the distance; no softmax."""
    i, j = _positions(q, k)
    faded = torch.exp((i - j) * decay.float().abs().view(-1, 1, 1) * -0.01)
    return (torch.where(j <= i, (q @ k.mT).float() * faded, 0.0)).to(v.dtype) @ v


def squared(q, k, v):
    """Squared ReLU of scores, causal."""
    i, j = _positions(q, k)
    return torch.where(j <= i, torch.relu(q @ k.mT * 0.1) ** 2, 0.0) @ v


def by_the_least(q, k, v):
    """Only keys before, by the least number of the type and not by -inf, as the first row sees none: a row begins at
    tiles of which it sees nothing."""
    i, j = _positions(q, k)
    return torch.softmax(torch.where(j < i, q @ k.mT * 0.1, torch.finfo(q.dtype).min), -1) @ v


def with_sizes(q, k, v):
    """Attention and the logarithm of each row's sum."""
    scores = (q @ k.mT).float() * 0.1
    top = scores.amax(-1, keepdim=True)
    total = torch.exp(scores - top).sum(-1, keepdim=True)
    return (torch.exp(scores - top) / total).to(v.dtype) @ v, (top + torch.log(total)).squeeze(-1)


def dropout(q, k, v, seed):
    """Causal, and a tenth of the probabilities are none."""
    i, j = _positions(q, k)
    p = torch.softmax(torch.where(j <= i, (q @ k.mT).float() * 0.1, float("-inf")), -1)
    kept = random16_op(seed, list(p.shape)) < 58982
    return (p * kept * (1 / 0.9)).to(v.dtype) @ v


def pages(q, k, v, table, used):
    """Keys in pages, of which each batch sees as many as data says."""
    at = torch.arange(table.shape[1] * k.shape[1], device=q.device)
    keys, values = (x[table[:, at // x.shape[1]], at % x.shape[1]].transpose(1, 2) for x in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    seen = at <= 100 + 50 * used.view(-1, 1, 1, 1)
    return torch.softmax(torch.where(seen, scores, float("-inf")), -1) @ values


def in_pages(page: int, dim: int, count: int = 4):
    """Shapes and types: two batches of two heads, a pool of seven pages."""
    pools = [((7, page, 2, dim), B)] * 2
    return [((2, 2, 200, dim), B), *pools, ((2, count), torch.int32), ((2,), torch.int64)]


def attention(
    queries: int, keys: int, dim: int, dtype: torch.dtype = B, kv: int = 2, heads: int = 2, value: int | None = None
):
    """Shapes and types of q, k, v: one batch."""
    return [((1, heads, queries, dim), dtype), ((1, kv, keys, dim), dtype), ((1, kv, keys, value or dim), dtype)]


#: Name -> function, shapes and types of its arguments.
FOLDS: dict[str, tuple[Callable[..., object], list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "causal": (o.causal, attention(333, 333, 128)),
    "full": (o.attention, attention(256, 384, 128, H)),
    "heads of 64": (o.causal, attention(300, 300, 64)),
    "heads of 96": (o.causal, attention(200, 200, 96)),
    "heads of 80": (o.attention, attention(130, 333, 80)),
    "heads of 72": (o.causal, attention(200, 333, 72)),
    "heads of 112, seven for one of keys": (o.causal, attention(130, 130, 112, kv=1, heads=7)),
    "heads of 160": (o.softcap(30.0), attention(130, 203, 160, H)),
    "heads of 192, values of 128": (o.causal, attention(203, 203, 192, value=128)),
    "heads of 192": (o.softcap(30.0), attention(130, 203, 192)),
    "heads of 256": (o.causal, attention(130, 203, 256)),
    "heads of 16, values of 256": (sigmoid, attention(65, 130, 16, value=256)),
    "soft cap, grouped heads": (o.softcap(30.0), attention(300, 300, 64, kv=2, heads=4)),
    "window": (o.window(100), attention(500, 500, 128)),
    "after a cache": (o.causal, attention(200, 500, 128)),
    "rows without a key": (o.causal, attention(500, 200, 128)),
    "alibi": (alibi, [*attention(256, 256, 64), ((2,), B)]),
    "bias": (biased, [*attention(300, 333, 128), ((2, 300, 333), B)]),
    "evoformer": (
        evoformer,
        [*(3 * [((3, 2, 203, 32), B)]), ((3, 1, 1, 203), torch.float32), ((1, 2, 203, 203), B), ((3, 2, 203, 32), B)],
    ),
    "windows": (windows, [*attention(200, 200, 32, H), ((2, 200, 200), torch.float32), ((200, 200), H), ((200,), H)]),
    "shifted": (shifted, [*attention(260, 333, 96), ((2, 260, 340), B), ((2, 260, 1), B)]),
    "documents": (documents, [*attention(200, 200, 64), ((200,), torch.int64)]),
    "lengths": (lengths, [*attention(200, 500, 64), ((2,), torch.int64)]),
    "sequences": (sequences, [*attention(333, 500, 64, kv=4, heads=4), *(2 * [((4,), torch.int64)])]),
    "listed": (listed, [*attention(300, 500, 128), *(2 * [((2, 3), torch.int64)])]),
    "sinks": (sinks, [*attention(200, 200, 64), ((2,), B)]),
    "sigmoid": (sigmoid, attention(300, 333, 128)),
    "retention": (retention, [*attention(200, 200, 64), ((2,), B)]),
    "squared": (squared, attention(200, 200, 64)),
    "scaled before": (scaled_before, attention(200, 300, 128)),
    "two softmaxes": (two_softmaxes, [*attention(130, 200, 64)[:2], *attention(130, 200, 64)]),
    "masked by the least number": (by_the_least, attention(300, 300, 64)),
    "with sizes": (with_sizes, attention(200, 300, 64)),
    "pages": (pages, in_pages(64, 64)),
    "pages of two tiles": (pages, in_pages(128, 128, 2)),
    "pages of 16": (pages, in_pages(16, 64, 13)),
    "pages of 32, heads of 128": (pages, in_pages(32, 128, 7)),
    "pages of 48": (pages, in_pages(48, 32, 5)),
    "pages of 96, heads of 80": (pages, in_pages(96, 80, 2)),
    "dropout": (dropout, [*attention(333, 333, 64), ((2,), torch.int64)]),
    "dropout, heads of 256": (dropout, [*attention(130, 203, 256), ((2,), torch.int64)]),
    "dropout, fewer queries": (dropout, [*attention(77, 500, 128), ((2,), torch.int64)]),
}


#: Streamed indices a tile, where 128 take more registers than there are, or than a page has.
TILES = {
    "windows": 64,
    "shifted": 64,
    "dropout, heads of 256": 64,
    "pages": 64,
    "pages of two tiles": 64,
    "pages of 16": 64,
    "pages of 32, heads of 128": 64,
    "pages of 48": 64,
    "pages of 96, heads of 80": 64,
    "two softmaxes": 64,
    "heads of 160": 64,
    "heads of 192": 64,
    "heads of 256": 64,
    "heads of 16, values of 256": 64,
}


def by_rows(
    groups: int = 2, tile: int = 128, stages: int = 2, *, draws: bool = False, turned: bool = True
) -> Callable[..., TritonConfig]:
    """A choice of configuration: groups that own 64 rows each, this many streamed indices a tile."""

    def choose(block: Block, sizes: Mapping[str, int], unit: tiles.UnitAxes | None = None, **how: bool) -> TritonConfig:
        base, s = _default(block, sizes, unit, **how), tiles.Shape.of(block)
        rows = [d for d in s.parallel if max(base.tiles.get(d, 1), base.lanes.get(d, 1)) >= 16][-1:]
        if not any(m and n for m, n, _ in s.products) or not rows:
            return base
        streams = [d for d in s.streamed if any(d in m | n for m, n, _ in s.products)]
        whole = {d: power_of_two(sizes[d]) for d in s.streamed if d not in streams}
        cut = {**base.tiles, **whole, **dict.fromkeys(rows, 64), **dict.fromkeys(streams, tile)}
        shared = {
            "groups": groups,
            "own": "rows",
            "draws": draws,
            "stages": stages,
            "descriptors": turned,
        }
        return replace(base, tiles=cut, lanes={}, **shared)  # type: ignore[arg-type]

    return choose
