"""Default renderings of the suites' kernels compiled for GPUs that are not here: registers, instructions, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import normalised_product  # noqa: E402
from tests.backends.triton.kernels import PROGRAMS, assembled, heads, kernels, made, meta, variant  # noqa: E402
from tests.backends.triton.warp_rows import mixed_up  # noqa: E402
from tilefold.backends.triton.build import Job, Target  # noqa: E402
from tilefold.backends.triton.build import built as compile_job  # noqa: E402
from tilefold.backends.triton.compile import resources  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel, Variant  # noqa: E402
from tilefold.backends.triton.values import float32, in_parts  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402
from tilefold.frontend.fuse import trace  # noqa: E402
from tilefold.frontend.operators.random import random16_op, random_op  # noqa: E402
from tilefold.pipeline import compile_program  # noqa: E402
from tilefold.runtime.steps import GpuStep, usual_variant  # noqa: E402

HOPPER, AMPERE, MI300 = Target("cuda", 90), Target("cuda", 80), Target("hip", "gfx942", 64)
#: Bytes that a thread may spill and the kernel still counts as one that does not.
FEW_BYTES = 16
#: Shared memory of a thread block, bytes.
SHARED = {90: 232_448, 80: 166_912}


pytestmark = pytest.mark.usefixtures("own_cache")


def spilled(ptx: str, arch: str, folder: Path) -> int:
    """Bytes that a thread stores because registers do not suffice, as the assembler reports them."""
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", assembled(ptx, arch, folder)))


def built(v: Variant, target: Target):
    return resources(v.kernel, v.rendered, v.config, target)


@pytest.mark.parametrize("name", PROGRAMS)
def test_defaults_do_not_spill_on_hopper(name, tmp_path):
    for k in kernels(name):
        r = built(variant(k), HOPPER)
        assert spilled(r.assembly["ptx"], "sm_90a", tmp_path) <= FEW_BYTES, k.block.name
        assert r.shared <= SHARED[90]


def test_indices_of_data_are_asserted_and_nothing_else(monkeypatch):
    ids, w = meta(512, dtype=torch.int64), meta(1000, 256)
    rows = lambda ids, w: w[ids].float().softmax(-1)  # noqa: E731
    (checked,) = made(rows, ids, w)
    assert "__assertfail" in built(variant(checked), HOPPER).assembly["ptx"]
    monkeypatch.setenv("TILEFOLD_INDEX_CHECKS", "0")
    (plain,) = made(rows, ids, w)
    (softmax,) = kernels("softmax")
    for k in (plain, softmax):
        assert "assert" not in built(variant(k), HOPPER).assembly["ptx"]


def test_functions_of_elements_have_no_branches():
    """Elements of a thread wait for one another where one branches: a softplus and a tangent have eight an element."""
    (k,) = made(torch.nn.functional.mish, meta(4096, 512, dtype=torch.float32))
    assert not re.search(r"\bbra\b", built(variant(k), HOPPER).assembly["ptx"])


def test_quotients_are_rounded_before_they_are_subtracted():
    """One of two in a fused multiply-add would not be: equal ones would differ."""

    def steps(x):
        shares = x / x.abs().sum(-1, keepdim=True)
        return shares[:, 1:] - shares[:, :-1]

    *_, k = made(steps, meta(64, 4096, dtype=torch.float32))
    text = built(variant(k), HOPPER).assembly["ptx"]
    assert "fma.rn.f32" in text and re.search(r"\bsub(\.rn)?\.f32", text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_and_by_numbers_compile(dtype):
    """A number is a float32 to Triton: of float64 the two types would differ (`torch.logspace` is 2.0 ** x)."""
    for fn in (lambda x: 2.0**x, lambda x: x**0.7):
        (k,) = made(fn, meta(4096, dtype=dtype))
        assert built(variant(k), HOPPER).assembly["ptx"]


def test_quotients_by_a_number_are_not_all_off_by_what_its_inverse_lacks():
    """The inverse of 49 is off by 2^-25.6: differences of means by it were off by 40 times what eager's were."""
    (k,) = made(lambda x: x.sum(-1) / 49, meta(4096, 49, dtype=torch.float32))
    v = variant(k)
    assert re.search(r"tf_by_parts\(\w+, 0.0204081\d+, \d\.\d+e-1\d\)", v.rendered.source)
    assert not re.search(r"\bdiv\.\w*\.?f32", built(v, HOPPER).assembly["ptx"])
    for fn, kind in ((lambda x: x.sum(-1) / 49, torch.bfloat16), (lambda x: x.sum(-1) / 64, torch.float32)):
        (k,) = made(fn, meta(4096, 49, dtype=kind))
        assert "tf_by_parts(" not in variant(k).rendered.source.split("@triton.jit")[-1]


@pytest.mark.parametrize("by", [3.0, 49.0, -7.0, 1e-3, 1e30, 2.0**-90])
def test_an_inverse_in_parts(by):
    low, rest = in_parts(1 / by)
    assert abs(low) <= abs(1 / by) and low * rest >= 0 and float32(low) == low and float32(rest) == rest
    assert abs((low + rest) * by - 1) < 2**-46


def test_groups_of_warps_draw_numbers_of_16_bits():
    """Their loops are written out, and leave no registers for ten rounds and a counter for each two numbers."""

    def attention(q, k, v, seed, draw, limit):
        p = (q @ k.mT).float().softmax(-1)
        return (p * (draw(seed, p.shape) < limit)).to(q.dtype) @ v

    args = (*heads(4, 16, 1024, 1024, 64), meta(2, dtype=torch.int64))

    def groups(*how) -> int:
        return sum(variant(k, hopper=True).rendered.groups for k in made(lambda *a: attention(*a, *how), *args))

    assert groups(random16_op, 1 << 15) and not groups(random_op, 1 << 23)


def test_a_spill_is_seen(tmp_path):
    (k,) = kernels("causal")
    config = replace(variant(k).config, tiles={"i": 1, "j": 128, "l": 128}, warps=4)
    v = variant(TritonKernel(k.block, lambda block, sizes: config))
    assert spilled(built(v, HOPPER).assembly["ptx"], "sm_90a", tmp_path) > FEW_BYTES


@pytest.mark.parametrize("name", ["heads of 64", "grouped decode", "variance"])
@pytest.mark.parametrize("target", [AMPERE, MI300], ids=lambda t: str(t.arch))
def test_other_architectures_compile_without_spills(name, target, tmp_path):
    for k in kernels(name):
        r = built(variant(k, nvidia=target is AMPERE), target)
        if target is AMPERE:
            assert spilled(r.assembly["ptx"], "sm_80", tmp_path) <= FEW_BYTES and r.shared <= SHARED[80]
        else:
            assert re.findall(r"\.vgpr_spill_count: +(\d+)", r.assembly["amdgcn"]) == ["0"]


def test_attention_uses_matrix_units_and_copies_by_tensor_map():
    (k,) = kernels("causal")
    v = variant(k)
    r = built(v, HOPPER)
    assert v.config.descriptors and r.has("wgmma.mma_async") and r.has("cp.async.bulk.tensor")
    plain = built(variant(k, plain=True), HOPPER)
    assert plain.has("wgmma.mma_async") and not plain.has("cp.async.bulk.tensor")
    ampere = built(v, AMPERE)
    assert ampere.has("mma.sync") and not ampere.has("wgmma")
    assert built(variant(k, plain=True), MI300).has("mfma")


@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_exponentials_of_large_float32_have_two_parts(scale):
    """Of one product with log2(e) the error is that of its rounding times |x|: 2e-6 at 30 (float64, emulated)."""
    for dtype, exact in ((torch.float32, True), (torch.bfloat16, False)):
        (k,) = made(lambda x: torch.exp(x * scale), meta(70, 500, dtype=dtype))
        assert ("libdevice.exp(" in variant(k).rendered.source) is exact
        assert built(variant(k), HOPPER).has("ex2.approx")
        built(variant(k, plain=True), MI300)
    (k,) = made(lambda x: torch.softmax(x, -1), meta(70, 500, dtype=torch.float32))
    assert "libdevice.exp(" not in variant(k).rendered.source  # nothing is large there


def test_kernels_without_products_use_none():
    for k in kernels("variance"):
        r = built(variant(k), HOPPER)
        assert not r.has("mma.sync") and not r.has("wgmma.mma_async")


def test_inertia_loads_elements_and_holds_no_coordinate_in_a_padded_vector():
    (k,) = kernels("inertia")
    v = variant(k)
    assert "tl.arange(0, 4)" not in v.rendered.source
    assert v.rendered.source.count("tl.sum(") == 7  # m, m x a tile; the moments once


def test_what_does_not_compile_is_an_error_of_ours():
    (k,) = kernels("causal")
    v = variant(k)
    bad = replace(v, rendered=replace(v.rendered, source=v.rendered.source.replace("tl.dot(", "tl.no_such(")))
    with pytest.raises(BackendError, match="does not compile"):
        built(bad, HOPPER)


def with_probabilities(q, k, v):
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    p = torch.softmax((q @ k.mT).float() * 0.125, -1)
    return (p.to(q.dtype) @ v).transpose(1, 2), p


def test_a_source_that_is_no_python_is_an_error_of_ours():
    job = Job("broken", "import triton\n\n\n@triton.jit\ndef broken(p):\n    x = = 1\n", {"p": "*fp32"}, (), {})
    with pytest.raises(BackendError, match=r"source of broken is no Python: .*x = = 1"):
        compile_job(job, HOPPER)


def test_a_product_that_registers_do_not_hold_is_refused_and_the_program_split():
    """16 rows of 4,096 columns: of as many elements Triton's code wrote outside of shared memory on a device."""
    args = heads(4, 16, 1024, 4096, 64, kv=4)
    refused = []
    for k in made(with_probabilities, *args):
        try:
            variant(k, hopper=True)
        except BackendError as err:
            refused.append(err.message)
    assert len(refused) == 1 and "would hold 65536 elements" in refused[0]
    torch._dynamo.reset()
    steps = compile_program(trace(with_probabilities, *args).program, device="cuda", load=False).steps
    assert len(steps) > 1 and not any(isinstance(usual_variant(s.triton), str) for s in steps if isinstance(s, GpuStep))


def several_queries(q, k, v):
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    return torch.softmax(q @ k.mT, -1) @ v


def test_a_product_that_rows_hold_has_as_few_as_registers_hold():
    first, _ = made(with_probabilities, *heads(4, 16, 1024, 1024, 64, kv=4))
    v = variant(first, hopper=True)
    assert v.config.tiles["k"] == 16 and built(v, HOPPER).shared <= SHARED[90]


def test_several_queries_of_heads_that_share_keys_compile():
    """Rows of two axes in a tile. Where a loop's state was reshaped for a product to add to, Triton aborted."""
    first, _ = made(several_queries, *heads(2, 32, 8, 4096, 128, kv=8))
    v = variant(first, hopper=True)
    assert "tl.reshape(tl.dot(" in v.rendered.source and "[4, 16, 128]" in v.rendered.source
    assert built(v, HOPPER).shared <= SHARED[90]


def routed(x, weight, gate):
    h = x.float()
    h = weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    values, places = torch.topk((h @ gate.mT).float(), 2)
    return h, torch.softmax(values, -1), places


def test_rows_that_the_threads_of_a_product_could_not_hold_are_another_kernel(tmp_path):
    args = meta(4096, 1024), meta(1024), meta(4, 1024)
    (whole,) = made(routed, *args)
    with pytest.raises(BackendError, match=r"a store to .* would hold 32768 elements"):
        variant(whole, hopper=True)
    torch._dynamo.reset()
    steps = compile_program(trace(routed, *args).program, device="cuda", load=False).steps
    found = [usual_variant(s.triton) for s in steps if isinstance(s, GpuStep)]
    assert len(found) > 1
    for v in found:
        assert isinstance(v, Variant) and spilled(built(v, HOPPER).assembly["ptx"], "sm_90a", tmp_path) <= FEW_BYTES


@pytest.mark.parametrize("columns", [300, 320])
def test_a_state_that_a_step_reads_before_it_adds_to_it_is_added_to_in_the_loop(columns):
    """The sums of the weights' columns move the product. Triton would keep a part of them in each thread until the
    end: of 300 columns the product was wrong by 8 %; of 320, where nothing reads them at the end, it aborted."""
    (k,) = made(normalised_product, meta(70, columns, dtype=torch.float32), meta(columns, 64, dtype=torch.float32))
    v = variant(k, hopper=True)
    assert "tl.sum(tl.trans(x_w), 0)" in v.rendered.source  # else the compilation below ends the process
    loop = built(v, HOPPER).assembly["ttgir"].split("scf.for")[1]
    assert not re.search(r"tensor<64x\d+x\d+xf32", loop)  # parts of sums, an axis for those of a thread


def of_pooled(x):
    """Sums, and sums of squares, of what 2 x 2 windows of images come to, and of the images."""
    y = (x[:, ::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, ::2] + x[:, 1::2, 1::2]) / 4
    return x.sum((1, 2)), y.sum((1, 2)), y.square().sum((1, 2)), y.logsumexp((1, 2))


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(lambda x: x.sum((1, 2)), (5280, 20, 24)), (of_pooled, (5280, 20, 24)), (lambda x: x.amax((1, 2)), (300, 5, 60))],
    ids=["sums", "pooled", "short"],
)
def test_rows_are_not_mixed_up_where_axes_are_reduced_as_one(fn, shape):
    """`x.sum((1, 2))` of 5280 x 20 x 24 was: two rows a block, each summed over half of both."""
    for k in made(fn, meta(*shape, dtype=torch.float32)):
        v = variant(k, hopper=True)
        assert mixed_up(built(v, HOPPER).assembly["ttgir"]) == [], k.block.name


def test_sums_that_nothing_in_the_loop_reads_stay_with_their_threads():
    (k,) = made(lambda x: x.sum(-1), meta(70, 5000, dtype=torch.float32))
    v = variant(k, hopper=True)
    assert "tl.sum(" in v.rendered.source and "tl.trans(" not in v.rendered.source
    built(v, HOPPER)
