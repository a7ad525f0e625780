"""Gradients of tensor programs against torch's autograd through the interpreter, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.programs import programs
from tilefold.algebra import derivative
from tilefold.algebra.ops import OPS
from tilefold.errors import UnsupportedError
from tilefold.tensor import interp
from tilefold.tensor.gradient import gradient
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import drop_dead
from tilefold.tensor.sizes import extent
from tilefold.tensor.text import parse

ATTENTION = """program attention(n)
  input q: f32[n, 4]
  input k: f32[n, 4]
  input v: f32[n, 3]
  dim i = n
  dim j = n
  dim d = 4
  dim e = 3
  s[i, j]: f32 = sum[d] q[i, d] * k[j, d]
  c[i, j]: f32 = where(j <= i, 3.0 * tanh(s[i, j] / 3.0), -inf)
  m[i]: f32 = max[j] c[i, j]
  x[i, j]: f32 = exp(c[i, j] - m[i])
  t[i]: f32 = sum[j] x[i, j]
  o[i, e]: f32 = sum[j] x[i, j] / t[i] * v[j, e]
  return o
"""
WINDOW = """program window(n)
  input x: f32[n + 4, 3]
  input w: f32[5, 3]
  dim i = n
  dim a = 5
  dim c = 3
  y[i, c]: f32 = sum[a] x[i + (4 - a), c] * w[a, c]
  z[i]: f32 = sum[c] y[i, c] * x[i, c] * x[2, c]
  return y, z
"""
DIAGONAL = """program diagonal(n)
  input x: f32[n, n]
  input u: f32[1, n]
  dim i = n
  dim j = n
  y[i]: f32 = sum[j] x[j, j] * x[i, j] * u[0, i]
  return y
"""
TIES = """program ties(n)
  input x: f32[n, 6]
  dim i = n
  dim j = 6
  m[i]: f32 = max[j] round(x[i, j]) + 0.0 * x[i, j]
  l[i]: f32 = min[j] abs(x[i, j])
  return m, l
"""


def given_inputs(p: Program, n: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {i.name: [extent(e, {"n": n}) for e in i.shape] for i in p.inputs}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def agrees(p: Program, n: int, seed: int) -> None:
    made = gradient(p)
    xs = {k: x.requires_grad_() for k, x in given_inputs(p, n, seed).items()}
    outs = interp.run(p, xs, exact=True, syms={"n": n})
    ys = [outs[o] for o in p.outputs]
    g = torch.Generator().manual_seed(seed + 1)
    cots = [torch.randn(y.shape, generator=g, dtype=torch.float64) for y in ys]
    live = [(y, c) for y, c in zip(ys, cots, strict=True) if y.requires_grad]
    want = torch.autograd.grad(
        [y for y, _ in live], list(xs.values()), [c for _, c in live], allow_unused=True, materialize_grads=True
    )
    inputs = {k: x.detach() for k, x in xs.items()} | dict(zip(made.given, cots, strict=True))
    got = interp.run(made.program, inputs, exact=True, syms={"n": n})
    for name, a in zip(made.program.outputs, want, strict=True):
        torch.testing.assert_close(got[name], a, rtol=1e-9, atol=1e-9 * float(a.abs().max()) if a.numel() else 0.0)


@pytest.mark.parametrize("text", [ATTENTION, WINDOW, DIAGONAL, TIES], ids=["attention", "window", "diagonal", "ties"])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_programs(text, n):
    agrees(parse(text), n, n)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 9), st.integers(0, 99))
def test_random_programs(p, n, seed):
    try:
        agrees(drop_dead(p), n, seed)
    except UnsupportedError as why:
        assert any(c.reducer in ("prod", "topk") for c in p.body), why


#: Where an operation's argument has to be.
DOMAIN = {"log": 0.5, "log2": 0.5, "log1p": 0.5, "sqrt": 0.5, "rsqrt": 0.5}


@pytest.mark.parametrize("op", sorted(derivative._RULES))
def test_operations(op):
    above = DOMAIN.get(op, 0.0)
    arguments = {1: "{}", 2: "{}, y[i] + 1.5"}.get(OPS[op].arity, "y[i] < 0.3, {}, y[i]")
    x = "sigmoid(x[i])" if op == "erfinv" else f"abs(x[i]) + {above}" if above or op == "pow" else "x[i]"
    infix = OPS[op].infix
    called = arguments.format(x)
    body = f"({x}) {infix} (y[i] + 1.5)" if infix else f"-({x})" if op == "neg" else f"{op}({called})"
    text = "program one(n)\n  input x: f32[n]\n  input y: f32[n]\n  dim i = n\n"
    agrees(parse(f"{text}  z[i]: f32 = {body}\n  return z\n"), 7, 3)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("prod[j] x[i, j]", "it is a prod"),
        ("sum[j] x[i * 2 % 3, j]", "it reads x at places that no single value of a dim gives"),
        ("sum[j] x[i, j] % 2.0", "mod has no derivative here"),
    ],
)
def test_what_has_none(body, why):
    text = "program one(n)\n  input x: f32[3, n]\n  dim i = 3\n  dim j = n\n"
    with pytest.raises(UnsupportedError, match=f"y has no gradient: {why}"):
        gradient(parse(f"{text}  y[i]: f32 = {body}\n  return y\n"))


def test_forward_definitions_that_no_gradient_needs_are_not_there():
    p = parse("program one(n)\n  input x: f32[n]\n  dim i = n\n  y[i]: f32 = x[i] * 3.0\n  return y\n")
    made = gradient(p)
    assert "y" not in made.program.names and len(made.program.body) == 2
