"""Fusion: block programs and their tile kernels mean what the tensor program meant."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import ALL, KERNELS, inputs, program
from tilefold.algebra.context import COUNTER
from tilefold.block import interp, text
from tilefold.block.fuse import Fused
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse
from tilefold.tile.interp import run_kernel
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.verify import verify as verify_tile


def run_blocks(fused: Fused, x: dict, n: int, sizes: dict[str, int], exact: bool) -> dict:
    tensors = dict(x)
    for k in fused.kernels:
        tensors.update(interp.run(k.block, tensors, {"n": n}, block_sizes=sizes, exact=exact))
    return tensors


@pytest.mark.parametrize("name", ALL)
def test_kernel_count(name: str) -> None:
    assert len(fuse(program(name)).kernels) == KERNELS[name]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n,step", [(1, 4), (17, 4), (9, 3), (300, 64)])
def test_blocks_mean_the_tensor_program(name: str, n: int, step: int) -> None:
    p = program(name)
    x = inputs(p, n)
    want = tensor_interp.run(p, x, exact=True)
    fused = fuse(p)
    dims = [d for k in fused.kernels for d in k.block.sizes]
    got = run_blocks(fused, x, n, dict.fromkeys(dims, step), exact=True)
    for out in p.outputs:
        torch.testing.assert_close(got[out], want[out], rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n,tile", [(1, 4), (17, 4), (300, None)])
def test_tiles_mean_the_tensor_program(name: str, n: int, tile: int | None) -> None:
    p = program(name)
    x = inputs(p, n)
    want = tensor_interp.run(p, x, exact=True)
    tensors = dict(x)
    for k in fuse(p).kernels:
        tiles = dict.fromkeys(k.block.sizes, tile) if tile else None
        kernel = verify_tile(lower(k.block, LowerOptions(tiles=tiles)))
        for r in k.block.results:
            shape = [tensor_interp.extent(k.block.sizes[d], {"n": n}) for d in r.dims]
            tensors[r.name] = torch.full(shape, 7, dtype=r.dtype.torch_dtype)
        run_kernel(kernel, tensors, {"n": n})
    for out in p.outputs:
        torch.testing.assert_close(tensors[out].double(), want[out].double(), rtol=2e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_text_round_trip(name: str) -> None:
    for k in fuse(program(name)).kernels:
        assert text.parse(text.show(k.block)) == k.block


def test_attention_is_one_pass_over_the_keys() -> None:
    (k,) = fuse(program("attention")).kernels
    assert [s.reductions for s in k.plan.stages] == [("m", "t", "o")]
    assert text.show(k.block).count("exp(c") == 1, "the exponentials are shared"


def test_refused_cascade_is_split_and_says_why() -> None:
    (k,) = fuse(program("refused")).kernels
    assert [s.reductions for s in k.plan.stages] == [("s",), ("y",)]
    (why,) = k.plan.rejections
    assert why.name == "y" and "exp" in why.reason


def test_rounding_keeps_quantisation_exact() -> None:
    (k,) = fuse(program("quant_gemm")).kernels
    assert [s.reductions for s in k.plan.stages] == [("x",), ("c",)]
    assert any("round" in r.reason for r in k.plan.rejections)


def deviations(count: str, others: int) -> Program:
    """Sums of deviations from the mean, times an input of this name; and so many inputs that they do not read."""
    lines = ["program deviations()", "  input x: f32[6, 40]", f"  input {count}: f32[6]"]
    lines += [f"  input z{k}: f32[6]" for k in range(others)]
    lines += ["  dim i = 6", "  dim j = 40", "  mean[i]: f32 = sum[j] x[i, j] * 0.025"]
    lines += ["  apart[i]: f32 = sum[j] (x[i, j] - mean[i]) * (x[i, j] - mean[i])"]
    lines += [f"  y[i]: f32 = apart[i] * {count}[i]"]
    lines += [f"  w{k}[i]: f32 = z{k}[i] + 1.0" for k in range(others)]
    results = ", ".join(["y", *(f"w{k}" for k in range(others))])
    return parse("\n".join([*lines, f"  return {results}"]))


def test_a_fold_knows_of_the_inputs_that_it_reads_and_of_names_that_it_might_take():
    (stage,) = (s for k in fuse(deviations("factor", 40)).kernels for s in k.plan.stages)
    assert [t for t, _ in stage.cascade.input_dtypes] == ["x"]
    (stage,) = (s for k in fuse(deviations(COUNTER, 0)).kernels for s in k.plan.stages)
    assert {t for t, _ in stage.cascade.input_dtypes} == {"x", COUNTER}


def test_an_input_of_a_state_s_name_is_not_taken_for_it():
    p = deviations("apart_1", 2)
    fused, x = fuse(p), inputs(p, 1)
    names = {v.name for k in fused.kernels for s in k.plan.stages for v in s.fold.state}
    assert "apart_1" not in names
    assert any(name.startswith("apart_1") for name in names)
    got, want = run_blocks(fused, x, 1, {"i": 2, "j": 16}, exact=True), tensor_interp.run(p, x, exact=True)
    for out in p.outputs:
        torch.testing.assert_close(got[out], want[out], rtol=1e-9, atol=1e-9)


#: What two branches need, read at places of an axis.
PLACED = """program placed()
  input f: f32[2, 48]
  dim i = 48
  y[i]: f32 = where(f[0, i] < f[1, i], exp({q} * 2.0), where(f[1, i] < 0.0, -exp({q} * 2.0), exp({q} * 2.0) + 1.0))
  return y
"""


@pytest.mark.parametrize("q, times", [("f[1, i]", 1), ("f[2, i]", 3)], ids=["there", "beyond"])
def test_what_branches_share_is_computed_once_where_its_elements_exist(q: str, times: int) -> None:
    (k,) = fuse(parse(PLACED.format(q=q))).kernels
    assert text.show(k.block).count("exp(") == times
