"""Dims joined where tensors have them side by side: the same values on views of the same memory, or left apart."""

from __future__ import annotations

import pytest
import torch

from tilefold.backends.triton.tiles import apart
from tilefold.backends.triton.views import Like, merged, neighbours
from tilefold.block import interp
from tilefold.block.collapse import collapsed
from tilefold.block.ir import Block, Loop, walk
from tilefold.block.text import parse
from tilefold.block.verify import verify
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.text import parse as program_of

CPU = torch.device("cpu")


def whole(x):
    return (x * x).sum((1, 2)), torch.logsumexp(x, (1, 2))


def positions(x):
    return x.flatten(1).argmax(1)


def halves(x):
    return torch.nn.functional.relu(x) * 0.5


def of_channels(x):
    return torch.var_mean(x, (0, 2, 3))


def biased(x, b):
    return x + b


def lower_half(x):
    return torch.tril(x).sum((-1, -2))


def diagonal(x):
    return torch.trace(x) + torch.diagonal(x).prod()


def blocks(fn, *args: torch.Tensor) -> tuple[Block, ...]:
    torch._dynamo.reset()
    return tuple(k.block for k in fuse_for_gpu(trace(fn, *args).program).kernels)


def tensors(b: Block, given: dict[str, torch.Tensor]) -> list[torch.Tensor | Like]:
    results = [torch.empty([int(b.sizes[d].value) for d in r.dims]) for r in b.results]
    return [*(given[i.name] for i in b.inputs), *results]


@pytest.mark.parametrize(
    ("fn", "shape", "memory", "joined"),
    [
        (whole, (3, 5, 7), None, 1),
        (halves, (3, 5, 7), None, 2),
        (of_channels, (4, 3, 5, 7), None, 1),
        (of_channels, (4, 3, 5, 7), torch.channels_last, 2),
        (positions, (3, 5, 7), None, 1),
    ],
)
def test_the_same_on_joined_views(fn, shape, memory, joined):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.contiguous(memory_format=memory) if memory else x
    (b,) = blocks(fn, x.float())
    given = {b.inputs[0].name: x.permute(0, 2, 3, 1) if memory else x}
    xs = tensors(b, given)
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    after, merges = collapsed(b, {n: neighbours(t) for n, t in zip(names, xs, strict=True)})
    assert len(merges) == joined and len(after.sizes) <= len(b.sizes)
    verify(after)
    views = dict(zip(names, merged(xs, names, merges), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    mine = {i.name: views[i.name] for i in after.inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)
    for r in b.results:
        torch.testing.assert_close(now[r.name].reshape(before[r.name].shape), before[r.name])


def beside(x, w):
    """A map of pixels of channels, and sums of a product with it over the pixels."""
    y = x + w
    return y, (y * w).sum((0, 1))


def test_segments_of_rows_are_segments_of_pixels():
    torch._dynamo.reset()
    x, w = torch.randn(2, 929, 3, 7, generator=torch.Generator().manual_seed(0))
    kernels = fuse_for_gpu(trace(beside, x, w).program, GpuTarget(given=Given(segments=4))).kernels
    b = kernels[0].block
    assert any(n.single for n in walk(b.body) if isinstance(n, Loop))
    given = {"x": x, "w": w}
    xs = tensors(b, given)
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    after, merges = collapsed(b, {n: neighbours(t) for n, t in zip(names, xs, strict=True)})
    assert merges
    verify(after)
    views = dict(zip(names, merged(xs, names, merges), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    mine = {i.name: views[i.name] for i in after.inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)
    for r in b.results:
        torch.testing.assert_close(now[r.name].reshape(before[r.name].shape), before[r.name])


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (biased, (torch.zeros(5, 7), torch.zeros(7))),  # the bias has columns alone
        (lower_half, (torch.zeros(3, 8, 8),)),  # a mask has rows and columns
        (diagonal, (torch.zeros(9, 9),)),  # one dim is both
        (biased, (torch.zeros(7, 5).T, torch.zeros(5, 7))),  # two orders in memory
    ],
)
def test_dims_that_something_has_alone_are_left(fn, args):
    for b in blocks(fn, *args):
        names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
        xs = tensors(b, {i.name: x for i, x in zip(b.inputs, args, strict=True)})
        near = {n: neighbours(x) for n, x in zip(names, xs, strict=True)}
        assert not collapsed(b, near)[1]


PIXELS = """block pixels()
  input w: f32[3, 4, 9, 1, 1]
  input x: f32[2, 5, 7, 9]
  dim i = 2
  dim n = 9
  dim j = 5
  dim k = 7
  dim l = 3
  dim m = 4
  result y[i, j, k, l, m]: f32
  forall i
    forall j
      forall k
        forall l
          forall m
            let p[i, j, k, l, m]: f32 = sum[n] x[i, j, k, n] * w[l, m, n, 0, 0]
            store y[i, j, k, l, m] over (i, j, k, l, m) = maximum(p[i, j, k, l, m], 0)
  return y
"""
HEADS = """block heads()
  input x: f32[2, 3, 5, 7, 9]
  input w: f32[2, 3, 9, 4]
  dim i = 2
  dim h = 3
  dim n = 9
  dim j = 5
  dim k = 7
  dim m = 4
  result y[i, h, j, k, m]: f32
  forall i
    forall h
      forall j
        forall k
          forall m
            let p[i, h, j, k, m]: f32 = sum[n] x[i, h, j, k, n] * w[i, h, n, m]
            store y[i, h, j, k, m] over (i, h, j, k, m) = maximum(p[i, h, j, k, m], 0)
  return y
"""


@pytest.mark.parametrize(
    ("text", "shapes", "left"),
    [
        (PIXELS, {"w": (3, 4, 9, 1, 1), "x": (2, 5, 7, 9)}, {70, 12, 9}),  # pixels are rows, channels in groups columns
        (HEADS, {"x": (2, 3, 5, 7, 9), "w": (2, 3, 9, 4)}, {2, 3, 35, 4, 9}),  # heads are not rows
    ],
)
def test_rows_and_columns_of_products_are_joined_each_for_itself(text, shapes, left):
    b = verify(parse(text))
    g = torch.Generator().manual_seed(0)
    given = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    xs = tensors(b, given)
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    after, merges = collapsed(b, {n: neighbours(t) for n, t in zip(names, xs, strict=True)}, apart)
    assert {int(e.value) for e in after.sizes.values()} == left
    views = dict(zip(names, merged(xs, names, merges), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)["y"]
    mine = {i.name: views[i.name] for i in verify(after).inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)["y"]
    torch.testing.assert_close(now.reshape(before.shape), before)


#: Scores of queries, which are rotated two by two, with keys that were rotated before.
ROTATED = """block rotated()
  input x: f32[5, 8]
  input t: f32[5, 4]
  input y: f32[6, 4, 2]
  dim i = 5
  dim j = 6
  dim c = 4
  dim u = 2
  result o[i, j]: f32
  forall i
    let a[i, c]: f32 = x[i, c * 2] * t[i, c] - x[i, c * 2 + 1]
    let b[i, c]: f32 = x[i, c * 2] + x[i, c * 2 + 1] * t[i, c]
    let q[i, c, u]: f32 = where(u < 1, a[i, c], b[i, c])
    forall j
      let s[i, j]: f32 = sum[c, u] q[i, c, u] * y[j, c, u]
      store o[i, j] over (i, j) = s[i, j]
  return o
"""


def test_what_a_product_sums_over_is_one_dim_though_an_operand_is_made_of_parts():
    b, g = verify(parse(ROTATED)), torch.Generator().manual_seed(0)
    shapes = {"x": (5, 8), "t": (5, 4), "y": (6, 4, 2)}
    given = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    xs = tensors(b, given)
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    near = {n: neighbours(t) for n, t in zip(names, xs, strict=True)}
    after, merges = collapsed(b, near)
    assert [dict(m.axes) for m in merges] == [{"y": (1, 2)}]
    assert {int(e.value) for e in verify(after).sizes.values()} == {5, 6, 8}
    views = dict(zip(names, merged(xs, names, merges), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)["o"]
    mine = {i.name: views[i.name] for i in after.inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)["o"]
    torch.testing.assert_close(now, before)
    assert not collapsed(b, near | {"y": frozenset()})[1]  # keys that do not lie so


#: Attention in windows of 3 x 4 positions, of what one product made.
WINDOWS = """program windows()
  input y: f32[2, 3, 4, 3, 2, 8]
  input t: f32[{t}]
  dim b = 2
  dim m = 3
  dim n = 4
  dim q = 3
  dim r = 4
  dim h = 2
  dim d = 8
  s[b, h, m, n, q, r]: f32 = sum[d] y[b, m, n, 0, h, d] * y[b, q, r, 1, h, d]
  a[b, h, m, n, q, r]: f32 = s[b, h, m, n, q, r] + t[{at}]
  x[b, h, m, n]: f32 = max[q, r] a[b, h, m, n, q, r]
  e[b, h, m, n, q, r]: f32 = exp(a[b, h, m, n, q, r] - x[b, h, m, n])
  z[b, h, m, n]: f32 = sum[q, r] e[b, h, m, n, q, r]
  o[b, m, n, h, d]: f32 = sum[q, r] e[b, h, m, n, q, r] * y[b, q, r, 2, h, d]
  p[b, m, n, h, d]: f32 = o[b, m, n, h, d] / z[b, h, m, n]
  return p
"""


@pytest.mark.parametrize(
    ("t", "at", "joined"),
    [
        ("3, 4, 3, 4", "m, n, q, r", {12}),
        ("2", "h", {12}),  # nothing but y has keys
        ("3, 3", "m, q", set()),  # a mask of rows of a window
        ("3, 4", "m, n", {12}),
        ("3, 3, 4", "m, q, r", set()),  # keys could be joined, but they are on queries' axes
    ],
)
def test_queries_and_keys_on_the_same_axes_are_joined_together_or_not_at_all(t, at, joined):
    kernels = fuse_for_gpu(program_of(WINDOWS.format(t=t, at=at))).kernels
    assert len(kernels) == 1
    b, gen = kernels[0].block, torch.Generator().manual_seed(0)
    shape = [int(n) for n in t.split(", ")]
    given = {
        "y": torch.randn(2, 3, 4, 3, 2, 8, generator=gen, dtype=torch.float64),
        "t": torch.randn(shape, generator=gen, dtype=torch.float64),
    }
    xs = tensors(b, given)
    names = [*(i.name for i in b.inputs), *(r.name for r in b.results)]
    after, merges = collapsed(b, {n: neighbours(x) for n, x in zip(names, xs, strict=True)}, apart)
    assert {int(n.value) for n in after.sizes.values()} - {1, 2, 3, 4, 8} == joined
    assert (len(after.sizes) == len(b.sizes) - 2) == bool(joined)
    verify(after)
    views = dict(zip(names, merged(xs, names, merges), strict=True))
    before = interp.run(b, given, {}, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    mine = {i.name: views[i.name] for i in after.inputs}
    now = interp.run(after, mine, {}, block_sizes=dict.fromkeys(after.sizes, 8), exact=True)
    for r in b.results:
        torch.testing.assert_close(now[r.name].reshape(before[r.name].shape), before[r.name])


def test_neighbours_follow_strides():
    packed = Like((2, 3, 4), (12, 4, 1), torch.float32, CPU)
    assert neighbours(packed) == {(0, 1), (1, 2)}
    assert neighbours(Like((2, 3, 4), (12, 1, 3), torch.float32, CPU)) == {(0, 2), (2, 1)}
    assert neighbours(Like((2, 3, 4), (16, 4, 1), torch.float32, CPU)) == {(1, 2)}
    assert neighbours(Like((2, 1, 4), (4, 99, 1), torch.float32, CPU)) == {(0, 2)}
