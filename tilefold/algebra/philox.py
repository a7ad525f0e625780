"""Random numbers as functions of a seed and a place: Philox-4x32-10.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011): ten rounds of a bijection of four
words of 32 bits, keyed with two more. No state, so any element can be drawn again, anywhere, in any order. A counter
gives four words, which are those of four neighbouring columns:

    random(seed, row, column) = word[column % 4] of philox((column // 4, row, 0, 0), seed) >> 8

in [0, 2^24), which float32 holds exactly: times 2^-24 it is uniform in [0, 1). Rows and columns are below 2^31. This
file is the definition; `tilefold_math.h` and the prelude of Triton kernels compute the same bits.
"""

from __future__ import annotations

import torch

#: Values of `random` are below 2 to this.
BITS = 24
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four words of a counter of four. All are int64 tensors of words in [0, 2^32), the seed of 64 bits."""
    a, b, c, d = counter
    k, m = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        (high, low), (other_high, other_low) = _product(_MULTIPLIERS[0], a), _product(_MULTIPLIERS[1], c)
        a, b, c, d = other_high ^ b ^ k, other_low, high ^ d ^ m, low
        k, m = (k + _WEYL[0]) & _WORD, (m + _WEYL[1]) & _WORD
    return a, b, c, d


def _product(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of factor * x, in halves of 16 bits: int64 has no room for 64 bits of it."""
    low, high = x & 0xFFFF, x >> 16
    below, above = factor * low, factor * high  # 48 bits each
    middle = (below >> 16) + (above & 0xFFFF)
    return ((above >> 16) + (middle >> 16)) & _WORD, ((middle & 0xFFFF) << 16) | (below & 0xFFFF)


def random(seed: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The number of a place, int64 in [0, 2^24); arguments broadcast."""
    seed, row, column = torch.broadcast_tensors(*(x.to(torch.int64) for x in (seed, row, column)))
    nothing = torch.zeros_like(row)
    words = torch.stack(philox(((column >> 2) & _WORD, row & _WORD, nothing, nothing), seed))
    return words.gather(0, (column & 3)[None])[0] >> (32 - BITS)
