"""Operands that products convert are stored once, where every tile of rows would convert them again."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.kernels import meta
from tilefold.algebra.expr import Cast, walk
from tilefold.frontend.fuse import trace
from tilefold.plan import converted
from tilefold.plan.converted import better_stored, converted_once
from tilefold.plan.hardware import H100
from tilefold.tensor.analysis import Graph
from tilefold.tensor.interp import run

B = torch.bfloat16


def product(x, w):
    return torch.relu(x @ w.to(x.dtype))


def converts(p):
    """Names of the statements of sums that convert."""
    return [c.name for c in p.body if c.reducer == "sum" and any(isinstance(e, Cast) for e in walk(c.body))]


@pytest.mark.parametrize(
    ("rows", "dtype", "stored"),
    [
        (2000, torch.int64, True),  # 50 MB in each of 16 tiles of rows
        (64, torch.int64, False),  # read once
        (2000, torch.int8, False),  # 6 MB
    ],
)
def test_wide_operands_of_many_rows_are_stored_as_the_library_takes_them(rows, dtype, stored):
    torch._dynamo.reset()
    p = trace(product, meta(rows, 2048, dtype=B), meta(2048, 3072, dtype=dtype)).program
    assert converts(p)
    assert (not converts(converted_once(p, H100))) == stored


def test_the_program_is_the_same(monkeypatch):
    monkeypatch.setattr(converted, "DOUBT", 0.0)
    torch._dynamo.reset()
    x, w = torch.randn(20, 16).to(B), torch.randint(-9, 9, (16, 30))
    p = trace(product, x, w).program
    after = converted_once(p, H100)
    inputs = {"x": x, "w": w}
    assert len(after.body) == len(p.body) + 1
    assert torch.equal(run(after, inputs)[after.outputs[0]], run(p, inputs)[p.outputs[0]])


def test_rows_that_are_picked_and_converted_are_priced_by_what_is_read():
    """An embedding's rows, in the type of the weight that they are multiplied with: two tensors are read."""

    def picked(table, i, w):
        return torch.relu(torch.nn.functional.embedding(i, table).to(w.dtype) @ w)

    torch._dynamo.reset()
    p = trace(picked, meta(20_000, 256, dtype=torch.float32), meta(512, 10, dtype=torch.int64), meta(256, 256, dtype=B))
    assert converts(converted_once(p.program, H100))  # once each, as they are read


def weights(s, dp, do, readers):
    """Probabilities in float32, as their own gradient reads them, and in 16 bits for the values' gradient."""
    p = torch.exp(s.float())
    ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).to(B)
    dv = p.to(B).mT @ do
    return (ds, dv, p) if readers else (ds, dv)


@pytest.mark.parametrize("kept", [False, True])
def test_what_its_maker_reads_wide_is_stored_as_the_product_takes_it(kept):
    """But where it is a result in float32 itself: the product reads that one."""
    torch._dynamo.reset()
    scores = meta(32, 1024, 1024, dtype=B)
    p = trace(lambda *x: weights(*x, kept), scores, scores, meta(32, 1024, 128, dtype=B)).program
    assert converts(p)
    assert bool(converts(converted_once(p, H100))) == kept


def combined(scores, x):
    """Of experts and their places: a mask, and what each token has of what is made, in one sum over both."""
    dispatch = (scores > 0).to(x.dtype)
    made = torch.einsum("tec,td->ecd", dispatch, x)
    return torch.einsum("tec,ecd->td", scores.to(x.dtype), made)


def test_a_product_that_ended_up_alone_reads_what_a_map_makes_for_it_as_the_library_takes_it():
    """A mask as numbers, for nothing; not where a kernel of its own is as fast."""
    torch._dynamo.reset()
    p = trace(combined, meta(1024, 8, 320, dtype=torch.float32), meta(1024, 512, dtype=B)).program
    first, last = (c for c in p.body if c.reducer == "sum")
    assert converts(p) == [first.name, last.name]
    for c, fast, slow in ((first, 10e-6, 40e-6), (last, 14e-6, 70e-6)):
        assert not better_stored(Graph.of(p), c, H100, fast) and better_stored(Graph.of(p), c, H100, slow)
        assert converts(converted_once(p, H100, frozenset({c.name}))) == [x for x in converts(p) if x != c.name]
    x = torch.randn(20, 4, 6), torch.randn(20, 8).to(B)
    torch._dynamo.reset()
    p = trace(combined, *x).program
    after, inputs = converted_once(p, H100, frozenset(converts(p))), dict(zip(("scores", "x"), x, strict=True))
    assert len(after.body) == len(p.body) + 2
    assert torch.equal(run(after, inputs)[after.outputs[0]], run(p, inputs)[p.outputs[0]])


def test_both_operands_may_be_stored():
    """Activations that a kernel makes in 8 bits, and weights: 94 us on an H200 in a kernel that widens both, Inductor
    62."""

    def quantised(x, w):
        q = (x.float() * 3).round().clamp(-128, 127).to(torch.int8)
        return q.to(B) @ w.to(B).t(), q

    torch._dynamo.reset()
    p = trace(quantised, meta(2048, 2048, dtype=B), meta(3072, 2048, dtype=torch.int8)).program
    (c,) = (c for c in p.body if c.reducer == "sum")
    assert not better_stored(Graph.of(p), c, H100, 50e-6) and better_stored(Graph.of(p), c, H100, 100e-6)
    assert not converts(converted_once(p, H100, frozenset({c.name})))
    torch._dynamo.reset()
    x = torch.randn(20, 16).to(B), torch.randint(-128, 128, (24, 16), dtype=torch.int8)
    p = trace(quantised, *x).program
    (c,) = (c for c in p.body if c.reducer == "sum")
    after, inputs = converted_once(p, H100, frozenset({c.name})), dict(zip("xw", x, strict=True))
    assert all(torch.equal(run(after, inputs)[t], run(p, inputs)[t]) for t in p.outputs)
