"""Random numbers as functions of a seed and a place: Philox-4x32-10.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011): ten rounds of a bijection of four
words of 32 bits, keyed with two more. No state, so any element can be drawn again, anywhere, in any order. A counter
gives four words, which are those of four neighbouring columns:

    random(seed, row, column) = word[column % 4] of philox((column // 4, row, 0, 0), seed) >> 8

in [0, 2^24), which float32 holds exactly: times 2^-24 it is uniform in [0, 1). Rows and columns are below 2^31. This
file is the definition; `tilefold_math.h` and the prelude of Triton kernels compute the same bits.

Where numbers are only compared with one (dropout of scores), 16 bits do, and seven rounds, the fewest that pass the
tests of the paper. Then a counter gives eight: those of two neighbouring columns, in rows and columns 8 apart, which
is what one thread has of a product's result (`mma`, as rows or turned), so that no word is drawn and left:

    random16(seed, batch, row, column) = half column % 2 of word[column / 8 % 2 + 2 (row / 8 % 2)]
                                         of philox((column without bits 0 and 3, row without bit 3, 0, batch), seed)
"""

from __future__ import annotations

import torch

#: Values of `random` are below 2 to this.
BITS = 24
ROUNDS = 10
#: Values of `random16` are below 2 to this.
FEW_BITS = 16
FEW_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor, rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """The four words of a counter of four. All are int64 tensors of words in [0, 2^32), the seed of 64 bits."""
    a, b, c, d = counter
    k, m = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
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


def random16(seed: torch.Tensor, batch: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The number of 16 bits of a place, int64 in [0, 2^16); arguments broadcast."""
    places = (seed, batch, row, column)
    seed, batch, row, column = torch.broadcast_tensors(*(x.to(torch.int64) for x in places))
    counter = (column & _WORD & ~9, row & _WORD & ~8, torch.zeros_like(row), batch & _WORD)
    words = torch.stack(philox(counter, seed, FEW_ROUNDS))
    which = (column >> 3 & 1) + 2 * (row >> 3 & 1)
    return words.gather(0, which[None])[0] >> FEW_BITS * (column & 1) & (1 << FEW_BITS) - 1
