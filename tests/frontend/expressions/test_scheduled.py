"""Functions scheduled by hand, on a CPU and as a GPU's kernels; hints that are followed, and that are refused."""

from __future__ import annotations

import pytest
import torch

import tilefold
from tilefold import ScheduleError, TilefoldError, te


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax_rows(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def captured():
    return tilefold.schedule(softmax_rows, normal(9, 70))


def named(f):
    """Names of the maximum, of the sum, and of the axis of both."""
    by_reducer = {c.reducer: c for c in f.schedule.program.body if c.reducer}
    (axis,) = by_reducer["max"].rdims
    return by_reducer["max"].name, by_reducer["sum"].name, axis


def test_a_function_as_its_schedule_says(captured):
    """Unfused, in blocks, and with the sum in the pass of the maximum: fewer kernels, the same values."""
    x = normal(9, 70, seed=1) * 30
    x[2, 5] = -torch.inf
    want = softmax_rows(x.double()).float()
    m, t, axis = named(captured)
    assert m in str(captured) and t in str(captured)
    blocks = captured.schedule.tile(m, **{axis: 16})
    one_pass = blocks.rolling_update(t, axis)
    assert len(one_pass.kernels) < len(captured.schedule.kernels)
    for s in (None, blocks, one_pass):
        torch.testing.assert_close(captured.compile(s)(x), want)


def test_what_a_scheduled_function_refuses(captured):
    run = captured.compile()
    with pytest.raises(TilefoldError, match=r"has shape \(9, 71\)"):
        run(normal(9, 71))
    with pytest.raises(TilefoldError, match="takes 1 tensors, not 2"):
        run(normal(9, 70), normal(9, 70))
    with pytest.raises(TilefoldError, match="has no gradient"):
        run(normal(9, 70).requires_grad_())
    other = tilefold.schedule(torch.sin, normal(9, 70))
    with pytest.raises(TilefoldError, match="the schedule is of sin, not of softmax_rows"):
        captured.compile(other.schedule)
    with pytest.raises(TilefoldError, match="function of tensors"):
        tilefold.schedule(softmax_rows, 3)


def rows():
    i, j = te.dims(i=6, j=40)
    x = te.tensor("x", (i, j))
    m = te.compute("m", (i,), te.max(x[i, j], over=j))
    t = te.compute("t", (i,), te.sum(te.exp(x[i, j] - m[i]), over=j))
    return te.program("rows", te.compute("o", (i,), t[i] + 0 * m[i]))


def one_pass():
    return te.schedule(rows()).tile("m", j=16).rolling_update("t", "j").fuse("t", "o")


@pytest.mark.parametrize(
    ("device", "hinted", "message"),
    [
        ("cpu", lambda s: s.warps("o", 4), "warps is not followed on a CPU: a CPU has no warps"),
        ("cpu", lambda s: s.pipeline("o", "j", 2), "pipeline is not followed on a CPU"),
        ("cpu", lambda s: s.place("x", "shared", at="o"), "place is not followed on a CPU"),
        ("cpu", lambda s: s.bind("o", i="x"), "bind is not followed on a CPU"),
        ("interpreter", lambda s: s.place("x", "shared", at="o"), "place is not followed on a GPU"),
        ("interpreter", lambda s: s.bind("o", i="x"), "bind is not followed on a GPU"),
        ("interpreter", lambda s: s.tile("o", i=3), "blocks on a GPU have powers of two"),
    ],
)
def test_hints_that_nothing_follows(device, hinted, message):
    s = hinted(one_pass())
    with pytest.raises(ScheduleError, match=message):
        te.compile(s, device=device)
    if "powers" not in message:
        te.compile(s.portable(), device=device)


def test_hints_that_a_gpu_follows():
    """The configuration of the kernel that would run; nothing is compiled."""
    s = one_pass().warps("o", 8).pipeline("o", "j", 3)
    (step,) = te.compile(s, device="cuda").run.steps
    assert step.triton.choose is not None
    chosen = step.triton.choose(step.triton.block, step.triton.sizes({}))
    assert (chosen.warps, chosen.stages) == (8, 3) and 16 in chosen.tiles.values()


def test_expressions_refuse_other_devices_and_gradients():
    run = te.compile(one_pass())
    with pytest.raises(TilefoldError, match=r"x is torch\.float32 on meta, rows takes f32 on cpu"):
        run(torch.empty(6, 40, device="meta"))
    with pytest.raises(TilefoldError, match="rows has no gradient"):
        run(normal(6, 40).requires_grad_())
    with pytest.raises(TilefoldError, match="there is no back end for 'tpu'"):
        te.compile(rows(), device="tpu")
