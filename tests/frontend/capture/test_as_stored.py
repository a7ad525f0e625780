"""Values that memory does not hold: negated or conjugated when they are read, zeros without memory."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.capture.as_stored import as_stored, stored_otherwise
from tilefold.frontend.capture.decompose import decompositions


def numbers(seed: int = 0, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fn", [lambda x: x * 2 + 1, lambda x: x.sum(1), lambda x: x.t() * x[:, 0]])
def test_arguments_that_are_negated_when_read(fn):
    x = numbers().conj().imag
    assert x.is_neg()
    run = torch.compile(fn, backend="tilefold")
    torch.testing.assert_close(run(x), fn(x))
    plain = x.resolve_neg()
    torch.testing.assert_close(run(plain), fn(plain))


def test_a_negated_argument_is_written_over():
    def fn(x, y):
        x.mul_(3)
        x[0] = y
        return x.sum(0)

    ours, eagers, y = numbers(), numbers(), torch.ones(4)
    found = torch.compile(fn, backend="tilefold")(ours.conj().imag, y)
    torch.testing.assert_close(found, fn(eagers.conj().imag, y))
    torch.testing.assert_close(ours, eagers)


@pytest.mark.parametrize("fn", [lambda z: z.conj().imag * 1, lambda z: z.conj().imag, lambda z: (z * 2).conj().imag])
def test_imaginary_parts_of_conjugates(fn):
    z = numbers()
    torch.testing.assert_close(torch.compile(fn, backend="tilefold")(z), fn(z))


def test_gradients_that_are_conjugated_when_read():
    def gradient(run):
        x = numbers().requires_grad_()
        (run(x).conj() * numbers(1)).real.sum().backward()
        return x.grad

    def fn(x):
        return x * 2 + x * x

    torch.testing.assert_close(gradient(torch.compile(fn, backend="tilefold")), gradient(fn))


def test_zeros_without_memory_are_zeros_in_a_graph():
    """The derivative of what does not depend on x: a kernel read from address 0."""

    def fn(x, w):
        return torch.func.jvp(lambda x: (x @ w).tanh(), (x,), (x,))[1]

    def step(run):
        x, w = (numbers(k, torch.float32).requires_grad_() for k in (0, 1))
        made = run(x, w.t())
        made.sum().backward()
        return made, x.grad, w.grad

    for found, want in zip(step(torch.compile(fn, backend="tilefold")), step(fn), strict=True):
        torch.testing.assert_close(found, want)
    zeros = decompositions()[torch.ops.aten._efficientzerotensor.default]((3, 4), dtype=torch.float64)
    assert zeros.data_ptr() and not zeros.any()


def test_what_memory_holds_stays():
    x = numbers(dtype=torch.float32)
    assert as_stored(x) is x
    assert not as_stored(torch._efficientzerotensor((3, 4)))._is_zerotensor()
    graph = torch.fx.symbolic_trace(lambda tangents_1, x: tangents_1 + x).graph
    for n in graph.find_nodes(op="placeholder"):
        n.meta["val"] = x
    assert stored_otherwise(graph, gradients=False) == []
    assert stored_otherwise(graph, gradients=True) == [0]


def test_a_gradient_that_there_is_not():
    assert as_stored(None) is None
