"""Losses in chunks of rows: gradients against float64, memory by counting, and what is left whole."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from tests.frontend.training.test_memory import allocations
from tilefold.frontend.capture.decompose import decompositions
from tilefold.frontend.regions import rows
from tilefold.frontend.training import chunks
from tilefold.frontend.training.row_parts import Part
from tilefold.frontend.training.saving import partitioner

N, K, V = 75, 32, 700


@pytest.fixture
def small(monkeypatch):
    """Budgets at which these sizes are large; loops that ran, each with how often."""
    monkeypatch.setattr(chunks, "MOST_BYTES", 1 << 10)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr(chunks, "SHARE", 0.0)
    found: dict[rows.Loop, int] = defaultdict(int)
    run = rows.Loop.__call__

    def counted(loop, *args):
        found[loop] += 1
        return run(loop, *args)

    monkeypatch.setattr(rows.Loop, "__call__", counted)
    torch._dynamo.reset()
    return found


def op_by_op(fn, budget=None):
    """The function with forward and backward cut by Tilefold, and run by torch."""

    def run(gm, _):
        return make_boxed_func(gm.forward)

    def backend(gm, examples):
        return aot_module_simplified(
            gm,
            examples,
            fw_compiler=run,
            bw_compiler=run,
            decompositions=dict(decompositions()),
            partition_fn=partitioner("folds", budget),
        )

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)


def smooth(x, w, y):
    logits = F.linear(x, w).float()
    return F.cross_entropy(logits.view(-1, V), y.view(-1), label_smoothing=0.1)


def capped(x, w, y):
    """A soft cap, a bias with a gradient, ignored labels, a sum over some number, and z-loss."""
    logits = 5 * torch.tanh(F.linear(x, w, w[:, 0]).view(-1, V) / 5)
    z = torch.logsumexp(logits, -1).square()
    return F.cross_entropy(logits, y.view(-1), reduction="sum") / 7 + 1e-3 * z.mean()


def weighed(x, w, y):
    """Each row's loss times a number of its own."""
    rest = F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1), reduction="none")
    return (rest * x.detach()[..., 0].reshape(-1)).sum()


def with_logits(x, w, y):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits


def two_losses(x, w, y):
    logits = F.linear(x, w).view(-1, V)
    return F.cross_entropy(logits, y.view(-1)), torch.logsumexp(logits, -1).mean()


def rows_together(x, w, y):
    logits = F.linear(x, w).view(-1, V)
    return F.cross_entropy(logits - logits.mean(0), y.view(-1))


def arguments(dtype=torch.float32, n=N):
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, n // 3, K, generator=gen), torch.randn(V, K, generator=gen) * 0.3
    y = torch.randint(V, (3, n // 3), generator=gen)
    y[0, :5] = -100
    return x.to(dtype), w.to(dtype), y


def step(fn, args, factor=1.0):
    x, w = (a.detach().clone().requires_grad_() for a in args[:2])
    made = fn(x, w, args[2])
    loss = made[0] + made[1].sum() if isinstance(made, tuple) else made
    (factor * loss).backward()
    return loss.detach(), x.grad, w.grad


def right(got, fn, args, factor=1.0):
    plain = step(fn, args, factor)
    exact = step(fn, (args[0].double(), args[1].double(), args[2]), factor)
    for g, p, e in zip(got, plain, exact, strict=True):
        allowed = 2 * (p.double() - e).abs().max() + 32 * torch.finfo(g.dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= allowed


CASES = [(smooth, torch.bfloat16), (smooth, torch.float32), (capped, torch.float32), (weighed, torch.float32)]


@pytest.mark.parametrize(("fn", "dtype"), CASES)
def test_gradients_are_right(fn, dtype, small):
    args = arguments(dtype)
    fast = op_by_op(fn)
    for factor in (1.0, 0.25):
        right(step(fast, args, factor), fn, args, factor)
    (loop,) = small
    assert loop.rows == N and loop.chunks > 1
    assert all(
        x.meta["val"].shape != (K, V) for b in loop.bodies.values() for x in b.graph.find_nodes(op="placeholder")
    )


def test_compiled_chunks_are_right(small):
    """The same through kernels: a body for whole chunks, and one for the rest of the rows."""
    args = arguments(torch.bfloat16)
    fast = torch.compile(smooth, backend="tilefold")
    for factor in (0.25, 0.5, 1.0, 0.25):  # calls that come again may be recorded
        right(step(fast, args, factor), smooth, args, factor)
    x, w = (a.requires_grad_() for a in args[:2])
    loss = fast(x, w, args[2])
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * first)
    (loop,) = small
    assert loop.rows % loop.chunk and len(loop.run) == 2


def test_few_rows_are_one_chunk(small, monkeypatch):
    """Nothing as wide as the logits is kept for the backward."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 30)
    args = arguments()
    fast = op_by_op(smooth)
    right(step(fast, args), smooth, args)
    (loop,) = small
    assert loop.chunks == 1
    x, w = (a.requires_grad_() for a in args[:2])
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        fast(x, w, args[2])
    assert held and all(t.numel() < N * V for t in held)


@pytest.mark.parametrize(
    ("device", "columns", "chunks_"),
    [
        ("cuda", 32000, 1),
        ("cpu", 32000, 2),
        ("cuda", 32001, 2),
        ("cuda", 128, 1),
        ("cuda", 128_256, 2),
        ("cpu", 128_256, 4),
    ],
)
def test_a_gradient_over_its_logits_leaves_room_for_more_rows(device, columns, chunks_):
    """Of 4096 rows in bf16, unless rows of the product lie apart, or are too short to be written over."""
    val = SimpleNamespace(device=torch.device(device), shape=(4096, columns), dtype=torch.bfloat16)
    val.numel, val.element_size = lambda: 4096 * columns, lambda: 2
    g = torch.fx.Graph()
    seed = g.placeholder("logits")
    seed.meta["val"] = val
    part = Part(4096, (seed,), (), (), frozenset())
    assert -(-4096 // chunks._chunk(part, seed, 1.0)) == chunks_


@pytest.mark.parametrize("fn", [with_logits, two_losses, rows_together])
def test_what_does_not_run_over_rows_stays_whole(fn, small):
    args = arguments()
    right(step(op_by_op(fn), args), fn, args)
    assert not small


def test_small_gradients_of_float16_need_the_factor(small):
    args = arguments(torch.float16)
    step(op_by_op(smooth), args)
    assert not small


def test_small_logits_stay_whole_and_inference_has_no_loop(small, monkeypatch):
    args = arguments()
    with torch.no_grad():
        op_by_op(smooth)(*args)
    monkeypatch.setattr(chunks, "MOST_BYTES", 1 << 29)
    torch._dynamo.reset()
    step(op_by_op(smooth), args)
    assert not small


def test_less_memory_is_more_chunks(small):
    counts = []
    for budget in (1.0, 0.5, 0.25):
        small.clear()
        torch._dynamo.reset()
        step(op_by_op(smooth, budget), arguments())
        counts += [loop.chunks for loop in small]
    assert len(counts) == 3 and all(a < b for a, b in pairwise(counts))


def test_chunks_are_equal_where_that_costs_little():
    assert chunks._even(4096, 704) == 1024
    assert chunks._even(4096, 512) == 512
    assert chunks._even(4096, 1335) == chunks._even(4096, 3000) == 2048
    assert chunks._even(4100, 704) == 704  # 820 rows are no whole blocks
    assert chunks._even(100, 700) == 100


def test_a_backward_can_be_repeated_and_accumulates(small):
    """The forward's gradients are scaled in place only where nobody else has them."""
    x, w = (a.requires_grad_() for a in arguments()[:2])
    y = arguments()[2]
    fast = op_by_op(smooth)
    loss = 3 * fast(x, w, y)
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), w.grad.clone()]
    loss.backward()
    for a, b in zip((x.grad, w.grad), first, strict=True):
        torch.testing.assert_close(a, 2 * b, rtol=1e-6, atol=1e-7)
    again = torch.autograd.grad(fast(x, w, y), [w])
    torch.testing.assert_close(3 * again[0], first[1], rtol=1e-5, atol=1e-6)
    (loop,) = small
    assert small[loop] == 2


def test_many_sums_of_16_bits_are_in_float32():
    """A hundred chunks whose products nearly cancel: rounded one after the other they would be wrong."""
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 8, generator=gen).bfloat16() for _ in range(2))
    results = (rows.Product((8, 8), torch.bfloat16),)
    g = torch.fx.Graph()
    g.output((g.placeholder("a"), g.placeholder("b")))
    body = torch.fx.GraphModule({}, g)
    (got,) = rows.Loop(200, 2, (True, True), results, {2: body})(a, b)
    exact = a.double().t() @ b.double()
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_memory_is_that_of_a_chunk(small):
    args = arguments(n=150)
    fast = op_by_op(smooth)
    step(fast, args)
    logits = 4 * 150 * V
    assert allocations(fast, args, step)[1] <= logits // 4 < logits <= allocations(smooth, args, step)[1]
