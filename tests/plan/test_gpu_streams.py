"""Streams on a GPU: the gradient of attention is planned without a tensor of queries times keys (no device needed)."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.kernels import meta
from tests.tensor.test_streams import program
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import GpuStep
from tilefold.tensor import streams
from tilefold.tensor.text import parse


def test_no_kernel_of_a_gradient_stores_a_stream():
    made = compile_program(program(1024), device="cuda")
    assert all(isinstance(s, GpuStep) for s in made.steps)
    by_name = {c.name: c for c in made.fused.program.body}
    stored = {o.removesuffix("_part") for s in made.steps for o in s.fused.block.outputs}
    assert {"dq", "dk", "dv", "slope"} <= stored
    assert not any({"i", "j"} <= {*by_name[n].dims} for n in stored & by_name.keys())


SHARED = """program shared()
  input x: bf16[2, 1024, 6, 64]
  input g: bf16[2, 1024, 2, 2, 64]
  input m: f32[2, 2, 2, 1024]
  input l: f32[2, 2, 2, 1024]
  input dot: f32[2, 2, 2, 1024]
  dim b = 2
  dim h = 2
  dim r = 2
  dim i = 1024
  dim j = 1024
  dim d = 64
  dim c = 2
  s[b, h, r, i, j]: f32 = sum[d] x[b, i, h * 2 + r, d] * x[b, j, h + 4, d]
  p[b, h, r, i, j]: f32 = exp(where(j <= i, s[b, h, r, i, j] * 0.125, -inf) - m[b, h, r, i]) / l[b, h, r, i]
  dv[b, h, r, j, d]: f32 = sum[i] p[b, h, r, i, j] * g[b, i, h, r, d]
  dp[b, h, r, i, j]: f32 = sum[d] g[b, i, h, r, d] * x[b, j, h + 4, d]
  ds[b, h, r, i, j]: f32 = p[b, h, r, i, j] * (dp[b, h, r, i, j] - dot[b, h, r, i])
  dk[b, h, r, j, d]: f32 = sum[i] x[b, i, h * 2 + r, d] * ds[b, h, r, i, j]
  dq[b, h, r, j, d]: f32 = sum[i] ds[b, h, r, j, i] * x[b, i, h + 4, d]
  both[b, j, h, c, d]: bf16 = where(c < 1, bf16(sk[b, h, j, d]), bf16(sv[b, h, j, d]))
  sk[b, h, j, d]: f32 = sum[r] dk[b, h, r, j, d]
  sv[b, h, j, d]: f32 = sum[r] dv[b, h, r, j, d]
  bias[h, c, d]: f32 = sum[b, j] both[b, j, h, c, d]
  return dq, both, bias
"""


def test_heads_that_share_keys_and_a_sum_over_what_is_written():
    """Gradients of packed projections: the copies stay apart though both are small enough for one block, and the sum
    over rows (a bias' gradient) does not become a loop around the stream's."""
    lines = SHARED.splitlines()
    both = next(n for n, line in enumerate(lines) if line.startswith("  both"))
    lines.insert(both + 2, lines.pop(both))  # after what it reads
    made = compile_program(parse("\n".join(lines)), device="cuda")
    by_name = {c.name: c for c in made.fused.program.body}
    stored = {o for s in made.steps for o in (r[0] for r in s.results)}
    wide = {n for n in stored & by_name.keys() if {"i", "j"} <= {*by_name[n].dims}}
    assert not wide
    assert not any(n.endswith("_parts") for n in stored)


def test_states_of_attention_are_written_by_the_kernel_that_has_them():
    text = """program forward()
  input q: bf16[4, 16, 1024, 64]
  input k: bf16[4, 16, 1024, 64]
  input v: bf16[4, 16, 1024, 64]
  dim b = 4
  dim h = 16
  dim i = 1024
  dim j = 1024
  dim d = 64
  dim e = 64
  s[b, h, i, j]: f32 = sum[d] q[b, h, i, d] * k[b, h, j, d]
  w[b, h, i, j]: f32 = where(j <= i, s[b, h, i, j] * 0.125, -inf)
  top[b, h, i]: f32 = max[j] w[b, h, i, j]
  shift[b, h, i]: f32 = where(top[b, h, i] == -inf, 0.0, top[b, h, i])
  e1[b, h, i, j]: f32 = exp(w[b, h, i, j] - shift[b, h, i])
  total[b, h, i]: f32 = sum[j] e1[b, h, i, j]
  safe[b, h, i]: f32 = where(total[b, h, i] == 0.0, 1.0, total[b, h, i])
  p[b, h, i, j]: f32 = e1[b, h, i, j] / safe[b, h, i]
  o[b, h, i, e]: bf16 = sum[j] p[b, h, i, j] * v[b, h, j, e]
  return o, shift, safe
"""
    made = compile_program(parse(text), device="cuda")
    assert len(made.steps) == 1


SEPARATE = """program separate()
  input q: bf16[32, 197, 12, 64]
  input k: bf16[32, 197, 12, 64]
  input v: bf16[32, 197, 12, 64]
  input y: bf16[32, 197, 12, 64]
  input g: bf16[32, 197, 12, 64]
  input m: f32[32, 12, 197]
  input l: f32[32, 12, 197]
  dim b = 32
  dim h = 12
  dim i = 197
  dim j = 197
  dim d = 64
  s[b, h, i, j]: f32 = sum[d] q[b, i, h, d] * k[b, j, h, d]
  p[b, h, i, j]: f32 = exp(s[b, h, i, j] * 0.125 - m[b, h, i]) / l[b, h, i]
  dv[b, h, j, d]: bf16 = sum[i] p[b, h, i, j] * g[b, i, h, d]
  dp[b, h, i, j]: f32 = sum[d] g[b, i, h, d] * v[b, j, h, d]
  dot[b, h, i]: f32 = sum[d] g[b, i, h, d] * y[b, i, h, d]
  ds[b, h, i, j]: f32 = p[b, h, i, j] * (dp[b, h, i, j] - dot[b, h, i]) * 0.125
  dk[b, h, j, d]: bf16 = sum[i] q[b, i, h, d] * ds[b, h, i, j]
  dq[b, h, i, d]: bf16 = sum[j] ds[b, h, i, j] * k[b, j, h, d]
  return dv, dk, dq
"""


def test_what_is_made_of_a_copy_stays_with_it():
    """Both copies read the sum of results times their gradients, which one of them computes: no way for a part of the
    other one into its kernel."""
    made = compile_program(parse(SEPARATE), device="cuda")
    by_name = {c.name: c for c in made.fused.program.body}
    stored = {r[0] for s in made.steps for r in s.results}
    assert stored >= {"dq", "dk", "dv"}
    assert not any({"i", "j"} <= {*by_name[n].dims} for n in stored & by_name.keys())


LONG = """program long()
  input q: {t}[2, {n}, 64]
  input k: {t}[2, {n}, 64]
  input do: {t}[2, {n}, 64]
  dim b = 2
  dim i = {n}
  dim j = {n}
  dim c = 64
  s[b, i, j]: {t} = sum[c] q[b, i, c] * k[b, j, c]
  p[b, i, j]: f32 = {map}
  dk[b, j, c]: {t} = sum[i] {t}(p[b, i, j]) * q[b, i, c]
  dv[b, j, c]: {t} = sum[i] {t}(exp(p[b, i, j])) * do[b, i, c]
  return dk, dv
"""


@pytest.mark.parametrize(("t", "n", "streamed"), [("bf16", 1024, False), ("bf16", 4096, True), ("f32", 4096, False)])
def test_memory_does_not_grow_with_the_square_of_a_length_however_heavy_a_score_is(t: str, n: int, streamed: bool):
    """Of what matrix units take; float32 passes memory while that is faster by much and there is room."""
    much = " + ".join(f"tanh(s[b, i, j] / {k}.0)" for k in range(50, 80))
    p = parse(LONG.format(t=t, n=n, map=much))
    assert bool(streams.streams(p, GpuTarget().streams)) is streamed


EXACT = """program exact()
  input q: {t}[{b}, 12, 1024, {d}]
  input k: {t}[{b}, 12, 1024, {d}]
  input v: {t}[{b}, 12, 1024, {d}]
  input g: {t}[{b}, 12, 1024, {d}]
  input m: f32[{b}, 12, 1024]
  input dot: f32[{b}, 12, 1024]
  dim b = {b}
  dim h = 12
  dim i = 1024
  dim j = 1024
  dim d = {d}
  s[b, h, i, j]: f32 = sum[d] q[b, h, i, d] * k[b, h, j, d]
  p[b, h, i, j]: f32 = exp(s[b, h, i, j] - m[b, h, i])
  dv[b, h, j, d]: {t} = sum[i] p[b, h, i, j] * g[b, h, i, d]
  dp[b, h, i, j]: f32 = sum[d] g[b, h, i, d] * v[b, h, j, d]
  ds[b, h, i, j]: f32 = p[b, h, i, j] * (dp[b, h, i, j] - dot[b, h, i])
  dk[b, h, j, d]: {t} = sum[i] q[b, h, i, d] * ds[b, h, i, j]
  dq[b, h, i, d]: {t} = sum[j] ds[b, h, i, j] * k[b, h, j, d]
  return dv, dk, dq
"""


def calls(t: str, b: int, d: int) -> int:
    made = compile_program(parse(EXACT.format(t=t, b=b, d=d)), device="cuda")
    return sum(isinstance(s, LibraryStep) for s in made.steps)


def test_scores_that_no_matrix_unit_takes_pass_memory_where_the_library_is_faster_by_more():
    """On an H100, 8 x 12 heads, 1,024 keys of 64 columns of float32: two kernels took 14.1 ms, five calls 2 (and a
    kernel between them, of 1.6 GB). Not of 16 columns, of 16 bits, or where scores would fill the memory."""
    assert calls("f32", 8, 64) == 5
    assert calls("f32", 8, 16) == calls("bf16", 8, 64) == calls("f32", 64, 64) == 0


def test_where_torch_allows_tf32_matrix_units_take_them():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert calls("f32", 8, 64) == 0
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_parts_of_a_result_are_put_together_apart():
    """Keys' gradient in the kernel of a fold over products, beside queries' in one tensor: registers for both."""

    def joined(q, k, v):
        return torch.stack([q, torch.softmax(q @ k.transpose(-1, -2), -1) @ v], 2)

    torch._dynamo.reset()
    args = [meta(4, 12, 1024, 64, dtype=torch.bfloat16) for _ in range(3)]
    f = fuse_for_gpu(trace(joined, *args).program)
    assert [len(k.plan.stages) for k in f.kernels] == [1, 0]
    assert any("one of the parts" in r.reason for r in f.grouping.refusals)
    whole = fuse_for_gpu(trace(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v + q, *args).program)
    assert len(whole.kernels) == 1


HANDED_BACK = """program handed_back()
  input dy: f32[65536, 3]
  input w: f32[3, 256]
  input x: f32[65536, 256]
  input u: f32[256, {o}]
  dim i = 65536
  dim k = 256
  dim l = 3
  dim j = {o}
  y[i, k]: f32 = sum[l] dy[i, l] * w[l, k]
  z[i, k]: f32 = y[i, k] * cos(x[i, k])
  b[k]: f32 = sum[i] z[i, k]
  s[i, j]: f32 = sum[k] z[i, k] * u[k, j]
  return b, s
"""


def test_what_a_stream_ends_in_is_multiplied_too():
    """A layer of three outputs hands back 256 features to a wide layer in front: those are stored for the library."""
    target = GpuTarget()
    copies = {o: streams.apart(parse(HANDED_BACK.format(o=o)), pays=target.streams)[1] for o in (4, 256)}
    assert copies[4] and not copies[256]


OUTER = """program gradients_of_outer_products()
  input a: bf16[128, 192, 32]
  input b: bf16[128, 192, 32]
  input w: bf16[32, 32, {o}]
  input g: bf16[192, 192, {o}]
  dim i = 192
  dim j = 192
  dim c = 32
  dim d = 32
  dim s = 128
  dim o = {o}
  h[i, j, c, d]: f32 = sum[o] g[i, j, o] * w[c, d, o]
  m[i, j, c, d]: bf16 = h[i, j, c, d] / 128.0
  da[s, i, c]: bf16 = sum[j, d] b[s, j, d] * m[i, j, c, d]
  db[s, j, d]: bf16 = sum[i, c] a[s, i, c] * m[i, j, c, d]
  return da, db
"""


def test_ends_of_axes_of_both_sides_read_their_operands_for_each_index_of_one():
    """The gradient of a mean of outer products is made once by the library, which contracts it twice."""
    p = parse(OUTER.format(o=128))
    assert streams.streams(p)
    assert not streams.streams(p, GpuTarget().streams)


MARGIN = """program margin()
  input x: bf16[1024, 192]
  input w: bf16[17984, 192]
  input l: f32[1024]
  dim i = 1024
  dim j = 17984
  dim k = 192
  h[i, j]: bf16 = sum[k] x[i, k] * w[j, k]
  p[i, j]: f32 = {map}
  dx[i, k]: f32 = sum[j] bf16(p[i, j]) * w[j, k]
  dw[j, k]: f32 = sum[i] bf16(p[i, j]) * x[i, k]
  return dx, dw
"""
ONCE = "exp(h[i, j] - l[i])"


def test_arithmetic_that_products_do_not_hide_is_not_done_again_for_each():
    """Gradients of an additive margin: some sixty operations of a logit, of which one kernel of maps makes all."""
    much = " + ".join(f"sqrt(abs(h[i, j] - {n}.0)) / (h[i, j] * h[i, j] + {n}.0)" for n in range(1, 6))
    for text, streamed in ((ONCE, True), (f"{ONCE} * ({much})", False)):
        p = parse(MARGIN.format(map=text))
        assert bool(streams.streams(p, GpuTarget().streams)) is streamed


CAPPED = """program capped()
  input q: bf16[8, 1024, 128]
  input k: bf16[8, 1024, 128]
  input v: bf16[8, 1024, 128]
  input do: bf16[8, 1024, 128]
  input m: f32[8, 1024]
  input l: f32[8, 1024]
  input d: f32[8, 1024]
  dim b = 8
  dim i = 1024
  dim j = 1024
  dim c = 128
  s[b, i, j]: bf16 = sum[c] q[b, i, c] * k[b, j, c]
  t[b, i, j]: bf16 = {cap}
  p[b, i, j]: f32 = exp(where((i - j >= 0) & (i - j < 256), t[b, i, j] * 50.0, -3e38) - m[b, i]) / l[b, i]
  dp[b, i, j]: bf16 = sum[c] do[b, i, c] * v[b, j, c]
  ds[b, i, j]: bf16 = p[b, i, j] * (dp[b, i, j] - d[b, i]) * 50.0 * (1.0 - t[b, i, j] * t[b, i, j]) / 50.0 * 0.09
  dq[b, i, c]: bf16 = sum[j] ds[b, i, j] * k[b, j, c]
  dk[b, j, c]: bf16 = sum[i] ds[b, i, j] * q[b, i, c]
  dv[b, j, c]: bf16 = sum[i] bf16(p[b, i, j]) * do[b, i, c]
  return dq, dk, dv
"""


TANH = "tanh(s[b, i, j] / 50.0)"
HEAVY = " + ".join(f"tanh(s[b, i, j] / {n}.0)" for n in range(50, 62))


@pytest.mark.parametrize(("cap", "streamed"), [("s[b, i, j] / 50.0", {"s", "dp"}), (TANH, {"s", "dp"}), (HEAVY, set())])
def test_what_does_not_stream_is_not_read_by_two_kernels_in_which_others_do(cap: str, streamed: set[str]):
    """Beside scores whose map is too much arithmetic for each gradient, those of weights streamed in two kernels of
    222 us on an H100; calls and the pass between them take 75. One hyperbolic tangent is not too much."""
    p = parse(CAPPED.format(cap=cap))
    found = streams.streams(p, GpuTarget().streams)
    assert {m for x in found for m in x.members} & {"s", "dp"} == streamed
