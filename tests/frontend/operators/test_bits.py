"""Bits of integers against eager: negative ones, every width, what overflows."""

from __future__ import annotations

import pytest
import torch

import tilefold
from tests.frontend.check import check

TYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    some = [0, 1, 2, 5, 17, 85, 100, 127, info.max, info.max - 1]
    return torch.tensor([*some, *([-1, -2, -17, -100, info.min, info.min + 1] if info.min else [])], dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("c", [0, 1, 15, 0x55, 0x5C, 100, -1, -16, -85])
def test_with_constants(dtype, c):
    if c < 0 and dtype is torch.uint8:
        pytest.skip("no such number")
    check(lambda x: (x & c, x | c, x ^ c, c & x), numbers(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 4, 6])
def test_shifts(dtype, n):
    check(lambda x: (x >> n, (x >> n) & 3, ~x), numbers(dtype))
    if dtype is not torch.int64:  # beyond its bits a number of 64 has no one meaning
        check(lambda x: x << n, numbers(dtype))


def test_positions_are_no_constants():
    """What has no elements in memory has no one value either."""
    check(lambda x: x + (torch.arange(7) & 3) + ((torch.arange(7) + 5) >> 1), torch.zeros(7))
    check(lambda x: x + (torch.arange(7) ^ torch.arange(7).flip(0)), torch.zeros(7))


@pytest.mark.parametrize("other", [*TYPES, torch.bool], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_of_two_tensors(dtype, other):
    x, y = numbers(dtype), torch.tensor([True, False]) if other is torch.bool else numbers(other)
    check(lambda x, y: (x & y, x | y, x ^ y), x[:, None], y)


@pytest.mark.parametrize("dtype", [*TYPES[:3], torch.float32, torch.float64], ids=str)
def test_remainders_and_quotients(dtype):
    """Of both signs, and beyond what a float holds."""
    large = [2**40 + 3, -(2**40) - 3] if dtype is torch.int64 else []
    x = torch.tensor([0, 1, 7, -7, 100, -100, *large], dtype=dtype)
    y = torch.tensor([1, 2, 3, -3, 7], dtype=dtype)
    check(lambda x, y: (torch.fmod(x, y), torch.remainder(x, y), torch.div(x, y, rounding_mode="trunc")), x[:, None], y)
    check(lambda x: (torch.fmod(x, 3), torch.fmod(x, -3)), x)


def test_booleans():
    a, b = torch.arange(6) % 2 == 0, torch.arange(6) % 3 == 0
    check(lambda p, q: (p & q, p | q, p ^ q, ~p), a, b)


def test_packed_weights_are_unpacked_in_the_kernel():
    """Two numbers of four bits in a byte, as quantised weights are kept."""
    w = torch.randint(0, 256, (24, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def unpacked(w, x):
        low, high = (w & 15).float() - 8, (w >> 4).float() - 8
        return x @ torch.stack((low, high), -1).flatten(-2).mT

    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(tilefold.fuse(unpacked)(w, x), unpacked(w, x))


@pytest.mark.parametrize("other", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_shifts_by_what_data_say(dtype, other):
    """Beyond all bits, too; upwards by what leaves 64-bit numbers a meaning."""
    by = torch.tensor([0, 1, 3, 6, 7, 8, 15, 31, 40, 63, 64, 100], dtype=other)
    check(lambda x, n: x >> n, numbers(dtype)[:, None], by)
    check(lambda x, n: x << n, numbers(dtype).clamp(-100, 100)[:, None], by[:4])
    if other is not torch.uint8:
        check(lambda x, n: (x >> n, x << n), numbers(dtype)[:, None], -by[1:])


def test_packed_weights_of_eight_numbers():
    """Four bits each of an int32, at shifts that are positions."""
    q = torch.randint(-(2**31), 2**31, (16, 24), generator=torch.Generator().manual_seed(0)).to(torch.int32)

    def unpacked(q):
        shift = torch.arange(0, 32, 4, dtype=torch.int32)
        return ((q[:, None] >> shift[None, :, None]) & 15).flatten(0, 1)

    assert torch.equal(tilefold.fuse(unpacked)(q), unpacked(q))


@pytest.mark.parametrize("fn", [lambda a: a << 63, lambda a: a >> 63, lambda a: a >> 70])
def test_shifts_of_all_bits(fn):
    check(fn, torch.tensor([0, 1, -1, 5]))
