"""Which sums by keys are additions in any order."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.keyed_programs import MAXIMA, picked
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.plan.hardware import H100
from tilefold.plan.keyed import with_sums_added
from tilefold.tensor.text import parse, show


def large(rows: int, indices: int, dtype: str = "f32"):
    p = picked("y[r, j] * 3.0", dtype)
    known = {**p.sizes, "r": Const(rows, DType.I64), "k": Const(indices, DType.I64)}
    return replace(p, sizes=known)


def test_long_sums_to_many_rows_are_and_short_ones_are_not():
    assert with_sums_added(large(20_000, 160_000), H100)[1] == {"y"}
    assert with_sums_added(large(1000, 2048), H100)[1] == {"y"}
    assert not with_sums_added(large(11, 37), H100)[1]


def test_nor_where_all_indices_name_one_row():
    assert not with_sums_added(large(1, 1_000_000), H100)[1]


def test_none_are_where_torch_is_to_be_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        p, found = with_sums_added(large(20_000, 160_000), H100)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not found and p == large(20_000, 160_000)


def test_maxima_are_the_same_in_any_order():
    p = parse(MAXIMA)
    known = {**p.sizes, "r": Const(600, DType.I64), "k": Const(10_000, DType.I64)}
    torch.use_deterministic_algorithms(True)
    try:
        assert with_sums_added(replace(p, sizes=known), H100)[1] == {"y"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_maxima_that_are_added_up_stay_two():
    p = parse(show(large(20_000, 160_000)).replace("sum[k]", "max[k]").replace(", m[k, j], 0.0)", ", m[k, j], -inf)"))
    p = replace(p, body=tuple(c for c in p.body if c.name != "u"))
    total = parse(show(p).replace("y[r, j] * 3.0", "y[r, j] + y[r, j]"))
    assert with_sums_added(total, H100)[1] == {"y"}


def test_sums_of_16_bits_are_rounded_once():
    p, found = with_sums_added(large(20_000, 160_000, "bf16"), H100)
    (name,) = found
    total = next(c for c in p.body if c.name == name)
    assert total.dtype is DType.F32 and next(c for c in p.body if c.name == "y").reducer is None
