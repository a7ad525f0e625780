"""Failures of Tilefold in automatic use: what runs instead, what is recorded, and what is raised all the same."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis
from torch._inductor.exc import InductorError

from tests.frontend.check import randn
from tilefold import fuse
from tilefold.backends.triton import refusals
from tilefold.block.text import parse
from tilefold.errors import BackendError, UnsupportedError
from tilefold.frontend import torch_compile
from tilefold.frontend.operators import fx_to_tensor
from tilefold.frontend.regions import guard
from tilefold.frontend.regions.assemble import Options, compilations
from tilefold.frontend.regions.execute import interpreted
from tilefold.frontend.regions.guard import Guarded, Part


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    compilations.clear()
    guard._said.clear()
    yield
    torch._dynamo.reset()


def compiled(fn, compile_program):
    """`fn` with regions compiled by `compile_program`."""

    def backend(gm, example_inputs):
        return torch_compile.compile_captured(gm, example_inputs, Options(compile_program, leftover="eager"))

    return torch.compile(fn, backend=backend)


def f(x):
    return torch.softmax(x * 2, -1).sum(0).tanh() @ x.t()


def refusing(wrong, late):
    """A compiler that fails for programs that contain `wrong`; `late`: when they first run."""
    tried = []

    def compile_program(program, *, device):
        tried.append(len(program.body))
        bad = any(wrong in str(c.body) for c in program.body)
        if bad and not late:
            raise KeyError("a bug")

        def run(inputs, syms):
            if bad:
                raise AssertionError("a late bug")
            return interpreted(program)(inputs, syms)

        return run

    return compile_program, tried


@pytest.mark.parametrize("late", [False, True])
def test_one_operator_that_fails_does_not_take_the_others_down(lenient, late, caplog):
    compile_program, tried = refusing("op='tanh'", late)
    x = randn(5, 5)
    fast = compiled(f, compile_program)
    with caplog.at_level(logging.WARNING, logger="tilefold"):
        for _ in range(5):  # kernels that fail when they run are found one call after the other
            torch.testing.assert_close(fast(x), f(x), rtol=1e-4, atol=1e-5)
    (record,) = compilations
    good = [r for r in record.regions if not any("op='tanh'" in str(c.body) for c in r.lowered.program.body)]
    assert len(good) >= 2 and tried[0] > max(len(r.lowered.program.body) for r in good)
    assert caplog.text.count("internal error") == 1  # the same reason, said once
    assert "test_guard.py" in caplog.text
    assert all("bug" in x.reason for x in record.fallbacks) and len(record.fallbacks) >= 2


@pytest.mark.parametrize("late", [False, True])
def test_strict_raises(late):
    compile_program, _ = refusing("op='tanh'", late)
    with pytest.raises((KeyError, AssertionError, torch._dynamo.exc.BackendCompilerFailed), match="bug"):
        compiled(f, compile_program)(randn(5, 5))


def test_a_lowering_that_fails_leaves_its_operator_to_eager(lenient, monkeypatch):
    def fails(ctx, node):
        raise RecursionError("too deep")

    monkeypatch.setitem(fx_to_tensor.TABLE, torch.ops.aten.tanh.default, fails)
    x = randn(5, 5)
    torch.testing.assert_close(compiled(f, lambda p, device: interpreted(p))(x), f(x), rtol=1e-4, atol=1e-5)
    (record,) = compilations
    (found,) = record.fallbacks
    assert found.node == "aten.tanh.default" and "internal error: RecursionError: too deep" in found.reason
    assert found.loc is not None and "tanh" in found.loc.text and record.regions


def test_a_graph_that_cannot_be_put_together_runs_as_it_is(lenient, monkeypatch):
    def fails(gm):
        raise IndexError("no groups")

    monkeypatch.setattr("tilefold.frontend.regions.assemble.partition", fails)
    x = randn(5, 5)
    torch.testing.assert_close(torch.compile(f, backend="tilefold")(x), f(x))
    assert "no groups" in compilations[-1].fallbacks[0].reason


def test_a_graph_that_cannot_be_captured_runs_as_it_is(lenient, monkeypatch):
    def fails(*args, **how):
        raise AssertionError("not functional")

    monkeypatch.setattr("tilefold.frontend.torch_compile.aot_module_simplified", fails)
    q = randn(1, 2, 5, 4)

    def g(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.testing.assert_close(torch.compile(g, backend="tilefold")(q), g(q))
    assert "not functional" in compilations[-1].fallbacks[0].reason


def test_what_eager_raises_is_raised_and_the_region_stays():
    def run(x):
        raise RuntimeError("an index out of range")

    def eager(x):
        raise IndexError("index out of range in self")

    found = []
    part = Guarded(Part("r", found, by="Inductor"), run, eager)
    with pytest.raises(IndexError, match="in self"):
        part(1)
    assert part.run is run and not found


def test_too_little_memory_is_no_lasting_failure():
    calls = []

    def run(x):
        calls.append(x)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        return "kernel"

    part = Guarded(Part("r", [], by="Inductor"), run, lambda x: "eager")
    assert [part(1), part(2)] == ["eager", "kernel"]


@pytest.mark.parametrize("err", [RuntimeError("CUDA error: an illegal memory access"), torch.AcceleratorError("x")])
def test_errors_of_a_device_are_raised(lenient, err):
    def run(x):
        raise err

    with pytest.raises(type(err)):
        Guarded(Part("r", []), run, lambda x: "eager")(1)


def test_a_limit_is_no_internal_error(lenient):
    found = []
    part = Part("r", found)

    def unsupported():
        raise UnsupportedError("no such operator")

    def limited():
        raise BackendError("too large")

    assert part.attempt(unsupported) is None and part.attempt(limited) is None and part.attempt(lambda: 3) == 3
    assert [str(x) for x in found] == ["r: UnsupportedError: no such operator", "r: BackendError: too large"]


def test_fuse_raises_what_automatic_use_hides(lenient, monkeypatch):
    def fails(gm):
        raise IndexError("no groups")

    monkeypatch.setattr("tilefold.frontend.regions.assemble.partition", fails)
    with pytest.raises(IndexError, match="no groups"):
        fuse(f)(randn(5, 5))


def test_what_inductor_fails_at_is_no_exception_that_steers_dynamo():
    """Its errors are Dynamo's by their class; those that restart an analysis go on up."""

    def fails(err):
        def make():
            raise err

        return make

    part = Part("left", [], by="Inductor")
    assert part.attempt(fails(InductorError(AssertionError("no symbol"), None))) is None
    assert "no symbol" in part.fallbacks[0].reason
    with pytest.raises(RestartAnalysis):
        part.attempt(fails(RestartAnalysis()))


BLOCK = """block {name}()
  input x: f32[{n}]
  dim i = {n}
  result y[i]: f32
  forall i
    store y[i] over (i) = x[i] * 2.0
  return y
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_region_is_planned_again_without_a_kernel_that_cannot_be_launched(times, lenient, monkeypatch):
    """And not cut into halves: what a launch refuses is known to the next plan."""
    monkeypatch.setattr(refusals, "_found", {})
    planned = []

    def compile_program(program, *, device):
        planned.append(len(program.body))
        number = len(planned)

        def run(inputs, syms):
            if number <= times:
                refusals.refuse(parse(BLOCK.format(name="k", n=number)), "too large")
                raise BackendError("too large")
            return interpreted(program)(inputs, syms)

        return run

    run, x = compiled(f, compile_program), randn(5, 7)
    for _ in range(times + 2):
        torch.testing.assert_close(run(x), f(x))
    assert len(planned) == times + 1 and len(set(planned)) == 1
    assert [x.reason for x in compilations[-1].fallbacks] == ["BackendError: too large"] * times


def test_a_refusal_is_of_kernels_that_are_equal_but_for_names(monkeypatch):
    monkeypatch.setattr(refusals, "_found", {})
    refusals.refuse(parse(BLOCK.format(name="a", n=64)), "why")
    assert refusals.refusal(parse(BLOCK.format(name="b", n=64).replace("x", "t"))) == "why"
    assert refusals.refusal(parse(BLOCK.format(name="a", n=65))) is None and len(refusals.refused()) == 1
