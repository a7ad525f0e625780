"""Biases of a CPU's products: in the library's call, which copies them to the result first, or in what reads it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.library import LibraryCall, library_calls, library_convolutions


def linear(x, w, b):
    return F.linear(x, w, b)


def activated(x, w, b):
    return F.gelu(F.linear(x, w, b))


def normed(x, w, b):
    return F.layer_norm(x + F.linear(x, w, b), x.shape[-1:])


def again(x, w, b):
    return F.linear(F.linear(x, w, b), w)


def heads(x, w, b):
    q = F.linear(x, w, b).view(4, 16, 4, 16).transpose(1, 2)
    return torch.softmax(q @ q.mT, -1)


def both(x, w, b):
    y = F.linear(x, w, b)
    return y, F.gelu(y)


def parts(x, w, b):
    q, k = F.linear(x, w, b).view(64, 2, 32).unbind(1)
    return F.elu(q) + 1, F.elu(k) + 1


def with_loss(x, w, b):
    y = F.linear(x, w, b)
    return y, y.float().square().mean()


def calls(fn, dtype):
    args = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)
    torch._dynamo.reset()
    p = trace(fn, *(x.to(dtype) for x in args)).program
    named = [c.name for c in p.body if "mm" in c.name]
    _, found = library_calls(p, named, copied=True)
    return [c for c in found.values() if isinstance(c, LibraryCall)]


def test_a_convolution_leaves_its_bias_to_what_reads_it():
    """Of one place, it is a product as well, but its call adds none: a kernel would pass over its result for that."""
    args = torch.randn(2, 64, 8, 8), torch.randn(32, 64, 1, 1), torch.randn(32)
    p = trace(lambda x, w, b: torch.cat((F.conv2d(x, w, b), x), 1), *args).program
    made, found = library_calls(p, library_convolutions(p))
    assert len(found) == 1 and made.body == p.body


@pytest.mark.parametrize(
    ("fn", "inside"),
    [(linear, True), (activated, False), (normed, False), (again, True), (heads, True), (both, True)],
)
def test_a_bias_is_in_the_call_unless_maps_alone_read_the_sum(fn, inside):
    first, *_ = calls(fn, torch.float32)
    assert (first.bias is not None) == inside


@pytest.mark.parametrize(("fn", "dtype"), [(both, torch.float32), (with_loss, torch.bfloat16)])
def test_a_sum_that_is_also_returned_is_what_the_call_makes(fn, dtype):
    torch._dynamo.reset()
    p = trace(fn, *(torch.randn(*shape, dtype=dtype) for shape in ((64, 64), (64, 64), (64,)))).program
    q, found = library_calls(p, [c.name for c in p.body if "mm" in c.name])
    (call,) = found.values()
    assert call.out in p.outputs and len(q.body) == len(p.body)


@pytest.mark.parametrize("fn", [activated, normed, parts, with_loss])
def test_products_of_16_bits_are_rounded_once(fn):
    first, *_ = calls(fn, torch.bfloat16)
    assert first.bias is not None


@pytest.mark.parametrize("fn", [activated, normed])
def test_results_are_those_of_float64(fn):
    args = [torch.randn(64, 64) * 3, torch.randn(64, 64), torch.randn(64) * 100]
    torch._dynamo.reset()
    p = trace(fn, *args).program
    found = compile_program(p)(dict(zip((i.name for i in p.inputs), args, strict=True)), {})
    torch.testing.assert_close(found[p.outputs[0]].double(), fn(*(x.double() for x in args)), rtol=1e-5, atol=1e-4)
