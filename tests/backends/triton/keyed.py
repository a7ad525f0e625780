"""Sums by keys in Triton's interpreter: kernels that add to zeros."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch
from triton.runtime.errors import InterpreterError

from tests.keyed_programs import MAXIMA, PLACES, arguments, picked
from tilefold.pipeline import compile_program
from tilefold.plan import keyed
from tilefold.runtime.steps import AddedStep
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse


def together() -> list[str]:
    """The zeros of two sums in one piece of memory."""
    p = picked("y[r, j] * u[r, j]")
    with patch.object(keyed, "LOOKED", 1.0):
        compiled = compile_program(p, device="interpreter")
    given = arguments(p)
    want = run(p, given)[p.outputs[0]]
    right = all(torch.allclose(compiled(given, {})[p.outputs[0]], want, rtol=0.02, atol=0.02) for _ in range(2))
    steps = [s.name for s in compiled.steps]
    return [] if right and steps.count("zeros") == 1 and steps[0] == "zeros" else [f"together: {steps}"]


ONE_HOT = """program assigned()
  input t: i64[200]
  input x: f32[200, 24]
  dim i = 200
  dim r = 7
  dim j = 24
  h[i, r]: i64 = i64(t[i] == r)
  y[r, j]: f32 = sum[i] f32(h[i, r]) * x[i, j]
  n[r]: f32 = sum[i] f32(i64(t[i] == r))
  z[r, j]: f32 = y[r, j] / maximum(n[r], 1.0)
  return z
"""


def one_hot() -> list[str]:
    """Rows of one-hot vectors times what they are of, with keys that are no row's."""
    p = parse(ONE_HOT)
    with ExitStack() as stack:
        for name, value in (("ADDED", 1e30), ("QUEUED", 1e30), ("LOOKED", 1.0)):
            stack.enter_context(patch.object(keyed, name, value))
        compiled = compile_program(p, device="interpreter")
    gen = torch.Generator().manual_seed(0)
    given = {"t": torch.randint(-2, 9, (200,), generator=gen), "x": torch.randn(200, 24, generator=gen)}
    hot = (given["t"][:, None] == torch.arange(7)).double()
    want = (hot.T @ given["x"].double()) / hot.sum(0).clamp(min=1)[:, None]
    added = [s for s in compiled.steps if isinstance(s, AddedStep)]
    right = all(torch.allclose(compiled(given, {})["z"].double(), want, atol=1e-5) for _ in range(2))
    return [] if right and len(added) == 2 else [f"one-hot: {len(added)}"]


def maxima() -> list[str]:
    """The largest of each place, of either sign; NaN is, whatever its sign; nothing is put to the last place."""
    p = parse(MAXIMA)
    with patch.object(keyed, "LOOKED", 1.0):
        compiled = compile_program(p, device="interpreter")
    given = arguments(p)
    given["at"][given["at"] == 5] = 4
    given["v"][0] -= 9
    given["v"][1, 3, :2] = torch.tensor([torch.nan, -torch.nan])
    want = run(p, given)[p.outputs[0]]
    got = [compiled(given, {})[p.outputs[0]] for _ in range(2)]
    right = all(torch.allclose(x, want, equal_nan=True) for x in got) and torch.isneginf(want).any()
    added = [s for s in compiled.steps if isinstance(s, AddedStep)]
    return [] if right and len(added) == 1 else [f"maxima: {len(added)}"]


def keyed_sums() -> str:
    """One index, several, rows of two tensors in one table, 16 bits; rows that half of them name, or that are not."""
    wrong = []
    for p in (parse(PLACES), picked(), picked("y[r, j] * 3.0", "bf16"), picked("bf16(u[r, j]) + bf16(y[r, j])")):
        with patch.object(keyed, "LOOKED", 1.0):
            compiled = compile_program(p, device="interpreter")
        added = [s for s in compiled.steps if isinstance(s, AddedStep)]
        given = arguments(p)
        for _ in range(2):  # zeros again
            got, want = compiled(given, {})[p.outputs[0]], run(p, given)[p.outputs[0]]
        wrong += [] if len(added) == 1 else [f"{p.name}: {len(added)} sums"]
        wrong += [] if torch.allclose(got, want, rtol=0.02, atol=0.02) else [p.name]
    wrong += together() + maxima() + one_hot()
    given = arguments(p) | {"at": torch.full((37,), 11)}
    try:
        compiled(given, {})
    except InterpreterError:
        return ", ".join(wrong)
    return ", ".join([*wrong, "an index out of range is no error"])
