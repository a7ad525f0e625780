"""What a multiprocessor holds of kernels with matrix products, and what its warps then hide."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tests.backends.triton.test_warps import of
from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.residency import HIDDEN, MEETING, Body, Resident, exposed, meetings
from tilefold.backends.triton.work import kind_of
from tilefold.plan.hardware import H100, H200


def resident(*bodies: Body, threads: int = 128) -> Resident:
    r = Resident()
    for b in bodies:
        r.add(b, threads)
    return r


def test_registers_and_shared_memory_say_how_many_blocks_there_are():
    small = Body(64 * 64, 0.0, 16 << 10)  # 32 registers of each of 128 threads, and those beside them
    assert resident(small).blocks(128, H100) == 8
    assert resident(Body(128 * 128, 64 * 128, 16 << 10)).blocks(128, H100) == 2
    assert resident(Body(64 * 64, 0.0, 100 << 10)).blocks(128, H100) == 2
    assert resident(small, Body(64 * 64, 0.0, 200 << 10)).blocks(128, H100) == 1


def test_what_registers_do_not_hold_is_spilled():
    """64 rows of 512 columns, of an operand of 16 bits as many, and a state of 128 columns, by eight warps."""
    r = Resident()
    assert r.add(Body(64 * 128, 0.0, 0.0), 256) == 0.0
    assert r.add(Body(64 * 512 * 1.5 + 64 * 128, 0.0, 0.0), 256) == pytest.approx(57344 - 256 * 223)
    assert r.add(Body(64 * 512 * 2, 0.0, 0.0), 256) > 0.0


def test_few_warps_hide_little_and_long_loops_much():
    assert exposed(4, 0) == 1.0
    assert exposed(4, 0) > exposed(8, 0) > exposed(16, 0) > exposed(64, 0) == HIDDEN
    assert exposed(8, 0) > exposed(8, 5) > exposed(8, 64) == HIDDEN


def test_warps_that_share_a_row_wait_for_one_another():
    assert meetings(1, 8) > meetings(32, 8) == pytest.approx(6 * MEETING)
    assert meetings(64, 4) == meetings(128, 8) == 0.0


def test_wide_tiles_of_few_warps_take_longer_than_their_longest_stage():
    """A product of short depth and an activation's gradient: a thread has 128 elements, and operands of as many."""

    def gradient(x, w, y):
        return x.mm(w) * F.gelu(y)

    given = [meta(*s, dtype=torch.bfloat16) for s in ((8192, 16), (16, 1024), (8192, 1024))]
    wide = of(gradient, *given, tiles={"i": 128, "j": 128}, warps=4)
    rest = sum(wide.stages.values()) - max(wide.stages.values())
    assert wide.seconds > max(wide.stages.values()) + rest / 2
    assert of(gradient, *given, tiles={"i": 64, "j": 64}, warps=4).seconds < wide.seconds


def test_what_is_in_memory_is_multiplied_as_it_is():
    f32, bf16 = DType.F32, DType.BF16
    assert kind_of((bf16, f32), {bf16, f32}, None, narrow=True) is f32
    assert kind_of((bf16, f32), {bf16}, None, narrow=True) is bf16  # computed: rounded to the other's
    assert kind_of((bf16, f32), {bf16}, f32, narrow=True) is f32  # but where that is kept
    assert kind_of((f32, f32), (), None, narrow=True) is DType.F16
    assert kind_of((f32, f32), (), None, narrow=False) is f32


def test_the_floor_of_a_product_of_float32_is_that_of_any_tiles():
    """Its small tiles reach a share of the rate: by itself it is far from its floor, and a library may be nearer."""

    def summed(x, w):
        return (x.mm(w).softmax(-1) * 2).sum(-1)

    f = of(summed, *(meta(*s, dtype=torch.float32) for s in ((65536, 128), (128, 64))))
    assert f.stages["products"] > 2 * (f.floor - H200.empty)
