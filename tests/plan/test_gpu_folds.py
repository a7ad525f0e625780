"""Folds that only read: which are cut into segments, and what is computed by kernels of its own after them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.backends.triton.kernels import meta
from tests.block.test_fuse import run_blocks
from tilefold.block.build import choose_loops
from tilefold.block.fuse import with_unit
from tilefold.block.group import Group
from tilefold.block.ir import Loop, walk
from tilefold.block.legal import legal
from tilefold.block.stages import plan_stages
from tilefold.frontend.fuse import trace
from tilefold.plan import gpu_folds
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.suites.gpu import operators as o
from tilefold.tensor import interp
from tilefold.tensor.analysis import Graph

B = torch.bfloat16


def fused(fn, *args):
    torch._dynamo.reset()
    program = trace(fn, *args).program
    return program, fuse_for_gpu(program)


def segments(fn, *args) -> int:
    """Of the first kernel; 1: it is not cut."""
    block = fused(fn, *args)[1].kernels[0].block
    found = [n.dim for n in walk(block.body) if isinstance(n, Loop) and n.single]
    return int(block.sizes[found[0]].value) if found else 1


def down(x):
    return x.float().sum(0)


def across(x):
    return x.float().sum(1)


def stats(x):
    return torch.var_mean(x.float(), (0, 2, 3))


def everything(x):
    return x.float().sum()


def pooled(x, w):
    """Of an image with one query: its rows are places as well as its columns."""
    scores = (x * w[:, None, None]).sum(1).flatten(1)
    return (x.flatten(2) * scores.softmax(-1)[:, None]).sum(-1)


@pytest.mark.parametrize(("shape", "cut"), [((16, 256, 28, 28), True), ((512, 64, 28, 28), False)])
def test_places_of_an_image_are_cut_though_its_rows_are_few(shape, cut):
    given = meta(*shape, dtype=torch.float32), meta(shape[1], dtype=torch.float32)
    assert (segments(pooled, *given) > 1) == cut


@pytest.mark.parametrize(
    ("fn", "shape", "cut"),
    [
        (down, (8192, 4096), True),
        (down, (64, 65536), False),  # enough columns, and few rows
        (down, (256, 1024), False),  # less time than a second kernel takes
        (across, (8192, 4096), False),
        (stats, (64, 64, 56, 56), True),
        (stats, (4, 256, 7, 7), False),
        (everything, (8192, 8192), True),
        (everything, (64, 64), False),
    ],
)
def test_what_is_cut(fn, shape, cut):
    assert (segments(fn, meta(*shape, dtype=B)) > 1) == cut


def test_enough_thread_blocks_for_every_multiprocessor():
    assert segments(down, meta(1 << 20, 64, dtype=B)) >= 2 * 132
    assert segments(everything, meta(8192, 8192, dtype=B)) >= 2 * 132
    assert segments(everything, meta(1 << 24, dtype=B)) >= 132  # one axis too: 64 blocks leave half of the device idle
    assert segments(everything, meta(1 << 16, dtype=B)) <= 64


def test_partial_states_of_columns_lie_in_rows():
    _, f = fused(down, meta(8192, 4096, dtype=B))
    part = f.kernels[0].block.results[0]
    assert [int(f.kernels[0].block.sizes[d].value) for d in part.dims][1:] == [4096]
    _, rows = fused(lambda x: x.var(1), meta(8, 1 << 20, dtype=B))
    sizes = rows.kernels[0].block.sizes
    assert int(sizes[rows.kernels[0].block.results[0].dims[0]].value) == 8


def softmax_down(x):
    return x.softmax(0)


def test_what_is_written_along_a_long_column_has_a_kernel_of_its_own():
    _, f = fused(softmax_down, meta(8192, 4096, dtype=B))
    assert [len(k.plan.stages) for k in f.kernels] == [1, 1, 0]  # partial states, the states, the results
    _, short = fused(softmax_down, meta(512, 65536, dtype=B))  # a thread block holds the columns
    assert len(short.kernels) == 1
    _, rows = fused(lambda x: x.softmax(1), meta(4096, 8192, dtype=B))
    assert len(rows.kernels) == 1


def test_a_copy_of_what_is_written_later_is_written_later_too():
    _, f = fused(lambda x: ((y := softmax_down(x)), y.t().contiguous()), meta(8192, 4096))
    first, later = f.grouping.groups
    assert later.members == f.program.outputs and not set(first.members) & set(later.members)


def scaled_by_the_largest(x):
    """And sums of rows and of columns of it by turns, which are all of one group at first."""
    c = x * x
    c = c / c.max()
    a = torch.logsumexp(c, 1)
    b = torch.logsumexp(c + a[:, None], 0)
    return torch.exp(c + a[:, None] + b).sum(), c


def test_parts_of_a_group_that_does_not_fit_are_asked_too():
    torch._dynamo.reset()
    target = GpuTarget(refuse=lambda k: "more than one fold" if len(k.plan.stages) > 1 else None)
    f = fuse_for_gpu(trace(scaled_by_the_largest, meta(1024, 1024)).program, target)
    (largest,) = (g for g in f.grouping.groups if "max_1" in g.members)
    assert largest.members == ("max_1",)  # in segments: with what it divides, it was a thread block's


def test_folds_that_differ_in_names_are_asked_once_what_is_computed_later(monkeypatch):
    own, asked = gpu_folds._later, []
    monkeypatch.setattr(gpu_folds, "_later", lambda g, x, *more: asked.append(x.members) or own(g, x, *more))
    x, y, narrow = (meta(8192, n, dtype=B) for n in (4096, 4096, 2048))
    _, one = fused(softmax_down, x)
    assert len(asked) == 1 and len(one.grouping.groups) == 2
    _, two = fused(lambda x, y: (softmax_down(x), softmax_down(y)), x, y)
    assert len(asked) == 2 and len(two.grouping.groups) == 4
    shapes = [(len(g.members), len(g.parallel)) for g in two.grouping.groups]
    assert sorted(shapes) == sorted(2 * [(len(g.members), len(g.parallel)) for g in one.grouping.groups])
    fused(lambda x, y: (softmax_down(x), softmax_down(y)), x, narrow)
    assert len(asked) == 4


def test_separated_maps_are_the_same_maps():
    def normed(x, w):
        y = x.softmax(0)
        return y * w, (y * w).exp()

    _, f = fused(normed, meta(8192, 96, dtype=torch.float32), meta(96, dtype=torch.float32))
    assert len(f.kernels) > 1
    torch._dynamo.reset()
    x, w = torch.randn(50, 7), torch.randn(7)
    program, small = fused(normed, x, w)
    from_groups = interp.run(small.program, {i.name: v for i, v in zip(program.inputs, (x, w), strict=True)})
    for name, want in zip(program.outputs, normed(x, w), strict=True):
        torch.testing.assert_close(from_groups[name], want)


def test_maps_of_the_same_elements_are_one_kernel():
    _, f = fused(lambda x: (x + 1, x * 2, x.relu()), meta(1024, 1024))
    assert len(f.kernels) == 1 and len(f.kernels[0].block.results) == 3
    _, apart = fused(lambda x, y: (x + 1, y * 2), meta(1024, 1024), meta(1024, 1024))
    assert len(apart.kernels) == 2
    _, broadcast = fused(lambda x, y, b: (x + b, y * b), meta(1024, 1024), meta(1024, 1024), meta(1024))
    assert len(broadcast.kernels) == 2  # a bias is read from the cache anyway


def scaled_and_summed(x, y, w):
    """A map, and the sum of a product with it over all but the last axis: what a norm's gradient writes."""
    s = x + y
    return s, (s.float() * w.float()).sum((0, 1))


def test_a_large_map_that_is_summed_down_its_columns_has_a_kernel_of_its_own():
    _, f = fused(lambda x, y: ((s := x + y), s.float().sum((0, 1))), *(meta(4, 1024, 2048, dtype=B) for _ in range(2)))
    first, partial, combine = f.kernels
    assert not first.plan.stages and partial.block.name.endswith("_partial") and len(combine.block.inputs) == 1
    assert first.block.outputs[0] in {i.name for i in partial.block.inputs}  # it reads what was written
    _, rows = fused(
        lambda x, y: ((s := x + y), s.float().sum(-1)), meta(4096, 2048, dtype=B), meta(4096, 2048, dtype=B)
    )
    assert len(rows.kernels) == 1  # rows are written by the blocks that sum them


def test_sums_that_run_down_columns_of_others_too_write_the_map():
    _, f = fused(scaled_and_summed, *(meta(4, 1024, 2048, dtype=B) for _ in range(3)))
    partial, _ = f.kernels
    assert [len(r.dims) for r in partial.block.results] == [2, 3]  # parts, and the map

    def normed(x, y, w):  # a sum along its rows as well
        s = x + y
        return s, (s.float() * w.float()).sum(0), s.float().sum(1)

    _, f = fused(normed, *(meta(4096, 2048, dtype=B) for _ in range(3)))
    assert not any(k.block.name.endswith("_partial") and len(k.block.results) > 1 for k in f.kernels)


def test_a_small_map_beside_a_sum_leaves_it_in_segments():
    _, f = fused(scaled_and_summed, *(meta(4, 4096, 64, dtype=B) for _ in range(3)))
    partial, _ = f.kernels
    assert [len(r.dims) for r in partial.block.results] == [2, 3]  # parts, and the map
    (segment,) = [n.dim for n in walk(partial.block.body) if isinstance(n, Loop) and n.single]
    assert int(partial.block.sizes[segment].value) >= 32


def test_segments_write_all_rows_of_what_is_beside_a_sum():
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = [torch.randn(3, 929, 7) for _ in range(3)]
    program = trace(scaled_and_summed, *args).program
    f = fuse_for_gpu(program, GpuTarget(given=Given(segments=4)))
    assert len(f.kernels) == 2
    tensors = {i.name: v for i, v in zip(program.inputs, args, strict=True)}
    found = run_blocks(f, tensors, 1, dict.fromkeys(f.kernels[0].block.sizes, 64), exact=True)
    for name, want in zip(program.outputs, scaled_and_summed(*args), strict=True):
        torch.testing.assert_close(found[name].float(), want, rtol=1e-5, atol=1e-4)


def test_segments_are_of_an_axis_that_has_as_many():
    """Four sequences of 1,024 rows: the batch has four indices, which leave most multiprocessors without a block."""
    heads = meta(4, 4, 4, 1024, 128, dtype=B)
    assert segments(lambda x: x.float().sum((0, 1, 2, 3)), heads) >= 132
    images = meta(32, 64, 56, 56, dtype=B)  # images stay whole
    assert segments(stats, images) <= 32


def test_rows_of_a_batch_are_whole_where_they_are_many():
    """Sums over the first and the last axis: 512 thread blocks of rows, which no layout of memory makes columns."""
    assert segments(lambda x: x.float().sum((0, 2)), meta(64, 512, 1024, dtype=B)) == 1
    assert segments(lambda x: x.float().sum((0, 2)), meta(64, 16, 32768, dtype=B)) > 8  # else most units have none


def stats_of_last(x):
    return torch.var_mean(x.float(), (0, 1, 2))


def parts(fn, *args) -> tuple[int, int]:
    """Thread blocks that share the columns of the first kernel: indices of the first axis, and segments of the next."""
    block = fused(fn, *args)[1].kernels[0].block
    singles = [int(block.sizes[n.dim].value) for n in walk(block.body) if isinstance(n, Loop) and n.single]
    return tuple(singles)


def test_images_with_few_channels_behind_their_places_are_cut_along_rows_as_well():
    """Batch norm's statistics: 32 images of 64 channels would leave 100 of 132 multiprocessors without a block."""
    assert parts(stats_of_last, meta(32, 56, 56, 64, dtype=B)) == (32, 14)
    assert parts(stats_of_last, meta(32, 28, 28, 128, dtype=B)) == (32, 4)
    assert len(parts(stats_of_last, meta(32, 7, 7, 2048, dtype=B))) <= 1  # there are blocks enough
    assert len(parts(stats, meta(32, 64, 56, 56, dtype=B))) == 1  # images stay whole


def added_scores(q, k, g):
    """The gradient of what weighs tanh of each pair of a query and a key."""
    return (torch.tanh(q[:, :, None] + k[:, None]).float() * g[..., None]).sum((0, 1, 2))


def test_columns_of_pairs_are_cut_along_two_axes_where_a_step_of_any_would_hold_all_pairs():
    """A step of the keys would hold 960 queries and one column: 241 us on an H100."""
    args = meta(16, 60, 128, dtype=B), meta(16, 200, 128, dtype=B), meta(16, 60, 200)
    assert parts(added_scores, *args) == (16, 15)


@pytest.mark.parametrize("segments", [3, 7, 28, 63])
def test_folds_cut_along_two_axes_are_the_same_folds(segments):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(7, 21, 9, 5) + 100
    program = trace(stats_of_last, x).program
    f = fuse_for_gpu(program, GpuTarget(given=Given(segments=segments)))
    assert len(f.kernels) == 2
    found = run_blocks(f, {program.inputs[0].name: x}, 1, {}, exact=True)
    for name, want in zip(program.outputs, stats_of_last(x.double()), strict=True):
        torch.testing.assert_close(found[name], want.to(found[name].dtype), rtol=1e-6, atol=1e-6)


def test_positions_are_not_cut_along_two_axes():
    """A position counts all axes."""
    torch._dynamo.reset()
    program = trace(lambda x: x.flatten(0, 1).argmax(0), meta(3, 211, 5)).program
    f = fuse_for_gpu(program, GpuTarget(given=Given(segments=12)))
    assert all(len([n for n in walk(k.block.body) if isinstance(n, Loop) and n.single]) <= 1 for k in f.kernels)


def test_a_map_of_the_sum_is_not_written_by_its_segments():
    """Of what the sum makes, the segments know nothing."""
    _, f = fused(lambda x: x.float() - x.float().sum(0), meta(512, 64, dtype=B))
    assert not any(k.block.name.endswith("_partial") and len(k.block.results) > 1 for k in f.kernels)


def gradient_of_a_norm(g, y, x, m):
    """Of columns behind an activation whose gradient a residual passes on: that, and the one of the norm's input."""
    s = torch.where(y <= 0, 0.0, g)
    centred = x.float() - m
    a, b = s.float().sum(0), (s.float() * centred).sum(0)
    return s, s - a / x.shape[0] - centred * b


def test_what_needs_nothing_of_the_fold_is_written_once_and_read_by_the_next():
    for n in (128, 1024):
        program, f = fused(gradient_of_a_norm, *(meta(8192, n, dtype=B) for _ in range(3)), meta(n))
        partial, _, last = f.kernels
        (passed_on, _) = program.outputs
        assert passed_on in {r.name for r in partial.block.results}
        read = {i.name for i in last.block.inputs}
        assert passed_on in read and not read & {"g", "y"}
    torch.manual_seed(0)
    args = [*(torch.randn(8192, 8) for _ in range(3)), torch.randn(8)]
    program, f = fused(gradient_of_a_norm, *args)
    assert len(f.kernels) == 3
    found = interp.run(f.program, dict(zip("gyxm", args, strict=True)))
    for name, want in zip(program.outputs, gradient_of_a_norm(*args), strict=True):
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("more", "written"), [(False, 1), (True, 2)])
def test_maps_of_more_tensors_than_reading_them_once_more_are_stored_for_the_next_kernel(more, written):
    """Nobody else reads the gradient behind an activation: it is computed again of two tensors of which one is read
    anyway, and read where it is of three that nothing else needs."""

    def gradient(g, h, y, x, m):
        s = torch.where((y if more else x) <= 0, 0.0, g + h if more else g)
        centred = x.float() - m
        return s - s.float().sum(0) / x.shape[0] - centred * (s.float() * centred).sum(0)

    _, f = fused(gradient, *(meta(8192, 256, dtype=B) for _ in range(4)), meta(256))
    partial, _, last = f.kernels
    columns = [i for i in last.block.inputs if len(i.shape) == 2 and i.dtype.nbytes == 2]
    assert len([r for r in partial.block.results if r.dtype.nbytes == 2]) == written - 1 and len(columns) == 2


def test_images_that_few_segments_cut_are_cut_along_their_rows_with_what_is_written():
    def gradient(y, g, x):
        s = torch.where(y <= 0, 0.0, g)
        return s, s.float().sum((0, 1, 2)), (s * x).float().sum((0, 1, 2))

    torch.manual_seed(0)
    args = [torch.randn(7, 21, 9, 5) for _ in range(3)]
    program = trace(gradient, *args).program
    f = fuse_for_gpu(program, GpuTarget(given=Given(segments=21)))
    partial, _ = f.kernels
    assert len([n for n in walk(partial.block.body) if isinstance(n, Loop) and n.single]) == 2
    tensors = {i.name: v for i, v in zip(program.inputs, args, strict=True)}
    found = run_blocks(f, tensors, 1, dict.fromkeys(partial.block.sizes, 64), exact=True)
    for name, want in zip(program.outputs, gradient(*args), strict=True):
        torch.testing.assert_close(found[name].float(), want, rtol=1e-5, atol=1e-4)


def test_columns_of_several_tensors_are_held_if_registers_have_room_for_all():
    """Columns of 2,048 rows: a softmax's fit, the three tensors of a norm's gradient do not."""
    _, one = fused(softmax_down, meta(2048, 2048, dtype=B))
    assert len(one.kernels) == 1
    _, three = fused(gradient_of_a_norm, *(meta(2048, 2048, dtype=B) for _ in range(3)), meta(2048))
    assert len(three.kernels) > 1


def test_columns_that_a_back_end_cannot_hold_are_read_twice_as_longer_ones_are():
    """Not cut between operators, each with a pass of its own."""
    program, one = fused(softmax_down, meta(2048, 2048, dtype=B))
    members = len(one.kernels[0].plan.group.members)
    refuse = lambda k: "it holds too much" if len(k.plan.group.members) == members else None  # noqa: E731
    f = fuse_for_gpu(program, GpuTarget(refuse=refuse))
    assert len(f.kernels) == 3 and f.kernels[0].block.name.endswith("_partial") and not f.kernels[2].plan.stages


def of_groups(x):
    """Statistics of channels in groups, [images, groups, channels, height, width]."""
    return x.float().square().sum((2, 3, 4))


def last(x):
    """[images, height, width, groups, channels], as convolutions on a GPU leave them."""
    return of_groups(x.permute(0, 3, 4, 1, 2))


@pytest.mark.parametrize(("fn", "shape", "streamed"), [
    (last, (128, 126, 126, 16, 4), 126),  # a step of four neighbours would be a quarter of each sector
    (of_groups, (128, 16, 4, 126, 126), 4),
])  # fmt: skip
def test_an_axis_of_neighbours_is_held_where_another_can_be_streamed(fn, shape, streamed):
    (k,) = fused(fn, meta(*shape))[1].kernels
    loops = {n.dim for n in walk(k.block.body) if isinstance(n, Loop) and n.kind == "for"}
    assert [k.block.sizes[d].value for d in loops] == [streamed]


def everything(x):
    return x.float().square().sum()


def scaled_mean(x, y):
    """What reads a number, too."""
    return (x.float().square() * y).mean() * y


@pytest.mark.parametrize(("fn", "shapes", "pieces"), [
    (everything, [(112, 64, 512, 512)], 448),  # its first axis has too few indices: each is cut in four
    (everything, [(16, 32, 32, 64, 64)], 512),
    (everything, [(3, 5, 2000, 2048)], 500),  # three images of five are held, rows are shared out
    (scaled_mean, [(4096, 7, 7, 64), ()], 512),
])  # fmt: skip
def test_folds_over_all_axes_share_out_the_first_ones(fn, shapes, pieces):
    """Neighbours in memory are left to a step: a step of the longest axis has few where many indices are before it."""
    first = fused(fn, *(meta(*s) for s in shapes))[1].kernels[0].block
    single = [n.dim for n in walk(first.body) if isinstance(n, Loop) and n.single]
    assert math.prod(first.sizes[d].value for d in single) == pieces


def squeezed(x, axes=(0, 1, 2)):
    """A batch norm in training, rectified, and the mean of each image."""
    h = x.float()
    m, v = h.mean(axes, keepdim=True), h.var(axes, keepdim=True)
    y = torch.relu((h - m) * torch.rsqrt(v + 1e-5))
    return y, y.mean(axes[1:])


def test_means_of_images_behind_statistics_of_a_batch_have_blocks_of_their_own():
    """Few channels, last in memory, would keep a dozen multiprocessors busy."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(32, 24, 24, 8)
    program = trace(squeezed, x).program
    f = fuse_for_gpu(program, GpuTarget())
    assert len(f.kernels) > 2 and all(len(k.plan.stages) <= 1 for k in f.kernels)
    found = run_blocks(f, {program.inputs[0].name: x}, 1, {}, exact=True)
    for name, want in zip(program.outputs, squeezed(x.double()), strict=True):
        torch.testing.assert_close(found[name].double(), want.double(), rtol=1e-5, atol=1e-5)


def variances(r, x):
    """Of components, about their means: of points that belong to them by shares."""
    total = r.sum(0)[:, None]
    mean = (r[:, :, None] * x[:, None]).sum(0) / total
    return mean, (r[:, :, None] * (x[:, None] - mean) ** 2).sum(0) / total


def test_folds_over_the_same_axis_that_are_no_one_fold_are_kernels_of_their_own():
    _, f = fused(variances, meta(65536, 8), meta(65536, 16))
    assert all(len(k.plan.stages) <= 1 for k in f.kernels)
    assert any(isinstance(n, Loop) and n.single for k in f.kernels for n in walk(k.block.body))
    _, few = fused(variances, meta(64, 8), meta(64, 16))
    assert len(few.kernels) < len(f.kernels)


def test_such_folds_are_the_same_folds():
    torch._dynamo.reset()
    torch.manual_seed(0)
    r, x = torch.rand(9000, 3), torch.randn(9000, 2)
    program = trace(variances, r, x).program
    f = fuse_for_gpu(program, GpuTarget())
    assert all(len(k.plan.stages) <= 1 for k in f.kernels)
    found = run_blocks(f, dict(zip((i.name for i in program.inputs), (r, x), strict=True)), 1, {}, exact=True)
    for name, want in zip(program.outputs, variances(r.double(), x.double()), strict=True):
        torch.testing.assert_close(found[name].double(), want, rtol=1e-5, atol=1e-5)


def test_segments_are_of_folds_of_variances_too():
    assert segments(lambda x: x.var(0).sqrt().mean((1, 2)), meta(4, 8, 512, 64)) * 8 >= 128


def test_means_of_images_stay_with_statistics_of_many_channels():
    """Of rows that one thread block reads: each channel has its own."""
    _, f = fused(lambda x: squeezed(x, (0, 2, 3))[1], meta(32, 2048, 7, 7))
    assert len(f.kernels) == 1


@pytest.mark.parametrize(("shape", "axes", "streamed"), [
    ((64, 16, 63, 63, 63), (0, 2, 3, 4), 63),  # planes of a volume, not the batch, of which each would be held whole
    ((64, 256, 56, 56), (0, 2, 3), 64),  # an image is held
    ((64, 16, 64, 512, 512), (0, 2, 3, 4), 512),  # one plane a block, along its rows
])  # fmt: skip
def test_volumes_of_a_batch_are_streamed_along_what_is_read_in_one_run(shape, axes, streamed):
    _, f = fused(lambda x: x.float().square().sum(axes), meta(*shape))
    assert len(f.kernels) <= 2
    first = f.kernels[0].block
    loops = [n.dim for n in walk(first.body) if isinstance(n, Loop) and n.kind == "for"]
    assert [first.sizes[d].value for d in loops] == [streamed]


@pytest.mark.parametrize(("fn", "shape", "streamed"), [
    (lambda x: x.float().square().sum(), (64, 128, 4000), 128),  # what lies behind is one run with it
    (lambda x: torch.nn.functional.glu(x, 1).float().square().sum(), (32, 512, 1369), 1369),
])  # fmt: skip
def test_whole_tensors_are_read_in_runs_however_few_neighbours_a_step_could_hold(fn, shape, streamed):
    """Steps of four neighbours, half a sector, beside 8,192 of other axes took 77 us on an H100 for what a line of
    elements takes 28, and of a gate 208 for 40."""
    first = fused(fn, meta(*shape))[1].kernels[0].block
    loops = [n for n in walk(first.body) if isinstance(n, Loop)]
    assert [first.sizes[n.dim].value for n in loops if n.kind == "for"] == [streamed]
    assert math.prod(first.sizes[n.dim].value for n in loops if n.single) >= 264


def gated_columns(x, gate):
    """A sum over images and places, of what a number of each image scales."""
    return (x * gate[:, None, None]).sum((0, 1))


def test_an_index_for_each_segment_is_single():
    """Of 64 images in 64 segments a tile would hold two, one of them beyond its segment, and all places of both."""
    first = fused(gated_columns, meta(64, 196, 512), meta(64))[1].kernels[0].block
    loops = {n.dim: n for n in walk(first.body) if isinstance(n, Loop)}
    assert [first.sizes[d].value for d, n in loops.items() if n.kind == "for"] == [196]
    assert [first.sizes[d].value for d, n in loops.items() if n.single] == [64, 1]


def windows(x, y):
    """A sum of all there is, of places that are read in windows of seven."""
    y = y.permute(0, 1, 3, 2, 4, 5).reshape(x.shape).roll((3, 3), (1, 2))
    return (x + y).square().sum()


def test_windows_are_cut_along_rows_and_not_along_neighbours():
    """Of what is read in no run with others, a block has rows of an image: 96 channels in 96 segments took 154 us on an
    H100, for single elements of lines."""
    first = fused(windows, meta(8, 56, 56, 96), meta(8, 8, 8, 7, 7, 96))[1].kernels[0].block
    loops = {n.dim: n for n in walk(first.body) if isinstance(n, Loop)}
    assert [first.sizes[d].value for d, n in loops.items() if n.kind == "for"] == [56]
    assert [first.sizes[d].value for d, n in loops.items() if n.single][:1] == [8]


def test_folds_of_runs_are_the_same_folds():
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(260, 2, 270, 20)
    program = trace(everything, x).program
    f = fuse_for_gpu(program, GpuTarget())
    first = f.kernels[0].block
    assert 270 not in [first.sizes[n.dim].value for n in walk(first.body) if isinstance(n, Loop) and n.kind == "for"]
    found = run_blocks(f, {program.inputs[0].name: x}, 1, {}, exact=True)
    (name,) = program.outputs
    torch.testing.assert_close(found[name].double(), x.double().square().sum(), rtol=1e-6, atol=0.0)


def apart(c):
    """The loss of Barlow Twins: what a matrix's diagonal is from one, and what lies beside it, as it is written."""
    n = c.shape[0]
    beside = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:]
    return (c.diagonal() - 1).square().sum() + 0.005 * beside.square().sum()


@pytest.mark.parametrize("fn", [apart, lambda c: (c.diagonal() - 1).square().sum() + c.square().sum()])
def test_a_long_sum_beside_another_is_cut_as_it_is_alone(fn):
    program, found = fused(fn, meta(1024, 1024, dtype=torch.float32))
    cut = [n for k in found.kernels for n in walk(k.block.body) if isinstance(n, Loop) and n.single]
    assert len(found.kernels) == 3 and cut
    program, found = fused(fn, meta(9, 9, dtype=torch.float32))
    assert len(found.kernels) == 1
    x = {program.inputs[0].name: torch.randn(9, 9, generator=torch.Generator().manual_seed(0))}
    got = run_blocks(found, x, 9, {}, exact=True)
    torch.testing.assert_close(got[program.outputs[0]], fn(x[program.inputs[0].name].double()), rtol=1e-9, atol=1e-9)


def test_short_sums_over_several_axes_share_a_kernel():
    (_,) = fused(lambda x, y: x.square().sum() + y.abs().sum(), meta(64, 8), meta(64, 16))[1].kernels


def test_scores_that_a_sum_is_made_of_stay_in_its_kernel():
    """They are sums over another axis, and in few blocks; the long axis is cut with them inside."""

    def decode(q, k, v):
        return torch.softmax((q[None] * k).sum(-1), 0)[:, None].mul(v).sum(0)

    block = fused(decode, meta(64), meta(1 << 17, 64), meta(1 << 17, 64))[1].kernels[0].block
    assert [n.dim for n in walk(block.body) if isinstance(n, Loop) and n.single]


def test_a_fold_that_computes_more_than_it_reads_is_cut():
    """The mean over rows of how many others have the same label: 4 million comparisons of 16 KB, which one thread block
    took 394 us for on an H100."""
    same = lambda y: (1 / (y[:, None] == y[None, :]).float().sum(1)).mean()  # noqa: E731
    assert segments(same, meta(2048, dtype=torch.int64)) >= 64
    assert segments(same, meta(128, dtype=torch.int64)) == 1


def test_rows_of_as_many_blocks_as_multiprocessors_are_cut():
    """A thread block that has a multiprocessor to itself reads, then computes: two of half a row each do both."""
    for rows, kernels in ((64, 2), (128, 2), (256, 1)):
        p = trace(o.l2_norm, torch.zeros(rows, 131_072, dtype=torch.float16)).program
        assert len(fuse_for_gpu(p).kernels) == kernels, rows


def overlap(p, t):
    (px, py, pw, ph), (tx, ty, tw, th) = p.unbind(-1), t.unbind(-1)
    both = (torch.minimum(px + pw, tx + tw) - torch.maximum(px, tx)) * (torch.minimum(py + ph, ty + th) - py)
    return (both / (pw * ph + tw * th - both)).sum()


def picked(x):
    return x[..., 499].exp().sum()


@pytest.mark.parametrize(
    ("fn", "shapes", "least"),
    [
        pytest.param(overlap, [(33600, 16, 4)] * 2, 256, id="a few numbers each"),
        pytest.param(overlap, [(400_000, 4)] * 2, 200, id="of one axis"),
        pytest.param(picked, [(4, 150, 40, 500)], 16, id="a sector each"),
    ],
)
def test_segments_have_what_a_block_takes_longer_for_than_to_wait(fn, shapes, least):
    assert segments(fn, *(torch.empty(x, device="meta") for x in shapes)) >= least


def alone(fn, *args) -> list[set[str]]:
    """Extents of the dims whose indices have blocks of their own, a kernel each."""
    kernels = fused(fn, *args)[1].kernels
    blocks = [k.block for k in kernels]
    return [{b.sizes[n.dim].value for n in walk(b.body) if isinstance(n, Loop) and n.kind == "forall"} for b in blocks]


@pytest.mark.parametrize(
    ("fn", "shape", "whole"),
    [
        pytest.param(lambda x: x.mean(1), (4096, 2048, 3), True, id="coordinates"),
        pytest.param(lambda x: x.mean(0), (1 << 22, 3), True, id="of no rows"),
        pytest.param(lambda x: x.logsumexp(1), (2048, 4096, 5), True, id="that are repaired"),
        pytest.param(lambda x: x.mean(1), (4096, 2048, 4), False, id="a vector's"),
        pytest.param(lambda x: x.mean(1), (4096, 2048, 12), False, id="enough for a tile"),
        pytest.param(lambda x: x.mean(2), (4096, 3, 2048), False, id="rows"),
    ],
)
def test_a_block_has_all_of_few_columns(fn, shape, whole):
    """Of one of three coordinates each, blocks would read all sectors three times."""
    first = alone(fn, meta(*shape))[0]
    assert (shape[-1] not in first and 3 not in first) == whole


@pytest.mark.parametrize("written", [False, True])
def test_columns_are_tiles_where_something_is_written_along_them(written):
    program = trace(lambda x: (x.exp().sum(1), x.exp()), meta(64, 8192, 3)).program
    g = Graph.of(program)
    names = tuple(c.name for c in program.body)
    group = legal(g, names if written else names[:1])
    assert isinstance(group, Group)
    plan = plan_stages(g, with_unit(group))
    assert bool(gpu_folds.whole_columns(g, plan, choose_loops(g, plan))) != written


def test_moments_of_inertia_in_segments_read_coordinates_once():
    first, *_ = alone(o.inertia, meta(128, 32768), meta(128, 32768, 3))
    assert 3 not in first and 128 in first and len(first) == 2
