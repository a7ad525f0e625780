"""Sums by keys in Triton's interpreter: kernels that add to zeros."""

from __future__ import annotations

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
    wrong += together() + maxima()
    given = arguments(p) | {"at": torch.full((37,), 11)}
    try:
        compiled(given, {})
    except InterpreterError:
        return ", ".join(wrong)
    return ", ".join([*wrong, "an index out of range is no error"])
