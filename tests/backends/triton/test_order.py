"""The order in which thread blocks start."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels
from tilefold.backends.triton import order
from tilefold.backends.triton.render import render
from tilefold.tile.layout import usual_units


def decoded(source: str, pid: int) -> tuple[int, int]:
    """Tile of rows and head of a program id, by running the kernel's first lines."""
    lines = [x.strip() for x in source[source.index("tl.program_id") :].splitlines()]
    known: dict[str, int] = {"pid": pid}
    for line in lines[1:]:
        name, _, code = line.partition(" = ")
        if name == "j0":
            break
        known[name] = eval(code.replace("tl.where", "where"), {"where": lambda c, a, b: a if c else b}, known)
    row, head = ([n for n in known if n.startswith(start)][-1] for start in ("b_j", "pid"))
    return known[row], known[head]


def rendered(interleave: int) -> str:
    (k,) = kernels("causal")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    return render(v.kernel, v.config, interleave=interleave).source


@pytest.mark.parametrize("interleave", [1, 5, 12, 32, 99])
def test_every_block_is_started_once_and_the_longest_of_the_last_heads_first(interleave):
    (k,) = kernels("causal")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    (tile,) = (t.tile for t in v.kernel.grid if t.tile > 1)
    rows, heads = 4096 // tile, 32
    source = rendered(interleave)
    found = [decoded(source, pid) for pid in range(rows * heads)]
    assert sorted(found) == sorted((j, h) for j in range(rows) for h in range(heads))
    alone = heads - min(interleave, heads)
    assert [h for _, h in found[: rows * alone]] == [h for h in range(alone) for _ in range(rows)]
    together = [j for j, h in found if h >= alone]
    assert together == sorted(together, reverse=True)
    for h in range(alone):
        assert [j for j, x in found if x == h] == list(reversed(range(rows)))


def test_enough_blocks_for_every_multiprocessor():
    for blocks in (1, 5, 32, 10_000):
        n = order.interleaved(blocks)
        assert n * blocks >= order.TURNS * order.FULL > (n - 1) * blocks


def test_loops_of_one_length_keep_the_order():
    (k,) = kernels("heads of 64")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    assert render(v.kernel, v.config, interleave=8).source == render(v.kernel, v.config).source
