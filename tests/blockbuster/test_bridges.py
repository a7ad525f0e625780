"""From tensor programs to block graphs, and from block graphs to loops and code."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.block.programs import ALL
from tests.blockbuster.rules.generate import random_program, sample
from tests.fuzz.programs import programs
from tilefold.block.interp import run as run_loops
from tilefold.blockbuster.from_tensor import from_tensor
from tilefold.blockbuster.interp import run
from tilefold.blockbuster.listing import lines_of
from tilefold.blockbuster.rules.algorithm import PEELING, fuse, fuse_reductions
from tilefold.blockbuster.safety import make_safe
from tilefold.blockbuster.to_loops import to_loops
from tilefold.errors import UnsupportedError
from tilefold.runtime.graphs import compile_graph
from tilefold.suites.blocks.examples import examples
from tilefold.tensor.interp import run as run_tensor
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import extent
from tilefold.tensor.text import parse

ATTENTION = """
program attention(n)
  input q: f32[2, n, 4]
  input k: f32[2, n, 4]
  input v: f32[2, n, 3]
  dim h = 2
  dim i = n
  dim j = n
  dim d = 4
  dim e = 3
  s[h, i, j]: f32 = sum[d] q[h, i, d] * k[h, j, d]
  m[h, i]: f32 = max[j] where(j <= i, s[h, i, j] * 0.5, -inf)
  t[h, i]: f32 = sum[j] exp(where(j <= i, s[h, i, j] * 0.5, -inf) - m[h, i])
  o[h, i, e]: f32 = sum[j] exp(where(j <= i, s[h, i, j] * 0.5, -inf) - m[h, i]) / t[h, i] * v[h, j, e]
  return o
"""
NORM = """
program norm()
  input x: f32[6, 8]
  input g: f32[8]
  input w: f32[8, 5]
  dim i = 6
  dim j = 8
  dim k = 5
  s[i]: f32 = sum[j] x[i, j] * x[i, j]
  y[i, k]: f32 = sum[j] x[i, j] * rsqrt(s[i] / 8.0 + 1e-05) * g[j] * w[j, k]
  return y
"""
CONV = """
program conv()
  input x: f32[2, 3, 6]
  input w: f32[4, 3, 2]
  dim b = 2
  dim o = 4
  dim p = 5
  dim c = 3
  dim r = 2
  y[b, o, p]: f32 = sum[r, c] x[b, c, p + r] * w[o, c, r]
  return y
"""
ROUTING = """
program routing()
  input x: f32[6, 8]
  input w: f32[5, 8]
  dim i = 6
  dim j = 8
  dim e = 5
  dim r = 2
  s[i, e]: f32 = sum[j] x[i, j] * w[e, j]
  v[i, r]: f32, n[i, r]: i64 = topk[e; r] s[i, e]
  t[i]: f32 = sum[r] v[i, r]
  return t, n
"""
PROGRAMS = {"attention": ATTENTION, "norm": NORM, "conv": CONV, "routing": ROUTING}


def inputs(p, syms, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {i.name: [extent(e, syms) for e in i.shape] for i in p.inputs}
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}


def agrees(text: str, fused: bool = True) -> list[str]:
    """A tensor program and its block programs compute the same; the last listing."""
    p = parse(text)
    syms = dict.fromkeys(p.syms, 7)
    x = inputs(p, syms)
    want = run_tensor(p, x, exact=True, syms=syms)
    b = from_tensor(p)
    given = {name: x[source] for name, source in b.source.items()}
    f = fuse(b.program)
    for q in (f.start, f.result, make_safe(f.result)):
        for blocks in (1, 2, 3):
            got = run(q, given, blocks=dict.fromkeys(q.sizes, blocks), syms=syms)
            for name, value in zip(p.outputs, q.graph.outputs, strict=True):
                torch.testing.assert_close(got[value].double(), want[name].double(), rtol=1e-8, atol=1e-8)
    return lines_of(make_safe(f.result))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    agrees(PROGRAMS[name])


def test_a_masked_softmax_becomes_flash_attention():
    """The user's own maximum cancels, and one loop with a running one is left."""
    lines = agrees(ATTENTION)
    loops = [ln.split(" in ")[0].strip() for ln in lines if " in range" in ln]
    assert loops == ["forall h", "forall i", "forall e", "for j", "for d"]
    assert not any("I1" in ln for ln in lines) and sum("pair(" in ln for ln in lines) == 2


def test_a_maximum_that_is_wanted_stays():
    lines = agrees(ATTENTION.replace("return o", "return o, m"))
    assert sum("for j" in ln for ln in lines) >= 2


def test_norm_moves_behind_the_product():
    lines = agrees(NORM)
    assert [ln.strip().split("(")[0] for ln in lines].index("for j in range") < len(lines)
    assert not any("I1[" in ln for ln in lines), "one kernel"


def test_convolution_is_a_view():
    assert any(ln.strip().startswith("view") for ln in agrees(CONV))


def test_all_programs_of_the_block_tests():
    """Either the same numbers, or a reason."""
    done = 0
    for text in ALL.values():
        try:
            agrees(text)
        except UnsupportedError as why:
            assert why.message
            continue
        done += 1
    assert done >= len(ALL) // 2


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("return o", "return o, q", "returned as it is"),
        ("max[j] where", "argmax[j] where", None),
        ("q[h, i, d] * k", "q[h, i, d // 2] * k", None),
        (
            "s[h, i, j]: f32 = sum[d] q[h, i, d] * k[h, j, d]",
            "s[h, i, j]: f32 = sum[d] q[h, j, d] + k[h, j, d]",
            "varies along i",
        ),
    ],
)
def test_refused_or_right(old, new, match):
    text = ATTENTION.replace(old, new)
    assert text != ATTENTION
    if match is None:
        agrees(text)
        return
    with pytest.raises(UnsupportedError, match=match):
        from_tensor(parse(text))


# -- loops -------------------------------------------------------------------------------------

EXAMPLES = {ex.name: ex for ex in examples()}


@pytest.mark.parametrize("whole", [(), ("d", "l"), ("k", "n")])
@pytest.mark.parametrize("name", EXAMPLES)
def test_loops(name, whole):
    ex = EXAMPLES[name]
    f = fuse(ex.program)
    x = sample(f.start)
    for p in (fuse_reductions(f.start), f.result, make_safe(f.result)):
        blocks = to_loops(p, [d for d in whole if d in p.sizes])
        for size in (1, 3, 100):
            tensors = dict(x)
            for b in blocks:
                mine = {i.name: tensors[i.name] for i in b.inputs}
                tensors |= run_loops(b, mine, {}, block_sizes=dict.fromkeys(b.sizes, size), exact=True)
            got = tensors[p.graph.outputs[0]]
            assert float((got - ex.reference(x)).abs().max()) < 1e-9


def test_one_kernel_when_fused():
    f = fuse(EXAMPLES["attention"].program)
    assert [len(to_loops(fuse_reductions(p), ("d",))) for p in (f.start, f.result)] == [7, 1]


def test_loops_refuse():
    f = fuse(EXAMPLES["attention"].program)
    with pytest.raises(UnsupportedError, match="stored and read again"):
        to_loops(f.programs[0])
    with pytest.raises(UnsupportedError, match="one entry for each block"):
        to_loops(f.start)
    with pytest.raises(UnsupportedError, match="peeled"):
        to_loops(fuse(EXAMPLES["attention"].program, extension=PEELING).result)
    with pytest.raises(UnsupportedError, match="miscellaneous"):
        to_loops(from_tensor(parse(ROUTING)).program, ("j", "e"))


def test_random_programs_as_code():
    for seed in (3, 5):
        p = make_safe(fuse(random_program(seed, steps=3)).result)
        x = sample(p)
        want = run(p, x)
        try:
            compiled = compile_graph(p)
        except UnsupportedError as why:
            assert "kernel" in why.message or "block" in why.message
            continue
        got = compiled({k: v.float() for k, v in x.items()})
        for name, w in want.items():
            assert float((got[name] - w).abs().max()) < 1e-3 * max(1.0, float(w.abs().max()))


# -- random programs ---------------------------------------------------------------------------


def test_random_tensor_programs():
    """Block programs of random tensor programs compute the same, or there is a reason why there is none."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=30, deadline=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def check(p: Program) -> None:
        try:
            bridged = from_tensor(p)
        except UnsupportedError:
            seen["refused"] += 1
            return
        syms = dict.fromkeys(p.syms, 6)
        x = inputs(p, syms)
        want = run_tensor(p, x, exact=True, syms=syms)
        given_ = {n: x[t] for n, t in bridged.source.items()}
        f = fuse(bridged.program)
        for q in (f.start, make_safe(f.result)):
            got = run(q, given_, blocks=dict.fromkeys(q.sizes, 2), syms=syms)
            for name, v in zip(p.outputs, q.graph.outputs, strict=True):
                torch.testing.assert_close(got[v].double(), want[name].double(), rtol=1e-7, atol=1e-7, equal_nan=True)
        seen["same"] += 1

    check()
    assert seen["same"] > seen["refused"]


def test_exponents_of_a_transposed_block():
    """exp(u[j] - v[i]) is made with rows j, used with rows i; its exponents go along."""
    agrees(
        "program p()\n  input v: f32[2]\n  input u: f32[7]\n  input w: f32[7, 3]\n  dim i = 2\n  dim j = 7\n"
        "  dim k = 3\n  y[i, k]: f32 = sum[j] exp(u[j] - v[i]) * w[j, k]\n  return y\n"
    )
