"""The gradient of a fold's prefixes, by one scan: of y[k], the product of x[0] .. x[k] or the log of the sum of their
exponentials, given g, the gradient of y.

    out[k] = scale[k] s[k]      s[k] = g[k] + share[k + 1] s[k + 1]

    product       share[k + 1] = x[k + 1]               scale[k] = y[k - 1]
    log-sum-exp   share[k + 1] = exp(y[k] - y[k + 1])   scale[k] = exp(x[k] - y[k])

s is a linear recurrence from the end: the composition of the maps s -> g[k] + share[k + 1] s, which is associative
(Blelloch, "Prefix sums and their applications", 1990). A stretch of a log-sum-exp has the y of its first place instead
of a share: that of two stretches is exp of one difference. A product of 65,536 numbers just below 1, each rounded, was
off by 1e-4. Nothing is divided by x, so that zeros are as good as any number, and no logarithm of g is taken, so that
its sign is none's concern; y grows, so that no exponential does. A thread block has some lanes (rows of the scan) and
takes them chunk by chunk, from their ends. Where lanes alone do not
fill the device, rows are cut into blocks: a first kernel composes the maps of each, and each block of the second starts
from what those behind it make of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod

import torch

from tilefold.backends.triton.prelude import INTERPRETED
from tilefold.backends.triton.written import Launch
from tilefold.errors import BackendError

#: Elements of a chunk; places of it, and warps of a block, where a row is contiguous (a warp has a row's), and where
#: lanes lie side by side (a thread has all places of its lanes).
_CHUNK, (_ALONG, _WARPS_ALONG), (_ACROSS, _WARPS_ACROSS) = 1024, (128, 4), (8, 1)
#: Warps that a multiprocessor should have, and chunks of a block of rows at least.
_WARPS, _FEW = 16, 8
#: Of each fold: what a place has beside g (its `share[k + 1]`, or y); of a stretch with c behind one with c0, that of
#: both, and the share; what a stretch of no places has; and `scale[k]`.
_FOLDS: Mapping[str, tuple[str, str, str, str, str]] = {
    "prod": (
        "tl.load(p_x + (place + inner), mask=later, other=0).to({kind})",
        "c * c0",
        "c",
        "1",
        "tl.load(p_y + (place - inner), mask=ok & (at > 0), other=1).to({kind})",
    ),
    "logsumexp": (
        "y",
        "c + tl.zeros_like(c0)",
        "ratio(c, c0)",
        "float('inf')",
        "ratio(tl.load(p_x + place, mask=ok, other=0).to({kind}), y)",
    ),
}

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def ratio(a, b):
    return tl.exp(tl.where(a == b, 0, a - b))


@triton.jit
def after(c0, d0, c, d):
    return {both}, d + {share} * d0


@triton.jit
def place_of(n, inner, total, blocks, height):
    pid = tl.program_id(0).to(tl.int64)
    lanes = pid // blocks * {lanes} + tl.arange(0, {lanes})
    start = pid % blocks * height
    return lanes, lanes // inner * inner * n + lanes % inner, start, tl.minimum(start + height, n)


@triton.jit
def maps(p_g, p_x, p_y, k, start, live, n, inner):
    at = n - 1 - k - tl.arange(0, {rows}).to(tl.int64){row}
    ok = (at >= 0) & live{lane}
    later = ok & (at < n - 1)
    place = start{lane} + at * inner
    g = tl.load(p_g + place, mask=ok, other=0).to({kind})
    y = tl.load(p_y + place, mask=ok, other=0).to({kind})
    scale = {scale}
    c, d = tl.associative_scan(({of_place}, g), {axis}, after)
    return place, ok, scale, c, d


@triton.jit
def totals(p_g, p_x, p_y, p_share, p_total, n, inner, total, blocks, height):
    lanes, start, begin, end = place_of(n, inner, total, blocks, height)
    live = lanes < total
    last = (tl.arange(0, {rows}) == {rows} - 1){row}
    share = tl.full([{lanes}], {none}, {kind})
    state = tl.zeros([{lanes}], {kind})
    for k in range(begin, end, {rows}):
        place, ok, scale, c, d = maps(p_g, p_x, p_y, k, start, live, n, inner)
        share, state = after(share, state, tl.sum(tl.where(last, c, 0), {axis}), tl.sum(tl.where(last, d, 0), {axis}))
    at = tl.program_id(0).to(tl.int64) % blocks * total + lanes
    tl.store(p_share + at, share, mask=live)
    tl.store(p_total + at, state, mask=live)


@triton.jit
def gradient(p_g, p_x, p_y, p_share, p_total, p_out, n, inner, total, blocks, height):
    lanes, start, begin, end = place_of(n, inner, total, blocks, height)
    live = lanes < total
    last = (tl.arange(0, {rows}) == {rows} - 1){row}
    share = tl.full([{lanes}], {none}, {kind})
    ahead = tl.zeros([{lanes}], {kind})
    for b in range(0, tl.program_id(0) % blocks, 1):
        c = tl.load(p_share + (b * total + lanes), mask=live, other=0)
        share, ahead = after(share, ahead, c, tl.load(p_total + (b * total + lanes), mask=live, other=0))
    for k in range(begin, end, {rows}):
        place, ok, scale, c, d = maps(p_g, p_x, p_y, k, start, live, n, inner)
        c, s = after(share{lane}, ahead{lane}, c, d)
        tl.store(p_out + place, (scale * s).to(p_out.dtype.element_ty), mask=ok)
        share, ahead = tl.sum(tl.where(last, c, 0), {axis}), tl.sum(tl.where(last, s, 0), {axis})
"""


def rows(n: int, inner: int) -> int:
    """Places of a chunk."""
    most = _ALONG if inner == 1 else _ACROSS
    return min(most, 1 << (n - 1).bit_length())


def cut(outer: int, n: int, inner: int, units: int) -> tuple[int, int]:
    """Blocks that rows are cut into, on a device of so many multiprocessors, and places of each: whole chunks."""
    height = rows(n, inner)
    chunks, groups = -(-n // height), -(-outer * inner * height // _CHUNK)
    warps = _WARPS_ALONG if inner == 1 else _WARPS_ACROSS
    wanted = min(_WARPS * units // (warps * max(1, groups)), chunks // _FEW)
    each = -(-chunks // max(1, wanted))
    return -(-chunks // each), each * height


@cache
def source(fold: str, height: int, along: bool, kind: str, *, interpreted: bool = False) -> str:
    """The kernels of a fold, for chunks of so many places. along: whether they are side by side. kind: the type of its
    state. BackendError: there is no fold of that name."""
    if fold not in _FOLDS:
        raise BackendError(f"there is no gradient of {fold}", hint=f"one of {', '.join(_FOLDS)}")
    names = ("of_place", "both", "share", "none", "scale")
    parts = {name: text.format(kind=kind) for name, text in zip(names, _FOLDS[fold], strict=True)}
    row, lane = ("[None, :]", "[:, None]") if along else ("[:, None]", "[None, :]")
    sizes = {"rows": height, "lanes": _CHUNK // height, "axis": int(along)}
    text = _SOURCE.format(**sizes, **parts, row=row, lane=lane, kind=kind)
    return text.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else text


def launches(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int, fold: str, units: int
) -> tuple[torch.Tensor, list[Launch]]:
    """What `run` gives, once its launches have run; the tensors, which are contiguous, may be fake ones."""
    outer, n, inner = prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
    out = x.new_empty(x.shape)
    if not x.numel():
        return out, []
    height, warps = rows(n, inner), _WARPS_ALONG if inner == 1 else _WARPS_ACROSS
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    kind = "tl.float64" if wide is torch.float64 else "tl.float32"
    text = source(fold, height, inner == 1, kind, interpreted=x.device.type == "cpu")
    blocks, each = cut(outer, n, inner, units)
    sizes = (n, inner, outer * inner, blocks, each)
    grid = -(-outer * inner // (_CHUNK // height)) * blocks
    share, total = (x.new_empty((blocks, outer * inner), dtype=wide) for _ in range(2))
    given = (grad, x, y, share, total)
    found = [Launch(text, "totals", given, sizes, grid, warps)] if blocks > 1 else []
    return out, [*found, Launch(text, "gradient", (*given, out), sizes, grid, warps)]


def run(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int, fold: str, units: int) -> torch.Tensor:
    """The gradient of x of its prefixes y along dim; contiguous tensors of one device (a CPU's: by Triton's
    interpreter)."""
    out, found = launches(grad, x, y, dim, fold, units)
    for launch in found:
        launch.run()
    return out
