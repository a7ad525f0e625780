"""Gradients of products along rows: right, and of as many operators however long the rows are."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.frontend.capture.decompose import rewrite_attention
from tilefold.frontend.capture.running_products import cumprod, prod
from tilefold.frontend.regions.assemble import compilations


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls(fn, rows):
    """Operators of a gradient that can be differentiated again, as torch 2.11 traces each."""
    x = (torch.rand(3, rows) + 0.5).requires_grad_()
    y = fn(x, 1)
    with Counting() as counted:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    return counted.calls


def test_a_gradient_has_as_many_operators_however_long_rows_are():
    assert calls(cumprod, 8) == calls(cumprod, 64)
    assert calls(torch.cumprod, 8) < calls(torch.cumprod, 64)  # or this is not needed


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 24)), (-1, (4, 1)), (0, (5, 3)), (1, (2, 23, 3, 8)), (1, (2, 0))])
def test_it_is_right_around_zeros(dim, shape):
    x, dy = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.1] = 0
    x[:1] = x[:1].clamp(min=0.5)  # rows of none
    x.requires_grad_()
    (want,) = torch.autograd.grad(torch.cumprod(x, dim), x, dy)
    (found,) = torch.autograd.grad(cumprod(x, dim), x, dy)
    torch.testing.assert_close(found, want)


def test_functions_and_methods_of_a_graph_have_it():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    found = [
        graph.call_function(torch.cumprod, (x,), {"dim": 1}),
        graph.call_method("cumprod", (x, -1)),
        graph.call_method("cumprod", (x, 0), {"dtype": torch.float64}),
        graph.call_function(torch.prod, (x, 1)),
        graph.call_method("prod", (x, -1, True)),
        graph.call_method("prod", (x,), {"dtype": torch.float64}),
    ]
    graph.output(tuple(found))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    before = [(n.op, n.target) for n in gm.graph.nodes]
    undo = rewrite_attention(gm)
    assert [(n.op, n.target) for n in found] == [("call_function", fn) for fn in (cumprod, prod) for _ in range(3)]
    x = torch.rand(3, 5, requires_grad=True)
    want = torch.cumprod(x, 1), x.cumprod(-1), x.cumprod(0, dtype=torch.float64)
    want += torch.prod(x, 1), x.prod(-1, True), x.prod(dtype=torch.float64)
    made = gm(x)
    assert type(made[0].grad_fn).__name__ == "_ProductBackward"
    assert type(made[4].grad_fn).__name__ == "_WholeBackward"
    torch.testing.assert_close(made, want)
    undo()
    assert [(n.op, n.target) for n in gm.graph.nodes] == before


def test_a_compiled_gradient_is_eagers():
    x = torch.rand(6, 33, dtype=torch.float64)
    x[2, 4:6] = 0
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()

    def loss(x):
        return (x.cumprod(-1) * torch.arange(33.0)).sin().sum()

    torch.compile(loss, backend="tilefold")(a).backward()
    loss(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("dim", "shape"),
    [(-1, (40, 2)), (1, (9, 4, 3)), (0, (5, 40)), (-1, (40, 5)), (None, (3, 4)), (1, (3, 1)), (1, (2, 0)), (None, ())],
)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_whole_products_is_right_around_zeros(dim, shape, keepdim):
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.2] = 0
    x.requires_grad_()
    given = () if dim is None else (dim, keepdim)
    y = torch.prod(x, *given)
    dy = torch.randn_like(y)
    torch.testing.assert_close(prod(x, *given), y)
    (want,) = torch.autograd.grad(y, x, dy)
    (found,) = torch.autograd.grad(prod(x, *given), x, dy)
    torch.testing.assert_close(found, want)


def test_a_product_of_products_can_be_differentiated_again():
    x = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: prod(x, 1), (x,))
    assert torch.autograd.gradgradcheck(lambda x: prod(x[:, :3], 1), (x,))


@pytest.mark.parametrize("length", [2, 3, 9])
def test_a_whole_products_gradient_is_covered(length):
    x = torch.randn(7, length)
    x[2, 1] = 0
    x[3, :2] = 0
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    compilations.clear()
    torch.compile(lambda x: x.prod(-1).sin(), backend="tilefold")(a).sum().backward()
    b.prod(-1).sin().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert [f for c in compilations for f in c.fallbacks] == []
