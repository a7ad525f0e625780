"""What studies fix for the GPU's kernels: segments and tiles, and where there is nothing to fix."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tilefold.block.ir import Loop, walk
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import USUAL, fuse_for_gpu
from tilefold.plan.gpu_forms import Given, held
from tilefold.plan.hardware import H100
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.suites.gpu import operators as o


def programs(fn, *shapes):
    return trace(fn, *(torch.zeros(s, dtype=torch.float16) for s in shapes)).program


def attention(queries, keys):
    return programs(o.attention, (1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64))


def config_of(step):
    """The configuration for contiguous tensors."""
    kernel = step.triton
    units = [len(i.shape) - 1 for i in kernel.block.inputs] + [len(r.dims) - 1 for r in kernel.block.results]
    return kernel.variant(tuple(units), kernel.sizes({})).config


def test_segments_as_given():
    p = attention(512, 1024)  # where the compiler's own choice may be any
    assert len(fuse_for_gpu(p, GpuTarget(given=Given(segments=1))).kernels) == 1
    partial, combine = fuse_for_gpu(p, GpuTarget(given=Given(segments=8))).kernels
    (segment,) = [n.dim for n in walk(partial.block.body) if isinstance(n, Loop) and n.single]
    assert int(partial.block.sizes[segment].value) == 8
    assert combine.block.name == partial.block.name.removesuffix("_partial")


def test_folds_that_write_along_their_axis_are_never_cut():
    p = programs(o.softmax, (4, 4096))
    assert len(fuse_for_gpu(p, GpuTarget(given=Given(segments=8))).kernels) == 1


def test_tiles_as_given():
    p = programs(o.softmax, (64, 1024))
    (step,) = compile_program(p, goal="fused", device="cuda", given=Given(stream=32, rows=16, warps=2)).steps
    config = config_of(step)
    assert sorted(config.tiles.values()) == [16, 32] and config.warps == 2
    (chosen,) = compile_program(p, goal="fused", device="cuda").steps
    assert config_of(chosen).key() != config.key()


def test_tiles_are_no_longer_than_what_they_tile():
    p = attention(70, 256)
    (step,) = compile_program(p, goal="fused", device="cuda", given=Given(segments=1, stream=4096, rows=64)).steps
    config = config_of(step)
    assert 256 in config.tiles.values() and max(config.tiles.values()) == 256


def kernels(fn, *shapes, dtype=torch.float32):
    args = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    return len(fuse_for_gpu(trace(fn, *args).program).kernels)


def test_segments_where_they_save_more_than_a_second_kernel_costs():
    assert kernels(o.variance_by_hand, (1, 8192)) == 1  # one block reads the row in less
    assert kernels(o.variance_by_hand, (128, 8192)) == 1
    assert kernels(o.variance_by_hand, (1, 1 << 17)) == 2
    assert kernels(o.variance_by_hand, (1024, 1 << 17)) == 1  # the machine is full


def test_decoding_keeps_its_segments():
    assert kernels(o.attention, (1, 16, 1, 128), (1, 16, 512, 128), (1, 16, 512, 128), dtype=torch.float16) == 2


def performer(length, features, target=USUAL):
    one = (8, length, 64)
    return fuse_for_gpu(programs(o.performer, one, one, one, (features, 64)), target)


def test_no_kernel_holds_more_than_a_thread_block_can():
    for length, features in ((512, 256), (300, 256), (256, 512), (1024, 256), (64, 2048)):
        assert all(held(k.block) <= H100.held for k in performer(length, features).kernels), (length, features)
    # without the bound one kernel keeps a state of features times columns
    roomy = GpuTarget(replace(H100, held=1 << 30))
    assert max(held(k.block) for k in performer(64, 2048, roomy).kernels) > 2048 * 64 > H100.held


def test_wide_states_of_short_axes_are_cut_until_the_device_is_full():
    def parts(batch, keys):
        fused = fuse_for_gpu(programs(o.mla(512), (batch, 128, 576), (batch, keys, 576)))
        segments = [n.dim for n in walk(fused.kernels[0].block.body) if isinstance(n, Loop) and n.single]
        return int(fused.kernels[0].block.sizes[segments[0]].value) if segments else 1

    assert parts(1, 1024) == 16  # 8 tiles of 16 rows each
    assert parts(1, 512) == 8  # not less than a tile of keys each
    assert parts(32, 1024) == 2


def test_rows_of_dynamic_length_are_streamed():
    x = torch.zeros(8, 300)
    loops = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        (k,) = fuse_for_gpu(trace(o.softmax, x, dynamic=dynamic).program).kernels
        loops.append([n.dim for n in walk(k.block.body) if isinstance(n, Loop) and n.kind == "for"])
    torch._dynamo.reset()
    assert loops[0] == [] and len(loops[1]) == 2


def test_features_of_keys_are_in_the_kernel_that_sums_their_products_with_values():
    """What a product would read of features counts for no kernel of its own where these are at hand."""
    for length in (512, 1024, 4096):
        blocks = [k.block for k in performer(length, 256).kernels]
        written = [math.prod(int(b.sizes[d].value) for d in r.dims) for b in blocks for r in b.results]
        assert max(written) < 8 * length * 256, length
