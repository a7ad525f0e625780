"""States that no thread block holds together: kernels of their own, with copies of what they share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.block.fuse import FusedKernel
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_states import states_apart
from tilefold.plan.greedy import group
from tilefold.plan.hardware import H100
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor import interp
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

TARGET = GpuTarget()

#: Gradients of keys and values; `more`: of what else is summed over the queries, and is returned.
KEYS = """program keys()
  input q: {kind}[8, {n}, {width}]
  input k: {kind}[8, {n}, {width}]
  input v: {kind}[8, {n}, {values}]
  input g: {kind}[8, {n}, {values}]
  input lse: f32[8, {n}]
  dim h = 8
  dim i = {n}
  dim j = {n}
  dim d = {width}
  dim e = {values}
  s[h, i, j]: {kind} = sum[d] q[h, i, d] * k[h, j, d]
  p[h, i, j]: f32 = exp(s[h, i, j] - lse[h, i])
  u[h, i, j]: {kind} = sum[e] g[h, i, e] * v[h, j, e]
  t[h, i, j]: {kind} = p[h, i, j] * u[h, i, j]
  dk[h, j, d]: {kind} = sum[i] t[h, i, j] * q[h, i, d]
  dv[h, j, e]: {kind} = sum[i] {kind}(p[h, i, j]) * g[h, i, e]
{more}
"""
ALONE = "  return dk, dv"


def keys(n: int = 2048, width: int = 256, values: int = 256, kind: str = "bf16", more: str = ALONE) -> Program:
    return parse(KEYS.format(n=n, width=width, values=values, kind=kind, more=more))


def fused(p: Program) -> tuple[FusedKernel, ...]:
    return fuse_for_gpu(p, TARGET).kernels


@pytest.mark.parametrize("width, values, kernels", [(256, 256, 2), (192, 128, 2), (128, 128, 1), (128, 64, 1)])
def test_states_that_do_not_fit_are_two_kernels(width, values, kernels):
    assert len(fused(keys(width=width, values=values))) == kernels


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"n": 128}, "a second kernel takes longer than it saves"),
        ({"width": 512}, "one state alone does not fit"),
        ({"kind": "f32"}, "products that no matrix unit takes"),
    ],
)
def test_one_kernel_stays_one(changes, why):
    p = keys(**changes)
    groups = group(p, frozenset(), TARGET.limits).groups
    assert states_apart(p, groups, TARGET.machine, TARGET.limits) == (p, list(groups)), why


def test_statements_of_a_call_stay_together():
    p = keys()
    groups = group(p, frozenset(), TARGET.limits).groups
    calls = {x.members for x in groups}
    assert states_apart(p, groups, TARGET.machine, TARGET.limits, calls)[0] == p
    assert states_apart(p, groups, TARGET.machine, TARGET.limits)[0] != p


def test_copies_compute_the_program():
    p = keys(n=9, width=256, values=256, more="  z[h, j, e]: f32 = dv[h, j, e] * 2.0\n  return dk, z")
    machine = replace(H100, second_kernel=0.0)
    other, groups = states_apart(p, group(p, frozenset(), TARGET.limits).groups, machine, TARGET.limits)
    assert [x.members[-1] for x in groups] == ["dk", "z"] and len(other.body) == len(p.body) + 2
    gen = torch.Generator().manual_seed(0)
    given = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen).double() for i in p.inputs}
    found, wanted = interp.run(other, given, exact=True), interp.run(p, given, exact=True)
    assert all(torch.equal(found[n], x) for n, x in wanted.items())
