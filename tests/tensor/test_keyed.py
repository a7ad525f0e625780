"""Sums by keys: found, computed with their elements, added up, and as kernels that add."""

from __future__ import annotations

import pytest
import torch

from tests.keyed_programs import IMAGE, MAXIMA, PLACES, arguments, picked
from tilefold.block import interp as block_interp
from tilefold.block.added import added_block
from tilefold.block.text import parse as parse_block
from tilefold.block.text import show as show_block
from tilefold.errors import PlanError
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.joined_keys import joined
from tilefold.tensor.keyed import NOTHING, keyed, with_values
from tilefold.tensor.text import parse
from tilefold.tile import interp as tile_interp
from tilefold.tile.lower import lower
from tilefold.tile.text import parse as parse_tile
from tilefold.tile.text import show as show_tile
from tilefold.tile.verify import verify


def same(p: Program, q: Program) -> None:
    given = {n: x.double() if x.is_floating_point() else x for n, x in arguments(p).items()}
    a, b = run(p, given, exact=True), run(q, given, exact=True)
    for name in p.outputs:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9)


def statement(p: Program, name: str):
    return next(c for c in p.body if c.name == name)


def found(p: Program, name: str):
    return keyed(statement(p, name), p.sizes)


def test_keys_are_what_a_sum_compares_its_dims_with():
    assert set(found(picked(), "y").keys) == {"r"} and found(picked(), "u").dims == ("l", "i")
    places = found(parse(PLACES), "y")
    assert set(places.keys) == {"r", "s"} and places.dims == ("b", "k", "j")


@pytest.mark.parametrize("row", ["(b * 6 + r) * 5 + s", "(b * 6 + r) * 4 + s", "s * 12 + b * 6 + r"])
def test_rows_in_digits_have_a_key_each(row):
    p = parse(IMAGE.replace("(b * 6 + r) * 5 + s", row))
    assert set(found(p, "y").keys) == {"b", "r", "s"}
    added(p, "y")


@pytest.mark.parametrize(
    "row", ["(b * 6 + r) * 3 + s", "(b * 5 + r) * 4 + s", "b * 30 + r * 10 + s * 2", "b + r", "r + 1"]
)
def test_rows_that_no_digits_say_have_none(row):
    p = parse(IMAGE.replace("(b * 6 + r) * 5 + s", row))
    assert found(p, "y") is None


@pytest.mark.parametrize(
    "sum_",
    [
        "where((at[b, k] < r) & (s == to[k]), v[b, k, j], 0.0)",  # many rows
        "where((r == at[b, k]) & (s == to[k]), v[b, k, j], 1.0)",
        "where((r == at[b, k]) & (s == to[k]), v[b, k, j] * f32(r), 0.0)",  # what is added depends on the row
        "where((r == k) & (s == to[k]), v[b, k, j], 0.0)",  # the element itself
    ],
)
def test_others_are_none(sum_):
    text = PLACES.replace("where((r == at[b, k]) & (s == to[k]), v[b, k, j], 0.0)", sum_)
    assert text != PLACES and found(parse(text), "y") is None


def test_sums_compute_their_elements_where_nothing_else_reads_them():
    p = picked("y[r, j] * 3.0")
    q = with_values(p, {"y"})
    assert [c.name for c in q.body] == ["y", "z"]
    same(p, q)
    shared = picked("y[r, j] * 3.0 + f32(m[r, j])")
    assert [c.name for c in with_values(shared, {"y"}).body] == ["m", "y", "z"]


@pytest.mark.parametrize("total", ["y[r, j] + u[r, j]", "bf16(u[r, j]) + bf16(y[r, j])", "(y[r, j] + u[r, j]) * 2.0"])
def test_sums_that_are_added_up_are_one(total):
    p = picked(total)
    q = joined(p, {"y", "u"})
    assert len(q.body) == len(p.body) - 1
    if "bf16" not in total:
        same(p, q)


@pytest.mark.parametrize("total", ["y[r, j] - u[r, j]", "y[r, j] + u[r, j] * y[r, j]", "y[r, j] + bf16(u[r, j])"])
def test_others_stay(total):
    assert joined(picked(total), {"y", "u"}) == picked(total)


@pytest.mark.parametrize("p", [parse(PLACES), joined(picked(), {"y", "u"})], ids=["places", "joined"])
def test_kernels_add_what_sums_are(p):
    total = next(c for c in p.body if keyed(c, p.sizes) is not None)
    added(with_values(p, {total.name}), total.name)


def test_kernels_raise_what_maxima_are():
    p = parse(MAXIMA)
    assert set(found(p, "y").keys) == {"r", "s"}
    added(p, "y")


@pytest.mark.parametrize("none", ["0.0", "inf"])
def test_maxima_of_another_value_elsewhere_are_none(none):
    assert found(parse(MAXIMA.replace("-inf", none)), "y") is None


def added(p: Program, n: str) -> None:
    """Block programs and kernels that add, or raise, are what the program is."""
    block = added_block(p, statement(p, n))
    assert parse_block(show_block(block)) == block
    given = arguments(p)
    want = run(p, given)[p.outputs[0]]
    kernel = verify(lower(block))
    assert parse_tile(show_tile(kernel)) == kernel
    made = block_interp.run(block, {i.name: given[i.name] for i in block.inputs}, {}, block_sizes={"k": 8})
    torch.testing.assert_close(made[n], want)
    zeros = torch.full(want.shape, NOTHING[statement(p, n).reducer])
    tensors = {t.name: given[t.name] if t.role == "in" else zeros for t in kernel.tensors}
    tile_interp.run_kernel(kernel, tensors, {})
    torch.testing.assert_close(zeros, want)


def test_a_statement_that_is_none_has_no_such_kernel():
    p = picked()
    with pytest.raises(PlanError):
        added_block(p, statement(p, "z"))
