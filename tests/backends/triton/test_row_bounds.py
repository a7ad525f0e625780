"""What the bounds of a stream's loop say for all blocks of rows: stretches of tiles that none has are not compiled."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.kernels import made  # noqa: E402
from tests.backends.triton.rows import attention, by_rows  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.suites.gpu import operators as o  # noqa: E402
from tilefold.tile.layout import usual_units  # noqa: E402


def turns_of(k: TritonKernel, **syms: int) -> tuple[list[str], bool]:
    """Counts of the loops over tiles that a group has, and whether one has a mask."""
    v = k.variant(usual_units(k.block), k.sizes(syms), hopper=True)
    folds = v.rendered.source.split("_folds(")[1].split("_folds_0(")[0]
    loops = re.findall(r"( *)for n in range\((.*)\):\n((?:\1    .*\n)*)", folds)
    return [count for _, count, _ in loops], any("[None, :] <" in body for *_, body in loops)


@pytest.mark.parametrize(
    "fn, queries, keys, groups, tile, stretches, masked",
    [
        (o.causal, 512, 512, 2, 128, 1, False),  # the last tile of a block of rows alone has a mask
        (o.causal, 512, 512, 2, 64, 2, True),  # and the one before it
        (o.causal, 576, 576, 3, 128, 2, True),
        (o.causal, 256, 300, 2, 128, 2, True),  # 44 keys more: the edge is inside of tiles
        (o.causal, 256, 384, 2, 128, 1, False),
        (o.causal, 333, 333, 2, 128, 1, False),
        (o.window(128), 1024, 1024, 2, 128, 1, True),  # no tile is clear
        (o.window(512), 1024, 1024, 2, 128, 2, True),
        (o.window(100), 200, 200, 2, 64, 2, True),
    ],
)
def test_stretches_that_no_block_has_are_not_compiled(fn, queries, keys, groups, tile, stretches, masked):
    """And what is left is right, by the emulator, where barriers would say if a turn were missing."""
    (k,) = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in attention(queries, keys, 64)), units=1)
    k = TritonKernel(k.block, by_rows(groups=groups, tile=tile))
    counts, has_mask = turns_of(k)
    assert (len(counts), has_mask) == (stretches, masked)
    same(*emulate(k, most=2))


def test_sizes_that_are_not_known_leave_all_stretches():
    args = [torch.empty(s, dtype=d, device="meta") for s, d in attention(512, 512, 64)]
    for x in args:
        torch._dynamo.mark_dynamic(x, 2)
    (k,) = made(o.causal, *args, units=1)
    k = TritonKernel(k.block, by_rows())
    assert len(turns_of(k, **dict.fromkeys(k.block.syms, 512))[0]) == 2


def test_they_are_counted_under_a_fake_mode_too():
    (k,) = made(o.causal, *(torch.empty(s, dtype=d, device="meta") for s, d in attention(512, 512, 64)), units=1)
    with FakeTensorMode():
        assert len(turns_of(TritonKernel(k.block, by_rows()))[0]) == 1
