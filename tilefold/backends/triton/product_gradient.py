"""The gradient of a running product, by one scan: of y[k] = x[0] ... x[k], given g, the gradient of y.

    out[k] = y[k - 1] s[k]      s[k] = g[k] + x[k + 1] s[k + 1]

s is a linear recurrence from the end: the composition of the maps s -> g[k] + x[k + 1] s, which is associative
(Blelloch, "Prefix sums and their applications", 1990). Nothing is divided by x, so that zeros are as good as any
number. A thread block has some lanes (rows of the scan) whole and takes them chunk by chunk, from their ends.
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch

from tilefold.backends.triton.prelude import INTERPRETED
from tilefold.backends.triton.written import Launch

#: Elements of a chunk; places of it, and warps of a block, where a row is contiguous (a warp has a row's), and where
#: lanes lie side by side (a thread has all places of its lanes).
_CHUNK, (_ALONG, _WARPS_ALONG), (_ACROSS, _WARPS_ACROSS) = 1024, (128, 4), (8, 1)

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def after(c0, d0, c, d):
    return c * c0, d + c * d0


@triton.jit
def gradient(p_g, p_x, p_y, p_out, n, inner, total):
    lanes = tl.program_id(0).to(tl.int64) * {lanes} + tl.arange(0, {lanes})
    live = lanes < total
    start = lanes // inner * inner * n + lanes % inner
    step = tl.arange(0, {rows}).to(tl.int64)
    ahead = tl.zeros([{lanes}], {kind})
    for k in range(0, n, {rows}):
        at = n - 1 - k - step
        ok = (at >= 0){row} & live{lane}
        place = start{lane} + (at * inner){row}
        g = tl.load(p_g + place, mask=ok, other=0).to({kind})
        x = tl.load(p_x + (place + inner), mask=ok & (at < n - 1){row}, other=0).to({kind})
        y = tl.load(p_y + (place - inner), mask=ok & (at > 0){row}, other=1).to({kind})
        c, d = tl.associative_scan((x, g), {axis}, after)
        s = d + c * ahead{lane}
        tl.store(p_out + place, (y * s).to(p_out.dtype.element_ty), mask=ok)
        ahead = tl.sum(tl.where((step == {rows} - 1){row}, s, 0), {axis})
"""


def rows(n: int, inner: int) -> int:
    """Places of a chunk."""
    most = _ALONG if inner == 1 else _ACROSS
    return min(most, 1 << (n - 1).bit_length())


def turns(n: int, inner: int) -> int:
    """Chunks that a thread block takes one after the other."""
    return -(-n // rows(n, inner))


@cache
def source(height: int, along: bool, kind: str, *, interpreted: bool = False) -> str:
    """The kernel, for chunks of so many places. along: whether they are side by side. kind: the type of its state."""
    row, lane = ("[None, :]", "[:, None]") if along else ("[:, None]", "[None, :]")
    text = _SOURCE.format(rows=height, lanes=_CHUNK // height, row=row, lane=lane, axis=int(along), kind=kind)
    return text.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else text


def launches(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> tuple[torch.Tensor, list[Launch]]:
    """What `run` gives, once its launches have run; the tensors, which are contiguous, may be fake ones."""
    outer, n, inner = prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
    out = x.new_empty(x.shape)
    if not x.numel():
        return out, []
    height, warps = rows(n, inner), _WARPS_ALONG if inner == 1 else _WARPS_ACROSS
    kind = "tl.float64" if x.dtype is torch.float64 else "tl.float32"
    text = source(height, inner == 1, kind, interpreted=x.device.type == "cpu")
    grid = -(-outer * inner // (_CHUNK // height))
    return out, [Launch(text, "gradient", (grad, x, y, out), (n, inner, outer * inner), grid, warps)]


def run(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of x of its running product y along dim; contiguous tensors of one device (a CPU's: by Triton's
    interpreter)."""
    out, found = launches(grad, x, y, dim)
    for launch in found:
        launch.run()
    return out
