"""Names: equal computations are one kernel whatever their tensors are called, and others are not."""

from __future__ import annotations

import pytest

from tilefold.block.canonical import canonical, nameless, nameless_text
from tilefold.block.text import show
from tilefold.plan.greedy import fuse
from tilefold.runtime.steps import triton_kernel
from tilefold.tensor.text import parse

NORM = """
program norm(n)
  input x: f32[5, n]
  input before: f32[n]
  input after: f32[n]
  dim i = 5
  dim j = n
  m[i]: f32 = max[j] x[i, j]
  y[i, j]: f32 = (x[i, j] - m[i]) * before[j] + after[j]
  return y
"""


def block(*changes: tuple[str, str]):
    text = NORM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (k,) = fuse(parse(text)).kernels
    return canonical(k.block).block


def named(*changes: tuple[str, str]) -> str:
    return show(nameless(block(*changes)))


def test_tensors_and_values_under_other_names_are_the_same_program():
    other = block(("before", "input_layernorm_weight"), ("after", "bias"), ("m[i]", "largest[i]"))
    assert show(other) != show(block())
    assert show(nameless(other)) == show(nameless(block()))
    kernel = triton_kernel(block())
    assert triton_kernel(other) is kernel and kernel.block.name == other.name == "y"


@pytest.mark.parametrize(
    "changes",
    [
        (("y[i, j]", "z[i, j]"), ("return y", "return z")),  # the kernel's own name
        (("* before[j] + after[j]", "* after[j] + before[j]"),),  # another tensor at a place
        (("* before[j] + after[j]", "* before[j] + before[j]"),),  # one tensor twice
        (("input after: f32", "input after: bf16"),),
        (("x: f32[5, n]", "x: f32[6, n]"), ("dim i = 5", "dim i = 6")),
        (("max[j]", "sum[j]"),),
    ],
)
def test_others_are_other_programs(changes):
    assert named(*changes) != named()


def test_names_are_found_once() -> None:
    b = block()
    assert canonical(b) is canonical(b)
    assert nameless_text(canonical(b).block) is nameless_text(canonical(b).block)
    assert nameless_text(b) == show(nameless(b))
