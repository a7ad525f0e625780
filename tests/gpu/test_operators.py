"""Every operator of the GPU suites, compiled on the GPU, on random and on hostile arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.backends.triton.functions import narrow_weights, normalised_product, of_bytes, of_logits, top_of_products
from tilefold import fuse
from tilefold.frontend.torch_compile import backend
from tilefold.frontend.verify import VerifyReport, compare, verify
from tilefold.suites.gpu import operators as o
from tilefold.suites.gpu.cases import SMALL

pytestmark = pytest.mark.gpu

CASES = {c.row: c for suite in ("redfuser", "neptune") for c in SMALL[suite]}
H, B = torch.float16, torch.bfloat16


def gen(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


def rand(*shape, device, dtype=H, seed=0, scale=1.0):
    return (torch.randn(shape, generator=gen(device, seed), device=device) * scale).to(dtype)


def right(report: VerifyReport) -> None:
    assert report.ok, str(report)


def rms_norm_by_hand(x, weight):
    """What `rms_norm` computes, in float32 at least and by its formula."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.to(wide)).to(x.dtype)


#: Stands for eager where its kernel for GPUs is not the formula on hostile arguments, in float64 neither. torch's
#: fused RMSNorm makes a row NaN that has one infinite element; by the formula that element is NaN and the rest are 0.
FORMULAS = {o.rms_norm: rms_norm_by_hand}


@pytest.mark.parametrize("name", CASES)
def test_operators_are_right_on_hostile_arguments(name, device):
    case = CASES[name]
    right(verify(FORMULAS.get(case.fn, case.fn), *case.args(device), compiled=fuse(case.fn)))


def test_infinite_elements_in_a_normalised_row(device):
    """By the formula in float64; where eager differs from that, eager is NaN."""
    x, weight = rand(5, 300, device=device, dtype=B), rand(300, device=device, dtype=B, seed=1)
    x[0], x[1, 7], x[2, 250] = -torch.inf, -torch.inf, torch.inf
    exact = rms_norm_by_hand(x.double(), weight.double())
    fast, eager = fuse(o.rms_norm)(x, weight).double(), o.rms_norm(x, weight).double()
    torch.testing.assert_close(fast, exact, rtol=2**-7, atol=2**-7, equal_nan=True)
    same = torch.isclose(eager, exact, rtol=2**-6, atol=2**-6, equal_nan=True)
    assert bool((same | eager.isnan()).all()) and bool(fast[3:].isfinite().all())
    assert int(fast[1].isnan().sum()) == 1 and bool(fast[0].isnan().all())


@pytest.mark.parametrize("name", ["causal-prefill-67", "gqa-decode-67", "Q-small", "performer-70", "R-small-6"])
def test_the_dynamo_backend_is_right(name, device):
    case = CASES[name]
    run = torch.compile(case.fn, backend=backend, options={"leftover": "eager"}, fullgraph=True)
    right(verify(case.fn, *case.args(device), compiled=run, hostile=False))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "dim, value_dim", [(80, 80), (192, 128), (40, 40), (128, 96), (256, 256), (320, 320), (512, 512)]
)
def test_head_dims(dim, value_dim, device):
    q, k = (rand(2, 3, n, dim, device=device, seed=n) for n in (45, 77))
    v = rand(2, 3, 77, value_dim, device=device, seed=3)
    right(verify(o.attention, q, k, v, compiled=fuse(o.attention), hostile=False))


@pytest.mark.parametrize(("batch", "tokens"), [(4, 130), (33, 7), (70, 3)])
def test_rows_along_two_parallel_dims(batch, tokens, device):
    x, w = rand(batch, tokens, 256, device=device, dtype=B), rand(256, 64, device=device, dtype=B, seed=1)
    right(verify(top_of_products, x, w, compiled=fuse(top_of_products), hostile=False))


@pytest.mark.parametrize(("length", "features"), [(512, 256), (300, 256), (64, 512), (200, 512)])
def test_features_that_no_thread_block_holds(length, features, device):
    q, k, v = (rand(4, length, 64, device=device, seed=n, scale=0.5) for n in range(3))
    right(verify(o.performer, q, k, v, rand(features, 64, device=device, seed=3), compiled=fuse(o.performer)))


@pytest.mark.parametrize("experts", [2, 6, 8, 12])
def test_few_experts(experts, device):
    x, w = rand(130, 512, device=device, dtype=B), rand(512, experts, device=device, dtype=B, seed=1)
    right(verify(top_of_products, x, w, compiled=fuse(top_of_products)))


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("features", [700, 2048])
def test_logits_that_are_never_in_memory(rows, features, device):
    x, w = rand(rows, features, device=device, dtype=B), rand(5000, features, device=device, dtype=B, seed=1, scale=0.1)
    right(verify(of_logits, x, w, compiled=fuse(of_logits), hostile=False))


@pytest.mark.parametrize("columns", [131_072, 2 * 131_072])
@pytest.mark.parametrize("fn", [o.softmax, rms_norm_by_hand], ids=["softmax", "norm"])
def test_long_rows_of_narrow_elements(fn, columns, device):
    args = [rand(5, columns, device=device, dtype=B)]
    args += [rand(columns, device=device, dtype=B, seed=1)] if fn is rms_norm_by_hand else []
    right(verify(fn, *args, compiled=fuse(fn)))


def sliced(q, k, v):
    """Every tensor a window of a larger one, not aligned to 16 bytes."""
    return tuple(torch.nn.functional.pad(x, (3, 5, 1, 2))[..., 1:-2, 3:-5] for x in (q, k, v))


def heads_last(q, k, v):
    """[B, S, H, D] in memory, as a projection leaves it."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))


def reversed_keys(q, k, v):
    """Keys and values every other row of a longer cache."""
    return q, *(x.repeat_interleave(2, -2)[:, :, ::2] for x in (k, v))


def expanded(q, k, v):
    """One batch entry for all: stride 0."""
    return q, *(x[:1].expand_as(x) for x in (k, v))


@pytest.mark.parametrize("change", [sliced, heads_last, reversed_keys, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("queries", [1, 50])
def test_strides_are_free(change, queries, device):
    args = (rand(2, 4, queries, 64, device=device), *(rand(2, 4, 83, 64, device=device, seed=n) for n in (1, 2)))
    right(verify(o.causal, *change(*args), compiled=fuse(o.causal), hostile=False))


@pytest.mark.parametrize("fn", [o.attention, o.causal, o.softcap(50.0)], ids=["plain", "causal", "softcap"])
def test_scores_of_1e4_do_not_overflow(fn, device):
    q, k, v = (rand(1, 2, 70, 64, device=device, seed=n) for n in range(3))
    right(verify(fn, q * 40, k * 40, v, compiled=fuse(fn), hostile=False))


def test_rows_that_see_nothing_are_nan_as_in_eager(device):
    def masked(q, k, v, mask):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return torch.softmax(torch.where(mask, scores, float("-inf")), -1) @ v

    q, k, v = (rand(1, 2, 33, 64, device=device, seed=n) for n in range(3))
    mask = torch.rand(33, 33, generator=gen(device), device=device) < 0.3
    mask[4], mask[:, 16:] = False, False
    run = fuse(masked)
    right(verify(masked, q, k, v, mask, compiled=run, hostile=False))
    assert run(q, k, v, mask)[:, :, 4].isnan().all() and not run(q, k, v, mask)[:, :, 5:].isnan().all()


@pytest.mark.parametrize("experts", [1, 8])
def test_ties_choose_distinct_experts(experts, device):
    x = torch.randint(-1, 2, (41, 32), generator=gen(device), device=device).to(B)
    w = torch.randint(-1, 2, (32, 64), generator=gen(device, 1), device=device).to(B)
    fn = o.moe_routing(experts)
    right(verify(fn, x, w, compiled=fuse(fn), hostile=False))
    equal = torch.zeros_like(x)
    right(verify(fn, equal, w, compiled=fuse(fn), hostile=False))


def test_quantisation_is_exactly_per_token(device):
    """The default rounds with the scale of the whole row, so the e4m3 values are eager's to the bit."""
    a, w = rand(64, 256, device=device, dtype=B), rand(128, 256, device=device).to(torch.float8_e4m3fn).t()
    a[:, 200] *= 50  # the row's largest element comes late
    one = torch.ones(1, 128, device=device)
    fast, slow = fuse(o.quant_gemm)(a, w, one), o.quant_gemm(a, w, one)
    quantised, scale = o.quantise(a)
    exact = quantised.double() @ w.double() * scale.double()
    size = exact.abs().max()
    assert (fast.double() - exact).abs().max() <= 2 * (slow.double() - exact).abs().max() + 2**-8 * size


@pytest.mark.parametrize(
    "fn, shape",
    [
        (o.softmax, (1, 1)), (o.softmax, (3, 1)), (o.softmax, (1, 100_003)), (o.softmax, (1031, 3)),
        (o.variance_by_hand, (1, 32768)), (o.variance_by_hand, (2, 40_009)), (o.l2_norm, (1, 131_072)),
        (o.rms_norm_max, (2, 70_001)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_short_long_and_ragged_rows(fn: Callable, shape, device):
    x = rand(*shape, device=device, dtype=torch.float32)
    right(verify(fn, x, compiled=fuse(fn), hostile=False))


@pytest.mark.parametrize("dtype", [H, B, torch.float32], ids=str)
def test_dtypes_of_attention(dtype, device):
    q, k, v = (rand(1, 2, 65, 64, device=device, dtype=dtype, seed=n) for n in range(3))
    right(verify(o.causal, q, k, v, compiled=fuse(o.causal), hostile=False))


LENGTHS = (
    *(1, 2, 3, 5, 7, 9, 11, 13, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257),
    *(300, 333, 384, 511, 513, 640, 777, 900, 1023, 1025),
)


def lengths_right(run, device, *, mark: bool) -> None:
    """Every length right; `mark`: sequence axes declared dynamic before the first call."""
    wrong = []
    for n in LENGTHS:
        args = tuple(rand(1, 2, n, 64, device=device, seed=n + s) for s in range(3))
        for x in args if mark and n > 1 else ():
            torch._dynamo.mark_dynamic(x, 2)
        checked = compare(f"length {n}", o.causal, run, args)
        if not checked.ok:
            wrong.append(str(checked))
    assert len(set(LENGTHS)) >= 30 and not wrong, "\n".join(wrong)


def test_thirty_lengths_through_one_compiled_attention(device):
    """One compilation for all lengths, and one for length 1, which torch always takes apart."""
    run = fuse(o.causal)
    lengths_right(run, device, mark=True)
    assert len(run.graphs) <= 2


def test_thirty_lengths_as_torch_finds_them_out(device):
    """The first length is compiled for itself, the second makes the axis dynamic, and that serves the rest."""
    run = fuse(o.causal)
    lengths_right(run, device, mark=False)
    assert len(run.graphs) <= 3


def test_all_sizes_symbolic(device):
    """dynamic=True: heads and the head's dim as well."""
    run = fuse(o.causal, dynamic=True)
    for b, h, n, d in ((1, 2, 33, 64), (2, 3, 70, 128), (3, 1, 129, 80)):
        checked = compare(f"{n} x {d}", o.causal, run, tuple(rand(b, h, n, d, device=device, seed=s) for s in range(3)))
        assert checked.ok, str(checked)


def test_decode_over_a_growing_cache_is_compiled_once(device):
    """The cache is never whole, so its views never become contiguous, which Dynamo would compile again for."""
    run = fuse(o.gqa)
    cache = tuple(rand(1, 2, 1300, 64, device=device, seed=s) for s in (1, 2))
    q = rand(1, 8, 1, 64, device=device)
    for n in (5, 64, 65, 500, 1111, 1200):
        views = tuple(x[:, :, :n] for x in cache)
        for x in views:
            torch._dynamo.mark_dynamic(x, 2)
        checked = compare(f"{n} keys", o.gqa, run, (q, *views))
        assert checked.ok, str(checked)
    assert len(run.graphs) == 1


@pytest.mark.parametrize("to", [H, B, torch.float32], ids=str)
@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_attention_of_8_bits(kept, to, device):
    """Nothing that the kernel computes is rounded to 8 bits."""
    args = (rand(1, 2, n, 64, device=device, seed=n).to(kept) for n in (130, 200, 200))
    fn = of_bytes(to)
    right(verify(fn, *args, compiled=fuse(fn), hostile=False))


def test_weights_of_8_bits(device):
    x, w = rand(130, 512, device=device), rand(512, 700, device=device, seed=1).to(torch.float8_e4m3fn)
    right(verify(narrow_weights, x, w, compiled=fuse(narrow_weights), hostile=False))


@pytest.mark.parametrize("dtype", [torch.float32, B], ids=str)
@pytest.mark.parametrize("columns", [200, 256, 300, 320, 1000])
def test_a_normalised_row_times_a_matrix(columns, dtype, device):
    """A state that a step of a loop reads before it adds to it (see `Reductions._turned`)."""
    x, w = rand(70, columns, device=device, dtype=dtype), rand(columns, 72, device=device, dtype=dtype, seed=1)
    right(verify(normalised_product, x, w, compiled=fuse(normalised_product)))


@pytest.mark.parametrize("columns", [777, 1001])
def test_products_whose_rows_are_ragged(columns, device):
    """Logits of an odd vocabulary between two products, and as a result; operands of odd lengths."""

    def fn(x, w, b, v):
        y = torch.nn.functional.linear(x, w, b)
        return torch.relu(y) @ v, x @ w.t()

    sizes = ((512, 1023), (columns, 1023), (columns,), (columns, 96))
    args = [rand(*s, device=device, dtype=B, seed=n, scale=0.1) for n, s in enumerate(sizes)]
    right(verify(fn, *args, compiled=torch.compile(fn, backend="tilefold"), hostile=False))


@pytest.mark.parametrize("hidden", [256, 512])
def test_weights_of_many_rows(hidden, device):
    """[hidden, 128] of a layer, held whole (see `triton.product.TALL`)."""

    def fn(x, w, b, v):
        h = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return (torch.nn.functional.gelu(h @ w.t() + b) @ v.t()).float()

    sizes = ((392, 64, 128), (hidden, 128), (hidden,), (128, hidden))
    args = [rand(*s, device=device, dtype=B, seed=n, scale=0.2) for n, s in enumerate(sizes)]
    right(verify(fn, *args, compiled=fuse(fn), hostile=False))
