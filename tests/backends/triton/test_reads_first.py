"""What is read stands ahead of what its warps wait for one another in."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import distances
from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.reads_first import ROOM, reads_first

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [
    "x = tl.load(a)",
    "s = tl.sum(x, 0)",
    "at = b + 4",
    "y = tl.load(at)",
    "z = tl.load(c + s)",
    "tl.store(o, y * z)",
]


def test_reads_and_what_they_need_go_ahead_of_a_reduction():
    found = reads_first(LINES, {"x": 4.0, "y": 4.0, "z": 4.0})
    assert found == [LINES[0], LINES[2], LINES[3], LINES[1], LINES[4], LINES[5]]  # where z is says the sum


def test_reads_stay_where_registers_have_no_room():
    assert reads_first(LINES, {"x": ROOM, "y": 4.0}) == LINES
    assert reads_first(LINES, {"x": ROOM - 4.0, "y": 4.0}) != LINES


@pytest.mark.parametrize("between", [
    ["for k in range(4):", "    at = at + k"],  # no read goes over a loop
    ["at = at + s"],
    ["at = at + 1"],  # given twice
    ["c, at = parts(at)"],
])  # fmt: skip
def test_reads_stay_behind_what_they_follow_from(between):
    lines = [*LINES[:3], *between, *LINES[3:]]
    assert reads_first(lines, {"x": 4.0, "y": 4.0}) == lines


def test_what_a_loop_carries_stays_where_it_is():
    lines = ["s = tl.sum(x, 0)", "t = s + at", "at = b + 4", "y = tl.load(at)"]  # the sum is of where it was before
    assert reads_first(lines, {"y": 4.0}) == lines


def test_all_rows_are_read_ahead_of_the_first_barrier():
    """The third row was read behind the first sum's barriers."""
    args = [meta(64, 2048, dtype=torch.float32) for _ in range(3)]
    (k,) = made(distances, *args)
    v = variant(k)
    assert v.config.warps > 1
    ptx = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32)).assembly["ptx"]
    order = re.findall(r"ld\.global|bar\.sync", ptx)
    assert "bar.sync" in order and "ld.global" not in order[order.index("bar.sync") :]
