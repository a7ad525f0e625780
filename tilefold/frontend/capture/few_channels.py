"""Convolutions of few channels with a stride, as convolutions of more channels without one.

    out[n, o, y]  =  sum over c, k of x[n, c, s y + k - p] w[o, c, k]
                  =  sum over (r, c), a of x'[n, (r, c), y + a] w'[o, (r, c), a]      k = s a + r
    x'[n, (r, c), b] = x[n, c, s b + r - p]        0 outside of x
    w'[o, (r, c), a] = w[o, c, s a + r]            0 beyond the last tap

along each axis of space: x' has an s-th of the places and s times the channels ("space to depth"), w' the taps that
belong to a place. Channels are filled up with zeros. A library has kernels for matrix units where channels are whole
vectors of 16 bytes; of an image's three it computes such a convolution at a fraction of their rate. On an H200, 32
images of 224 x 224 in bf16, channels last: 221 us for 7 x 7 taps with a stride of 2, 7.6 GFLOP; 16 of 160 x 160 on an
H100: 107, and 35 in this form. The image is converted to channels last for it anyway; x' is that copy. The weight's
gradient stays as it is: of x' a few thread blocks sum over all places (640 us of those 16 images), of x, which it fills
up itself, the library shares them out (36 us, and 8 for filling up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

#: Bytes of channels that a matrix unit's kernel of a library reads at once.
VECTOR = 16


@dataclass(frozen=True, slots=True)
class Steps:
    """The strides, paddings and taps of a convolution, by axis of space; its image's extents and its result's."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    taps: tuple[int, ...]
    image: tuple[int, ...]
    made: tuple[int, ...]

    @property
    def taps_left(self) -> tuple[int, ...]:
        """Taps of w'."""
        return tuple(-(-k // s) for k, s in zip(self.taps, self.stride, strict=True))

    def channels(self, have: int, whole: int) -> int:
        """Channels of x' for those of x: so many that they are whole vectors of `whole`."""
        return -(-have * prod(self.stride) // whole) * whole


def strided(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Steps | None:
    """What is rewritten of a convolution of x [N, C, H, W] and w [O, C, KH, KW]; None: it stays. It must be of 16 bits,
    on a GPU, of fewer channels than a vector has, of one group and of known sizes, with windows that overlap; and with
    vectors filled up it must not have more products than before."""
    sizes = (*x.shape, *w.shape)
    if x.dim() != 4 or x.device.type != "cuda" or x.dtype.itemsize != 2 or x.dtype is not w.dtype or transposed:
        return None
    if groups != 1 or any(d != 1 for d in dilation) or not all(isinstance(n, int) and n > 0 for n in sizes):
        return None
    whole, channels = VECTOR // x.dtype.itemsize, x.shape[1]
    s, p = (tuple(a) if len(a) == 2 else (a[0], a[0]) for a in (stride, padding))
    taps, image = tuple(w.shape[2:]), tuple(x.shape[2:])
    made = tuple((n + 2 * q - k) // t + 1 for n, q, k, t in zip(image, p, taps, s, strict=True))
    found = Steps(s, p, taps, image, made)
    if channels >= whole or prod(s) == 1 or min(made) < 2 or all(k <= t for k, t in zip(taps, s, strict=True)):
        return None
    after = found.channels(channels, whole) * prod(found.taps_left)
    return found if after <= whole * prod(taps) else None


def images(x: torch.Tensor, by: Steps) -> torch.Tensor:
    """x': [N, C, H, W] -> [N, C', H', W']."""
    places = [y + a - 1 for y, a in zip(by.made, by.taps_left, strict=True)]
    around = [(p, s * b - n - p) for n, p, s, b in zip(by.image, by.padding, by.stride, places, strict=True)]
    wide = F.pad(x, (*around[1], *around[0]))
    return _in_channels(wide, by, places)


def weights(w: torch.Tensor, by: Steps) -> torch.Tensor:
    """w': [O, C, KH, KW] -> [O, C', KH', KW']."""
    more = [a * s - k for a, s, k in zip(by.taps_left, by.stride, by.taps, strict=True)]
    return _in_channels(F.pad(w, (0, more[1], 0, more[0])), by, by.taps_left)


def _in_channels(x: torch.Tensor, by: Steps, places: Sequence[int]) -> torch.Tensor:
    """[N, C, s H', t W'] -> [N, (s, t, C) and zeros, H', W']."""
    n, c = x.shape[:2]
    (s, t), (h, w) = by.stride, places
    parts = x.reshape(n, c, h, s, w, t).permute(0, 3, 5, 1, 2, 4).reshape(n, s * t * c, h, w)
    return F.pad(parts, (0, 0, 0, 0, 0, by.channels(c, VECTOR // x.dtype.itemsize) - s * t * c))


def convolution(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, by: Steps) -> torch.Tensor:
    """The convolution, in that form."""
    made: torch.Tensor = torch.ops.aten.convolution.default(
        images(x, by), weights(w, by), bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    )
    return made
