"""Where a factor of earlier results is 0, whether every element seen so far is 0 too: no guard is needed there."""

from __future__ import annotations

import pytest

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tilefold.algebra import derive, guard
from tilefold.algebra.context import Options
from tilefold.algebra.derive import build_fold


@pytest.fixture
def asked(monkeypatch):
    """Every question with its answer, as a text is derived with its divisions repaired and not delayed."""
    found, real = [], guard.dominated_factor

    def told(atom, terms, ctx):
        found.append((atom, terms, ctx, real(atom, terms, ctx)))
        return found[-1][-1]

    monkeypatch.setattr(guard, "dominated_factor", told)

    def of(text):
        derive._derive.cache_clear()
        found.clear()
        build_fold(cascade(text), Options(delay=False))
        return list(found)

    yield of
    derive._derive.cache_clear()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (c.ATTENTION, True),  # exponentials, which are 0 where they are too small
        ("s = sum[l] abs(y[l]) \n o = sum[l] y[l] * x[l] / s", True),
        ("s = sum[l] abs(y[l]) \n o = sum[l] y[l] / s", True),
        ("s = max[l] abs(y[l]) \n o = sum[l] y[l] * x[l] / s", True),
        ("s = sum[l] abs(y[l]) \n o = sum[l] x[l] / s", False),  # a sum of something else
        ("s = sum[l] y[l] \n o = sum[l] y[l] * x[l] / s", False),  # elements may cancel
        ("s = sum[l] abs(y[l]) * abs(z[l]) \n o = sum[l] y[l] * x[l] / s", False),  # z alone may be 0
        ("s = sum[l] abs(y[l]) + 1.0 \n o = sum[l] y[l] * x[l] / s", False),
    ],
)
def test_a_sum_of_sizes_of_factors_is_zero_only_where_they_are(text, answer, asked):
    assert [found for *_, found in asked(text)] == [answer]


def test_all_terms_must_have_the_factors(asked):
    first, second = asked("s = sum[l] abs(y[l]) \n q = max[l] x[l] \n o = sum[l] (y[l] * q + w[l]) / s")
    assert (first[-1], second[-1]) == (True, False)
    atom, terms, ctx, _ = first
    assert not guard.dominated_factor(atom, (*terms, *second[1]), ctx)
