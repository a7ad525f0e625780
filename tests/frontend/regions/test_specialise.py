"""Sizes that become numbers: head counts and head sizes do, lengths and what the user marked do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import randn
from tilefold.algebra.expr import Const, walk
from tilefold.frontend.fuse import fuse, trace
from tilefold.frontend.regions.specialise import LAST
from tilefold.pipeline import compile_program
from tilefold.suites.gpu import operators as o


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()  # it remembers what it saw change by the names of functions
    yield
    torch._dynamo.reset()


def heads(b, h, groups, queries, keys, dim):
    return randn(b, h, queries, dim), randn(b, groups, keys, dim, seed=1), randn(b, groups, keys, dim, seed=2)


#: Two models: other batches, heads, groups, lengths and head sizes.
SMALL, LARGE = (2, 8, 4, 7, 20, 16), (3, 24, 6, 9, 30, 32)


def by_dynamo(fn, *calls):
    """What `fn` lowers to in the last call, with the sizes symbolic that changed."""
    return [trace(fn, *args, dynamic="auto").program for args in calls][-1]


def shape(program, name):
    return [str(getattr(n, "name", getattr(n, "value", n))) for i in program.inputs if i.name == name for n in i.shape]


def kernels(program):
    return [s.name for s in compile_program(program, goal="fused", device="cpu", load=False).steps]


def constants(program):
    return [e for c in program.body for e in walk(c.body) if isinstance(e, Const)]


def symbolic(program, name):
    return [not n.isdigit() for n in shape(program, name)]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return o.attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def gathered(q, k, v):
    at = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    return o.attention(q, k[:, at], v[:, at])


def grouped(q, k, v):
    b, h, s, d = q.shape
    q = q.view(b, k.shape[1], h // k.shape[1], s, d)
    return o.attention(q, k[:, :, None], v[:, :, None]).reshape(b, h, s, d)


@pytest.mark.parametrize("fn", [o.gqa, sdpa, repeated, gathered, grouped], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("groups", [6, 4], ids=["other groups", "the same groups"])
def test_two_models_have_the_kernels_of_numbers(fn, groups):
    large = heads(*LARGE[:2], groups, *LARGE[3:])
    p = by_dynamo(fn, heads(*SMALL), large)
    for name in "qkv":
        assert symbolic(p, name)[0] and symbolic(p, name)[-2:] == [True, False]
    static = trace(fn, *large).program
    assert len(kernels(p)) == len(kernels(static)) == 1
    assert [c.origin for c in p.body] == [c.origin for c in static.body]


def test_the_scale_is_a_literal():
    p = by_dynamo(o.attention, heads(*SMALL[:2], 8, *SMALL[3:]), heads(*LARGE[:2], 24, *LARGE[3:]))
    assert any(c.value == pytest.approx(32**-0.5, rel=1e-12) for c in constants(p))


@pytest.mark.parametrize("dynamic", [None, True])
def test_values_and_compilations(dynamic):
    run = fuse(o.gqa, dynamic=dynamic)

    def right(*sizes):
        args = heads(*sizes)
        torch.testing.assert_close(run(*args), o.gqa(*args), rtol=1e-4, atol=1e-5)
        return len(run.graphs)

    models = (SMALL[:3], SMALL[-1]), (LARGE[:3], LARGE[-1])
    for m, (some, dim) in enumerate(models):
        right(*some, *SMALL[3:5], dim)
        made = right(*some, *LARGE[3:5], dim)
        for n in range(5, 200, 13):
            assert right(*some, n, n + 2, dim) == made, f"model {m} was compiled again for length {n}"
    for some, dim in models:
        made = right(*some, 10, 21, dim)
        assert right(*some, 11, 22, dim) == made
    assert made <= 4
    last = run.graphs[-1].regions[0]
    assert symbolic(last.lowered.program, "k")[2:] == [True, False] and len(last.runner.steps) == 1


def test_many_models_are_served_by_the_last_graphs():
    run = fuse(o.attention, runner="interpreter")
    limit = torch._dynamo.config.recompile_limit
    for dim in range(3, 3 + 2 * limit):
        args = heads(1, 2, 2, 3, 4, dim)
        torch.testing.assert_close(run(*args), o.attention(*args))
    assert limit - LAST < len(run.graphs) <= limit
    assert symbolic(run.graphs[-1].regions[0].lowered.program, "q")[-1]


def test_training():
    run = torch.compile(o.gqa, backend="tilefold", options={"runner": "interpreter"})
    for sizes in (SMALL, LARGE, (*LARGE[:3], 5, 11, LARGE[-1])):
        args = [x.requires_grad_() for x in heads(*sizes)]
        grads = torch.autograd.grad(run(*args).square().sum(), args)
        for got, want in zip(grads, torch.autograd.grad(o.gqa(*args).square().sum(), args), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def masked(q, k, v, mask):
    return torch.softmax(q @ k.mT + mask, -1) @ v


def test_a_length_that_is_a_last_axis_too():
    calls = [(*heads(1, 2, 2, m, n, d), randn(m, n)) for m, n, d in ((5, 6, 16), (7, 9, 32))]
    p = by_dynamo(masked, *calls)
    assert symbolic(p, "mask") == [True, True] and symbolic(p, "q")[2:] == [True, False]


def tokens(ids, table):
    x = table[ids]
    return torch.softmax(x @ x.mT, -1) @ x


def series(x, w):
    x = x[..., None] * w
    return torch.softmax(x @ x.mT, -1) @ x


def channels(q, k, v):
    return v @ torch.softmax(q.mT @ k, -1).mT


@pytest.mark.parametrize(
    "fn, name, make",
    [
        (tokens, "ids", lambda n: (torch.zeros(2, n, dtype=torch.int64), randn(5, 16))),
        (series, "x", lambda n: (randn(2, n), randn(16))),
        (channels, "q", lambda n: [randn(2, 8, n)] * 3),
        (channels, "q", lambda n: (randn(2, 8, n), randn(2, 8, n + 1), randn(2, 8, n + 1))),
    ],
)
def test_a_length_that_is_a_last_axis_alone(fn, name, make):
    assert symbolic(by_dynamo(fn, make(5), make(7)), name)[-1]


def test_rows_and_batches_stay():
    p = by_dynamo(
        lambda x, y, w: (x + y).flatten(0, 1) @ w.T,
        (randn(2, 7, 16), randn(2, 7, 16), randn(24, 16)),
        (randn(3, 9, 32), randn(3, 9, 32), randn(40, 32)),
    )
    assert symbolic(p, "x") == [True, True, False] and symbolic(p, "w") == [True, False]


def test_long_last_axes_stay():
    p = by_dynamo(lambda x, w: x @ w.T, (randn(2, 7), randn(3, 7)), (randn(2, 2000), randn(3, 2000)))
    assert symbolic(p, "x") == [False, True]


def test_heads_as_an_argument():
    def fn(x, n):
        x = x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)
        return o.attention(x, x, x)

    p = by_dynamo(fn, (randn(2, 7, 16), 2), (randn(3, 9, 32), 4))
    assert symbolic(p, "x")[:2] == [True, True] and not any(symbolic(p, "x")[2:])
    assert len(kernels(p)) == 1


def test_marked_sizes_stay():
    """Dynamo would raise a ConstraintViolationError, and the next head size would be compiled again."""
    run = fuse(o.attention, runner="interpreter")
    for dim in (16, 32, 8):
        args = heads(1, 2, 2, 5, 6, dim)
        for x in args:
            torch._dynamo.mark_dynamic(x, 3)
        torch.testing.assert_close(run(*args), o.attention(*args))
    assert symbolic(run.graphs[-1].regions[0].lowered.program, "q")[-1]
    assert len(run.graphs) == 1


def test_marked_heads_stay():
    args = heads(*LARGE)
    for x in args:
        torch._dynamo.mark_dynamic(x, 1)
    p = by_dynamo(o.gqa, args)
    assert symbolic(p, "q") == [False, True, False, False] and symbolic(p, "k") == [False, True, False, False]
