"""The proof of a Fold: what it must hold, and that a law that fails is an error."""

from __future__ import annotations

import pytest

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tilefold.algebra import derive
from tilefold.algebra.expr import Load, call
from tilefold.algebra.fold import Check
from tilefold.algebra.symbolic import equal_at_points
from tilefold.errors import NotFusibleError

WRONG = Check("a law", "symbolic", False, "1 differs from 2")


def names(text: str) -> list[str]:
    return [k.name for k in derive.derive_fold(cascade(text)).checks]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """Nothing is remembered of earlier derivations, nor of these."""
    for cached in (derive._derive, derive._proved):
        cached.cache_clear()
    yield
    for cached in (derive._derive, derive._proved):
        cached.cache_clear()


@pytest.mark.parametrize("text", [c.ATTENTION, c.VARIANCE])
def test_a_law_that_fails_is_an_error(text, monkeypatch):
    monkeypatch.setattr(derive, "prove", lambda ctx: (WRONG,))
    with pytest.raises(NotFusibleError, match="failed its own check: a law: 1 differs from 2"):
        derive.derive_fold(cascade(text))


def test_the_papers_two_methods_are_held_against_the_form_without_delay(monkeypatch):
    """Attention divides by its sum at the end; both papers repair the division itself."""
    said = [n for n in names(c.ATTENTION) if "fixed-point test" in n or "inversion" in n]
    assert {n.split(":")[0] for n in said} > {"m"} or len(said) >= 4
    seen = []
    monkeypatch.setattr(derive, "prove_methods", lambda ctx: seen.append(ctx.options) or (WRONG,))
    for cached in (derive._derive, derive._proved):
        cached.cache_clear()
    with pytest.raises(NotFusibleError, match="a law"):
        derive.derive_fold(cascade(c.ATTENTION))
    assert [(o.guards, o.delay, o.ignore_rounding) for o in seen] == [(False, False, False)]


@pytest.mark.parametrize("text", [c.VARIANCE, c.INERTIA, c.DERIVABLE["softmax"], c.DERIVABLE["RMSNorm + max"]])
def test_linear_repair_and_what_delays_nothing_have_no_second_method(text, monkeypatch):
    monkeypatch.setattr(derive, "prove_methods", lambda ctx: (WRONG,))
    assert all(k.ok for k in derive.derive_fold(cascade(text)).checks)


def test_the_proof_is_of_the_unguarded_form_and_comes_before_the_numbers(monkeypatch):
    seen = []
    real = derive.prove
    monkeypatch.setattr(derive, "prove", lambda ctx: seen.append(ctx.options) or real(ctx))
    checks = derive.derive_fold(cascade(c.ATTENTION)).checks
    assert [(o.guards, o.delay, o.ignore_rounding) for o in seen] == [(False, True, False)]
    assert len({k.name for k in checks}) == len(checks)
    assert next(k for k in checks if "incremental update" in k.name).method == "numeric"


def test_rounding_is_ignored_in_the_proof_where_it_is_in_the_fold(monkeypatch):
    text = c.DERIVABLE.get("RMSNorm + GEMM")
    seen = []
    real = derive.prove
    monkeypatch.setattr(derive, "prove", lambda ctx: seen.append(ctx.options.ignore_rounding) or real(ctx))
    derive.derive_fold(cascade(text), ignore_rounding=True)
    assert seen == [True]


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.000001, False), (1.5, False)])
def test_identities_that_are_not_rational_hold_to_rounding(factor, same):
    a = Load("a", ())
    twice, apart = call("exp", call("mul", 2.0, a)), call("mul", call("exp", a), call("exp", a))
    assert equal_at_points(twice, call("mul", apart, factor), {}) == (same, "numeric")


def test_the_first_part_of_a_sum_has_its_name():
    fold = derive.derive_fold(cascade("m = max[l] x[l] \n v = sum[l] exp(x[l] - m) + y[l] * m + z[l]"))
    found = [v.name for v in fold.state]
    assert found[1] == "v" and len(set(found)) == len(found)
