"""What is around a step: gradients added up, gradients of functions, and gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilefold.frontend.regions.assemble import Options
from tilefold.frontend.regions.execute import interpreted
from tilefold.frontend.torch_compile import compile_captured


@pytest.fixture
def compiled():
    """Compiles a function to programs that the interpreter runs; the programs of its graphs."""
    torch._dynamo.reset()
    programs = []

    def run(program, *, device="cpu"):
        programs.append(program)
        return interpreted(program)

    def backend(gm, examples):
        return compile_captured(gm, examples, Options(run, leftover="eager"))

    return lambda fn, **how: (torch.compile(fn, backend=backend, **how), programs)


def loss(x, w):
    return F.softplus(torch.tanh(x @ w)).square().mean()


def arguments():
    gen = torch.Generator().manual_seed(0)
    return torch.randn(12, 8, generator=gen), torch.randn(8, 6, generator=gen)


def test_gradients_add_up(compiled):
    x, w = arguments()
    fast, _ = compiled(loss)
    mine, theirs = (w.clone().requires_grad_() for _ in range(2))
    for scale in (1.0, 0.5, 2.0):
        fast(scale * x, mine).backward()
        loss(scale * x, theirs).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_gradients_of_functions(compiled):
    x, w = arguments()
    fast, programs = compiled(torch.func.grad(loss, argnums=1))
    torch.testing.assert_close(fast(x, w), torch.func.grad(loss, argnums=1)(x, w), rtol=1e-5, atol=1e-6)
    assert programs


def test_gradients_of_gradients_are_refused_with_a_reason(compiled):
    x, w = arguments()
    fast, _ = compiled(loss)
    w.requires_grad_()
    (first,) = torch.autograd.grad(fast(x, w), w, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()
