"""Attention as one call of torch's library: operands and results in any order of memory, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as f

from tilefold.frontend.fuse import trace
from tilefold.frontend.regions.execute import Executable
from tilefold.pipeline import compile_program
from tilefold.plan import attention
from tilefold.runtime.attention import AttentionStep

B = torch.bfloat16


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Here the library is asked wherever it can be, however few its blocks."""
    monkeypatch.setattr(attention, "DOUBT", 0.0)


def plain(q, k, v):
    return f.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return f.scaled_dot_product_attention(q, k, v, is_causal=True)


def turned(q, k, v):
    return plain(q, k, v).transpose(-2, -3)


def projected(q, k, v, w):
    y = plain(q, k, v).transpose(1, 2)
    return y.reshape(*y.shape[:2], -1) @ w


def compiled(fn, args):
    """The steps, and what runs them on such arguments. All are calls of the library, which a CPU has as well."""
    traced = trace(fn, *args)
    program = compile_program(traced.program, device="interpreter")
    assert any(isinstance(s, AttentionStep) for s in program.steps)
    run = Executable(traced, program)
    order = [b.name for b in sorted(traced.inputs, key=lambda b: b.position)]
    given = [dict(zip("qkvw", args, strict=False))[n] for n in order]
    return program.steps, lambda: run(*given)[0]


def check(fn, args):
    steps, run = compiled(fn, args)
    made, eager, exact = run(), fn(*args), fn(*(x.double() for x in args))
    assert made.shape == eager.shape and torch.equal(made.isnan(), eager.isnan())
    error, bound = ((x.double() - exact).abs().nan_to_num(0).max() for x in (made, eager))
    assert error <= 2 * bound + 1e-3
    return steps


def tensors(*shape, dtype=B):
    return [torch.randn(shape).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("fn", [plain, causal, turned])
@pytest.mark.parametrize("shape", [(3, 70, 72), (2, 3, 65, 72), (2, 2, 3, 64, 40)])
def test_results_are_right(fn, shape):
    check(fn, tensors(*shape))


def test_of_one_head():
    check(plain, tensors(1100, 72))


def test_of_float16_and_large_scores():
    q, k, v = tensors(2, 3, 80, 72, dtype=torch.float16)
    check(causal, (q * 30, k * 30, v))


def test_of_keys_that_nothing_sees():
    q, k, v = tensors(2, 3, 80, 72)
    k[..., 5, :] = -math.inf
    check(plain, (q.abs(), k, v))


def test_operands_are_read_where_they_are():
    x = torch.randn(2, 80, 3, 4, 72).to(B)
    check(plain, [t.transpose(1, 2) for t in x.unbind(2)])


def test_a_product_reads_the_result_as_it_is():
    x = torch.randn(2, 80, 3, 4, 72).to(B)
    first, _ = check(projected, [*(t.transpose(1, 2) for t in x.unbind(2)), torch.randn(288, 24).to(B) / 17])
    assert isinstance(first, AttentionStep) and not first.packed


def test_callers_have_it_packed():
    ((step,), _) = compiled(plain, tensors(2, 3, 80, 72))
    assert step.packed


def test_the_result_goes_where_it_is_wanted():
    (step,), _ = compiled(plain, args := tensors(2, 3, 80, 72))
    given = dict(zip("qkv", args, strict=True))
    target = torch.empty(2, 80, 3, 72, dtype=B).transpose(1, 2)
    there = {**given, step.name: target}
    step.run(there, {})
    assert there[step.name] is target
    step.run(given, {})
    torch.testing.assert_close(target, given[step.name])
