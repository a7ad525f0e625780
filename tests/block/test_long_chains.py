"""Programs that do the same over and over: planning takes no time that doubles with each step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.block.test_fuse import run_blocks
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp
from tilefold.tensor.ir import Program
from tilefold.tensor.passes import normalise
from tilefold.tensor.text import parse

#: What is done with y to get the next one.
STEPS = {
    "a residual": "  y{m}[i, j]: f32 = y{n}[i, j] + tanh(y{n}[i, j])\n",
    "a choice": "  y{m}[i, j]: f32 = where(y{n}[i, j] > x[i, j], y{n}[i, j], y{n}[i, j] * 0.5)\n",
    "a norm": "  s{m}[i]: f32 = sum[j] abs(y{n}[i, j])\n  y{m}[i, j]: f32 = y{n}[i, j] / (s{m}[i] + 1.0)\n",
    "a mean": "  s{m}[i]: f32 = sum[j] y{n}[i, j]\n"
    "  y{m}[i, j]: f32 = y{n}[i, j] - s{m}[i] * 0.25 + tanh(y{n}[i, j])\n",
    "a sum": "  s{m}[i]: f32 = sum[j] y{n}[i, j]\n  y{m}[i, j]: f32 = y{n}[i, j] - 0.25 * s{m}[i] + x[i, j]\n",
    "a softmax": "  t{m}[i]: f32 = max[j] y{n}[i, j]\n  e{m}[i, j]: f32 = exp(y{n}[i, j] - t{m}[i])\n"
    "  s{m}[i]: f32 = sum[j] e{m}[i, j]\n  y{m}[i, j]: f32 = e{m}[i, j] / s{m}[i] + y{n}[i, j]\n",
}
SOFTMAX = """  t[i]: f32 = max[j] y{n}[i, j]
  e[i, j]: f32 = exp(y{n}[i, j] - t[i])
  s[i]: f32 = sum[j] e[i, j]
  o[i, j]: f32 = e[i, j] / s[i]
  return o
"""


def chain(step: str, times: int) -> Program:
    body = "".join(STEPS[step].format(n=n, m=n + 1) for n in range(times))
    head = "program p()\n  input x: f32[3, 4]\n  dim i = 3\n  dim j = 4\n  y0[i, j]: f32 = x[i, j] * 2.0\n"
    return normalise(parse(head + body + SOFTMAX.format(n=times)))[0]


@contextlib.contextmanager
def seconds(most: float) -> Iterator[None]:
    """TimeoutError after so many seconds of this process's work."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {most} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, 20])
def test_planning_ends_and_kernels_mean_the_program(step: str, times: int) -> None:
    with seconds(60):
        p = chain(step, times)
        fused = fuse(p)
    x = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
    dims = {d: 3 for k in fused.kernels for d in k.block.sizes}
    got = run_blocks(fused, x, 0, dims, exact=True)
    torch.testing.assert_close(got["o"], interp.run(p, x, exact=True)["o"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("times", "passes"), [(7, [8]), (8, [8, 1]), (17, [8, 8, 2])])
def test_a_pass_has_at_most_eight_reductions_that_follow_from_one_another(times: int, passes: list[int]) -> None:
    body = "".join(STEPS["a sum"].format(n=n, m=n + 1) for n in range(times))
    head = "program p()\n  input x: f32[3, 4]\n  dim i = 3\n  dim j = 4\n  y0[i, j]: f32 = x[i, j] * 2.0\n"
    last = f"  o[i]: f32 = sum[j] y{times}[i, j]\n  return o\n"
    (kernel,) = fuse(normalise(parse(head + body + last))[0]).kernels
    assert [len(s.reductions) for s in kernel.plan.stages] == passes
    assert {r.reason.partition(" follows")[2] for r in kernel.plan.rejections} == (
        {" from 8 reductions of a pass, one after another: it starts the next"} if len(passes) > 1 else set()
    )


def test_reductions_that_do_not_follow_from_one_another_share_a_pass() -> None:
    sums = "".join(f"  s{n}[i]: f32 = sum[j] x[i, j] * {n}.0\n" for n in range(1, 12))
    total = " + ".join(f"s{n}[i]" for n in range(1, 12))
    head = "program p()\n  input x: f32[3, 4]\n  dim i = 3\n  dim j = 4\n"
    (kernel,) = fuse(normalise(parse(head + sums + f"  o[i]: f32 = {total}\n  return o\n"))[0]).kernels
    assert [len(s.reductions) for s in kernel.plan.stages] == [11]
