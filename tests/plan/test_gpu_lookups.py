"""Elements found by the values of others: looked up by a kernel of their own beside products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.block.interp import run
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_lookups import lookups_apart
from tilefold.plan.greedy import group
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.text import parse, show

TARGET = GpuTarget()

#: Attention in `b` windows of `n` places with a bias by distance.
WINDOWS = """program windows()
  input q: bf16[{b}, {n}, 32]
  input k: bf16[{b}, {n}, 32]
  input v: bf16[{b}, {n}, 32]
  input table: f32[225]
  input index: i64[{n}, {n}]
  dim b = {b}
  dim i = {n}
  dim j = {n}
  dim d = 32
  bias[i, j]: f32 = {bias}
  s[b, i, j]: f32 = sum[d] q[b, i, d] * k[b, j, d]
  t[b, i, j]: f32 = s[b, i, j] + bias[i, j]
  m[b, i]: f32 = max[j] t[b, i, j]
  e[b, i, j]: f32 = exp(t[b, i, j] - m[b, i])
  z[b, i]: f32 = sum[j] e[b, i, j]
  y[b, i, d]: f32 = sum[j] bf16(e[b, i, j]) * v[b, j, d]
  o[b, i, d]: bf16 = y[b, i, d] / z[b, i]
  return o
"""
LOOKED_UP = "table[index[i, j]] * 16.0"


def windows(b: int = 4096, n: int = 64, bias: str = LOOKED_UP):
    return parse(WINDOWS.format(b=b, n=n, bias=bias))


def parts(p) -> list[tuple[str, ...]]:
    groups = group(p, frozenset(), TARGET.limits).groups
    return [x.members for x in lookups_apart(p, groups, TARGET.machine, TARGET.limits)[1]]


def test_a_bias_of_many_windows_is_looked_up_once():
    first, second = parts(windows())
    assert first == ("bias",) and second[-1] == "o" and "bias" not in second
    kernels = fuse_for_gpu(windows(), TARGET).kernels
    assert [k.block.results[-1].name for k in kernels] == ["bias", "o"]


@pytest.mark.parametrize(
    "p, why",
    [
        (windows(b=4), "four windows find it as fast themselves"),
        (windows(bias="f32(i) * 0.5 + f32(j)"), "nothing is looked up"),
        (windows(bias="f32(index[i, j]) * 0.5"), "read where it lies"),
    ],
)
def test_what_stays_inside(p, why):
    groups = group(p, frozenset(), TARGET.limits).groups
    assert parts(p) == [x.members for x in groups], why


def test_a_call_s_statements_stay_together():
    p = windows()
    groups = group(p, frozenset(), TARGET.limits).groups
    calls = {x.members for x in groups}
    assert lookups_apart(p, groups, TARGET.machine, TARGET.limits, calls) == (p, list(groups))


def test_a_lookup_within_a_statement_becomes_one():
    p = windows(bias="0.0")
    p = replace(p, body=tuple(c for c in p.body if c.name != "bias"))
    p = parse(show(p).replace("bias[i, j]", LOOKED_UP))
    first, second = parts(p)
    assert first == ("t_read",) and second[-1] == "o"


@pytest.mark.parametrize("bias", [LOOKED_UP, "table[index[i, j]]"])
def test_the_kernels_compute_the_program(bias):
    p, gen = windows(b=64, n=16, bias=bias), torch.Generator().manual_seed(0)
    given = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen).double() for i in p.inputs[:4]}
    given["index"] = torch.randint(0, 225, (16, 16), generator=gen)
    target = GpuTarget(machine=replace(TARGET.machine, second_kernel=0.0))
    kernels = fuse_for_gpu(p, target).kernels
    assert len(kernels) == 2
    made = dict(given)
    for k in kernels:
        made |= run(k.block, made, {}, exact=True)
    bias = given["table"][given["index"]] * (16.0 if bias is LOOKED_UP else 1.0)
    wanted = torch.softmax(torch.einsum("bid,bjd->bij", given["q"], given["k"]) + bias, -1) @ given["v"]
    torch.testing.assert_close(made["o"], wanted)
