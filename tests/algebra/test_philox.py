"""Random numbers of a seed and a place: the published bits, and statistics that bad numbers fail."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.philox import BITS, FEW_BITS, FEW_ROUNDS, philox, random, random16

ALL = 0xFFFFFFFF


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v) for v in values)


@pytest.mark.parametrize(
    ("counter", "seed", "want"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ALL, ALL, ALL, ALL), -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, seed, want):
    """Those of Random123's `kat_vectors` for philox4x32 of ten rounds."""
    found = philox(words(*counter), torch.tensor(seed))
    assert " ".join(f"{int(w):08x}" for w in found) == want


@pytest.mark.parametrize(
    ("counter", "seed", "want"),
    [
        ((0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((ALL, ALL, ALL, ALL), -1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_known_answers_of_seven_rounds(counter, seed, want):
    found = philox(words(*counter), torch.tensor(seed), FEW_ROUNDS)
    assert " ".join(f"{int(w):08x}" for w in found) == want


def few(seed: int, batch: int = 0) -> torch.Tensor:
    """Numbers of 16 bits, as those of 24 whose last bits are another matrix's."""
    place = (torch.arange(256)[:, None], torch.arange(1024))
    first, second = (random16(torch.tensor(seed), torch.tensor(n), *place) for n in (2 * batch, 2 * batch + 1))
    return first << (BITS - FEW_BITS) | second >> (2 * FEW_BITS - BITS)


def test_numbers_of_few_bits_are_uniform_and_independent():
    first = few(0)
    for seed, batch in ((1, 0), (1 << 32, 0), (-1, 7), (0, 1)):
        x = few(seed, batch)
        assert wrong(x, first) == []
        for rows, columns in ((8, 0), (0, 8), (8, 8), (0, 1)):  # what shares a counter
            u = x.double() / (1 << BITS) - 0.5
            p = u[rows:, columns:] * u[: u.shape[0] - rows, : u.shape[1] - columns]
            assert abs(p.mean()) < 5 / 12 / p.numel() ** 0.5


def table(seed: int, rows: int = 256, columns: int = 1024) -> torch.Tensor:
    return random(torch.tensor(seed), torch.arange(rows)[:, None], torch.arange(columns))


def wrong(x: torch.Tensor, y: torch.Tensor) -> list[str]:
    """What speaks against two tables of uniform and independent numbers, each at five standard deviations."""
    u = x.double() / (1 << BITS)
    n, found = u.numel(), []
    if abs(u.mean() - 0.5) > 5 * (1 / 12 / n) ** 0.5:
        found.append("mean")
    if abs(u.var() - 1 / 12) > 5 * (1 / 180 / n) ** 0.5:
        found.append("variance")
    for name, bits in (("high bits", x >> (BITS - 8)), ("low bits", x & 255)):
        squares = (bits.flatten().bincount(minlength=256).double() - n / 256).square().sum() / (n / 256)
        if abs(squares - 255) > 5 * 510**0.5:  # chi squared of 255 degrees of freedom
            found.append(name)
    v = u - 0.5
    pairs = {"rows": v[1:] * v[:-1], "columns": v[:, 1:] * v[:, :-1], "words": v[:, 4:] * v[:, :-4]}
    pairs |= {"tables": v * (y.double() / (1 << BITS) - 0.5), "transposed": v[:, :256] * v[:, :256].T}
    return found + [k for k, p in pairs.items() if abs(p.mean()) > 5 / 12 / p.numel() ** 0.5]


def test_numbers_are_uniform_and_independent():
    first = table(0)
    for seed in (1, 1 << 32, -1, 123456789):
        assert wrong(table(seed), first) == []
    assert int(first.min()) >= 0 and int(first.max()) < 1 << BITS


def test_bad_numbers_are_seen():
    rows, columns = torch.arange(256)[:, None], torch.arange(1024)
    mask = (1 << BITS) - 1
    assert wrong((rows * 1024 + columns) * 2654435761 & mask, table(0))  # a multiplicative hash
    assert "rows" in wrong(table(1)[:1].expand(256, 1024), table(0))
    assert "columns" in wrong(table(1)[:, :1].expand(256, 1024), table(0))
    assert "tables" in wrong(table(1), table(1))
    assert "low bits" in wrong(table(1) & ~255, table(0))


def test_arguments_broadcast_and_large_places_differ():
    far = random(torch.tensor(3), torch.tensor([0, 2**31 - 1]), torch.tensor([[0], [2**31 - 1]]))
    assert far.shape == (2, 2) and far.unique().numel() == 4
