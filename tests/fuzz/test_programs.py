"""Differential tests: random programs mean the same in every IR."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.block.programs import inputs
from tests.fuzz.programs import programs, unlucky
from tilefold.block import interp as block_interp
from tilefold.block import text as block_text
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor import text as tensor_text
from tilefold.tensor.ir import Program
from tilefold.tile import text as tile_text
from tilefold.tile.interp import run_kernel
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.verify import verify as verify_tile

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def close(got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    scale = want.abs().max().item() if want.numel() and want.isfinite().all() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol * max(scale, 1e-3), equal_nan=True)


@SETTINGS
@given(
    st.one_of(programs(), unlucky()), st.sampled_from((1, 2, 13)), st.sampled_from((1, 4, 7)), st.integers(0, 1 << 16)
)
def test_blocks_and_tiles_mean_the_program(p: Program, n: int, step: int, seed: int) -> None:
    note(tensor_text.show(p))
    x = inputs(p, n, seed)
    want = tensor_interp.run(p, x, exact=True)
    blocks, tiles = dict(x), dict(x)
    for k in fuse(p).kernels:
        dims = dict.fromkeys(k.block.sizes, step)
        blocks.update(block_interp.run(k.block, blocks, {"n": n}, block_sizes=dims, exact=True))
        kernel = verify_tile(lower(k.block, LowerOptions(tiles=dims)))
        for r in k.block.results:
            shape = [tensor_interp.extent(k.block.sizes[d], {"n": n}) for d in r.dims]
            tiles[r.name] = torch.zeros(shape, dtype=torch.float64 if r.dtype.is_float else r.dtype.torch_dtype)
        run_kernel(kernel, tiles, {"n": n}, exact=True)
    for name in p.outputs:
        close(blocks[name], want[name], 1e-7)
        close(tiles[name], want[name], 1e-7)


@SETTINGS
@given(programs())
def test_text_forms_round_trip(p: Program) -> None:
    assert tensor_text.parse(tensor_text.show(p)) == p
    for k in fuse(p).kernels:
        assert block_text.parse(block_text.show(k.block)) == k.block
        kernel = lower(k.block)
        assert tile_text.parse(tile_text.show(kernel)) == kernel
