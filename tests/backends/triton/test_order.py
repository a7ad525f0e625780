"""The order in which thread blocks start."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels
from tilefold.backends.triton import order
from tilefold.backends.triton.render import render
from tilefold.runtime.tuner.compiler import usual_units


def decoded(source: str, pid: int) -> tuple[int, int]:
    """Tile of rows and head of a program id, by running the kernel's first lines."""
    lines = [x.strip() for x in source[source.index("tl.program_id") :].splitlines()]
    known: dict[str, int] = {"pid": pid}
    for line in lines[1:]:
        name, _, code = line.partition(" = ")
        if name == "j0":
            break
        known[name] = eval(code.replace("tl.minimum", "min"), {"min": min}, known)
    last = max(n for n in known if n.startswith("b_j"))
    return known[last], known["pid_1"]


def rendered(interleave: int) -> str:
    (k,) = kernels("causal")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    return render(v.kernel, v.config, interleave=interleave).source


@pytest.mark.parametrize("interleave", [1, 5, 12, 32, 99])
def test_every_block_is_started_once_and_the_longest_of_a_group_first(interleave):
    (k,) = kernels("causal")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    (tile,) = (t.tile for t in v.kernel.grid if t.tile > 1)
    rows, heads = 4096 // tile, 32
    source = rendered(interleave)
    found = [decoded(source, pid) for pid in range(rows * heads)]
    assert sorted(found) == sorted((j, h) for j in range(rows) for h in range(heads))
    side = min(interleave, heads)
    for start in range(0, heads, side):
        group = [j for j, h in found if start <= h < start + side]
        assert group == sorted(group, reverse=True)


def test_as_many_heads_as_the_cache_holds(monkeypatch):
    (k,) = kernels("causal")
    sizes = k.sizes({})
    keys_and_values = 2 * 4096 * 128 * 2
    for n in (1, 3, 12):
        monkeypatch.setattr(order, "CACHE", n * keys_and_values)
        assert order.interleaved(k.block, sizes, "j") == n
    monkeypatch.setattr(order, "CACHE", 1)
    assert order.interleaved(k.block, sizes, "j") == 1


def test_loops_of_one_length_keep_the_order():
    (k,) = kernels("heads of 64")
    v = k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False)
    assert render(v.kernel, v.config, interleave=8).source == render(v.kernel, v.config).source
