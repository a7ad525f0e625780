"""Conditions over indices, and what is read in the branches that they guard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilefold.tensor.interp import run
from tilefold.tensor.narrow import narrow
from tilefold.tensor.text import parse, show

FIELDS, ROWS = 5, 7


def fields(x: Tensor, s: Tensor, table: Tensor) -> Tensor:
    """A row beside one of each field's part of a table."""
    return torch.cat([x[:, None], table[s + torch.arange(FIELDS) * ROWS], x[:, None]], 1) * 2.0


@pytest.mark.parametrize("rows", (1, 6))
def test_a_part_that_is_looked_up_is_checked_where_it_is(rows):
    """At the first place there is no field -1: its rows begin before the table."""
    gen = torch.Generator().manual_seed(0)
    x, table = torch.randn(rows, 8, generator=gen), torch.randn(FIELDS * ROWS, 8, generator=gen)
    s = torch.randint(0, ROWS, (rows, FIELDS), generator=gen)
    torch._dynamo.reset()
    compiled = torch.compile(fields, backend="tilefold")
    assert torch.equal(compiled(x, s, table), fields(x, s, table))
    with pytest.raises(IndexError):
        compiled(x, s.index_fill(1, torch.tensor([FIELDS - 1]), ROWS), table)


PARTS = """program parts()
  input a: f32[3, 4]
  input b: f32[3, 4]
  dim i = 3
  dim p = 5
  dim k = 4
  y[i, p, k]: f32 = where(p < 2, where(p < 1, a[i, k], b[i, k]), {inner})
  return y
"""
INNER = "where(p - 2 < 1, a[i, p * 4 + k - 8], where(p - 2 < 2, b[i, p * 4 + k - 12], a[i, p * 4 + k - 16] * 2.0))"


def test_parts_of_parts_are_read_at_plain_places():
    """What is concatenated twice: each part is known by the part's number, wherever counting begins."""
    p = parse(PARTS.format(inner=INNER))
    q = narrow(p)
    want = "where(p < 3, a[i, k], where(p < 4, b[i, k], a[i, k] * 2.0))"
    assert show(q) == show(parse(PARTS.format(inner=want)))
    given = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    assert torch.equal(run(q, given)["y"], run(p, given)["y"])
