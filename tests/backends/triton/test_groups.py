"""Groups of warps that share a wide state: which kernels have roles, and what the assembler makes of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton import emulated  # noqa: E402
from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.groups import WIDE, shared_out  # noqa: E402
from tests.backends.triton.kernels import kernels, made, variant  # noqa: E402
from tests.backends.triton.test_compile import FEW_BYTES, HOPPER, SHARED, built, spilled  # noqa: E402
from tilefold.backends.triton import build as build_  # noqa: E402
from tilefold.backends.triton import launch  # noqa: E402
from tilefold.backends.triton.config import TritonConfig  # noqa: E402
from tilefold.backends.triton.context import Context  # noqa: E402
from tilefold.backends.triton.dependent import Place  # noqa: E402
from tilefold.backends.triton.gluon import render_groups  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.roles import Roles, readers, roles_of, shared_bytes  # noqa: E402
from tilefold.backends.triton.tiles import default_config  # noqa: E402
from tilefold.block.ir import Block  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402
from tilefold.suites.gpu import operators as o  # noqa: E402
from tilefold.tile.ir import Kernel  # noqa: E402
from tilefold.tile.layout import unit_axis, usual_units  # noqa: E402
from tilefold.tile.text import parse  # noqa: E402
from tilefold.tile.verify import verify  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


def fold_of(name: str, dynamic: Sequence[tuple[int, int]] = ()) -> Block:
    """The fold of a program; `dynamic`: axes of arguments. In one kernel of two sequences for a small device."""
    fn, shapes = WIDE[name]
    alone = name.endswith("one kernel")
    args = [torch.empty((2, *s[1:]) if alone else s, dtype=d, device="meta") for s, d in shapes]
    for n, axis in dynamic:
        torch._dynamo.mark_dynamic(args[n], axis)
    return made(fn, *args, units=1 if alone else 132)[0].block


def wide_kernel(name: str, **changes) -> TritonKernel:
    """The fold of a program, in a configuration for groups."""
    return TritonKernel(fold_of(name), lambda block, sizes: replace(shared_out(block, sizes), **changes))


def roles(name: str, **changes) -> tuple[Kernel, Roles | None]:
    v = variant(wide_kernel(name))  # the usual form: the tile kernel is the same
    return v.kernel, roles_of(v.kernel, replace(v.config, **{"groups": 2, **changes}), {})


@pytest.mark.parametrize("name", WIDE)
def test_nothing_spills_and_all_fits(name, tmp_path):
    v = variant(wide_kernel(name), hopper=True)
    assert v.rendered.groups == 2
    r = built(v, HOPPER)
    assert spilled(r.assembly["ptx"], "sm_90a", tmp_path) <= FEW_BYTES and r.shared <= SHARED[90]
    assert r.has("wgmma.mma_async") and r.has("cp.async.bulk.tensor") and r.has("setmaxnreg.inc")


def test_latent_attention_is_shared_out_by_default():
    k = kernels("latent")[0]
    config = default_config(k.block, k.sizes({}))
    assert config.groups == 2
    assert variant(k, hopper=True).rendered.groups == 2
    # elsewhere, in the interpreter too, the same kernel has its usual form
    assert variant(k).rendered.groups == 0 and variant(k).config == replace(config, groups=0)
    assert variant(k, hopper=True, wide=True).rendered.groups == 0


def test_causal_masks_are_no_reason_against_it():
    h = torch.float16
    wide, narrow = (
        made(o.causal, *(torch.empty((1, 32, 4096, d), dtype=h, device="meta") for d in (64, 64, value)))[0]
        for value in (512, 128)
    )
    assert default_config(wide.block, wide.sizes({})).groups == 2
    assert default_config(narrow.block, narrow.sizes({})).groups == 0


def test_values_that_are_columns_of_the_keys_are_copied_once():
    kernel, r = roles("latent")
    assert r is not None and r.width == 256
    assert [(p.tensor, p.start, p.width) for p in r.parts] == [
        ("latent", 0, 256),
        ("latent", 256, 256),
        ("latent", 512, 64),
    ]
    # scores and one group read the values' columns, scores alone those of the positions
    assert [readers(r, n) for n in range(3)] == [2, 2, 1] and r.shares == (0, 1)
    assert len(r.factors) == 1 and not r.finals  # segments: the state is divided by the combination
    assert {p.tensor for p in r.rows} == {"q"} and kernel.grid[1].tile == 64


def test_what_divides_the_state_at_the_end_is_handed_over():
    _, r = roles("causal")
    assert r is not None and len(r.finals) == 1
    assert [(p.tensor, p.width) for p in r.parts] == [("k_2", 64), ("v", 256), ("v", 256)]
    assert [readers(r, n) for n in range(3)] == [1, 1, 1]


def test_a_sum_without_factors():
    _, r = roles("no softmax")
    assert r is not None and r.factors == () and r.finals == ()


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"groups": 0}, "not asked for"),
        ({"groups": 3}, "512 columns are no three shares"),
        ({"groups": 16}, "a share has fewer columns than a matrix instruction"),
        ({"groups": 1}, "a share has more than the registers of four warps"),
        ({"stages": 4}, "shared memory does not suffice"),
        ({"lanes": {"i": 16}}, "padded rows"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kernels_without_roles(changes, why):
    assert roles("latent", **changes)[1] is None, why


def test_other_row_tiles_and_types_have_no_roles():
    k = wide_kernel("latent")
    config = k.choose(k.block, k.sizes({}))
    v = variant(k)
    (row,) = [t.dim for t in v.kernel.grid if t.tile > 1]
    half = variant(TritonKernel(k.block, lambda b, s: replace(config, tiles={**config.tiles, row: 32})))
    assert roles_of(half.kernel, half.config, {}) is None
    for name in ("attention of float32", "variance", "softmax", "routing"):
        (k, *_) = kernels(name)
        assert roles_of(variant(k).kernel, replace(variant(k).config, groups=2), {}) is None


def test_shared_memory_is_what_the_compiler_takes():
    for name in ("latent", "causal", "no softmax"):
        v = variant(wide_kernel(name), hopper=True)
        r = roles_of(v.kernel, v.config, {})
        assert r is not None
        assert 0 <= shared_bytes(r, v.config) - built(v, HOPPER).shared <= 1024


def test_the_wait_for_the_kernel_ahead_comes_before_all_roles():
    v = variant(wide_kernel("latent"), hopper=True, place=Place(follows=True, followed=True))
    entry = v.rendered.source[v.rendered.source.index(f"def {v.rendered.name}(") :]
    order = [entry.index(s) for s in ("gdc_wait", "gdc_launch_dependents", "allocate_shared_memory", "warp_specialize")]
    assert order == sorted(order)
    ptx = built(v, HOPPER).assembly["ptx"]
    assert len(re.findall(r"griddepcontrol\.\w+", ptx)) == 2


@pytest.mark.parametrize("name", WIDE)
def test_roles_together_compute_the_kernel(name):
    """No deadlock, and the same result."""
    same(*emulate(wide_kernel(name)))


@pytest.mark.parametrize("name, lengths", [("latent, one kernel", [(1, 1)]), ("causal", [(0, 2), (1, 2), (2, 2)])])
def test_one_rendering_serves_all_lengths(name, lengths, tmp_path):
    k = TritonKernel(fold_of(name, lengths), lambda block, sizes: shared_out(block, sizes))
    for n in (300, 64, 130, 1):
        same(*emulate(k, **dict.fromkeys(k.block.syms, n)))
    v = k.variant(usual_units(k.block), k.sizes(dict.fromkeys(k.block.syms, 300)), hopper=True)
    assert spilled(built(v, HOPPER).assembly["ptx"], "sm_90a", tmp_path) <= FEW_BYTES


@pytest.mark.parametrize(
    "change",
    [
        ("taken.index(0), count=2", "taken.index(0), count=3"),
        ("turn = ((it // 2) & 1) ^ 1", "turn = (it // 2) & 1"),
        ("mbarrier.expect(full.index(s), ", "mbarrier.expect(full.index(s), 16 + "),
        ("b_j_2 = 6 - 1 - b_j", "b_j_2 = b_j"),  # of the copying warp alone
    ],
    ids=["a reader too many", "the wrong turn", "bytes that do not come", "blocks in another order"],
)
def test_what_would_hang_a_device_is_found(change, monkeypatch):
    monkeypatch.setattr(emulated, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=r"deadlock|arrivals|bytes"):
        emulate(wide_kernel("causal"), change)


@pytest.mark.parametrize("exactly", [False, True])
def test_a_device_that_refuses_the_groups_gets_the_usual_form(exactly, monkeypatch):
    k = wide_kernel("latent")
    k.exactly = exactly
    tried = []

    def plan(self, xs, syms, place):
        units = tuple(unit_axis(x) for x in xs)
        tried.append(self._config(self.sizes(syms), units, tf32=False).groups)
        if tried[-1]:
            raise BackendError("no such instruction")
        return "planned"

    monkeypatch.setattr(TritonKernel, "_plan", plan)
    sizes = k.sizes({})
    results = [torch.empty([sizes[d] for d in r.dims]) for r in k.block.results]
    xs = [torch.empty(0) for _ in k.block.inputs] + results
    if exactly:
        with pytest.raises(BackendError, match="no such instruction"):
            k.plan(xs, {})
        assert tried == [2]
    else:
        assert k.plan(xs, {}) == "planned" and tried == [2, 0]


@pytest.mark.parametrize("tensor, groups", [("mask", 2), ("k_2", 0), ("q", 0), ("v", 0)])
def test_only_what_is_copied_must_have_rows_that_tensor_maps_describe(tensor, groups, monkeypatch):
    """The mask's rows of 200 bytes are read as ever; of the others, rows that are no multiple of 16 bytes apart."""
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    k = wide_kernel("mask")
    xs = []
    for t, shape in variant(k).params:
        *rest, last = shape({})
        more = last + 4 if t.name == tensor != "mask" else last
        xs.append(torch.zeros((*rest, more), dtype=t.dtype.torch_dtype)[..., :last])
    assert set(k.tensors) >= {"mask", "k_2", "q", "v"}
    assert k._bound(xs, {})[0].rendered.groups == groups


def test_other_versions_of_gluon_are_not_used(monkeypatch):
    assert build_.has_gluon() == triton.__version__.startswith("3.6.")
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert not build_.has_gluon()


MORE = """kernel fold()
  dim j = 128
  dim m = 256
  dim l = 512
  dim n = 64
  in q: f16[128, 64] unit 1
  in k: f16[256, 64] unit 1
  in v: f16[256, 512] unit 1
  out y: f32[128, 512] unit 1
  grid j:64
    alloc acc: f32[j:64, l:512] tile
    fill acc = 0.0
    for m:64
      alloc s: f32[j:64, m:64] tile
      s[j, m] = gemm over n: q[j, n] * k[m, n]
      acc[j, l] gemm= over m: s[j, m] * v[m, l]
      {more}
    alloc z: f32[j:64, l:512] tile
    fill z = 1.0
    z[j, l] = z[j, l] + acc[j, l]
    store y[j, l] over j, l = z[j, l]
"""


@pytest.mark.parametrize(
    "more, has",
    [
        ("acc[j, l] = acc[j, l] * 0.5", True),
        ("acc[j, l] sum= over m: v[m, l] * 2.0", False),  # a sum that is no product
        ("acc[j, l] gemm= over m: s[j, m] * v[m, l]", False),  # two products
        ("s[j, m] = s[j, m] * 2.0", False),  # the probabilities change after they were used
    ],
)
def test_what_the_loop_does_to_the_state(more, has):
    kernel = verify(parse(MORE.format(more=more)))
    config = TritonConfig({"j": 64, "m": 64}, stages=2, groups=2)
    r = roles_of(kernel, config, {})
    assert (r is not None) == has
    if r is not None:  # what begins anew after the loop is the columns' too
        assert len(r.sums_after) == 4 and r.after == ()
        context = Context(kernel, config, {}, wide=False, interpreted=False, nvidia=True)
        assert "v_z = " in render_groups(kernel, r, context).source
