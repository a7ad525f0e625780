"""Score and mask functions of FlexAttention's documentation, its tests in torch and the Attention Gym, as data.

They are for B batches and H heads of queries, H / 2 of keys, L queries and S keys; the tensors that they capture are
the module's. The last section of `SCORES` is not from there: it asks what `vmap` means by indexing in two steps.
"""

from __future__ import annotations

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
scale, temperature = rand(H, seed=1), torch.tensor(0.7)
token, pair, whole, distance = rand(S, seed=2), rand(L, S), rand(B, H, L, S), rand(H, L + S)
rotary_q, rotary_k = rand(B, H, L, 4), rand(B, H // 2, S, 4)
LESS = -float("inf")


def slope(h):
    return torch.exp2(-((h + 1) * 8.0 / H))


def paged(s, b, h, q, k):
    there = pages[b, k // 8] * 8 + k % 8
    return torch.where(there < lengths[b], torch.where(q >= there, s, LESS), LESS)


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
    "soft cap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "silu": lambda s, b, h, q, k: F.silu(s),
    "scale of a head": lambda s, b, h, q, k: s * scale[h],
    "bias of a head": lambda s, b, h, q, k: s + scale[h],
    "temperature": lambda s, b, h, q, k: s * temperature,
    "bias of a token": lambda s, b, h, q, k: s + token[k],
    "symmetric bias": lambda s, b, h, q, k: s + token[q] + token[k],
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
    "global and local": lambda b, h, q, k: ((q - k).abs() < 4) | (k % 16 == 0) | (q < 2),
}
