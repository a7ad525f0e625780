"""Arithmetic of statements as they are rendered, and what threads hold where it branches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tests.backends.triton.test_warps import of
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used
from tilefold.backends.triton.work import OF_BASE, QUOTIENT, REST, held, index_units, room, work
from tilefold.plan.dataflow import GPU_UNITS
from tilefold.plan.hardware import H200
from tilefold.tile import ir

X, Y, R = Load("x", (Index("i"), Index("j"))), Load("y", (Index("i"), Index("j"))), Load("r", (Index("i"),))
SIZES = {"i": 4, "j": 100}


def area(dims: frozenset[str]) -> float:
    n = 1
    for d in dims:
        n *= SIZES[d]
    return n


def call(op: str, *args: Expr) -> Call:
    return Call(op, args)


def test_an_operation_is_computed_once():
    e = call("exp", X)
    assert work(call("mul", e, call("add", e, e)), area) == 400 * (GPU_UNITS["exp"] + 2 * GPU_UNITS["add"])


def test_what_does_not_vary_along_a_dim_is_computed_once_for_it():
    e = call("mul", X, call("rsqrt", call("add", R, Const(1e-5, DType.F32))))
    assert work(e, area) == 400 * GPU_UNITS["mul"] + 4 * (GPU_UNITS["rsqrt"] + GPU_UNITS["add"])


def test_a_division_by_a_number_is_a_product():
    assert work(call("div", X, Const(812.0, DType.F32)), area) == 400 * GPU_UNITS["mul"]
    assert work(call("div", X, R), area) == 400 * GPU_UNITS["div"]


def test_digits_of_a_position_are_computed_for_each_element_and_sums_of_dims_are_not():
    i, j, n = Index("i"), Index("j"), Const(81, DType.I64)
    assert index_units(call("add", call("mul", i, n), j)) == 0
    assert index_units(call("floordiv", i, n)) == QUOTIENT
    assert index_units(call("mod", call("floordiv", i, n), n)) == 2 * QUOTIENT + REST


def test_the_logarithm_of_a_base_is_taken_once():
    whole, one = work(call("pow", X, Y), area), work(call("pow", R, X), area)
    assert whole == 400 * GPU_UNITS["pow"]
    assert one == 400 * (GPU_UNITS["pow"] - OF_BASE) + area(dims_used(R)) * OF_BASE < whole / 2


def test_a_cube_is_no_power():
    two, three = (Const(n, DType.F32) for n in (2.5, 3.0))
    assert work(call("pow", X, three), area) == 400 * GPU_UNITS["mul"]
    assert work(call("pow", X, two), area) == 400 * GPU_UNITS["pow"]
    assert held(stored(call("mul", call("pow", X, three), call("log", Y))), area) == 0


def stored(*exprs: Expr) -> list[ir.Stmt]:
    return [ir.Store("z", (Index("i"), Index("j")), ("i", "j"), e) for e in exprs]


@pytest.mark.parametrize(
    ("exprs", "elements"),
    [
        ([call("log", call("mul", X, Y))], 0),  # nothing branches
        ([call("pow", X, Y)], 800),  # both operands, of which one becomes the result
        ([call("pow", call("add", X, Y), R)], 404),
        ([call("mul", call("pow", X, R), call("log", X))], 800),
        ([call("mul", call("sin", X), call("sin", Y))], 800),
        (
            [call("pow", X, R), call("pow", X, call("sub", R, Const(1.0, DType.F32)))],
            404,
        ),  # the first is stored
    ],
)
def test_what_is_in_registers_at_a_branch(exprs: list[Expr], elements: float):
    assert held(stored(*exprs), area) == pytest.approx(elements, abs=4)


def test_a_value_of_the_block_is_what_it_was_computed_as():
    dims = ("i", "j")
    b = Load("b", tuple(map(Index, dims)))
    stmts: list[ir.Stmt] = [ir.Map("b", call("pow", X, R)), *stored(call("add", b, call("sin", Y)))]
    assert held(stmts, area) >= 800
    assert dims_used(b) == {"i", "j"}


def test_two_elements_of_16_bits_are_in_a_register():
    assert held(stored(call("pow", X, Y)), area, lambda tensor: 0.5) == 400


def test_threads_have_the_registers_of_a_multiprocessor():
    assert room(128) == 128 * (255 - 16)
    assert room(512) == 512 * (128 - 16)


def test_powers_of_many_elements_spill_and_logarithms_do_not():
    """Tiles of 32,768 of 16 warps: 1,452 bytes a thread are spilled, and none, by the assembler for Hopper."""

    def power(x, y):
        return (x**y) * x.log()

    def logs(x, y):
        return (x + y).log() * x.log()

    given = [meta(64, 1 << 15, dtype=torch.float32) for _ in range(2)]
    tiles = {"i": 1, "j": 1 << 15}
    powers, logarithms = (of(fn, *given, tiles=tiles, warps=16) for fn in (power, logs))
    assert powers.stages["cache"] > 1.5 * logarithms.stages["cache"]
    few = of(power, *given, tiles={"i": 1, "j": 1 << 14}, warps=16)
    assert few.stages["cache"] <= logarithms.stages["cache"]


def test_a_power_takes_as_long_as_it_was_measured():
    """The mean of a power of 32 x 512 rows of 812, held in lanes of 1,024: 55.8 us on an H100."""
    x, y = meta(32, 512, 812, dtype=torch.bfloat16), meta(512, dtype=torch.float32)
    f = of(lambda x, y: (x.clamp(min=1e-3).float() ** y[:, None]).mean(-1), x, y)
    assert f.seconds == pytest.approx(55.8e-6, rel=0.15)
    assert f.floor * 3 < f.seconds
    assert H200.vector == 16e12


def test_a_quotient_of_a_position_is_a_product_and_a_shift_and_computed_once():
    """114 columns and their neighbours: what a condition on the column computes, the address of the element uses."""
    row = call("floordiv", Index("j"), Const(114, DType.I64))
    column = call("mod", Index("j"), Const(114, DType.I64))
    assert work(call("ge", column, row), area) == 100 * (2 * QUOTIENT + REST + GPU_UNITS["ge"])
    data = call("floordiv", Load("n", (Index("j"),)), Const(114, DType.I64))
    assert work(data, area) == 100 * GPU_UNITS["floordiv"]
    assert index_units(column, {column}) == 0 and index_units(column, {row}) == QUOTIENT + REST
