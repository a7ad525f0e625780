"""Complex numbers that Python prints and cannot read are read in graphs' code."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.frontend.regions.spelled import spell_complex

NUMBERS = [complex(math.nan, math.nan), complex(1, math.inf), complex(-math.inf, -math.inf), complex(2, 3)]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_a_number_in_a_graph_keeps_its_value(number):
    spell_complex()
    graph = torch.fx.Graph()
    made = graph.call_function(torch.ops.aten.full.default, ([2], number), {"dtype": torch.complex128})
    graph.output(made)
    got = torch.fx.GraphModule({}, graph)()[0].item()
    for a, b in ((got.real, number.real), (got.imag, number.imag)):
        assert a == b or (math.isnan(a) and math.isnan(b))


def test_an_operator_whose_decomposition_has_such_a_number():
    x = torch.tensor([1 + 2j, -3j, complex(math.nan, 0)], dtype=torch.complex64)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(torch.logaddexp, backend="tilefold")(x, x.flip(0)), torch.logaddexp(x, x.flip(0)), equal_nan=True
    )
