"""What Inductor compiles of what is left, and what eager runs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.leftover import CROWDED, compile_leftover
from tilefold.frontend.regions.partition import Group, extract

ROWS = 2


def leftover(indices: int, *, other: bool) -> tuple[torch.fx.GraphModule, Group]:
    """Gradients of embeddings of ROWS and of many rows of four columns; `other`: and an operator besides."""
    g = torch.fx.Graph()
    dy, few, many = (g.placeholder(name) for name in ("dy", "few", "many"))
    made = [
        g.call_function(torch.ops.aten.embedding_dense_backward.default, (dy, at, rows, -1, False))
        for at, rows in ((few, ROWS), (many, indices))
    ]
    if other:
        made.append(g.call_function(torch.ops.aten.sin.default, (dy,)))
    g.output(tuple(made))
    with FakeTensorMode():
        for n in (dy, *made):
            n.meta["val"] = torch.empty(ROWS if n is made[0] else indices, 4)
        for n in (few, many):
            n.meta["val"] = torch.empty(indices, dtype=torch.int64)
    return torch.fx.GraphModule({}, g), Group(0, False, tuple(made), tuple(made))


@pytest.mark.parametrize(
    ("indices", "other", "by_inductor"),
    [(ROWS * CROWDED + 1, False, False), (ROWS * CROWDED, False, True), (ROWS * CROWDED + 1, True, True)],
)
def test_many_indices_of_few_rows_are_added_by_eager(indices, other, by_inductor):
    gm, group = leftover(indices, other=other)
    run = compile_leftover(group, extract(gm, group), Part("left", []), {})
    assert (run is not None) is by_inductor
    if run is not None:
        dy, few, many = torch.randn(indices, 4), torch.randint(ROWS, (indices,)), torch.randint(indices, (indices,))
        got = run(dy, few, many)
        for made, at, rows in ((got[0], few, ROWS), (got[1], many, indices)):
            torch.testing.assert_close(made, torch.zeros(rows, 4).index_add_(0, at, dy), rtol=1e-4, atol=1e-3)
