"""Peeling: where masks are known, they are gone; the meaning stays, for any block sizes and on the back end."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import ATTENTION, inputs
from tilefold.block import interp, text
from tilefold.block.ir import Block, Loop, walk
from tilefold.block.peel import peel_loop
from tilefold.errors import ScheduleError
from tilefold.plan.greedy import fuse
from tilefold.runtime.executor import load_kernel
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.verify import verify

MASKS = {
    "causal": ("j <= i", 2),
    "strictly": ("j < i", 2),
    "window": ("(j <= i) & (i - j < 5)", 3),
    "band": ("(j - i <= 3) & (i - j <= 3)", 3),
    "later": ("i <= j", 2),
    "prefix": ("j < 7", 2),
    "not": ("~(j > i)", 2),
}


def masked(mask: str) -> Program:
    return parse(ATTENTION.replace("where(j <= i,", f"where({mask},"))


def loops(b: Block) -> list[Loop]:
    return [n for n in walk(b.body) if isinstance(n, Loop) and n.dim == "j"]


@pytest.mark.parametrize("name", MASKS)
def test_peeling_leaves_one_loop_without_the_mask(name: str) -> None:
    mask, count = MASKS[name]
    p = masked(mask)
    (k,) = fuse(p).kernels
    peeled = peel_loop(k.block, "j")
    shown = ["\n".join(text.show_nodes((n,))) for n in loops(peeled)]
    assert len(shown) == count
    assert sum("where(j" in s or "-inf)" in s.split("accum m")[0] for s in shown) == count - 1
    assert text.parse(text.show(peeled)) == peeled
    for n, sizes in ((1, {}), (5, {"i": 1, "j": 1}), (11, {"i": 4, "j": 3}), (11, {"i": 3, "j": 5})):
        x = inputs(p, n)
        want = tensor_interp.run(p, x, exact=True)["o"]
        got = interp.run(peeled, x, {"n": n}, block_sizes=sizes, exact=True)["o"]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_the_compiled_kernel_is_right(name: str) -> None:
    p = masked(MASKS[name][0])
    (k,) = fuse(p).kernels
    kernel = verify(lower(peel_loop(k.block, "j"), LowerOptions(tiles={"i": 8, "j": 16})))
    launch = load_kernel(kernel)
    for n in (5, 40):
        x = inputs(p, n)
        out = torch.empty(2, 3, n, 8)
        launch({**x, "o": out}, {"n": n})
        torch.testing.assert_close(out, tensor_interp.run(p, x)["o"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["j % 2 == 0", "(j <= i) | (j < 3)", "j * j <= i", "d0[j] < 1.0"])
def test_masks_that_no_bound_decides_are_refused(mask: str) -> None:
    p = parse(
        ATTENTION.replace("where(j <= i,", f"where({mask},").replace("  dim b = 2", "  input d0: f32[n]\n  dim b = 2")
    )
    (k,) = fuse(p).kernels
    with pytest.raises(ScheduleError, match="no loop over j has a mask"):
        peel_loop(k.block, "j")


def test_parallel_loops_are_not_peeled() -> None:
    (k,) = fuse(masked("j <= i")).kernels
    with pytest.raises(ScheduleError, match="no loop over i has a mask"):
        peel_loop(k.block, "i")
