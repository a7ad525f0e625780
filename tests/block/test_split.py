"""Split folds: the derived combine kernel gives what one pass gives."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import inputs
from tests.block.test_fuse import run_blocks
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Index, call, lit, substitute
from tilefold.backends.triton.views import neighbours
from tilefold.block import interp
from tilefold.block.collapse import collapsed
from tilefold.block.fuse import with_unit
from tilefold.block.group import ANY, Group
from tilefold.block.ir import Loop, walk
from tilefold.block.split import column_dim, share_of, with_even_shares
from tilefold.block.stages import plan_stages
from tilefold.block.verify import verify
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.greedy import fuse
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse
from tilefold.tile.interp import run_kernel
from tilefold.tile.lower import lower
from tilefold.tile.verify import verify as verify_tile

N = ANY.long_axis + 77

VARIANCE = f"""
program variance(n)
  input x: f32[{N}]
  dim l = {N}
  s[]: f32 = sum[l] x[l]
  v[]: f32 = sum[l] (x[l] - s / size(l)) * (x[l] - s / size(l))
  y[]: f32 = v / (size(l) - 1)
  return y
"""

DECODE = f"""
program decode(n)
  input q: f32[2, 4]
  input k: f32[{N}, 4]
  input v: f32[{N}, 6]
  dim h = 2
  dim j = {N}
  dim d = 4
  dim e = 6
  s[h, j]: f32 = sum[d] q[h, d] * k[j, d]
  m[h]: f32 = max[j] s[h, j]
  t[h]: f32 = sum[j] exp(s[h, j] - m[h])
  o[h, e]: f32 = sum[j] exp(s[h, j] - m[h]) / t[h] * v[j, e]
  return o
"""

ORDER = f"""
program order(n)
  input x: f32[{N}]
  dim l = {N}
  dim r = 4
  a[]: i64 = argmax[l] x[l]
  b[]: i64 = argmin[l] x[l]
  t[r]: f32, ti[r]: i64 = topk[l; r] x[l]
  return a, b, t, ti
"""


@pytest.mark.parametrize("text", [VARIANCE, DECODE, ORDER], ids=["variance", "decode", "order"])
def test_split_equals_one_pass(text: str) -> None:
    p = parse(text)
    fused = fuse(p)
    assert [k.block.name.endswith("_partial") for k in fused.kernels] == [True, False]
    x = inputs(p, 1, seed=5)
    if "x" in x:
        x["x"][::7] = x["x"][3]  # ties
    want = tensor_interp.run(p, x, exact=True)
    got = run_blocks(fused, x, 1, {"j": 5000, "l": 3000}, exact=True)
    tensors = dict(x)
    for k in fused.kernels:
        for r in k.block.results:
            shape = [tensor_interp.extent(k.block.sizes[d], {}) for d in r.dims]
            tensors[r.name] = torch.zeros(shape, dtype=r.dtype.torch_dtype)
        run_kernel(verify_tile(lower(k.block)), tensors, {"n": 1})
    for name in p.outputs:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(tensors[name].double(), want[name].double(), rtol=1e-3, atol=1e-4)


def test_short_axes_and_many_rows_are_not_split() -> None:
    assert len(fuse(parse(VARIANCE.replace(str(N), "1000"))).kernels) == 1
    assert len(fuse(parse(DECODE.replace("[2, 4]", "[8, 4]").replace("h = 2", "h = 8"))).kernels) == 1


def test_segments_stop_at_the_end_of_the_axis() -> None:
    """Fewer elements than segments, and a length that segments do not divide: on the compiled kernels."""
    text = VARIANCE.replace(f"f32[{N}]", "f32[n, 300]").replace("x[l]", "x[l, c]").replace("[l]", "[l, c]")
    p = parse(text.replace(f"dim l = {N}", "dim l = n\n  dim c = 300").replace("size(l)", "(size(l) * size(c))"))
    assert len(fuse(p).kernels) == 2
    compiled = compile_program(p)
    for n in (2, 3, 17, 131):
        x = torch.randn(n, 300)
        got = compiled({"x": x}, {"n": n})["y"]
        torch.testing.assert_close(got, x.var(), rtol=1e-5, atol=1e-6)


def test_counts_of_several_kernels_have_their_own_parts() -> None:
    """Variances down columns of different lengths: a count is no value of the program, and was called the same, as it
    was where a dim has its name."""
    text = """program two()
  input x: f32[65536, 64]
  input y: f32[32768, 128]
  dim i = 65536
  dim j = 64
  dim n = 32768
  dim l = 128
  a[j]: f32 = sum[i] x[i, j]
  m[j]: f32 = a[j] / size(i)
  r[j]: f32 = sum[i] x[i, j] - m[j]
  v[j]: f32 = sum[i] (x[i, j] - m[j]) * (x[i, j] - m[j])
  b[l]: f32 = sum[n] y[n, l]
  o[l]: f32 = b[l] / size(n)
  s[l]: f32 = sum[n] y[n, l] - o[l]
  w[l]: f32 = sum[n] (y[n, l] - o[l]) * (y[n, l] - o[l])
  return m, r, v, o, s, w
"""
    made = compile_program(parse(text), device="cuda", load=False)
    names = [r[0] for s in made.steps for r in s.results]
    assert sum(n.endswith("_part") for n in names) >= 6
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("length", "segments"), [(12, 4), (13, 4), (3, 4), (0, 2), (7, 7), (1, 1), (4099, 3), (4096, 3)]
)
@pytest.mark.parametrize("known", [False, True])
def test_segments_have_each_index_once(length: int, segments: int, known: bool) -> None:
    start, stop = share_of("l", "s", segments, lit(length) if known else None)
    env = Env(lambda *_: torch.tensor(0.0), {"l": length, "s": segments}, {}, exact=True)
    held: list[int] = []
    for k in range(segments):
        at = {call("tile_start", Index("s")): call("add", Index("s"), 0)}
        here = Grid({"s": (k, k + 1)})
        a, b = (int(evaluate(substitute(e, at), here, env)) for e in (start, stop))
        held += range(a, b)
        assert not known or length < 4096 or a % 8 == 0  # vectors of 16 bytes
    assert held == list(range(length))


def test_segments_of_rows_of_odd_lengths_begin_at_whole_vectors():
    """As one axis, rows need not be whole in a segment; what is combined is the same."""
    torch._dynamo.reset()
    x = torch.randn(271, 63, generator=torch.Generator().manual_seed(0))
    made = trace(lambda x: x.square().sum(), x).program
    first, second = fuse_for_gpu(made, GpuTarget(given=Given(segments=4, stream=2))).kernels
    near = {i.name: neighbours(x) for i in first.block.inputs}
    joined, _ = collapsed(first.block, {**near, **{r.name: frozenset() for r in first.block.results}})
    even = verify(with_even_shares(joined))
    (loop,) = [n for n in walk(even.body) if isinstance(n, Loop) and n.kind == "for"]
    (segment,) = [n.dim for n in walk(even.body) if isinstance(n, Loop) and n.single]
    assert even != joined and (loop.start, loop.stop) == share_of(loop.dim, segment, 4, lit(271 * 63))
    (name,) = [i.name for i in first.block.inputs]
    parts = interp.run(even, {name: x.flatten()}, {}, block_sizes=dict.fromkeys(even.sizes, 512), exact=True)
    found = interp.run(second.block, parts, {}, block_sizes=dict.fromkeys(second.block.sizes, 64), exact=True)
    (total,) = [found[r.name] for r in second.block.results if r.name in made.outputs]
    torch.testing.assert_close(total.double(), x.double().square().sum(), rtol=1e-9, atol=0.0)
    assert with_even_shares(even) == even


@pytest.mark.parametrize("product", ["a[j, k, i] * b[j, i, k]", "b[j, i, k] * a[j, k, i]"])
def test_of_as_many_elements_in_columns_as_in_rows_a_fold_has_columns(product):
    """Channels last and channels first: not as a set of loads happens to be ordered."""
    sizes = "input a: f32[4, 9, 8]\n input b: f32[4, 8, 9]\n dim i = 8\n dim j = 4\n dim k = 9"
    g = Graph.of(parse(f"program p()\n {sizes}\n s[i]: f32 = sum[j, k] {product}\n return s\n"))
    plan = plan_stages(g, with_unit(Group(("s",), ("i",))))
    assert column_dim(g, plan) == "i"
