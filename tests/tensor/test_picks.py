"""Elements that data pick out of rows, as sums of the pass that reduces the rows."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.picks import picked_with_rows
from tilefold.tensor.text import parse, show

LOSS = """program loss()
  input a: f32[6, 4]
  input b: f32[4, 9]
  input y: i64[6]
  dim i = 6
  dim j = 9
  dim k = 4
  dim r = 6
  x[i, j]: f32 = sum[k] a[i, k] * b[k, j]
  m[i]: f32 = max[j] x[i, j]
  s[i]: f32 = sum[j] exp(x[i, j] - m[i])
  loss[]: f32 = sum[r] where(y[r] != -100, m[r] + log(s[r]) - x[r, {at}], 0.0)
  g[i, j]: {dtype} = exp(x[i, j] - m[i]) / s[i]{more}
  return loss, g{out}
"""
AT = "within(where(y[r] != -100, y[r], 0), size(j))"


def program(at: str = AT, dtype: str = "f32", more: str = "", out: str = "") -> Program:
    return parse(LOSS.format(at=at, dtype=dtype, more=more, out=out))


def test_a_loss_has_its_logit_from_the_pass_over_the_row():
    p = program()
    made = picked_with_rows(p)
    (picked,) = [c for c in made.body if c.name not in {c.name for c in p.body}]
    assert picked.dims == ("i",) and picked.rdims == ("j",)
    assert "x[r" not in show(made)
    gen = torch.Generator().manual_seed(0)
    given = {"a": torch.randn(6, 4, generator=gen), "b": torch.randn(4, 9, generator=gen) * 30}
    given["y"] = torch.tensor([0, 8, -100, 3, 3, -100])
    for name, want in run(p, given).items():
        torch.testing.assert_close(run(made, given)[name], want)


def test_what_is_not_picked_may_be_anything():
    """An infinite logit beside the label's is not added."""
    p = program()
    given = {"a": torch.ones(6, 4), "b": torch.ones(4, 9), "y": torch.full((6,), 2)}
    given["b"][0, 5] = -torch.inf
    assert torch.equal(run(picked_with_rows(p), given)["loss"], run(p, given)["loss"])


@pytest.mark.parametrize(
    "changes",
    [
        {"out": ", x"},  # the logits are wanted
        {"dtype": "bf16"},  # nothing of their type is written
        {"at": "(r + 1) % size(j)"},  # positions, which no data choose
        {"more": " + x[i, (j + 1) % size(j)]"},  # read at other positions as well
    ],
)
def test_picks_that_gain_nothing_stay(changes):
    p = program(**changes)
    assert picked_with_rows(p) == p
