"""Every law, at every place where it applies in random programs, keeps the meaning (float64)."""

from __future__ import annotations

import pytest

from tests.tensor.law_programs import random_program, same
from tilefold.block.epilogue.search import LAWS
from tilefold.tensor.laws import partials
from tilefold.tensor.laws.normal import normal
from tilefold.tensor.text import parse, show

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_form_keeps_the_meaning(seed):
    p = random_program(seed)
    q = normal(p)
    same(p, q)
    assert parse(show(q)) == q
    assert normal(q) == q


@pytest.mark.parametrize("seed", SEEDS)
def test_every_match_keeps_the_meaning(seed):
    p = normal(random_program(seed))
    for law in LAWS:
        for match in law.matches(p):
            assert match.law == law.name
            q = law.apply(p, match)
            assert q != p
            same(p, normal(q))


@pytest.mark.parametrize("seed", SEEDS)
def test_laws_one_after_another_keep_the_meaning(seed):
    first = p = normal(random_program(seed))
    for law in LAWS:
        found = law.matches(p)
        if found:
            p = normal(law.apply(p, found[-1]))
    same(first, p)


@pytest.mark.parametrize("seed", SEEDS)
def test_partials_keep_the_meaning(seed):
    p = normal(random_program(seed))
    found = partials.matches(p, 4)
    q = normal(partials.apply(p, partials.together(found)))
    assert any(c.name.endswith("_part") for c in q.body)
    same(p, q)


def test_every_law_is_exercised():
    programs = [normal(random_program(seed)) for seed in SEEDS]
    assert {law.name for law in LAWS for p in programs if law.matches(p)} == {law.name for law in LAWS}
