"""Score and mask functions of FlexAttention's documentation, its tests in torch and the Attention Gym, as data.

They are for B batches and H heads of queries, H / 2 of keys, L queries and S keys; the tensors that they capture are
the module's. The last section of `SCORES` is not from there: it asks what `vmap` means by indexing in two steps.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

B, H, L, S, D = 2, 4, 45, 51, 8


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


#: Documents of 13, 20 and 18 tokens, and where they begin.
document = torch.tensor([0] * 13 + [1] * 20 + [2] * 18, dtype=torch.int32)
begins = torch.tensor([0, 13, 33])
lengths = torch.tensor([17, 48])
prefixes = torch.tensor([7, 20])
#: A page table: which page of eight keys is where.
pages = torch.tensor([[6, 0, 4, 2, 1, 5, 3], [1, 2, 0, 3, 5, 6, 4]])
order = torch.randperm(S, generator=torch.Generator().manual_seed(3))
which = torch.tensor(2)
scale, temperature = rand(H, seed=1), torch.tensor(0.7)
token, pair, whole, distance = rand(S, seed=2), rand(L, S), rand(B, H, L, S), rand(H, L + S)
rotary_q, rotary_k = rand(B, H, L, 4), rand(B, H // 2, S, 4)
LESS = -float("inf")
#: Tokens of text that see an image of 17 tokens each.
intervals = torch.tensor([[0, 20], [5, 30], [30, 45]])
image = torch.arange(S) // 17


def slope(h):
    return torch.exp2(-((h + 1) * 8.0 / H))


def paged(s, b, h, q, k):
    there = pages[b, k // 8] * 8 + k % 8
    return torch.where(there < lengths[b], torch.where(q >= there, s, LESS), LESS)


def in_tiles(n):
    """Row and column of a token of an image of 6 x 8, kept in tiles of 2 x 4."""
    tile, inside = n // 8, n % 8
    return tile // 2 * 2 + inside // 4, tile % 2 * 4 + inside % 4


def even_bits(n):
    n = n & 0x55
    n = (n + (n >> 1)) & 0x33  # no bit of one is in the other
    return (n + (n >> 2)) & 0x0F


def on_a_curve(n):
    """Row and column of a token of an image of 8 x 8, kept on a Morton curve."""
    return even_bits(n >> 1), even_bits(n)


def neighbours(place, height, width):
    """A token sees those less than two rows and three columns from the nearest whole neighbourhood."""

    def seen(b, h, q, k):
        (y, x), (row, column) = place(q), place(k)
        return ((y.clamp(1, height - 2) - row).abs() <= 1) & ((x.clamp(2, width - 3) - column).abs() <= 2)

    return seen


def sliding_tiles(b, h, q, k):
    """Tiles of eight tokens in rows of three see the eight around them; text behind an image sees all and is seen."""
    y, x, row, column = q // 8 // 3, q // 8 % 3, k // 8 // 3, k // 8 % 3
    near = ((y.clamp(0, 1) - row).abs() <= 1) & ((x.clamp(1, 1) - column).abs() <= 1)
    return ((q < 40) & (k < 40) & near) | ((k >= 40) & (k < 48)) | (q >= 40)


def of_an_image(b, h, q, k):
    when = intervals[image[k]]
    return (q >= when[0]) & (q < when[1])


class Rounded(torch.autograd.Function):
    """A hyperbolic tangent with a gradient of its own, as one that is approximate has."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

    @staticmethod
    def vmap(info, dims, x):
        return torch.tanh(x), 0


SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, LESS),
    "inverse causal": lambda s, b, h, q, k: torch.where(q <= k, s, LESS),
    "distance": lambda s, b, h, q, k: s + (q - k),
    "causal distance": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), LESS),
    "ALiBi": lambda s, b, h, q, k: s + (k - q) * slope(h),
    "trigonometry": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b.float()),
    "trigonometry, twice": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b.float()),
    "soft cap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "soft cap, a gradient of its own": lambda s, b, h, q, k: 5 * Rounded.apply(s / 5),
    "silu": lambda s, b, h, q, k: F.silu(s),
    "scale of a head": lambda s, b, h, q, k: s * scale[h],
    "bias of a head": lambda s, b, h, q, k: s + scale[h],
    "temperature": lambda s, b, h, q, k: s * temperature,
    "bias of a token": lambda s, b, h, q, k: s + token[k],
    "symmetric bias": lambda s, b, h, q, k: s + token[q] + token[k],
    "biases of a batch, a head, a query and a key": lambda s, b, h, q, k: s + token[b] + scale[h] + token[q] - token[k],
    "bias of a pair": lambda s, b, h, q, k: s + pair[q, k],
    "bias of all": lambda s, b, h, q, k: s + whole[b, h, q, k],
    "relative bias": lambda s, b, h, q, k: s + distance[h, q - k + S],
    "clipped relative bias": lambda s, b, h, q, k: s + distance[h, torch.clamp(q - k, -8, 8) + S],
    "indirect bias": lambda s, b, h, q, k: s + token[order[k]],
    "documents": lambda s, b, h, q, k: torch.where(document[q] == document[k], s, LESS),
    "every other key": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, float("-inf")),
    "padding": lambda s, b, h, q, k: torch.where((k < lengths[b]) & (q < lengths[b]), s, LESS),
    "latent attention's positions": lambda s, b, h, q, k: s + (rotary_q[b, h, q] * rotary_k[b, h // 2, k]).sum(),
    "pages": paged,
    "a row, then an element": lambda s, b, h, q, k: s + distance[h][q],
}

MASKS = {
    "noop": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    "causal": lambda b, h, q, k: q >= k,
    "sliding window": lambda b, h, q, k: (q >= k) & (q - k <= 7),
    "two-sided window": lambda b, h, q, k: (q - k).abs() <= 5,
    "dilated window": lambda b, h, q, k: ((q - k).abs() <= 9) & ((q - k) % 3 == 0),
    "prefix": lambda b, h, q, k: (k <= 9) | (q >= k),
    "prefix of a batch": lambda b, h, q, k: (k < prefixes[b]) | (q >= k),
    "documents": lambda b, h, q, k: document[q] == document[k],
    "causal documents": lambda b, h, q, k: (
        (document[q] == document[k]) & (q - begins[document[q]] >= k - begins[document[k]])
    ),
    "neighbourhood of an image": lambda b, h, q, k: (
        ((q // 8).clamp(1, 4) - k // 8).abs().le(1) & ((q % 8).clamp(2, 5) - k % 8).abs().le(2)
    ),
    "padding": lambda b, h, q, k: k < lengths[b],
    "masks of heads": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q - k).abs() < 4),
    "shared question": lambda b, h, q, k: (q >= k) & ((document[q] == document[k]) | (document[k] == 0)),
    "offset": lambda b, h, q, k: q + 6 >= k,
    "empty rows": lambda b, h, q, k: (q >= k) & (q > 10) & (q < 40),
    "nothing": lambda b, h, q, k: q < 0,
    "an image's text": of_an_image,
    "window and sinks": lambda b, h, q, k: (q >= k) & ((q - k <= 7) | (k < 4)),
    "sliding tiles": sliding_tiles,
    "frames": lambda b, h, q, k: (q < 5) | (k < 15) | ((q - k).abs() < 8),
    "places in frames": lambda b, h, q, k: (q < 5) | (k < 5) | (((q - 5) % 10 - (k - 5) % 10).abs() < 3),
    "neighbourhood in tiles": neighbours(in_tiles, 6, 8),
    "neighbourhood on a curve": neighbours(on_a_curve, 8, 8),
    "global and local": lambda b, h, q, k: ((q - k).abs() < 4) | (k % 16 == 0) | (q < 2),
}

#: A dense mask that follows no rule; images and texts among tokens, (kind, first token, length) each.
dense = rand(L, S, seed=5) > -0.2
modalities = torch.tensor([[[0, 3, 6], [1, 20, 9], [0, 36, 4]], [[1, 0, 4], [0, 10, 12], [1, 30, 15]]])
batched = torch.stack([document, document.flip(0)])
row_bias, column_bias, layered = rand(B, H, L, 7), rand(B, H, L, 8), rand(4, B, H, L)


def transfusion(b, h, q, k):
    """Causal, and within each image everything."""
    seen = q >= k
    for _, first, length in modalities[b]:
        seen = seen | ((q >= first) & (k < first + length))
    return seen


def bucket(distance):
    """Distances as T5 has them: as they are up to 8, their logarithms beyond."""
    far = 8 + (torch.log(distance.abs().float().clamp(min=1) / 8) / 1.4 * 8).long()
    return torch.where(distance.abs() < 8, distance.abs(), far.clamp(max=15))


class Window:
    """A mask that is an object."""

    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q, k):
        return (q >= k) & (q - k < self.width)


def near(width, b, h, q, k):
    return torch.maximum(q, k) - torch.minimum(q, k) < width


#: More of both: other functions, and other ways to write them.
MORE_SCORES = {
    "biases of rows and columns": lambda s, b, h, q, k: s + row_bias[b, h, q, k // 8] + column_bias[b, h, q, k % 8],
    "buckets of distances": lambda s, b, h, q, k: s + distance[h, bucket(q - k)],
    "one of four": lambda s, b, h, q, k: s + layered[which, b, h][q],
    "a slice": lambda s, b, h, q, k: s + layered[0][b, h, q],
    "decay": lambda s, b, h, q, k: s * torch.exp2(-0.1 * (q - k).abs()),
    "logarithm of the distance": lambda s, b, h, q, k: s + torch.log1p((q - k).abs()),
    "gelu": lambda s, b, h, q, k: F.gelu(s),
    "softplus": lambda s, b, h, q, k: F.softplus(s),
    "logarithm of a sigmoid": lambda s, b, h, q, k: F.logsigmoid(s),
    "elu": lambda s, b, h, q, k: F.elu(s),
    "bounds": lambda s, b, h, q, k: s.clamp(-1, 1),
    "root": lambda s, b, h, q, k: torch.sign(s) * torch.sqrt(s.abs() + 1e-3),
    "steps": lambda s, b, h, q, k: s + torch.floor(q / 8) * 0.1 + torch.div(k, 8, rounding_mode="floor") * 0.1,
    "half precision": lambda s, b, h, q, k: (s.to(torch.bfloat16) * 2).float(),
    "filled": lambda s, b, h, q, k: s.masked_fill(q < k, LESS),
    "a large negative number": lambda s, b, h, q, k: torch.where(q >= k, s, -1e9),
    "weights that are dropped": lambda s, b, h, q, k: torch.where((q * 110351 + k * 12345) % 7 > 0, s, LESS),
}
MORE_MASKS = {
    "dense": lambda b, h, q, k: dense[q, k],
    "block diagonal": lambda b, h, q, k: q // 8 == k // 8,
    "transfusion": transfusion,
    "documents of a batch": lambda b, h, q, k: (batched[b, q] == batched[b, k]) & (q >= k),
    "strided": lambda b, h, q, k: (q >= k) & ((q - k < 4) | ((q - k) % 4 == 0)),
    "an object": Window(9),
    "a part of a function": functools.partial(near, 7),
    "ones": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
    "not": lambda b, h, q, k: ~(q < k),
    "one or the other": lambda b, h, q, k: (q % 2 == 0) ^ (k % 3 == 0),
}
