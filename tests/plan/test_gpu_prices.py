"""Prices of GPU kernels by hand arithmetic, and groups that are selected by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.block.programs import ALL, inputs
from tilefold.block.fuse import Fused
from tilefold.block.group import Group
from tilefold.block.interp import run as run_block
from tilefold.plan import gpu
from tilefold.plan.forms import Form
from tilefold.plan.gpu import USUAL, fuse_for_gpu
from tilefold.plan.gpu_cost import gpu_shape
from tilefold.plan.gpu_forms import Given
from tilefold.plan.hardware import H100
from tilefold.plan.selected import Selected, predicted, priced, selected
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.analysis import Graph
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import extents
from tilefold.tensor.text import parse

SEARCH, WHOLE = GpuTarget(search=True), GpuTarget(given=Given(segments=1))
MAP = "program m()\n  input x: f32[{n}]\n  dim i = {n}\n  y[i]: f32 = x[i] * 2.0\n  return y\n"
SUM = """
program s()
  input x: f32[{rows}, {columns}]
  dim i = {rows}
  dim j = {columns}
  y[i]: f32 = sum[j] x[i, j]
  return y
"""
SCORES = """
program a()
  input q: {t}[8, 1024, 64]
  input k: {t}[8, 1024, 64]
  input v: {t}[8, 1024, 64]
  dim h = 8
  dim i = 1024
  dim j = 1024
  dim d = 64
  dim e = 64
  s[h, i, j]: f32 = sum[d] q[h, i, d] * k[h, j, d]
  p[h, i, j]: f32 = exp(minimum(s[h, i, j], 10.0))
  o[h, i, e]: f32 = sum[j] p[h, i, j] * v[h, j, e]
  return o
"""


def cost(text: str, target: GpuTarget = USUAL):
    """Of the one kernel of a program."""
    (k,) = fuse_for_gpu(parse(text), target).kernels
    return gpu_shape(k.block, extents(k.block.sizes, {}), target.machine).cost


def test_a_map_of_much_memory_takes_the_time_of_its_bytes() -> None:
    found = cost(MAP.format(n=1 << 26))
    nbytes = 2 * 4 * (1 << 26)
    assert found.nbytes == nbytes and found.bottleneck == "global"
    assert found.stages["global"] == pytest.approx(nbytes / (0.85 * 3.0e12), rel=0.01)
    assert found.seconds > H100.empty + found.stages["global"]


def test_a_slower_memory_costs_more_and_a_small_kernel_its_start() -> None:
    slow = replace(H100, tiers=(*H100.tiers[:-1], replace(H100.tiers[-1], bandwidth=1e12)))
    at = cost(MAP.format(n=1 << 26), GpuTarget(slow))
    assert at.stages["global"] == pytest.approx(3 * cost(MAP.format(n=1 << 26)).stages["global"])
    assert H100.empty < cost(MAP.format(n=64)).seconds < 2 * H100.empty


def test_few_blocks_use_their_share_of_the_memory() -> None:
    many, one = (cost(SUM.format(rows=n, columns=(1 << 24) // n), WHOLE) for n in (1 << 12, 2))
    assert one.stages["global"] == pytest.approx(many.stages["global"] * 132 / 2, rel=0.1)


def test_values_are_rounded_to_what_they_multiply() -> None:
    narrow, wide = (cost(SCORES.format(t=t), WHOLE).stages["compute"] for t in ("f16", "f32"))
    flops = 2 * 2.0 * 8 * 1024 * 1024 * 64
    assert narrow == pytest.approx(flops / H100.own[next(d for d in H100.own if d.value == "f16")], rel=0.1)
    assert wide > 10 * narrow


def test_a_form_that_holds_too_much_is_not_offered() -> None:
    g = Graph.of(parse(SCORES.format(t="f16")))
    x = Group(("s", "p", "o"), ("h", "i"))
    assert [f for f, _ in USUAL.forms(g, x)] == [Form(segments=2), Form()]
    assert not list(GpuTarget(replace(H100, held=0)).forms(g, x))
    assert list(GpuTarget(replace(H100, held=0)).forms(g, Group(("s",), ("h", "i", "j"))))


def ran(f: Fused, p: Program, n: int) -> dict[str, torch.Tensor]:
    """The results of the kernels, one after the other."""
    tensors = dict(inputs(p, n))
    for k in f.kernels:
        tensors |= run_block(k.block, tensors, dict.fromkeys(k.block.syms, n))
    return {name: tensors[name] for name in p.outputs}


@pytest.mark.parametrize("name", ["softmax", "attention", "routing", "layernorm", "quant_gemm", "refused"])
def test_what_is_selected_is_no_dearer_and_right(name: str) -> None:
    p = parse(ALL[name])
    usual, found = fuse_for_gpu(p), fuse_for_gpu(p, SEARCH)
    assert predicted(found, SEARCH, ()) <= predicted(usual, SEARCH, ())
    assert sorted(m for x in found.grouping.groups for m in x.members) == sorted(c.name for c in found.program.body)
    want, have = run(p, inputs(p, 7), syms=dict.fromkeys(p.syms, 7)), ran(found, p, 7)
    for o in p.outputs:
        torch.testing.assert_close(have[o], want[o], equal_nan=True)


def test_a_dearer_selection_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parse(ALL["softmax"])

    def apart(p: Program, target: object, alone: object, calls: object) -> Selected:
        groups = tuple(Group((c.name,), c.dims) for c in p.body)
        return Selected(gpu.Grouping(groups, ()), {})

    monkeypatch.setattr(gpu, "selected", apart)
    assert len(fuse_for_gpu(p, SEARCH).kernels) == len(fuse_for_gpu(p).kernels) == 1


def test_library_calls_are_kernels_of_their_own_with_the_librarys_price() -> None:
    p = parse(SCORES.format(t="f16"))
    calls = (("s",), ("o",))
    for target in (USUAL, SEARCH):
        f = fuse_for_gpu(p, target, calls=calls)
        found = {x.members: x for x in priced(f, target, calls)}
        assert [found[m].how for m in (("s",), ("p",), ("o",))] == ["library", "maps", "library"]
        assert sum(x.cost.seconds for x in found.values()) == pytest.approx(predicted(f, target, calls))


def test_a_selection_says_why_operators_are_apart() -> None:
    p = gpu.align_reductions(parse(SCORES.format(t="f16")))
    found = selected(p, USUAL, frozenset({"s"}), (("s",),))
    reasons = {(r.producer, r.consumer): r.reason for r in found.grouping.refusals}
    assert reasons["s", "p"] == "a library call computes it"


@pytest.mark.parametrize(("rows", "heads", "tile"), [(1, 32, 4), (1024, 32, 1)])
def test_few_rows_of_heads_that_share_keys_are_in_one_tile(rows: int, heads: int, tile: int) -> None:
    text = SCORES.format(t="bf16").replace("dim h = 8", f"dim h = {heads}").replace("dim i = 1024", f"dim i = {rows}")
    text = text.replace("q: bf16[8, 1024", f"q: bf16[{heads}, {rows}")
    text = text.replace("k[h,", "k[h // 4,").replace("v[h,", "v[h // 4,")
    (k,) = fuse_for_gpu(parse(text), WHOLE).kernels
    tiles = dict(gpu_shape(k.block, extents(k.block.sizes, {}), H100).tiles)
    assert (tiles["h"], tiles["i"]) == (tile, min(rows, H100.rows))
