"""What is stored of many parts: a thread block branches to its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.interpreted import of_tables
from tests.backends.triton.kernels import made, meta, variant
from tilefold.algebra.expr import Call, Index, Load, lit
from tilefold.backends.triton.choices import LEAST_PARTS, choices, of_parts
from tilefold.backends.triton.tiles import default_config

F = torch.float32


pytestmark = pytest.mark.usefixtures("own_cache")


def part(n: int) -> Load:
    return Load(f"t{n}", (Index("i"),))


def first(n: int) -> Call:
    return Call("lt", (Index("j"), lit(n)))


def stack(count: int, condition=first):
    e = part(count - 1)
    for n in range(count - 2, -1, -1):
        e = Call("where", (condition(n + 1), part(n), e))
    return e


def test_conditions_are_found_outermost_first():
    found = choices(Call("maximum", (stack(3), lit(0.0))), {"j": 1, "i": 0}.__getitem__)
    assert found == (first(1), first(2))
    assert choices(stack(3), {"j": 0, "i": 1}.__getitem__) == ()


def test_a_tile_is_of_one_part_where_it_divides_all_of_their_ends():
    wide = stack(4, lambda n: first((96, 128, 224)[n - 1]))
    assert of_parts([wide], lambda d: True) == {"j": 32}
    assert len(choices(wide, lambda d: 32)) == 3
    assert choices(wide, lambda d: 64) == (first(128),)
    beyond = stack(4, lambda n: Call("lt", (Call("add", (Index("j"), Index("i"))), lit(32 * n))))
    assert of_parts([beyond], lambda d: True) == {"i": 1, "j": 1} and not choices(beyond, lambda d: 32)


def test_conditions_of_data_and_choices_of_numbers_are_none():
    data = Call("where", (Call("lt", (part(5), lit(0.0))), part(0), part(1)))
    padding = Call("where", (first(1), part(0), lit(0.0)))
    assert choices(data, lambda d: 1) == choices(padding, lambda d: 1) == ()


def test_few_parts_are_read_side_by_side():
    assert of_parts([stack(LEAST_PARTS)], lambda d: True) == {"j": 1}
    assert of_parts([stack(LEAST_PARTS - 1), stack(2)], lambda d: True) == {}


def _source(*args: torch.Tensor) -> tuple[str, dict[int, int]]:
    (k,) = made(of_tables, *args)
    sizes = k.sizes({})
    tiles = {sizes[d]: n for d, n in default_config(k.block, sizes).tiles.items()}
    return variant(k).rendered.source, tiles


@pytest.mark.parametrize("heavy", [True, False])
def test_of_two_parts_a_block_computes_its_own_where_they_are_heavy(heavy):
    """The gradient of a gate, and of what it is multiplied by, side by side."""

    def both(x, y):
        a, b = (torch.erf(x) / (1 + y.exp()), torch.erf(y) / (1 + x.exp())) if heavy else (x + 1, y + 2)
        return torch.cat([a, b], 1)

    (k,) = made(both, meta(4096, 2048, dtype=F), meta(4096, 2048, dtype=F))
    source = variant(k).rendered.source
    body = source[source.rindex("@triton.jit") :]
    assert (body.count("else:") == 1 and body.count("tl.erf(") == 2) == heavy and ("tl.where(" in body) != heavy


def test_a_block_reads_its_part_alone():
    places = meta(8192, 4, dtype=torch.int64)
    source, tiles = _source(meta(8192, 64, dtype=F), places, *[meta(1000, 64, dtype=F)] * 4)
    assert tiles[5] == 1 and tiles[64] == 64 and tiles[8192] >= 16
    body = source[source.rindex("@triton.jit") :]
    assert body.count("else:") == 4 and body.count("tl.store(") == 5
    before = body[: body.index("if ")]
    assert "tl.load(" not in before


def test_parts_side_by_side_in_memory_share_a_block():
    """Of a concatenation along what is contiguous, lanes of one row have several parts."""

    def joined(a, b, c, d, e):
        return torch.cat([a, b, c, d, e], 1) * 2.0

    (k,) = made(joined, *[meta(4096, 24, dtype=F)] * 5)
    source = variant(k).rendered.source
    assert "else:" not in source[source.rindex("@triton.jit") :]


def test_channels_that_are_concatenated_in_whole_vectors_are_read_part_by_part():
    def joined(a, b, c, d, e):
        return torch.relu(torch.cat([a, b, c, d, e], 1))

    parts = [meta(4096, n, dtype=torch.bfloat16) for n in (64, 32, 32, 32, 32)]
    (k,) = made(joined, *parts)
    sizes, config = k.sizes({}), default_config(k.block, k.sizes({}))
    assert {sizes[d]: n for d, n in config.tiles.items()} == {192: 32, 4096: 128}
    source = variant(k).rendered.source
    body = source[source.rindex("@triton.jit") :]
    assert body.count("else:") == 4 and body.count("tl.store(") == 5
    assert "tl.load(" not in body[: body.index("if ")]


def test_a_concatenation_in_another_one_has_parts_of_its_own():
    """Statistics beside what they are of, and the same scaled: 13 parts, which each thread would compute."""
    inner = Call("where", (Call("lt", (Call("sub", (Index("j"), lit(96))), lit(64))), part(1), part(2)))
    e = Call("where", (first(96), part(0), Call("where", (first(224), inner, part(3)))))
    assert of_parts([e], lambda d: True) == {"j": 32}

    def joined(x, a, b, s):
        both = torch.cat([a, b.exp()], 1)
        return torch.cat([x, both, both * s, both / s], 1)

    (k,) = made(joined, *[meta(4096, 64, dtype=F)] * 3, meta(4096, 1, dtype=F))
    source = variant(k).rendered.source
    body = source[source.rindex("@triton.jit") :]
    assert body.count("else:") == 6 and body.count("tl.store(") == 7 and "tl.where(" not in body


def test_taps_of_a_window_over_a_concatenation_are_no_parts():
    """Each tap has a condition of its own: their combinations, which branches would be made of, have no end."""
    taps = part(0)
    for n in range(30):
        taps = Call("add", (taps, Call("where", (first(n + 1), part(n), part(n + 1)))))
    assert choices(taps, lambda d: 1) == ()
    assert len(choices(stack(30), lambda d: 1)) == 29
    of_two = Call("mul", (stack(5), stack(5)))  # the same parts of two tensors
    assert len(choices(of_two, lambda d: 1)) == 4
