"""Maps that several of a GPU's kernels read: stored, or computed in each of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import call, tensors_read
from tilefold.block.legal import one_kernel
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_again import computed_again, guards
from tilefold.plan.greedy import group
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor import interp
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

TARGET = GpuTarget()
B, F = torch.bfloat16, torch.float32


def layer_norm(dy, x, w, mean, rstd, residual):
    """Gradients of x, scale and shift."""
    normed, d = (x.float() - mean[:, None]) * rstd[:, None], dy.float()
    scaled = d * w.float()
    dx = scaled - scaled.mean(1, keepdim=True) - normed * (scaled * normed).mean(1, keepdim=True)
    return (rstd[:, None] * dx + residual.float()).to(x.dtype), (d * normed).sum(0).to(x.dtype), d.sum(0).to(x.dtype)


def arguments(rows: int, columns: int, device: str = "meta") -> tuple[torch.Tensor, ...]:
    def x(*shape: int, dtype: torch.dtype = B) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    big, row = (rows, columns), (rows,)
    return x(*big), x(*big), x(columns), x(*row, dtype=F), x(*row, dtype=F), x(*big)


def traced(rows: int, columns: int) -> Program:
    torch._dynamo.reset()
    return trace(layer_norm, *arguments(rows, columns)).program


def test_what_is_normalised_is_computed_by_rows_and_by_columns():
    fused = fuse_for_gpu(traced(4096, 768))
    written = [r for k in fused.kernels for r in k.block.results]
    assert not [r for r in written if r.dtype is DType.F32 and {"i", "j"} <= set(r.dims)]
    assert len([k for k in fused.kernels if "x" in {i.name for i in k.block.inputs}]) == 2


def adafactor(p, g, row, col):
    """An update over the roots of its rows' and columns' moving means, no longer than one."""
    s = g.square() + 1e-30
    row, col = 0.99 * row + 0.01 * s.mean(1), 0.99 * col + 0.01 * s.mean(0)
    u = g * (row / row.mean()).rsqrt()[:, None] * col.rsqrt()
    return p - u / u.square().mean().sqrt().clamp(min=1.0), row, col


def test_sums_along_two_axes_that_a_map_held_together_are_kernels_of_their_own_without_it():
    """The map, in memory, was written once and read twice: 197 us of an H100, Inductor's 148."""
    p = trace(
        adafactor, *(torch.empty(*s, device="meta") for s in ((4096, 3001), (4096, 3001), (4096,), (3001,)))
    ).program
    wide = [r.name for k in fuse_for_gpu(p).kernels for r in k.block.results if {"i", "j"} <= set(r.dims)]
    assert wide == ["sub_out"]


def again(text: str, calls: tuple[tuple[str, ...], ...] = ()) -> Program:
    p = parse(text)
    groups = group(p, frozenset(m for call in calls for m in call), TARGET.limits, calls=calls).groups
    return computed_again(p, groups, TARGET.machine, TARGET.limits, calls)[0]


NORM = """program norm()
  input x: bf16[{rows}, {columns}]
  input dy: bf16[{rows}, {columns}]
  input w: bf16[{columns}]
  input mean: f32[{rows}]
  input rstd: f32[{rows}]
  dim i = {rows}
  dim j = {columns}
  n[i, j]: f32 = (x[i, j] - mean[i]) * rstd[i]
  a[i]: f32 = sum[j] dy[i, j] * w[j] * n[i, j]
  z[i, j]: bf16 = rstd[i] * (dy[i, j] * w[j] - n[i, j] * a[i] / {columns}.0)
  s[j]: f32 = sum[i] dy[i, j] * n[i, j]
  return z, s
"""


PAIRS = """program pairs()
  input x: bf16[256, 512]
  dim i = 256
  dim j = 512
  dim k = 512
  dim l = 512
  w[i, j, k]: bf16 = {pair}
  a[i, k]: f32 = sum[j] w[i, j, k]
  b[i, k]: f32 = sum[l] w[i, k, l]
  z[i, k]: bf16 = a[i, k] - b[i, k]
  return z
"""
NEAR = "x[i, k] - x[i, j]"


@pytest.mark.parametrize(
    ("pair", "stored"),
    [
        (f"exp({NEAR}) / (exp({NEAR}) + 1.0)", False),  # twice, but each with one exponential
        (f"pow(tanh({NEAR}), 0.3) / (erf({NEAR}) + 1.0) / (1.0 + exp({NEAR})) / (3.0 + log1p({NEAR}))", True),
    ],
)
def test_pairs_that_two_sums_read_are_stored_where_their_arithmetic_takes_longer(pair, stored):
    """Sums over one element of each pair and over the other: an expression that a pair has twice counts once."""
    after = again(PAIRS.format(pair=pair))
    assert ("w" in {c.name for c in after.body}) == stored


@pytest.mark.parametrize(("rows", "columns"), [(37, 19), (1, 5), (300, 1)])
def test_the_program_means_the_same(rows, columns):
    p = parse(NORM.format(rows=rows, columns=columns))
    after = again(NORM.format(rows=rows, columns=columns))
    gen = torch.Generator().manual_seed(0)
    given = {}
    for i in p.inputs:
        x = torch.randn([int(e.value) for e in i.shape], generator=gen)
        given[i.name] = x.to(i.dtype.torch_dtype) + (1e5 if i.name == "mean" else 0)
    for name, want in interp.run(p, given).items():
        torch.testing.assert_close(interp.run(after, given)[name], want)


def test_what_is_normalised_is_put_in_where_columns_are_summed():
    (s,) = [c for c in again(NORM.format(rows=4096, columns=768)).body if c.name == "s"]
    assert {"x", "mean", "rstd"} <= set(tensors_read(s.body))


ROOT = """program f()
  input x: bf16[4096, 64]
  input y: bf16[4096, 64]
  input v: f32[4096]
  dim i = 4096
  dim j = 64
  r[i]: f32 = rsqrt(v[i] / 64.0 + 0.1)
  z[i, j]: bf16 = x[i, j] * r[i]
  s[j]: f32 = sum[i] y[i, j] * r[i]
  return z, s{more}
"""


def test_a_number_a_row_is_no_kernel_of_its_own():
    assert [c.name for c in again(ROOT.format(more="")).body] == ["z", "s"]
    assert [c.name for c in again(ROOT.format(more=", r")).body] == ["r", "z", "s"]


TABLE = """program f()
  input x: bf16[64, 1024, 128]
  input y: bf16[64, 1024, 128]
  input v: f32[128]
  dim h = 64
  dim i = 1024
  dim j = 128
  t[i, j]: f32 = cos(i * v[j])
  z[h, i, j]: bf16 = x[h, i, j] * t[i, j]
  m[h, i]: f32 = max[j] y[h, i, j] * t[i, j]
  return z, m
"""


def test_a_table_of_cosines_is_not_computed_for_every_head():
    assert again(TABLE) == parse(TABLE)


SUMS = """program f()
  input a: bf16[4096, 2048]
  input b: bf16[4096, 2048]
  input c: bf16[4096, 2048]
  dim i = 4096
  dim j = 2048
  t[i, j]: bf16 = a[i, j] + b[i, j] + c[i, j]
  m[i]: f32 = max[j] t[i, j]
  s[j]: f32 = sum[i] t[i, j]
  return m, s
"""


def test_what_is_made_of_more_than_it_is_stays_in_memory():
    p = parse(SUMS)
    assert again(SUMS) == p


MULTIPLIED = """program f()
  input a: f32[4096, 2048]
  input w: f32[2048, 512]
  dim i = 4096
  dim j = 512
  dim k = 2048
  t[i, k]: f32 = a[i, k] * 2.0
  s[k]: f32 = sum[i] t[i, k]
  y[i, j]: f32 = sum[k] t[i, k] * w[k, j]
  return s, y
"""


def test_operands_of_products_stay_in_memory():
    assert any(c.name == "t" for c in again(MULTIPLIED, calls=(("y",),)).body)
    assert "t" in {ld for c in again(MULTIPLIED).body if c.name == "y" for ld in tensors_read(c.body)}


UNROLLED = """program f()
  input x: f32[8, 12, 512, 16]
  input d: f32[8, 12, 512]
  input w: f32[8, 12, 16]
  dim i = 8
  dim j = 12
  dim k = 512
  dim l = 16
  a1[i, k, l]: f32 = d[i, 3, k] * w[i, 3, l] * x[i, 3, k, l] + d[i, 2, k] * w[i, 2, l]
  a2[i, k, l]: f32 = a1[i, k, l] * x[i, 2, k, l] + d[i, 1, k] * w[i, 1, l]
  a3[i, k, l]: f32 = a2[i, k, l] * x[i, 1, k, l] + d[i, 0, k] * w[i, 0, l]
  o1[i, k]: f32 = max[l] a1[i, k, l]
  o2[i, k]: f32 = max[l] a2[i, k, l]
  o3[i, k]: f32 = max[l] a3[i, k, l]
  z[i, j, k, l]: f32 = where(j < 1, a3[i, k, l], where(j < 2, a2[i, k, l], a1[i, k, l]))
  s[i, j, k]: f32 = sum[l] z[i, j, k, l] * x[i, j, k, l]
  u[i, j, l]: f32 = sum[k] z[i, j, k, l] * d[i, j, k]
  return o1, o2, o3, s, u
"""


def test_states_of_a_recurrence_are_not_computed_again_in_each_block_of_steps():
    """A thread block a step computed the states of all steps, each from the first: of twelve, 72 s of one compiler."""
    p = parse(UNROLLED)
    g = Graph.of(p)
    parts = [
        one_kernel(g, members, TARGET.limits) for members in (("a1", "a2", "a3", "o1", "o2", "o3"), ("z", "s", "u"))
    ]
    (z,) = [c for c in computed_again(p, parts, TARGET.machine, TARGET.limits)[0].body if c.name == "z"]
    assert set(tensors_read(z.body)) == {"a1", "a2", "a3"}


CHOSEN = """program f()
  input x: f32[64, 4096]
  input v: f32[4096]
  dim i = 64
  dim j = 4096
  m[j]: f32 = exp(v[j] * 2.0)
  n[j]: f32 = max[i] x[i, j] * m[j]
  z[i, j]: f32 = {body}
  return n, z
"""


@pytest.mark.parametrize(
    ("body", "times"),
    [
        ("x[i, j] * m[j] + m[j]", 1),
        ("where(i < 9, m[j], 0.0) + where(i < 5, m[j], 1.0)", 2),
        ("where(i < 9, where(i < 5, m[j], 1.0), m[j])", 2),
        ("where(m[j] > 1.0, x[i, j], 0.0)", 1),
    ],
)
def test_what_is_chosen_is_computed_for_each_choice(body, times):
    z = parse(CHOSEN.format(body=body)).body[-1]
    assert len(list(guards(z.body, "m"))) == times


HALVES = """program halves()
  input x: bf16[2, 6, 1024, 1024]
  input m: f32[2, 6, 1024]
  dim b = 2
  dim g = 6
  dim h = 3
  dim i = 1024
  dim j = 1024
  e[b, g, i, j]: f32 = exp(x[b, g, i, j] - m[b, g, i])
  s[b, g, i]: f32 = sum[j] e[b, g, i, j]
  d[b, h, i, j]: bf16 = e[b, {first}, i, j] - e[b, {second}, i, j]
  return s, d
"""


@pytest.mark.parametrize(
    ("first", "second", "stored"),
    [("h * 2", "h * 2 + 1", False), ("h", "h + 3", False), ("0", "1", False), ("h // 2", "h + 3", True)],
)
def test_what_is_read_at_every_second_place_is_computed_there(first, second, stored):
    p = parse(HALVES.format(first=first, second=second))
    groups = [one_kernel(Graph.of(p), members, TARGET.limits) for members in (("e", "s"), ("d",))]
    done, _ = computed_again(p, groups, TARGET.machine, TARGET.limits)
    d = next(c for c in done.body if c.name == "d")
    assert ("e" in tensors_read(d.body)) == stored
    small = {"x": torch.randn(2, 6, 1024, 1)[..., [0] * 1024].bfloat16(), "m": torch.zeros(2, 6, 1024)}
    if not stored:
        got, want = interp.run(done, small), interp.run(p, small)
        torch.testing.assert_close(got["d"], want["d"])


def test_choices_of_a_recurrence_are_counted_up_to_a_limit():
    """Each step reads the one before it under either choice: there are 2^40 ways to the first."""
    p = parse(CHOSEN.format(body="where(x[i, j] > m[j], m[j], 1.0)"))
    state = p.body[-1].body
    for _ in range(40):
        state = call("where", call("gt", state, 0.0), state, call("neg", state))
    assert len(list(islice(guards(state, "m"), 9))) == 9
    deep = replace(p, body=(*p.body[:-1], replace(p.body[-1], body=state)))
    parts = [one_kernel(Graph.of(deep), (m,), TARGET.limits) for m in ("m", "n", "z")]
    done, _ = computed_again(deep, parts, TARGET.machine, TARGET.limits)
    assert "m" in tensors_read(done.body[-1].body)
