"""The algorithm on the paper's examples and on random programs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.blockbuster.rules.generate import outputs, random_program, sample
from tilefold.blockbuster.edit import canonical
from tilefold.blockbuster.ir import Func, Map, walk
from tilefold.blockbuster.listing import lines_of, show
from tilefold.blockbuster.parse import parse
from tilefold.blockbuster.rules.algorithm import PEELING, PRIORITY, RULES, fuse, fuse_reductions
from tilefold.blockbuster.rules.law import places
from tilefold.blockbuster.verify import verify
from tilefold.suites.blocks.examples import examples
from tilefold.suites.blocks.paper import cases, paper_program, same_rules

EXAMPLES = {ex.name: ex for ex in examples()}


def test_priority_is_the_papers():
    assert [law.number for law in PRIORITY] == [8, 4, 5, 9, 3, 1, 2]
    assert sorted(RULES) == list(range(1, 10))


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_paper(case):
    outcome = case.run()
    assert outcome.ok, outcome.detail


def test_comparison_with_the_paper_can_fail():
    """Another operator, another order of loops, or another operand, and the listing is not the paper's."""
    ex = EXAMPLES["attention"]
    p = fuse(ex.program).result
    good = show(paper_program(ex, p))
    for old, new in (("row_scale(", "row_shift("), ("load(KT[n,d])", "load(KT[n,d]) "), ("** (-0.5)", "** (-0.4)")):
        other = parse(good.replace(old, new)) if old in good else None
        assert other is not None
        assert (canonical(other.graph) == canonical(p.graph)) == (new.strip() == old)
    assert not same_rules((1, 4), (4, 1)) and same_rules((2, 4), (12, 4))


@pytest.mark.parametrize("name", EXAMPLES)
def test_peeling_instead_of_extending(name):
    """Rule 7 as the alternative: no operator is computed again in an inner loop, and the results are the same."""
    ex = EXAMPLES[name]
    f = fuse(ex.program, extension=PEELING)
    assert [s.law.number for s in f.steps].count(7) == len(f.snapshots) - 1 > 0
    x = sample(f.start)
    for p in f.programs:
        again = parse(show(verify(p)))  # up to where the first entry is taken out of a list
        assert show(parse(show(again))) == show(again)
        for blocks in (1, 2, 3):
            for q in (p, again):
                assert float((outputs(q, x, blocks)[0] - ex.reference(x)).abs().max()) < 1e-9
    assert any("range(1," in line for line in lines_of(f.result))


def test_random_programs():
    """Every step of the algorithm keeps the meaning; all rules get their turn."""
    used: Counter[int] = Counter()
    for seed in range(30):
        p = random_program(seed, steps=5)
        x = sample(p)
        want = outputs(p, x, 2)[0]
        bound = 1e-8 * max(1.0, float(want.abs().max()))
        f = fuse(p)
        used.update(s.law.number for s in f.steps)
        for q in {id(q): q for q in (*f.programs, f.after(len(f.steps) // 2))}.values():
            assert canonical(parse(show(verify(q))).graph) == canonical(q.graph)
            assert float((outputs(q, x, 3)[0] - want).abs().max()) < bound, seed
        assert not any(True for law in (*PRIORITY, RULES[6]) for _ in places(f.result, law)), "nothing is left to do"
    assert set(used) == {1, 2, 3, 4, 5, 6, 8, 9}, used


def test_all_reductions_fused():
    p = fuse_reductions(EXAMPLES["rmsnorm_swiglu"].program)
    assert not list(places(p, RULES[3]))
    assert sum(isinstance(n, Map) and n.serial for n in walk(p.graph)) == 4
    assert sum(isinstance(n, Func) and n.op == "dot" for n in walk(p.graph)) == 3
