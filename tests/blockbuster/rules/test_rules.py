"""Each rule keeps the meaning of random programs, and refuses what its side condition forbids."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.blockbuster.rules.generate import outputs, random_program, sample
from tilefold.blockbuster.ir import Program, graph_at
from tilefold.blockbuster.listing import show
from tilefold.blockbuster.parse import parse
from tilefold.blockbuster.rules.algorithm import RULES
from tilefold.blockbuster.rules.law import Law, Refusal, places, rewrite
from tilefold.blockbuster.verify import verify

_DECLARATIONS = """program p()
dim m = 5
dim k = 6
dim n = 4
dim l = 3
input A[m, k] of (m, k) in (m, k): f32
input B[n, k] of (n, k) in (n, k): f32
input C[n, k] of (n, k) in (n, k): f32
input V[l, k] of (l, k) in (l, k): f32
input c[m] of (m) in (m): f32
"""


def program(body: str, *outs: str) -> Program:
    """A program over the matrices above; `outs` like "O[m, n] in (m, n)"."""
    return parse(_DECLARATIONS + "".join(f"output {o}: f32\n" for o in outs) + body)


def check(p: Program, law: Law) -> Program:
    """The program after the first match of a law anywhere; equal in meaning for several cuts."""
    path, m = next(places(p, law))
    after = verify(rewrite(p, path, m))
    x = sample(p)
    for blocks in (1, 2, 3, 6):
        for a, b in zip(outputs(p, x, blocks), outputs(after, x, blocks), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return after


def refusals(p: Program, law: Law) -> list[str]:
    """Why a law refuses, at the graphs inside the outermost map; it must not match there."""
    found: list[str] = []
    for path in ((), (0,)):
        tries = list(law.attempts(graph_at(p.graph, path)))
        assert all(isinstance(t, Refusal) for t in tries)
        found += [t.reason for t in tries if isinstance(t, Refusal)]
    return found


def test_random_walks():
    """Any applicable rule, anywhere, in any order: the meaning stays."""
    used: Counter[int] = Counter()
    laws = list(RULES.values())
    for seed in range(24):
        r = random.Random(seed)
        p = random_program(seed)
        x = sample(p)
        want = outputs(p, x, 2)
        scale = max(1.0, max(float(w.abs().max()) for w in want))
        for _ in range(14):
            law = r.choice(laws)
            found = list(places(p, law))
            if not found:
                continue
            p = verify(rewrite(p, *r.choice(found)))
            used[law.number] += 1
            assert show(parse(show(p))).count("\n") >= show(p).count("range("), "the listing parses"
        for blocks in (1, 2, 4):
            for a, b in zip(outputs(p, x, blocks), want, strict=True):
                assert float((a - b).abs().max()) < 1e-8 * scale, (seed, blocks)
    assert set(used) >= {1, 2, 3}, used


def test_rule_1_joins_maps_and_drops_the_list():
    p = program(
        "forall m in range(M):\n    t1 = load(c[m])\n    t2 = exp(t1)\n    store(t2,I1[m])\n"
        "forall m in range(M):\n    t3 = load(I1[m])\n    t4 = t3 + 1.0\n    store(t4,O[m])\n",
        "O[m] in (m)",
    )
    assert "I1" not in show(check(p, RULES[1]))


def test_rule_1_refuses_an_indirect_path():
    p = program(
        "forall m in range(M):\n    forall k in range(K):\n        t1 = load(A[m,k])\n        t2 = exp(t1)\n"
        "        store(t2,I1[m,k])\n    for k in range(K):\n        t3 = load(I1[m,k])\n        t4 = row_sum(t3)\n"
        "        t5 += t4\n    forall k in range(K):\n        t6 = load(I1[m,k])\n        t7 = row_scale(t6,t5)\n"
        "        store(t7,O[m,k])\n",
        "O[m, k] in (m, k)",
    )
    tries = list(RULES[1].attempts(graph_at(p.graph, (0,))))
    assert any("path through" in t.reason for t in tries if isinstance(t, Refusal))


def test_rule_1_refuses_a_sum_that_is_not_complete():
    p = program(
        "forall m in range(M):\n    for k in range(K):\n        t1 = load(A[m,k])\n        t2 = row_sum(t1)\n"
        "        t3 += t2\n        store(t1,I1[m,k])\n    forall k in range(K):\n        t4 = load(I1[m,k])\n"
        "        t5 = row_scale(t4,t3)\n        store(t5,O[m,k])\n",
        "O[m, k] in (m, k)",
    )
    assert "complete only after the last iteration" in " ".join(refusals(p, RULES[1]))


def test_rule_2_shares_a_load():
    p = program(
        "forall m in range(M):\n    t1 = load(c[m])\n    t2 = exp(t1)\n    store(t2,O[m])\n"
        "forall m in range(M):\n    t3 = load(c[m])\n    t4 = t3 + 1.0\n    store(t4,P[m])\n",
        "O[m] in (m)",
        "P[m] in (m)",
    )
    assert show(check(p, RULES[2])).count("load(c[m])") == 1


def test_rule_2_refuses_dependent_maps():
    p = program(
        "for m in range(M):\n    t1 = load(c[m])\n    t2 += block_max(t1)\n"
        "forall m in range(M):\n    t3 = load(c[m])\n    t4 = t3 * t2\n    store(t4,O[m])\n",
        "O[m] in (m)",
    )
    assert refusals(p, RULES[2]) == ["one of them depends on the other"]


_ROW_SUMS = (
    "forall m in range(M):\n    forall k in range(K):\n        t1 = load(A[m,k])\n        t2 = row_sum(t1)\n"
    "        store(t2,I1[m,k])\n    for k in range(K):\n        t3 = load(I1[m,k])\n        t4 += t3\n"
    "    store(t4,O[m])\n"
)


def test_rule_3_makes_the_loop_serial():
    assert "for k in range(K):\n        t2 = load(A[m,k])\n        t1 += row_sum(t2)" in show(
        check(program(_ROW_SUMS, "O[m] in (m)"), RULES[3])
    )


def test_rule_3_refuses_a_peeled_list():
    assert "put together" in " ".join(refusals(program(_PEELED, "O[m] in (m)"), RULES[3]))


_PEELED = (
    "forall m in range(M):\n    t1 = load(A[m,0])\n    t2 = row_sum(t1)\n    store(t2,I1[m,0])\n"
    "    forall k in range(1,K):\n        t3 = load(A[m,k])\n        t4 = row_sum(t3)\n        store(t4,I1[m,k])\n"
    "    for k in range(K):\n        t5 = load(I1[m,k])\n        t6 += t5\n    store(t6,O[m])\n"
)


def _product(op: str, *, again: str = "") -> str:
    return (
        f"forall m in range(M):\n    s = load(c[m])\n    forall k in range(K):\n        t1 = load(A[m,k])\n"
        f"        t2 = {op}(t1,s)\n        store(t2,I1[m,k])\n    forall n in range(N):\n"
        "        forall k in range(K):\n            t3 = load(I1[m,k])\n            t4 = load(B[n,k])\n"
        "            t5 = dot(t3,t4)\n            store(t5,I2[m,n,k])\n        for k in range(K):\n"
        f"            t6 = load(I2[m,n,k])\n            t7 += t6\n        store(t7,O[m,n])\n{again}"
    )


_USED_AGAIN = "    forall k in range(K):\n        u1 = load(I1[m,k])\n        u2 = exp(u1)\n        store(u2,P[m,k])\n"


@pytest.mark.parametrize(("rule", "op", "gone"), [(4, "row_scale", "row_scale(t1"), (5, "row_shift", "row_shift")])
def test_rules_4_and_5_move_behind_the_product(rule, op, gone):
    p = program(_product(op), "O[m, n] in (m, n)")
    text = show(check(p, RULES[rule]))
    assert text.index("dot(") < text.index("row_scale" if rule == 4 else "add(")
    assert rule == 4 or "outer(" in text


@pytest.mark.parametrize(("rule", "op"), [(4, "row_scale"), (5, "row_shift")])
def test_rules_4_and_5_refuse_a_second_use(rule, op):
    p = program(_product(op, again=_USED_AGAIN), "O[m, n] in (m, n)", "P[m, k] in (m, k)")
    assert "other uses" in " ".join(refusals(p, RULES[rule]))


def test_rule_8_gives_each_product_its_scale():
    second = _product("row_scale").partition("    forall n")[2]
    body = (
        _product("row_scale")
        + "    forall n"
        + second.replace("B[", "C[").replace("O[", "P[").replace("I2[", "I3[").replace("t7", "t8")
    )
    p = program(body, "O[m, n] in (m, n)", "P[m, n] in (m, n)")
    assert show(p).count("row_scale") == 1 and show(check(p, RULES[8])).count("row_scale") == 2


def test_rule_8_refuses_another_kind_of_use():
    p = program(_product("row_scale", again=_USED_AGAIN), "O[m, n] in (m, n)", "P[m, k] in (m, k)")
    assert "no product of it" in " ".join(refusals(p, RULES[8]))


def test_rule_9_composes():
    body = "forall m in range(M):\n    t1 = load(c[m])\n    t2 = exp(t1)\n    t3 = t2 + t1 * t2\n    store(t3,O[m])\n"
    p = program(body, "O[m] in (m)")
    assert "exp(t1) + t1 * exp(t1)" in show(check(p, RULES[9]))


def test_rule_9_refuses_a_second_use():
    body = (
        "forall m in range(M):\n    t1 = load(c[m])\n    t2 = exp(t1)\n    t3 = t2 + 1.0\n    store(t3,O[m])\n"
        "    store(t2,P[m])\n"
    )
    assert refusals(program(body, "O[m] in (m)", "P[m] in (m)"), RULES[9]) == ["t2 has other uses"]


# -- rules 6 and 7 -----------------------------------------------------------------------------

_VARIANTS = {
    "a": (
        "forall m in range(M):\n    forall k in range(K):\n        t1 = load(A[m,k])\n        t2 = exp(t1)\n"
        "        store(t2,I1[m,k])\n    forall n in range(N):\n        for k in range(K):\n"
        "            t3 = load(I1[m,k])\n            t4 = load(B[n,k])\n            t5 += dot(t3,t4)\n"
        "        store(t5,O[m,n])\n"
    ),
    "b": (
        "forall m in range(M):\n    for k in range(K):\n        t1 = load(A[m,k])\n        t2 += row_sum(t1)\n"
        "    forall n in range(N):\n        for k in range(K):\n            t3 = load(A[m,k])\n"
        "            t4 = load(B[n,k])\n            t5 += dot(t3,t4)\n        t6 = row_scale(t5,t2)\n"
        "        store(t6,O[m,n])\n"
    ),
}
_SHARED_LIST = (
    "forall m in range(M):\n    s = load(c[m])\n    u = s * 2.0\n    for k in range(K):\n        t1 = load(A[m,k])\n"
    "        t2 = row_scale(t1,u)\n        t3 += row_sum(t2)\n    forall n in range(N):\n        for k in range(K):\n"
    "            t4 = load(B[n,k])\n            t5 = row_sum(t4)\n            t6 = outer(u,t5)\n            t7 += t6\n"
    "        t8 = row_scale(t7,t3)\n        store(t8,O[m,n])\n"
)


@pytest.mark.parametrize("rule", [6, 7])
@pytest.mark.parametrize("variant", ["a", "b", "c"])
def test_rules_6_and_7_bring_maps_together(rule, variant):
    p = program({**_VARIANTS, "c": _SHARED_LIST}[variant], "O[m, n] in (m, n)")
    path, m = next(places(p, RULES[rule]))
    assert (path, m.variant, m.dim) == ((0,), variant, "n")
    after = check(p, RULES[rule])
    assert any(places(after, RULES[1 if variant == "a" else 2])), "the maps can be fused now"
    text = show(after)
    assert "range(1,N)" in text if rule == 7 else text.index("forall n") < text.index("for k")
    assert show(parse(text)) == show(parse(show(parse(text))))


def test_rule_6_refuses_when_the_map_has_users():
    body = _VARIANTS["a"].replace("store(t5,O[m,n])", "store(t5,I2[m,n])") + (
        "    for n in range(N):\n        u1 = load(I2[m,n])\n        u2 += row_sum(u1)\n    store(u2,O[m])\n"
    )
    assert "used after" in " ".join(refusals(program(body, "O[m] in (m)"), RULES[6]))


def test_rule_6_refuses_when_the_maps_would_not_fuse():
    """A second pass that needs the whole of the first one's sum."""
    body = (
        "forall m in range(M):\n    for k in range(K):\n        t1 = load(A[m,k])\n        t2 max= row_max(t1)\n"
        "    forall n in range(N):\n        for k in range(K):\n            t3 = load(A[m,k])\n"
        "            t4 = row_scale(t3,t2)\n            t5 = load(B[n,k])\n            t6 += dot(t4,t5)\n"
        "        store(t6,O[m,n])\n"
    )
    assert "only after the last iteration" in " ".join(refusals(program(body, "O[m, n] in (m, n)"), RULES[6]))


def test_rule_7_refuses_a_body_that_knows_its_position():
    body = _VARIANTS["b"].replace("t6 = row_scale(t5,t2)", "t9 = t5 + n\n        t6 = row_scale(t9,t2)")
    assert "position along n" in " ".join(refusals(program(body, "O[m, n] in (m, n)"), RULES[7]))
