"""Loads in front of a kernel's reductions: the same results, and one wait."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.expr import Load
from tilefold.tile.interp import run_kernel
from tilefold.tile.ir import Alloc, Map, Reduce
from tilefold.tile.reads_first import reads_first
from tilefold.tile.text import parse
from tilefold.tile.verify import verify

COMBINE = """
kernel combine(R)
  dim i = R
  dim j = 7
  in a: {dtype}[7, R] unit 1
  in b: {dtype}[7, R] unit 1
  in n: {dtype}[7] unit 0
  out y: f32[R] unit 0
  out z: f32[R] unit 0
  grid i:4
    alloc s: f32[i:4] tile
    s[i] = sum over j: a[j, i]
    alloc c: f32[] tile
    c = sum over j: n[j]
    alloc t: f32[i:4] tile
    t[i] = sum over j: b[j, i] * b[j, i] + (s[i] - a[j, i]) * n[j]
    store y[i] over i = s[i] / c
    store z[i] over i = t[i]
"""


def made(dtype: str = "f32"):
    return verify(parse(COMBINE.format(dtype=dtype)))


def lanes(d: str) -> int:
    return {"i": 4, "j": 8}[d]


def test_all_reads_stand_in_front_of_the_first_reduction_and_nothing_changes():
    before = made()
    after = verify(reads_first(before, lanes, 100))
    first = next(n for n, s in enumerate(after.body) if isinstance(s, Reduce))
    read = [s.expr.tensor for s in after.body[:first] if isinstance(s, Map)]
    assert read == ["n", "b"]  # `a` is what the first reduction reads
    args = {"a": torch.randn(7, 6), "b": torch.randn(7, 6) * 1e3, "n": torch.rand(7)}
    args = {k: v.double() for k, v in args.items()}
    found = []
    for kernel in (before, after):
        out = {k: torch.zeros(6, dtype=torch.float64) for k in "yz"}
        run_kernel(kernel, {**args, **out}, {"R": 6}, exact=True)
        found.append(out)
    for k in "yz":
        torch.testing.assert_close(found[1][k], found[0][k])


def test_only_as_much_as_there_is_room_for():
    after = verify(reads_first(made(), lanes, 8))
    held = {s.buffer.name for s in after.body if isinstance(s, Alloc)}
    assert "n_read" in held and "b_read" not in held


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_tensors_are_no_parts(dtype):
    assert reads_first(made(dtype), lanes, 100) == made(dtype)


def test_kernels_with_loops_are_left():
    text = COMBINE.format(dtype="f32").replace("    store y", "    for j:2\n      c sum= over j: n[j]\n    store y")
    kernel = verify(parse(text))
    assert reads_first(kernel, lanes, 100) == kernel


STEPS = """
kernel steps(R)
  dim i = R
  dim j = 7
  in a: f32[2, R] unit 1
  in b: f32[2, 7] unit 1
  out y: f32[2, R] unit 1
  grid i:4
    alloc s: f32[i:4, j:7] tile
    s[i, j] = a[0, i] * b[0, j]
    alloc t: f32[i:4] tile
    t[i] = sum over j: s[i, j]
    store y[0, i] over i = t[i]
    alloc u: f32[i:4, j:7] tile
    u[i, j] = s[i, j] * a[1, i] + b[1, j]
    alloc v: f32[i:4] tile
    v[i] = sum over j: u[i, j]
    store y[1, i] over i = v[i]
"""


def test_what_the_next_state_reads_stands_in_front_of_the_first_sum():
    after = verify(reads_first(verify(parse(STEPS)), lanes, 100))
    first = next(n for n, s in enumerate(after.body) if isinstance(s, Reduce))
    read = [s.expr.tensor for s in after.body[:first] if isinstance(s, Map) and isinstance(s.expr, Load)]
    assert read == ["a", "b"]
