"""The order of parallel loops: the law, and where the planner uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.block.canonical import canonical
from tilefold.block.fuse import FusedKernel
from tilefold.block.interchange import interchanged, parallel
from tilefold.block.interp import run
from tilefold.errors import ScheduleError
from tilefold.frontend.fuse import trace
from tilefold.plan.greedy import fuse
from tilefold.plan.machine import nominal
from tilefold.plan.search import shapes
from tilefold.runtime.steps import KernelStep
from tilefold.suites import functions as f
from tilefold.tensor.sizes import estimate, extents


def lookup(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x: [B, K], t: [H, K]. The largest sum of a row of each: [B, H]."""
    return (x[:, None] + t).amax(-1)


def kernel(fn, *shapes_: tuple[int, ...]) -> FusedKernel:
    torch._dynamo.reset()
    (k,) = fuse(trace(fn, *(torch.empty(s, device="meta") for s in shapes_)).program).kernels
    return k


def test_parallel_loops_commute():
    b = canonical(kernel(f.attention, (2, 3, 20, 8), (2, 3, 24, 8), (2, 3, 24, 8)).block).block
    dims = parallel(b)
    assert len(dims) >= 2
    x = {i.name: torch.randn([estimate(e, dims=extents(b.sizes)) for e in i.shape]) for i in b.inputs}
    want = run(b, x, {})
    for order in (tuple(reversed(dims)), (*dims[1:], dims[0])):
        turned = interchanged(b, order)
        assert parallel(turned) == order
        got = run(turned, x, {})
        for name, y in want.items():
            torch.testing.assert_close(got[name], y)


def test_what_is_no_order_of_the_loops_is_refused():
    b = kernel(lookup, (4, 8), (5, 8)).block
    for order in (parallel(b)[:1], (*parallel(b), "z"), ("z", "y")):
        with pytest.raises(ScheduleError, match="no parallel loops"):
            interchanged(b, order)


def test_the_larger_operand_is_kept_while_the_other_changes():
    machine = nominal()
    tiers = (*machine.tiers[:-1], replace(machine.tiers[-1], bandwidth=machine.tiers[-1].bandwidth / 100))
    slow = replace(machine, tiers=tiers)
    few, many = (64, 1024), (65536, 1024)
    for a, b, turned in ((few, many, True), (many, few, False)):
        k = kernel(lookup, a, b)
        named = canonical(k.block)
        first = shapes(named.block, extents(named.block.sizes), slow)[0]
        assert bool(first.order) is turned
        own = parallel(named.block)
        innermost = (first.order or own)[-1]
        larger = named.dims[next(d for d, e in k.block.sizes.items() if int(e.value) == many[0])]
        assert innermost != larger


def test_a_kernel_in_another_order_computes_the_same():
    k = kernel(lookup, (37, 50), (70, 50))
    named = canonical(k.block)
    order = tuple(reversed(parallel(named.block)))
    x, t = torch.randn(37, 50), torch.randn(70, 50)
    for step in (KernelStep(k), KernelStep(k, order=order)):
        tensors = {"x": x, "t": t}
        step.run(tensors, {})
        torch.testing.assert_close(tensors[k.block.outputs[0]], lookup(x, t))
    assert [g.dim for g in KernelStep(k, order=order).kernel().grid] == list(order)
