"""The library's table is made of calls that are what their sizes say."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cli import invoke
from tilefold.algebra.dtypes import DType
from tilefold.plan.library_rates import Sizes
from tilefold.suites import library_rates
from tilefold.suites.library_rates import LEAST, MOST, call_of, grid, measured
from tilefold.suites.timing import Series

F = DType.F32


class Clock:
    """Every call takes a second for each element of its result."""

    policy = "made up"

    def ready(self, call):
        return call

    def rounds(self, calls, *, most, budget):
        return {name: Series((float(call().numel()),) * 3) for name, call in calls.items()}


def test_the_grid_has_every_kind_and_type_and_nothing_that_takes_long():
    found = list(grid())
    assert {k for k, _, _ in found} == {"mm", "bmm", "addmm", "conv"} and {d for _, d, _ in found} == {*DType} & {
        DType.BF16,
        DType.F16,
        F,
    }
    assert len(set(found)) == len(found) < 2000 and all(LEAST <= s.flops <= MOST for _, _, s in found)


@pytest.mark.parametrize(
    "kind, sizes",
    [("mm", Sizes(1, 64, 16, 64)), ("addmm", Sizes(1, 64, 16, 64)), ("bmm", Sizes(8, 64, 64, 64))],
)
def test_a_call_does_the_work_that_its_sizes_say(kind, sizes):
    call = call_of(kind, F, sizes, "cpu")
    with FlopCounterMode(display=False) as counted:
        result = call()
    assert counted.get_total_flops() == sizes.flops and result.numel() == sizes.batch * sizes.rows * sizes.cols


def test_a_convolution_too():
    kind, dtype, sizes = next(x for x in grid([F]) if x[0] == "conv" and x[2].flops < 1e8)
    with FlopCounterMode(display=False) as counted:
        result = call_of(kind, dtype, sizes, "cpu")()
    assert counted.get_total_flops() == sizes.flops and result.numel() == sizes.rows * sizes.cols


def test_what_is_timed_is_kept_and_what_the_library_refuses_is_left_out(monkeypatch):
    real = call_of

    def call(kind, dtype, sizes, device):
        if kind == "bmm":
            raise RuntimeError("not for this type")
        return real(kind, dtype, sizes, device)

    monkeypatch.setattr(library_rates, "call_of", call)
    chosen = [("mm", F, Sizes(1, 16, 64, 64)), ("bmm", F, Sizes(8, 64, 64, 64)), ("addmm", F, Sizes(1, 4, 8, 16))]
    said = []
    found = measured(Clock(), "cpu", "made up", of=chosen, progress=said.append)
    assert [(p.kind, p.seconds) for p in found.points] == [("mm", 16.0 * 64), ("addmm", 4.0 * 8)]
    assert len(said) == 3 and found.device == "made up" and dict(found.versions)["torch"] == torch.__version__


def test_the_command_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke(["tune", "library"])
    assert result.exit_code == 2 and "no CUDA device" in result.stderr
