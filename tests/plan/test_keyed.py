"""Which sums by keys are additions in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.keyed_programs import MAXIMA, picked
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.plan import keyed as plan_keyed
from tilefold.plan.hardware import H100
from tilefold.plan.keyed import of_one_hot, with_sums_added
from tilefold.tensor.interp import run
from tilefold.tensor.keyed import keyed
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


#: Rows of one-hot vectors, times what they are of; `y` sums by what `t` names, `n` counts.
STEP = """program p()
  input t: i64[{many}]
  input x: {kind}[{many}, 64]
  dim i = {many}
  dim r = {rows}
  dim j = 64
  h[i, r]: i64 = i64(t[i] == r)
  y[r, j]: {kind} = sum[i] {kind}(h[i, r]) * x[i, j]
  n[r]: {kind} = sum[i] {kind}(i64(t[i] == r))
  return y, n
"""


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_products_with_one_hot_rows_are_sums_by_keys(kind, monkeypatch):
    p = parse(STEP.format(many=65536, rows=256, kind=kind))
    q, found = with_sums_added(p, H100)
    assert len(found) == 2 and not any(c.name == "h" for c in q.body)
    small = parse(STEP.format(many=300, rows=7, kind=kind))
    for name, value in (("ADDED", 1e30), ("QUEUED", 1e30), ("LOOKED", 1.0)):
        monkeypatch.setattr(plan_keyed, name, value)
    by_keys = of_one_hot(small, H100)
    assert all(keyed(c, by_keys.sizes) for c in by_keys.body) and len(by_keys.body) == 2
    gen = torch.Generator().manual_seed(0)
    args = {"t": torch.randint(-1, 9, (300,), generator=gen), "x": torch.randn(300, 64, generator=gen)}
    args["x"] = args["x"].to(torch.float32 if kind == "f32" else torch.bfloat16)
    exact = torch.zeros(7, 64, dtype=torch.float64)
    for at, row in zip(args["t"].tolist(), args["x"].double(), strict=True):
        if 0 <= at < 7:
            exact[at] += row
    found_sums = run(by_keys, args)
    torch.testing.assert_close(found_sums["y"].double(), exact, rtol=0.02 if kind == "bf16" else 1e-5, atol=1e-4)
    counts = torch.stack([(args["t"] == r).sum() for r in range(7)])
    torch.testing.assert_close(found_sums["n"].double(), counts.double())


def test_products_of_few_rows_and_long_queues_stay():
    """All of 65,536 at one of two places wait for each other; a product of a few hundred is over sooner."""
    for many, rows in ((1 << 20, 2), (64, 256)):
        p = parse(STEP.format(many=many, rows=rows, kind="f32"))
        assert "y" not in with_sums_added(p, H100)[1]
    torch.use_deterministic_algorithms(True)
    try:
        p = parse(STEP.format(many=65536, rows=256, kind="f32"))
        assert with_sums_added(p, H100) == (p, frozenset())
    finally:
        torch.use_deterministic_algorithms(False)
