"""Which products a GPU program leaves to the library."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.layers import Layer
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import loads
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program, gpu_kernels
from tilefold.plan import folded, gpu_library
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_library import gpu_library_products
from tilefold.plan.hardware import H100, H200, Gpu, gpu_named
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.library import LibraryStep
from tilefold.suites.gpu import operators as o
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.product import product_of
from tilefold.tensor.text import parse


def program(batch: int, heads: int, keys: int, values: int, positions: int = 64) -> Program:
    """Latent attention with one query a sequence."""
    dim = values + positions
    args = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((batch, heads, dim), (batch, keys, dim)))
    torch._dynamo.reset()
    return trace(o.mla(values), *args).program


def seconds(p: Program) -> float:
    """What a fold with a wide state is estimated to take."""
    found: list[float] = []
    fused = gpu_library.fused_seconds
    with patch.object(gpu_library, "fused_seconds", lambda *a: found.append(fused(*a)) or found[-1]):
        gpu_library_products(p, H200)
    return found[0]


def slower_memory(m: Gpu, factor: float) -> Gpu:
    last = m.tiers[-1]
    return replace(m, tiers=(*m.tiers[:-1], replace(last, bandwidth=last.bandwidth / factor)))


@pytest.mark.parametrize("machine", [H100, H200], ids=lambda m: m.name)
def test_a_wide_fold_of_few_keys_is_left_to_the_library(machine: Gpu) -> None:
    p = program(16, 128, 512, 512)
    assert gpu_library_products(p, machine) == {c.name for c in p.body if c.reducer == "sum" and len(c.dims) == 3}


def test_scores_stay_out_of_a_slow_memory() -> None:
    assert gpu_library_products(program(16, 128, 512, 512), H200)
    assert not gpu_library_products(program(16, 128, 512, 512), slower_memory(H200, 4))


HEADS = """program heads()
  input x: bf16[4, 8, 1024, 64]
  input w: bf16[8, 64, 512]
  input v: bf16[8, 512]
  input u: bf16[8, 512]
  dim b = 4
  dim i = 1024
  dim h = 8
  dim k = 64
  dim m = 512
  dim n = 512
  y[b, i, m]: bf16 = sum[h, k] x[b, h, i, k] * w[h, k, m]
  s[b, i, h]: bf16 = sum[m] y[b, i, m] * v[h, m]
  z[b, i, n]: bf16 = sum[h] s[b, i, h] * u[h, n]
  return z
"""


def test_products_that_a_wide_fold_would_compute_in_parts_are_the_library_s_whole() -> None:
    """Aligned with what is summed over heads, y is a sum over heads of products that the program does not have."""
    p = parse(HEADS)
    with patch.object(gpu_library, "unfused_seconds", lambda *given: 0.0):
        assert gpu_library._of_wide_folds(p, frozenset(), replace(H200, wide=1)) == {"y", "s", "z"}
    with patch.object(gpu_library, "unfused_seconds", lambda *given: math.inf):
        assert not gpu_library._of_wide_folds(p, frozenset(), replace(H200, wide=1))


@pytest.mark.parametrize("machine", [H100, H200], ids=lambda m: m.name)
@pytest.mark.parametrize("batch, keys", [(32, 1024), (32, 4096), (16, 2048), (64, 256)])
def test_warps_that_share_a_wide_state_are_faster_than_the_library(batch: int, keys: int, machine: Gpu) -> None:
    assert not gpu_library_products(program(batch, 128, keys, 512), machine)


def test_few_rows_are_not_shared_out() -> None:
    """Tiles of 16 heads are no matrix instruction of four warps: the estimate is that of the usual kernel."""
    of = {h: seconds(program(64, h, 4096, 512)) for h in (16, 64)}
    assert of[16] > 0.5 * of[64]  # a quarter of the products, at less than half of the rate


def test_a_narrow_state_is_always_fused() -> None:
    assert not gpu_library_products(program(16, 128, 1024, 128), H200)


def test_a_product_that_nothing_reduces_over_is_the_library_s() -> None:
    torch._dynamo.reset()
    p = trace(lambda x, w: torch.relu(x @ w), *(torch.empty(256, 256, device="meta") for _ in range(2))).program
    assert gpu_library_products(p) == {"mm"}


def products(fn, *shapes: tuple[int, ...]) -> frozenset[str]:
    """The library's products of a function."""
    torch._dynamo.reset()
    return gpu_library_products(
        trace(fn, *(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)).program
    )


def test_projections_of_a_layer_are_the_library_s_and_attention_is_fused() -> None:
    torch._dynamo.reset()
    layer = Layer(1024, 16, 4, 2816).to("meta", torch.bfloat16)
    x = torch.empty((4, 512, 1024), dtype=torch.bfloat16, device="meta")
    weights = dict(layer.named_parameters())
    p = trace(lambda x, w: torch.func.functional_call(layer, w, (x,)), x, weights).program
    found = gpu_library_products(p)
    assert len(found) == 7 and all(n.startswith(("mm", "addmm")) for n in found)
    assert {c.name for c in p.body if c.name.startswith("bmm")} == {"bmm", "bmm_1"}


def test_a_row_that_is_needed_after_its_reduction_is_the_library_s_unless_short() -> None:
    def normalised(x, w):
        y = (x @ w).float()
        return y / y.sum(-1, keepdim=True)

    assert products(normalised, (4096, 512), (512, 2048))
    assert not products(normalised, (4096, 512), (512, 128))


def test_a_chain_of_products_is_fused_while_its_tiles_can_be_held() -> None:
    def chain(x, w, v):
        return torch.relu(x @ w) @ v

    assert not products(chain, (4096, 256), (256, 2048), (2048, 256))
    assert len(products(chain, (4096, 2048), (2048, 2048), (2048, 256))) == 2
    assert len(products(chain, (4096, 256), (256, 2048), (2048, 2048))) == 2


def test_probabilities_that_are_results_are_written_by_a_softmax_of_their_own() -> None:
    def attention(q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p

    shapes = [(2, 16, 512, 64)] * 3
    assert len(products(attention, *shapes)) == 2
    assert not products(lambda *x: attention(*x)[0], *shapes)


def test_projections_that_are_results_keep_no_scores_out_of_a_kernel() -> None:
    """What a backward needs of queries is in memory; between the two products that are one kernel nothing is."""

    def attention(x, w, b, k, v):
        q = x @ w + b
        return torch.softmax(q @ k.mT, -1) @ v, q

    assert len(products(attention, (2, 16, 512, 768), (768, 64), (64,), (2, 16, 512, 64), (2, 16, 512, 64))) == 1


@pytest.mark.parametrize("fn,shapes", [(o.inertia, ((4, 512), (4, 512, 3))), (o.rms_norm_max, ((8, 512),))])
def test_a_sum_of_products_that_uses_each_element_once_is_fused(fn, shapes) -> None:
    torch._dynamo.reset()
    p = trace(fn, *(torch.empty(s, device="meta") for s in shapes)).program
    assert any(c.reducer == "sum" for c in p.body) and not gpu_library_products(p)


def test_the_description_of_a_device_has_its_multiprocessors() -> None:
    assert gpu_named("NVIDIA H200", 130) == replace(H200, cores=130)
    assert gpu_named("NVIDIA A100-SXM4-80GB", 108) == replace(H100, cores=108)


def normalised_rows(readers: int) -> Program:
    """Rows over their root mean square times `readers` matrices of 64 columns."""

    def fn(x, *ws):
        n = x * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return tuple(n @ w for w in ws)

    x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta")
    ws = [torch.empty(2048, 64, dtype=torch.bfloat16, device="meta") for _ in range(readers)]
    torch._dynamo.reset()
    return trace(fn, x, *ws).program


def test_a_product_of_rows_that_are_in_memory_anyway_is_the_library_s() -> None:
    """Of three projections of normalised rows, none saves those rows' way through memory."""
    assert len(gpu_library_products(normalised_rows(3))) == 3
    assert not gpu_library_products(normalised_rows(1))


def test_logits_that_are_only_reduced_are_folded_where_their_way_through_memory_costs_more():
    """Arithmetic grows with the contraction, what is saved does not."""

    def head(x, w):
        return torch.logsumexp((x @ w).float(), -1)

    assert not products(head, (4096, 64), (64, 32000))
    assert products(head, (4096, 2048), (2048, 32000))


def test_a_product_whose_fold_would_have_few_thread_blocks_is_the_library_s():
    """Each of them contracts all of the weight's rows; the library cuts these."""

    def gate(x, w):
        return torch.sigmoid(x @ w).float().sum(-1)

    assert products(gate, (128, 24576), (24576, 4096))
    assert not products(gate, (16384, 64), (64, 4096))


def test_heads_that_are_normalised_come_from_the_library():
    """Queries and keys, each head divided by its root mean square: short rows of a long contraction."""

    def heads(x, w):
        y = (x @ w).view(4096, 16, 128).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True))).to(x.dtype)

    assert products(heads, (4096, 2048), (2048, 2048))
    assert not products(heads, (4096, 64), (64, 2048))


def test_a_chain_of_products_is_fused_only_where_what_is_between_costs_more_than_the_library_gains():
    """A feed-forward part of few features: between are four times as many, and the arithmetic is the library's."""

    def mlp(x, w, v):
        return torch.relu(x @ w) @ v

    assert len(products(mlp, (4096, 512), (512, 2048), (2048, 512))) == 2
    assert not products(mlp, (65536, 64), (64, 256), (256, 64))


def lowered(fn, *shapes: tuple[int, ...]) -> Program:
    """A function of bf16 tensors."""
    torch._dynamo.reset()
    return trace(fn, *(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)).program


def projected(x, wq, wk, wv):
    q, k, v = (torch.einsum("bil,hdl->bhid", x, w) for w in (wq, wk, wv))
    return torch.softmax(q @ k.mT, -1) @ v


def test_projections_in_front_of_scores_are_the_library_s() -> None:
    """Their results are no larger than what they are made of; scores and values stay one kernel."""
    w = (8, 64, 512)
    p = lowered(projected, (4, 256, 512), w, w, w)
    assert gpu_library_products(p) == {"bmm", "bmm_1", "bmm_2"}
    assert [c.name for c in p.body if product_of(c)] == ["bmm", "bmm_1", "bmm_2", "bmm_3", "view_14_out"]


#: Attention in windows of 49 rows, of a joint projection that has the dims of keys.
WINDOWS = """program windows()
  input x: bf16[2048, 49, 96]
  input w: bf16[3, 3, 32, 96]
  dim b = 2048
  dim i = 49
  dim j = 49
  dim t = 3
  dim h = 3
  dim d = 32
  dim c = 96
  y[b, j, t, h, d]: bf16 = sum[c] x[b, j, c] * w[t, h, d, c]
  s[b, h, i, j]: bf16 = sum[d] y[b, i, 0, h, d] * y[b, j, 1, h, d]
  m[b, h, i]: f32 = max[j] s[b, h, i, j]
  e[b, h, i, j]: f32 = exp(s[b, h, i, j] - m[b, h, i])
  t_[b, h, i]: f32 = sum[j] e[b, h, i, j]
  p[b, h, i, j]: bf16 = e[b, h, i, j] / t_[b, h, i]
  o[b, i, h, d]: bf16 = sum[j] p[b, h, i, j] * y[b, j, 2, h, d]
  return o
"""


def test_a_joint_projection_is_the_library_s_however_many_columns_it_has() -> None:
    """It makes more than it reads, and a window's rows are few; but keys and values are other rows' than queries."""
    assert gpu_library_products(parse(WINDOWS), H200) == {"y"}


def merged(x, y, b, w, m):
    """Its heads merged, added to y, and normalised."""
    q, k, v = (x @ w.T).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
    heads = (torch.softmax(q @ k.mT + b, -1) @ v).transpose(1, 2).flatten(-2)
    z = y + heads @ m
    return z, torch.nn.functional.layer_norm(z, (64,))


def test_heads_are_not_multiplied_element_by_element_for_what_merges_them() -> None:
    """One kernel would have scores of two heads at once, which no matrix unit multiplies."""
    p = lowered(merged, (2048, 49, 64), (2048, 49, 64), (2, 49, 49), (192, 64), (64, 64))
    fused = fuse_for_gpu(p, GpuTarget(H200), calls=[(m,) for m in gpu_library_products(p, H200)])
    merge = next(c.name for c in p.body if len(c.rdims) == 2)
    (members,) = (k.plan.group.members for k in fused.kernels if merge in k.plan.group.members)
    assert not set(members) & set(Graph.of(p).producers[merge]), members


@pytest.mark.parametrize("rows, kernel", [(256, False), (1 << 16, True)])
def test_two_products_without_a_fold_are_a_kernel_where_rows_fill_the_machine(rows: int, kernel: bool) -> None:
    p = lowered(lambda x, a, b: torch.relu(x @ a) @ b, (rows, 256), (256, 2048), (2048, 256))
    assert gpu_library_products(p) == (set() if kernel else {c.name for c in p.body if c.reducer})


def test_a_residual_between_two_products_is_in_memory_anyway() -> None:
    def block(x, y, a, b):
        r = y + x @ a
        n = r * torch.rsqrt((r.float() ** 2).mean(-1, keepdim=True) + 1e-6).to(r.dtype)
        return torch.tanh(r) + n @ b

    p = lowered(block, (1 << 14, 512), (1 << 14, 512), (512, 512), (512, 512))
    assert "mm" in gpu_library_products(p)


@pytest.mark.parametrize("machine", [H100, H200], ids=lambda m: m.name)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_attention_is_priced_by_the_type_that_its_products_have(dim, machine):
    """Probabilities are float32 by name, and are multiplied in the type of the values."""

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    x = torch.empty(4, 16, 1024, dim, dtype=torch.bfloat16, device="meta")
    assert not gpu_library_products(trace(attention, x, x, x).program, machine)


IMAGES = """program images()
  input x: {t}[32, {n}, {n}, {c}]
  input w: {t}[{o}, {k}, {k}, {c}]
  input g: f32[{o}]
  dim b = 32
  dim i = {m}
  dim j = {m}
  dim o = {o}
  dim c = {c}
  dim p = {k}
  dim q = {k}
  y[b, i, j, o]: {t} = sum[p, q, c] x[b, i + p, j + q, c] * w[o, p, q, c]
  z[b, i, j, o]: {t} = maximum({t}(y[b, i, j, o]{scale} + g[o]), 0)
  return z
"""
PIXELS = IMAGES.replace("[{o}, {k}, {k}, {c}]", "[{o}, {c}]").replace("  dim p = {k}\n  dim q = {k}\n", "")


def in_call(text: str, m: int, c: int, o: int, k: int, t: str = "bf16", scale: str = " * g[o]") -> bool:
    p = parse(text.format(n=m + k - 1, m=m, c=c, o=o, k=k, t=t, scale=scale))
    return bool(GpuTarget(H200).with_tails(p)[1])


def test_what_follows_a_convolution_is_in_its_call_where_that_saves_more_than_scaled_weights_cost():
    assert in_call(IMAGES, 56, 64, 64, 3)
    assert not in_call(IMAGES, 7, 512, 512, 3)
    assert in_call(IMAGES, 7, 512, 512, 3, scale="")  # weights as they are
    assert not in_call(IMAGES, 56, 64, 64, 3, "f32")
    assert not in_call(IMAGES, 56, 3, 64, 3)  # no 16 bytes of channels


def test_so_are_large_images_of_single_taps():
    text = PIXELS.replace("sum[p, q, c] x[b, i + p, j + q, c] * w[o, p, q, c]", "sum[c] x[b, i, j, c] * w[o, c]")

    def wins(*args: int, **how: str) -> bool:
        p = parse(
            text.format(**dict(zip("mco", args, strict=True)), n=args[0], t="bf16", scale=how.get("scale", " * g[o]"))
        )
        body = tuple(replace(c, origin="aten.convolution.default") if c.name == "y" else c for c in p.body)
        return bool(GpuTarget(H200).with_tails(replace(p, body=body))[1])

    assert wins(56, 64, 256) and wins(28, 128, 512)
    assert not wins(7, 512, 2048)
    assert not wins(56, 64, 256, scale="")  # a product with a bias


NORMED = """program normed()
  input dy: bf16[32, 14, 14, 64]
  input k: bf16[64, 384]
  input x: bf16[32, 14, 14, 384]
  input w: bf16[384, 3, 3]
  dim b = 32
  dim i = 14
  dim j = 14
  dim a = 64
  dim c = 384
  dim p = 3
  dim q = 3
  dx[b, i, j, c]: bf16 = sum[a] dy[b, i, j, a] * k[a, c]
  s[c]: f32 = sum[b, i, j] f32(dx[b, i, j, c]) * f32(x[b, i, j, c])
  z[b, i, j, c]: bf16 = bf16(f32(dx[b, i, j, c]) - f32(x[b, i, j, c]) * s[c])
  y[b, i, j, c]: bf16 = sum[p, q] {body} * w[c, p, q]
  return {made}
"""
WINDOW = "where((i + 1 - p >= 0) & (i + 1 - p < 14), where((j + 1 - q >= 0) & (j + 1 - q < 14), {at}, 0.0), 0.0)"


def test_a_product_that_is_summed_is_the_library_s_where_a_convolution_reads_what_is_made_of_both():
    """The gradient behind a batch norm goes to memory anyway, for the gradient of a depthwise convolution."""

    def products(at: str, made: str) -> frozenset[str]:
        p = parse(NORMED.format(body=WINDOW.format(at=at), made=made))
        body = tuple(replace(c, origin="aten.convolution_backward.default") if c.name == "y" else c for c in p.body)
        return gpu_library_products(replace(p, body=body), H200)

    assert products("z[b, i + 1 - p, j + 1 - q, c]", "y, s") == {"dx", "y"}
    assert products("x[b, i + 1 - p, j + 1 - q, c]", "y, s") == {"y"}


POOLED = """program pooled()
  input x: bf16[32, 7, 7, 256]
  input z: bf16[32, 7, 7, 64]
  input w: bf16[128, 256]
  dim b = 32
  dim i = 7
  dim j = 7
  dim c = 256
  dim o = 128
  dim e = 192
  y[b, i, j, o]: bf16 = sum[c] x[b, i, j, c] * w[o, c]
  m[b, {d}]: f32 = sum[i, j] {read}
  return m
"""
JOINED = "where(e < 128, y[b, i, j, e], where(e >= 128, z[b, i, j, e - 128], 0.0))"


def test_a_product_is_kept_only_for_a_reduction_that_its_kernel_can_have():
    """A mean over places, of the product's own channels or of a concatenation with others'."""

    def products(d: str, read: str) -> frozenset[str]:
        return GpuTarget(H200).products(parse(POOLED.format(d=d, read=read)))

    assert products("o", "maximum(y[b, i, j, o], 0.0)") == set()
    assert products("e", JOINED) == {"y"}


GROUPED = """program grouped()
  input x: bf16[32, 28, 28, 1024]
  input w: bf16[8, 16, 1024]
  input k: bf16[128, 3, 3, 16]
  dim b = 32
  dim i = 28
  dim j = 28
  dim a = 1024
  dim g = 8
  dim c = 16
  dim o = 128
  dim p = 3
  dim q = 3
  y[b, i, j, g, c]: bf16 = sum[a] x[b, i, j, a] * w[g, c, a]
  r[b, i, j, g, c]: bf16 = maximum(y[b, i, j, g, c], 0.0)
  v[b, i, j, o]: bf16 = sum[p, q, c] {read} * k[o, p, q, c]
  return v
"""
PADDED = "where((j + q - 1 >= 0) & (j + q - 1 < 28), where((i + p - 1 >= 0) & (i + p - 1 < 28), {at}, 0.0), 0.0)"


def test_a_convolution_s_sum_over_channels_of_a_group_keeps_no_product_from_the_library():
    at = "r[b, i + p - 1, j + q - 1, o // 16, c]"
    assert GpuTarget(H200).products(parse(GROUPED.format(read=PADDED.format(at=at)))) == {"y", "v"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_times_a_matrix_is_one_call(dtype: torch.dtype) -> None:
    """As kernels of ours it would be two: segments of what it contracts, and their sum."""
    torch._dynamo.reset()
    given = (torch.empty(s, dtype=dtype, device="meta") for s in ((8192, 8192), (8192,)))
    (step,) = compile_program(trace(lambda x, y: y @ x, *given).program, device="interpreter").steps
    assert isinstance(step, LibraryStep)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_few_classes_of_float32_are_the_librarys(dtype: torch.dtype, apart: bool) -> None:
    """No matrix unit takes float32: ten columns are sixteen in a kernel of ours, whose threads have four elements each
    and read as many operands (316 us on an H100, 72 by the library)."""
    torch._dynamo.reset()
    given = (torch.empty(s, dtype=dtype, device="meta") for s in ((65536, 512), (10, 512), (10,)))
    classes = lambda x, w, b: torch.nn.functional.linear(x, w, b).log_softmax(-1)  # noqa: E731
    p = trace(classes, *given).program
    assert bool(gpu_library_products(p, H100)) is apart


def test_float32_is_multiplied_slowly_in_kernels_of_ours() -> None:
    few, many = (H100.folded_rate(DType.F32, 64, n) for n in (16, 64))
    assert H100.folded_rate(DType.F32, 64, 8) == few / 2 and few < many < H100.gemm_rate(DType.F32, library=True) / 4
    assert H100.folded_rate(DType.BF16, 64, 16) == H100.folded * H100.gemm_rate(DType.BF16, library=True)


@pytest.mark.parametrize("both", [True, False])
def test_columns_that_are_normalised_on_both_sides_are_multiplied_by_the_library(both: bool) -> None:
    """Correlations of two views: each thread block would normalise all columns of the other view again."""
    torch._dynamo.reset()
    given = (torch.empty(1024, 256, dtype=torch.bfloat16, device="meta") for _ in range(2))
    norm = lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6)  # noqa: E731
    p = trace(lambda a, b: norm(a).mT @ (norm(b) if both else b), *given).program
    assert bool(gpu_library_products(p, H100)) or not both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_are_summed_over_their_batch_are_the_librarys(dtype: torch.dtype) -> None:
    """A mixture of experts, weighed for each token: a thread block that holds both experts has no matrix unit."""
    torch._dynamo.reset()
    given = (torch.empty(s, dtype=dtype, device="meta") for s in ((8192, 2, 64), (2, 64, 512), (8192, 2)))
    p = trace(lambda x, w, g: (torch.einsum("ber,erd->bed", x, w) * g[..., None]).sum(1), *given).program
    assert gpu_library_products(p, H100)


GATED = """program gated()
  input t: f32[32, 16]
  input w: f32[16, 128]
  input x: f32[32, 128, {places}]
  dim j = 32
  dim i = 128
  dim k = 16
  dim l = {places}
  y[j, i]: f32 = sum[k] t[j, k] * w[k, i]
  z[j, i, l]: f32 = y[j, i] / {places}.0 + x[j, i, l]
  s[i]: f32 = sum[j, l] z[j, i, l] * x[j, i, l]
  return s
"""


def test_a_product_is_not_kept_in_a_fold_of_few_blocks_that_reads_much_beside_it():
    """Gates of channels and a batch norm's gradient: its sums would have a thread block for 64 channels."""
    assert GpuTarget(H100).products(parse(GATED.format(places=3136))) == {"y"}
    assert GpuTarget(H100).products(parse(GATED.format(places=1))) == set()


NEIGHBOURS = """program neighbours()
  input x: f32[8, {features}, {points}]
  dim b = 8
  dim i = {points}
  dim j = {points}
  dim n = {features}
  dim s = {slots}
  d[b, i, j]: f32 = sum[n] x[b, n, i] * x[b, n, j]
  v[b, i, s]: f32, k[b, i, s]: i64 = topk[j; s] d[b, i, j]
  return v, k
"""


@pytest.mark.parametrize(("points", "slots", "apart"), [(1024, 20, {"d"}), (64, 2, set())])
def test_many_of_a_long_row_are_not_found_tile_by_tile(points, slots, apart):
    """The nearest neighbours of points: 20 slots of each tile of distances take longer than the distances' way to
    memory; the two largest of 64 are one tile's."""
    p = parse(NEIGHBOURS.format(features=3, points=points, slots=slots))
    assert GpuTarget(H100).products(p) == apart


@pytest.mark.parametrize(("between", "apart"), [("sin", True), ("relu", False)])
def test_sines_between_products_are_kernels_of_their_own(between: str, apart: bool) -> None:
    """They branch, which the few warps of a kernel with products wait for."""
    torch._dynamo.reset()
    given = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((65536, 32), (256, 32), (256, 256)))
    p = trace(lambda x, a, b: getattr(torch, between)(x @ a.mT) @ b.mT, *given).program
    assert bool(gpu_library_products(p, H100)) is apart


@pytest.mark.parametrize(("columns", "apart"), [(256, False), (416, True)])
def test_two_products_that_hold_much_of_a_row_are_calls(columns: int, apart: bool) -> None:
    """832 columns between 416 and 416: 125 us in one kernel on an H100, 35 in two calls."""
    p = lowered(lambda x, a, b: torch.relu(x @ a) @ b, (8192, columns), (columns, 832), (832, columns))
    found = gpu_library_products(p, H100)
    assert (len(found) == 2) == apart, found


def test_weights_that_every_tile_of_rows_reads_again_are_priced() -> None:
    p = lowered(lambda x, a, b: torch.relu(x @ a) @ b, (8192, 256), (256, 2048), (2048, 256))
    g = Graph.of(p)
    first, second = (c for c in p.body if c.reducer)
    (rows,) = set(first.dims) & set(second.dims)
    few, many = (folded._read_again(g, first, {rows}, tile, H100) for tile in (64, 128))
    weights = 256 * 2048 * 2
    assert few == pytest.approx(128 * weights / (H100.cache_reached * H100.last_cache.bandwidth)) and few == 2 * many


#: Rows of 384 that are normalised, times a matrix of 192 columns.
NORMALISED = """program normalised()
  input x: bf16[{rows}, 384]
  input g: bf16[384]
  input b: bf16[384]
  input w: bf16[192, 384]
  dim i = {rows}
  dim l = 384
  dim m = 192
  c[i, l]: bf16 = {made}
  s[i]: f32 = sum[l] c[i, l]
  q[i]: f32 = sum[l] (c[i, l] - s[i] / size(l)) * (c[i, l] - s[i] / size(l))
  r[i]: f32 = rsqrt(q[i] / size(l) + 1e-05)
  n[i, l]: bf16 = {normed}
  y[i, m]: bf16 = sum[l] n[i, l] * w[m, l]
  return y
"""
CENTRED, SCALED = "(c[i, l] - s[i] / size(l)) * r[i] * g[l] + b[l]", "c[i, l] * r[i] * g[l]"


@pytest.mark.parametrize(
    ("made", "normed", "apart"),
    [
        ("x[i, l]", SCALED, False),
        ("tanh(x[i, l]) * sigmoid(x[i, l]) + exp(x[i, l])", SCALED, True),  # for both blocks of columns
        ("x[i, l]", f"{CENTRED} + g[l] * b[l]", True),  # three sums of weights for every block of rows
    ],
)
def test_rows_are_not_made_in_front_of_a_product_where_that_takes_longer_than_a_pass(made, normed, apart):
    p = parse(NORMALISED.format(rows=12544, made=made, normed=normed))
    assert gpu_library_products(p, H100) == ({"y"} if apart else set())


def test_a_product_that_is_left_alone_reads_what_the_library_takes() -> None:
    """A sum of its result was expected in its kernel, and is in none: the library would convert one operand to the
    other's float32, and multiply without a matrix unit."""
    p = parse(
        """program p()
  input a: f32[16, 8, 49, 49]
  input y: bf16[16, 49, 8, 32]
  input w: bf16[8, 32, 192]
  dim b = 16
  dim h = 8
  dim i = 49
  dim j = 49
  dim k = 32
  dim n = 192
  s[b, h, j, k]: bf16 = sum[i] a[b, h, i, j] * y[b, i, h, k]
  t[h, k]: bf16 = sum[b, j] s[b, h, j, k]
  out[b, j, n]: bf16 = sum[h, k] s[b, h, j, k] * w[h, k, n]
  return t, out
"""
    )
    assert gpu_library_products(p, H200) == {"out"}
    made = gpu_kernels(p, GpuTarget(H200))
    after, called = made.fused.program, {m for call in made.calls for m in call}
    read = {ld.tensor for c in after.body if c.name in called for ld in loads(c.body)}
    assert len(called) == 2 and {after.dtype_of(t) for t in read} == {DType.BF16}
