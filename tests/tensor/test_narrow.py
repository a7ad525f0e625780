"""Conditions over indices, and what is read in the branches that they guard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    run = torch.compile(fields, backend="tilefold")
    assert torch.equal(run(x, s, table), fields(x, s, table))
    with pytest.raises(IndexError):
        run(x, s.index_fill(1, torch.tensor([FIELDS - 1]), ROWS), table)
