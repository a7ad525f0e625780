"""Groups of warps that own rows of a backward with dropout, of heads of many columns: which form, right, no spills."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.gradients import (  # noqa: E402
    SEED,
    arguments,
    dropped_keys,
    dropped_queries,
    of_values,
)
from tests.backends.triton.kernels import made  # noqa: E402
from tests.backends.triton.rows import by_rows  # noqa: E402
from tests.backends.triton.test_compile import HOPPER, built  # noqa: E402
from tests.backends.triton.test_row_groups import in_loops  # noqa: E402
from tilefold.backends.triton.config import SHARED  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.machine_code import disassembled  # noqa: E402
from tilefold.backends.triton.row_room import REGISTERS, Form, longest, of_several  # noqa: E402
from tilefold.tile.ir import For  # noqa: E402
from tilefold.tile.layout import usual_units  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

#: Whose gradient: the function, and its arguments of so many rows, columns, features and features of values.
OF = {
    "queries": (dropped_queries, lambda n, m, dim, val: of_values(arguments(n, m, dim, 1, saved=True), val)),
    "keys": (dropped_keys, lambda n, m, dim, val: of_values(arguments(n, m, dim, 2), val)),
}


@pytest.mark.parametrize(
    "of, result, dim, values, tile, stages",
    [
        ("queries", 0, 192, 128, 64, 3),
        ("queries", 0, 192, 192, 64, 2),
        ("queries", 0, 256, 256, 32, 3),
        ("keys", 0, 192, 192, 64, 2),
        ("keys", 1, 192, 128, 64, 3),
        ("keys", 0, 256, 256, 32, 3),
        ("keys", 1, 256, 256, 64, 2),
    ],
)
def test_gradients_of_many_columns(of, result, dim, values, tile, stages):
    """Each state alone, as kernels have them."""
    fn, shapes = OF[of]
    given = [torch.empty(s, dtype=d, device="meta") for s, d in [*shapes(130, 203, dim, values), SEED]]
    (k,) = made((lambda *x: fn(*x)[1]) if result else (lambda *x: fn(*x)[0]), *given)
    k = TritonKernel(k.block, by_rows(tile=tile, stages=stages))
    same(*emulate(k, most=2))


@pytest.mark.parametrize(
    "of, dim, values, tiles, most",
    [
        ("queries", 192, 192, (64,), 520),
        ("queries", 256, 256, (32,), 380),
        ("keys", 192, 128, (64, 64), 780),
        ("keys", 256, 256, (32, 64), 470),
    ],
)
def test_heads_of_many_columns_have_the_form_and_no_loop_spills(of, dim, values, tiles, most):
    """Instructions of a tile without a mask; of the usual form 1,000 to 1,170, with 8 to 89 of what is spilled."""
    fn, shapes = OF[of]
    given = [((2, 16, *s[2:]) if s != SEED[0] else s, d) for s, d in [*shapes(4096, 4096, dim, values), SEED]]
    found = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in given))
    variants = [k.variant(usual_units(k.block), k.sizes({}), hopper=True) for k in found]
    assert [v.rendered.groups for v in variants] == [2] * len(tiles)
    assert [s.tile for v in variants for s in v.kernel.body if isinstance(s, For)] == list(tiles)
    loops = sorted(in_loops(disassembled(built(variants[0], HOPPER).assembly["cubin"])))[:4]
    assert loops[0][0] < most and not any(s for _, s in loops[:2])


@pytest.mark.parametrize(
    "lifts, columns, form",
    [
        (((192, True), (192, False)), 192, Form(2, 64, 2)),
        (((192, True), (128, False)), 192, Form(2, 64, 3)),
        (((256, True), (256, False)), 256, Form(2, 32, 3)),
    ],
)
def test_numbers_take_registers(lifts, columns, form):
    """Of 256 columns tiles of 64 spilled in the loop, or the assembler mixed groups up."""
    room = of_several(lifts, columns, draws=True)
    assert longest(room) == form and room.registers(form.tile, behind=False) <= REGISTERS[2]
    assert room.shared(form.tile, 2, form.stages) <= SHARED
