"""What a kernel may write over."""

from __future__ import annotations

import pytest
import torch

from tilefold.block.text import parse as parse_block
from tilefold.pipeline import compile_program
from tilefold.plan.greedy import fuse
from tilefold.runtime.convolution import ConvolutionStep
from tilefold.runtime.reuse import overwritable, replaceable
from tilefold.runtime.steps import GpuStep
from tilefold.tensor.text import parse

HEAD = """program f()
  input x: f32[4, 8]
  input z: f32[4, 8]
  input v: f32[8]
  input h: bf16[4, 8]
  dim i = 4
  dim j = 8
"""


def pairs(body: str) -> tuple[tuple[str, str], ...]:
    (kernel,) = fuse(parse(f"{HEAD}{body}  return y\n")).kernels
    return overwritable(kernel.block)


def test_maps_may_be_written_over_what_they_read_at_the_same_element():
    assert pairs("  y[i, j]: f32 = maximum(x[i, j] * v[j] + z[i, j], 0)\n") == (("y", "x"), ("y", "z"))


@pytest.mark.parametrize(
    "body",
    [
        "  y[i, j]: f32 = x[i, j] + x[i, 7 - j]\n",  # another element too
        "  y[j, i]: f32 = x[i, j] * 2.0\n",  # turned: the same memory is another element
        "  y[i, j]: f32 = h[i, j] * 2.0\n",  # another type
        "  y[i, j]: f32 = v[j] * 2.0\n",  # read by every row
        "  s[i]: f32 = sum[j] x[i, j]\n  y[i, j]: f32 = x[i, j] / s[i]\n",  # read again after a reduction
    ],
)
def test_nothing_else_may(body):
    assert pairs(body) == ()


ROWS = """program f()
  input x: f32[4, {n}]
  dim i = 4
  dim j = {n}
  s[i]: f32 = sum[j] x[i, j]
  y[i, j]: f32 = {y}
  return {out}
"""


def of_rows(n: int, y: str, out: str = "y") -> tuple[tuple[str, str], ...]:
    (kernel,) = fuse(parse(ROWS.format(n=n, y=y, out=out))).kernels
    return overwritable(kernel.block)


@pytest.mark.parametrize(
    ("n", "y", "over"),
    [
        (2048, "x[i, j] / s[i]", True),
        (100_000, "x[i, j] / s[i]", True),  # the row is streamed, twice
        (512, "x[i, j] / s[i]", False),  # several threads read an element
        (2048, "x[i, j] / s[i] + x[i, (j + 1) % size(j)]", False),  # another thread's element
        (2048, "x[i, j] / s[i] + x[0, j]", False),  # another thread block's
    ],
)
def test_rows_may_be_written_over_once_they_are_reduced(n, y, over):
    assert of_rows(n, y) == ((("y", "x"),) if over else ())


LATER = """block f()
  input x: f32[4, 2048]
  dim i = 4
  dim j = 2048
  result y[i, j]: f32
  result z[i]: f32
  forall i
    let u[i, j]: f32 = x[i, j] * 2.0
    let s[i]: f32 = sum[j] {first}
    store y[i, j] over (i, j) = u[i, j] - s[i]
    let t[i]: f32 = sum[j] {then}
    store z[i] over (i) = t[i]
  return y, z
"""


@pytest.mark.parametrize(
    ("then", "over"),
    [("1.0", True), ("x[i, j]", False), ("u[i, j]", False)],  # u may be computed where it is used
)
def test_nothing_is_written_over_that_is_read_afterwards(then, over):
    found = overwritable(parse_block(LATER.format(first="x[i, j]", then=then)))
    assert found == ((("y", "x"),) if over else ())


STEP = """program f()
  input x: f32[4, 8]
  input z: f32[4, 8]
  input v: f32[8]
  input h: i64[4, 8]
  dim i = 4
  dim j = 8
  m[i, j]: f32 = x[i, j] * 0.5 + v[j]
  y[i, j]: f32 = {y}
  return m, y
"""


@pytest.mark.parametrize(
    ("y", "over"),
    [
        ("z[i, j] - exp(m[i, j])", {("m", "x"), ("y", "x"), ("y", "z")}),  # x is read for m alone, before either
        ("z[i, j] - z[i, 7 - j] + m[i, j]", {("m", "x"), ("y", "x")}),
        ("z[i, h[i, j]]", {("m", "x")}),  # and no kernel that may fail when it has written
    ],
)
def test_results_take_the_place_of_what_is_read_for_them_alone(y, over):
    found = {pair for k in fuse(parse(STEP.format(y=y))).kernels for pair in replaceable(k.block)}
    assert found == over


TWICE = """block f()
  input x: f32[4, 8]
  input z: f32[4, 8]
  dim i = 4
  dim j = 8
  result m[i, j]: f32
  result y[i, j]: f32
  forall i
    forall j
      store m[i, j] over (i, j) = x[i, j] * 0.5
      store y[i, j] over (i, j) = z[i, j] - x[i, j]
  return m, y
"""


def test_nothing_takes_the_place_of_what_another_result_is_made_of():
    assert replaceable(parse_block(TWICE)) == (("y", "z"),)  # which store comes first is not known
    assert overwritable(parse_block(TWICE)) == (("y", "x"), ("y", "z"))


def test_rows_that_are_reduced_take_no_place():
    (kernel,) = fuse(parse(ROWS.format(n=2048, y="x[i, j] / s[i]", out="y"))).kernels
    assert replaceable(kernel.block) == ()


CONVOLVED = """program f()
  input x: f32[2, 4, 9]
  input w: f32[6, 4, 3]
  dim n = 2
  dim o = 6
  dim i = 7
  dim c = 4
  dim k = 3
  y[n, o, i]: f32 = sum[c, k] x[n, c, i + k] * w[o, c, k]
  z[n, o, i]: f32 = maximum(y[n, o, i], 0)
  return z{more}
"""


@pytest.mark.parametrize("more, over", [("", [("z", "y")]), (", y", [])])
def test_only_what_nobody_needs_again_is_written_over(more, over):
    compiled = compile_program(parse(CONVOLVED.format(more=more)), device="cuda")
    assert [type(s) for s in compiled.steps] == [ConvolutionStep, GpuStep]
    assert compiled._over[1] == over

    tensors = {"y": torch.zeros(2, 6, 7)}
    compiled._write_over(1, tensors, {})
    assert (tensors.get("z") is tensors["y"]) is bool(over)
    turned = {"y": torch.zeros(7, 6, 2).permute(2, 1, 0)}
    compiled._write_over(1, turned, {})
    assert "z" not in turned
