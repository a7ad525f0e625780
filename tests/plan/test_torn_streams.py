"""Streams one end of which no kernel holds: found, and planned in the cheaper way."""

from __future__ import annotations

import pytest

from tilefold import pipeline
from tilefold.plan.gpu import Decisions
from tilefold.plan.hardware import H100
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.text import parse

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

GRADIENT = """program gradient()
  input q: bf16[4, 1024, 128]
  input k: bf16[4, 1024, 128]
  input v: bf16[4, 1024, 128]
  input g: bf16[4, 1024, 128]
  input m: f32[4, 1024]
  dim b = 4
  dim i = 1024
  dim j = 1024
  dim d = 128
  dim e = 128
  s[b, i, j]: bf16 = sum[d] q[b, i, d] * k[b, j, d]
  t[b, i, j]: f32 = tanh(s[b, i, j])
  p[b, i, j]: f32 = exp(where(j <= i, t[b, i, j] * 50.0, -inf) - m[b, i])
  dp[b, i, j]: bf16 = sum[e] g[b, i, e] * v[b, j, e]
  dot[b, i]: f32 = sum[j] p[b, i, j] * dp[b, i, j]
  ds[b, i, j]: bf16 = p[b, i, j] * (dp[b, i, j] - dot[b, i]) * (1.0 - t[b, i, j] * t[b, i, j])
  dk[b, j, d]: bf16 = sum[i] q[b, i, d] * ds[b, i, j]
  dq[b, i, d]: bf16 = sum[j] ds[b, i, j] * k[b, j, d]
  dv[b, j, e]: bf16 = sum[i] p[b, i, j] * g[b, i, e]
  return dq, dk, dv
"""


@pytest.mark.parametrize("refused", [True, False])
def test_products_that_are_in_memory_all_the_same_are_found(refused):
    refuse, _ = pipeline.refuser(None, interpreted=False)
    target = GpuTarget(H100, None, refuse, pipeline.predictor(H100)) if refused else GpuTarget()
    p = parse(GRADIENT)
    _, stored = pipeline._gpu_kernels(p, target, "fast", True, target.streams, Decisions())
    assert stored == ({"s", "dp"} if refused else set())


def test_the_cheaper_way_is_taken(monkeypatch):
    refuse, _ = pipeline.refuser(None, interpreted=False)
    target, p = GpuTarget(H100, None, refuse, pipeline.predictor(H100)), parse(GRADIENT)
    for cheaper in (True, False):
        prices = iter([2.0, 1.0] if cheaper else [1.0, 2.0])
        monkeypatch.setattr(pipeline, "seconds", lambda *_, prices=prices: next(prices))
        made = pipeline.gpu_kernels(p, target)
        assert any(c.name.endswith("_again") for c in made.fused.program.body) is not cheaper
