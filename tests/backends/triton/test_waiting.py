"""Stores wait for the loads behind them, and sums of short rows for no other warp."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import each_state, summed_states
from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.waiting import ROOM, Waiting

F = torch.float32


pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(fn, *args):
    (k,) = made(fn, *args)
    v = variant(k)
    return v, resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32))


def test_all_steps_are_read_before_a_state_is_stored():
    _, found = compiled(each_state, meta(12, 65536, dtype=F), meta(12, 65536, dtype=F))
    accesses = re.findall(r"(ld|st)\.global", found.assembly["ptx"])
    assert accesses == ["ld"] * 24 + ["st"] * 12


def test_values_that_wait_are_as_many_as_fit():
    lines: list[str] = []
    names = iter("abcdefgh")
    waiting = Waiting(lines.append, lambda stem: next(names), 32, stores=frozenset({"s"}))  # type: ignore[arg-type]
    for n in range(3):
        waiting.put("s", f"x{n}", 32 * ROOM // 2, lambda v: f"store {v}")  # type: ignore[arg-type]
    assert lines == ["a = x0", "b = x1", "store a", "store b", "c = x2"]
    waiting.put("s", "x3", 32, lambda v: f"store {v}", now=True)  # type: ignore[arg-type]
    waiting.end()
    assert lines[5:] == ["store x3", "store c"]


def test_states_of_few_rows_are_summed_within_a_warp():
    n, rows = 12, 512
    v, found = compiled(summed_states, meta(n, 2, rows, dtype=F), meta(rows, 16, dtype=F), meta(n, 2, 16, dtype=F))
    assert v.config.warps == 1 and found.shared == 0
    assert "bar.sync" not in found.assembly["ptx"] and "shfl" in found.assembly["ptx"]
    assert v.config.registers is None  # all blocks are there at once, whatever they take
    rows *= 1 << 10
    (k,) = made(summed_states, meta(n, 2, rows, dtype=F), meta(rows, 16, dtype=F), meta(n, 2, 16, dtype=F))
    assert variant(k).config.warps > 1  # multiprocessors are busy


def test_no_block_waits_for_others_to_end_where_registers_can_be_fewer():
    n, rows = 12, 2000
    v, found = compiled(summed_states, meta(n, 2, rows, dtype=F), meta(rows, 16, dtype=F), meta(n, 2, 16, dtype=F))
    blocks = 2 * rows // v.config.tiles["k"]
    assert v.config.registers == 128 and -(-blocks // 132) * 32 * 128 <= 1 << 16
    assert ".maxnreg 128" in found.assembly["ptx"]
