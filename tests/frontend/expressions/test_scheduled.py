"""Functions scheduled by hand, on a CPU and as a GPU's kernels; hints that are followed, and that are refused."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_expressions_refuse_other_devices():
    run = te.compile(one_pass())
    with pytest.raises(TilefoldError, match=r"x is torch\.float32 on meta, rows takes f32 on cpu"):
        run(torch.empty(6, 40, device="meta"))
    with pytest.raises(TilefoldError, match="there is no back end for 'tpu'"):
        te.compile(rows(), device="tpu")


@pytest.mark.parametrize("device", ["cpu", "interpreter", "cuda"])
def test_expressions_differentiate(device):
    """The interpreter's are run by `test_expressions_differentiate_on_gpus`."""
    if device == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was not asked to interpret")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    run = te.compile(one_pass().portable(), device=device)
    where = "cuda" if device == "cuda" else "cpu"
    x, given = normal(6, 40).to(where).requires_grad_(), normal(6, seed=1).to(where)
    run(x).backward(given)
    exact = x.detach().double().requires_grad_()
    torch.exp(exact - exact.detach().amax(-1, keepdim=True)).sum(-1).backward(given.double())
    m = exact.detach().argmax(-1)  # of the maximum, which is subtracted: minus all that is summed
    want = exact.grad.clone()
    want[torch.arange(6), m] -= exact.grad.sum(-1)
    torch.testing.assert_close(x.grad, want.float(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not run(x).requires_grad


def test_expressions_differentiate_on_gpus(tmp_path):
    """The same, in Triton's interpreter, which a process asks for when it starts."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "TILEFOLD_CACHE_DIR": str(tmp_path)}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "differentiate[interpreter]",
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_gradients_that_expressions_have_not():
    i, j = te.dims(i=6, j=40)
    x = te.tensor("x", (i, j))
    run = te.compile(te.program("p", te.compute("y", (i,), te.prod(x[i, j], over=j))))
    with pytest.raises(TilefoldError, match="y has no gradient: it is a prod"):
        run(normal(6, 40).requires_grad_())
    y = run(normal(6, 40).requires_grad_().detach())
    assert not y.requires_grad


def test_a_scheduled_function_has_the_functions_gradient(captured):
    m, t, axis = named(captured)
    run = captured.compile(captured.schedule.tile(m, **{axis: 16}).rolling_update(t, axis))
    x, given = normal(9, 70, seed=2).requires_grad_(), normal(9, 70, seed=3)
    run(x).backward(given)
    exact = x.detach().double().requires_grad_()
    softmax_rows(exact).backward(given.double())
    torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-4, atol=1e-6)


def test_a_scheduled_module_has_no_gradient_for_its_parameters():
    layer = torch.nn.LayerNorm(8)
    run = tilefold.schedule(layer, normal(3, 8)).compile()
    with pytest.raises(TilefoldError, match="no gradient for tensors that it holds"):
        run(normal(3, 8))
    with torch.no_grad():
        torch.testing.assert_close(run(normal(3, 8)), layer(normal(3, 8)))
