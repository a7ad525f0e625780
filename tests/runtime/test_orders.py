"""Kernels write results in the order of axes in which a product of the library reads them: no copy between."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.memory_orders import library_copies
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.orders import strides_in
from tilefold.runtime.steps import FusedStep

aten = torch.ops.aten
#: [B, H, S, D] as [B, S, H, D].
HEADS = [(0, 2, 1, 3)]


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func in (aten.clone.default, aten._to_copy.default, aten.copy_.default)
        return func(*args, **(kwargs or {}))


def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def projected(q, k, v, o):
    b, h, s, d = q.shape
    return attention(q, k, v).transpose(1, 2).reshape(b, s, h * d) @ o


def normalised(q, k, v, o):
    """Another kernel reads it too."""
    y = attention(q, k, v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)
    return y @ o, y * 2


def by_heads(q, k, v, o):
    """A product a head, of the rows of all images."""
    return attention(q, k, v) @ o.view(1, q.shape[1], q.shape[3], -1)


def by_images(q, k, v, o):
    """A product an image and head: no copy in either order."""
    return attention(q, k, v) @ torch.softmax(k.mT, -1)


def kept(q, k, v, o):
    """The caller sees it as it is."""
    y = attention(q, k, v)
    return y, y.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) @ o


def tensors(b=2, h=3, s=60, d=16, columns=16384):
    return (*(torch.randn(b, h, s, d) for _ in range(3)), torch.randn(h * d, columns) / 7)


def compiled(fn, args, device="interpreter"):
    """For a GPU, or for the CPU, whose plan may be another."""
    traced = trace(fn, *args)
    return compile_program(traced.program, device=device), traced


def read_by_products(fn):
    """The program of a GPU, and the statements whose results its library products read."""
    program, _ = compiled(fn, tensors())
    read = {name for s in program.steps if isinstance(s, LibraryStep) for name in s.reads}
    return program, [c for c in program.program.body if c.name in read]


@pytest.mark.parametrize(
    ("fn", "found"),
    [(projected, HEADS), (normalised, HEADS), (by_heads, []), (by_images, [(0, 1, 3, 2)]), (kept, HEADS)],
)
def test_the_order_is_that_of_a_product_that_would_copy(fn, found):
    """Dims are named as they come: those of [B, H, S, D] in order. `by_heads` gives its result as it is, so that its
    weights, which are less, are stored for each image; `by_images` reads [B, H, D, S] as it is made."""
    program, read = read_by_products(fn)
    orders = [tuple(sorted(c.dims).index(d) for d in c.dims) for c in read]
    assert [o for o in orders if o != tuple(range(len(o)))] == found
    products = [
        c for c in program.program.body if c.name in {s.name for s in program.steps if isinstance(s, LibraryStep)}
    ]
    assert products and not any(library_copies(program.program, c) for c in products)


def test_what_the_caller_sees_lies_as_it_is_beside():
    """One kernel writes attention's result twice."""
    program, _ = read_by_products(kept)
    assert len(program.steps) == 2 and len(program.steps[0].results) == 2


@pytest.mark.parametrize("fn", [projected, normalised])
def test_nothing_is_copied_and_results_are_right(fn):
    args = tensors(h=8, s=128, d=64, columns=512)  # the library's on any machine
    program, traced = compiled(fn, args, "cpu")
    assert any(s.orders for s in program.steps if isinstance(s, FusedStep))
    given = dict(zip("qkvo", args, strict=True))
    given = {i.name: given[i.name].reshape([int(e.value) for e in i.shape]) for i in traced.program.inputs}
    with Copies() as copies:
        made = program(given, {})
    assert copies.found == 0
    wanted = fn(*(x.double() for x in args))
    for name, x in zip(traced.program.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(made[name].double().reshape(x.shape), x, rtol=1e-5, atol=1e-5)


def test_strides_of_an_order():
    assert strides_in(None, (2, 3, 4)) == (12, 4, 1) and strides_in((1, 0, 2), (2, 3, 4)) == (4, 8, 1)
    assert strides_in((1, 0), (0, 5)) == (1, 1) and strides_in(None, ()) == ()


def test_compiled_calls_agree_call_after_call():
    """A replayed record allocates as the first call did."""
    torch.manual_seed(0)
    fast = torch.compile(projected, backend="tilefold")
    for _ in range(5):
        args = tensors()
        torch.testing.assert_close(fast(*args), projected(*args), rtol=1e-4, atol=1e-4)
