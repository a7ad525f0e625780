"""Gradients of running products and log-sum-exps are one operator, right also around zeros and infinities."""

from __future__ import annotations

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tilefold.frontend.capture.decompose import decompositions
from tilefold.frontend.operators.prefix_gradient import prefix_gradient_op
from tilefold.frontend.training.prefix_gradients import one_scan

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

ATEN = torch.ops.aten


def joint(dim, *shape, device="cuda:0", scan=torch.cumprod):
    """The joint graph of a scan, of a fake device's tensors."""
    x = torch.empty(shape, requires_grad=True)
    gm = aot_export_joint_simple(
        lambda x: (scan(x * 2, dim),), (x,), trace_joint=True, decompositions=dict(decompositions())
    )
    for n in gm.graph.nodes:
        if isinstance(val := n.meta.get("val"), FakeTensor):
            n.meta["val"] = FakeTensor(val.fake_mode, val.detach().to("meta"), torch.device(device))
    return gm


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 24)), (-1, (6, 129)), (1, (2, 23, 3, 8))])
def test_it_is_one_operator(dim, shape):
    gm = joint(dim, *shape)
    assert one_scan(gm.graph) == 1
    (n,) = gm.graph.find_nodes(op="call_function", target=prefix_gradient_op)
    assert n.args[3:] == (dim % len(shape), "prod")
    left = {m.target for m in gm.graph.nodes if m.op == "call_function"}
    assert not {ATEN.cumsum.default, ATEN.scatter.value, ATEN.max.dim, ATEN.flip.default} & left
    x, g = torch.rand(shape) / 2 + 0.25, torch.randn(shape)
    x[0, 2:4] = 0
    x[-1, 0] = 0
    wide = x.double().requires_grad_()
    (want,) = torch.autograd.grad((wide * 2).cumprod(dim), wide, g.double())
    found = tree_leaves(torch.fx.Interpreter(gm).run(x, g))[-1]
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 24)), (1, (2, 23, 8))])
def test_a_log_sum_is_too(dim, shape):
    gm = joint(dim, *shape, scan=torch.logcumsumexp)
    assert one_scan(gm.graph) == 1
    (n,) = gm.graph.find_nodes(op="call_function", target=prefix_gradient_op)
    assert n.args[3:] == (dim, "logsumexp")
    assert len(gm.graph.find_nodes(op="call_function", target=ATEN.logcumsumexp.default)) == 1
    x, g = torch.randn(shape) * 9, torch.randn(shape)
    x[0, 2:4] = -torch.inf
    g[-1, 3:6] = 0
    wide = x.double().requires_grad_()
    (want,) = torch.autograd.grad(torch.logcumsumexp(wide * 2, dim), wide, g.double())
    found = tree_leaves(torch.fx.Interpreter(gm).run(x, g))[-1]
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


def test_another_difference_of_exponentials_stays():
    def close(x):
        y = torch.logcumsumexp(x, 0)
        return (x - y).exp() - (x + y).exp()

    x = torch.empty(24, requires_grad=True)
    gm = aot_export_joint_simple(lambda x: (close(x),), (x,), trace_joint=True, decompositions=dict(decompositions()))
    for n in gm.graph.nodes:
        if isinstance(val := n.meta.get("val"), FakeTensor):
            n.meta["val"] = FakeTensor(val.fake_mode, val.detach().to("meta"), torch.device("cuda:0"))
    assert one_scan(gm.graph) == 1  # that of the scan, not the function itself


def test_what_stays():
    assert one_scan(joint(0, 1 << 12, 4).graph) == 1  # many chunks: blocks of them
    assert one_scan(joint(1, 6, 24, device="cpu").graph) == 0  # which has no such kernel
