"""Scales of channels go into weights, and what follows a convolution into its call: interpreted before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.tensor.analysis import Graph
from tilefold.tensor.convolution_tails import of_call, tail_of, tails_in_calls
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse, show

HEAD = """program f()
  input x: {t}[2, 7, 6, 8]
  input w: {t}[16, 3, 3, 8]
  input r: {t}[2, 16, 5, 4]
  input g: f32[16]
  input m: f32[16]
  input v: f32[16]
  dim n = 2
  dim i = 5
  dim j = 4
  dim o = 16
  dim c = 8
  dim p = 3
  dim q = 3
  y[n, i, j, o]: {t} = sum[p, q, c] x[n, i + p, j + q, c] * w[o, p, q, c]
"""
FOLLOW = {
    "statistics": "  s[o]: f32 = 1.0 / sqrt(v[o] + 1.0)\n"
    "  z[n, i, j, o]: {t} = maximum({t}((y[n, i, j, o] - m[o]) * s[o] * g[o] + v[o]), 0)\n",
    "statistics and a residual": "  z[n, i, j, o]: {t} = "
    "maximum({t}((y[n, i, j, o] - m[o]) / g[o]) + r[n, o, i, j], 0)\n",
    "a bias": "  z[n, i, j, o]: {t} = maximum(m[o] + y[n, i, j, o], 0)\n",
    "a residual in front": "  z[n, i, j, o]: {t} = maximum(r[n, o, i, j] + y[n, i, j, o] * g[o], 0)\n",
    "nothing but the maximum": "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o], 0)\n",
}
OTHERS = {
    "no maximum": "  z[n, i, j, o]: {t} = y[n, i, j, o] * g[o]\n",
    "a maximum with 1": "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o], 1)\n",
    "another function": "  z[n, i, j, o]: {t} = tanh(y[n, i, j, o] * g[o])\n",
    "squares": "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o] * y[n, i, j, o], 0)\n",
    "a scale of places": "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o] * r[n, o, i, j], 0)\n",
    "a divisor": "  z[n, i, j, o]: {t} = maximum(g[o] / y[n, i, j, o], 0)\n",
    "two readers": "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o], 0)\n  u[n, i, j, o]: {t} = tanh(y[n, i, j, o])\n",
    "its own statistics": "  a[o]: f32 = sum[n, i, j] y[n, i, j, o]\n"
    "  z[n, i, j, o]: {t} = maximum(y[n, i, j, o] - a[o], 0)\n",
    "another type": "  z[n, i, j, o]: f64 = maximum(y[n, i, j, o] * g[o], 0)\n",
}


def program(after: str, t: str) -> Program:
    return parse((HEAD + after + "  return z\n").format(t=t))


def inputs(p: Program) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {i.name: [int(n.value) for n in i.shape] for i in p.inputs}  # type: ignore[attr-defined]
    made = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    made["v"] = made["v"].abs()
    return {i.name: made[i.name].to(i.dtype.torch_dtype) for i in p.inputs}


@pytest.mark.parametrize("t", ["f64", "bf16"])
@pytest.mark.parametrize("after", FOLLOW)
def test_the_result_is_the_same(after, t):
    p = program(FOLLOW[after], t)
    q, names = tails_in_calls(p, lambda g, tail: True)
    assert names == {"y"} and parse(show(q)) == q
    x = inputs(p)
    if t == "f64":
        want, got = (run(a, x, exact=True)["z"] for a in (p, q))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # what is made of float32 is rounded to it
        return
    exact = run(program(FOLLOW[after], "f64"), {n: v.double() if v.dim() > 1 else v for n, v in x.items()}, exact=True)[
        "z"
    ]
    before, now = ((run(a, x)["z"].double() - exact).norm() for a in (p, q))
    assert now <= 1.5 * before


@pytest.mark.parametrize("after", FOLLOW)
def test_what_was_rewritten_is_one_call(after):
    q, _ = tails_in_calls(program(FOLLOW[after], "bf16"), lambda g, tail: True)
    g = Graph.of(q)
    found = of_call(g, g.by_name["y"])
    assert found is not None and found[0].map.name == "z"
    assert (found[1] is None) is (after in ("nothing but the maximum", "a residual in front"))
    assert (found[0].added is None) is ("residual" not in after)


@pytest.mark.parametrize("after", OTHERS)
def test_what_no_call_does_stays_as_it_is(after):
    p = program(OTHERS[after], "bf16")
    g = Graph.of(p)
    assert tail_of(g, g.by_name["y"]) is None
    assert tails_in_calls(p, lambda g, tail: True) == (p, frozenset())


def test_a_scale_is_no_call_before_it_is_in_the_weights():
    g = Graph.of(program(FOLLOW["statistics"], "bf16"))
    assert of_call(g, g.by_name["y"]) is None


@pytest.mark.parametrize("weight", ["w[o, p, q, c]", "w[o, 1, 1, c]"], ids=["windows", "single taps"])
def test_channels_may_be_groups_of_channels(weight):
    """As a convolution of groups reads them: 16 channels as 2 groups of 8."""
    text = (HEAD + FOLLOW["statistics"] + "  return z\n").format(t="f64")
    for name in "gmv":
        text = text.replace(f"input {name}: f32[16]", f"input {name}: f32[2, 8]").replace(f"{name}[o]", f"{name}[o, d]")
    text = text.replace("f64[16, 3, 3, 8]", "f64[2, 8, 3, 3, 8]").replace("dim o = 16", "dim o = 2\n  dim d = 8")
    text = text.replace("s[o]", "s[o, d]").replace("j, o]", "j, o, d]").replace("w[o,", "w[o, d,")
    if weight != "w[o, p, q, c]":
        single = text.replace("sum[p, q, c]", "sum[c]").replace("x[n, i + p, j + q, c]", "x[n, i, j, c]")
        text = single.replace("w[o, d, p, q, c]", "w[o, d, c]").replace("f64[2, 8, 3, 3, 8]", "f64[2, 8, 8]")
        text = text.replace("[2, 7, 6, 8]", "[2, 5, 4, 8]").replace("  dim p = 3\n  dim q = 3\n", "")
    p = parse(text)
    p = replace(p, body=tuple(replace(c, origin="aten.convolution.default") if c.name == "y" else c for c in p.body))
    q, names = tails_in_calls(p, lambda g, tail: True)
    g = Graph.of(q)
    found = of_call(g, g.by_name["y"]) if names else None
    assert names == {"y"} and found is not None and found[0].outs == ("o", "d")
    want, got = (run(a, inputs(p), exact=True)["z"] for a in (p, q))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
