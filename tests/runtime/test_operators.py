"""Calls of torch's operators as instructions: values in the order of the schema, tensors by their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilefold.runtime.operators import Given, form_of

aten = torch.ops.aten
X, Y, Z = torch.ones(2, 3), torch.ones(3), torch.ones(1)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "values"),
    [
        (aten.add.Tensor, (X, Y), {"alpha": 2}, ((0, 0), (0, 1), 2)),
        (aten.add.Tensor, (X, 3), {}, ((0, 0), (6, 3), 1)),
        (aten.sum.dim_IntList, (X, [0, 1], True), {}, ((0, 0), (1, 0, 1), True, None)),
        (aten.cat.default, ([X, Y, X], 1), {}, ((4, 2, 1, 2), 1)),  # one tensor in two places: either
        (aten.cat.default, ((Y, X),), {}, ((4, 0, 1), 0)),
        (aten.index.Tensor, (X, [None, Y]), {}, ((0, 0), (5, -1, 1))),
        (aten.index_put.default, (X, [Z, None], Y), {}, ((0, 0), (5, 1, -1), (0, 2), False)),
        (aten.layer_norm.default, (X, [3], None, Y, True), {}, ((0, 0), (1, 3), None, (0, 1), True, True)),
        (aten.leaky_relu.default, (X, 1), {}, ((0, 0), 1)),
    ],
)
def test_values_are_those_of_the_call_in_the_order_of_the_schema(
    func: Any, args: tuple[object, ...], kwargs: dict[str, object], values: tuple[object, ...]
) -> None:
    found = form_of(func, args, kwargs)
    assert found == (func._schema.name, func._schema.overload_name, *values)


def test_tensors_have_places_in_lists_and_behind_them() -> None:
    found = form_of(aten.cat.default, ([X, Y],), {"dim": 0})
    assert found is not None and found[2] == (int(Given.TENSORS), 0, 1)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.sum.dim_IntList, (X, 1)),  # a number for a list: torch makes one of it, C++ does not
        (aten.sum.dim_IntList, (X, ["a"])),
        (aten.add.Tensor, (X, "a")),
        (torch.add, (X, Y)),
        (aten.rand.generator, ([2],)),
    ],
)
def test_other_calls_have_no_form(func: Any, args: tuple[object, ...]) -> None:
    kwargs = {"generator": torch.Generator()} if func is aten.rand.generator else {}
    assert form_of(func, args, kwargs) is None
