"""The suite's schedules: what they must show holds, and would not if a schedule did less."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tilefold.frontend.expressions import te
from tilefold.suites.blocks import schedules
from tilefold.suites.blocks.schedules import VARIANTS, cases, decode, rolling, same_kernels, split_k

QUICK = ("attention, causal", "every step means the same", "as short as Figures 12 and 13", "illegal steps")


@pytest.mark.parametrize("name", QUICK)
def test_case(name: str) -> None:
    (case,) = (c for c in cases() if c.name == name)
    outcome = case.run()
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_schedule_makes_the_automatic_kernel(variant: schedules.Variant) -> None:
    p = variant.program()
    assert same_kernels(p, rolling(te.schedule(p)))


def test_the_split_schedule_makes_the_automatic_kernels() -> None:
    p = decode()
    assert same_kernels(p, split_k(te.schedule(p)))
    assert not same_kernels(p, rolling(te.schedule(p))), "one kernel is not two"
    assert not same_kernels(decode(41), split_k(te.schedule(decode(41)))), "a short axis is not split"


def test_less_than_the_schedule_is_another_kernel() -> None:
    p = VARIANTS[0].program()
    assert not same_kernels(p, te.schedule(p))
    some = te.schedule(p).fuse("p", "s", "m", "x", "t", "a", "o")
    assert not same_kernels(p, some), "three passes are not one"


def test_the_example_makes_one_kernel_and_is_right() -> None:
    path = Path(__file__).parents[2] / "examples" / "06_schedule_by_hand.py"
    example = runpy.run_path(str(path))
    start = example["attention"]()
    done = example["fused"](start)
    assert (len(start.kernels), len(done.kernels)) == (6, 1)
    args = tuple(torch.randn(3, 4, 150, 32))
    got, want = te.compile(done.portable())(*args), te.reference(start.program)(*args)
    assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
