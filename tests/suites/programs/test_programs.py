"""The programs are many and of every class, and run at their small sizes in their dtypes and in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tilefold.frontend.verify import judge
from tilefold.suites.gpu.cases import select
from tilefold.suites.gpu.exact import references
from tilefold.suites.programs.all import CLASSES, PROGRAMS
from tilefold.suites.programs.program import SUITE


def test_there_are_enough_of_every_class():
    names = [p.name for p in PROGRAMS]
    assert len(set(names)) == len(names) >= 150
    assert all(sum(p.family == c for p in PROGRAMS) >= 5 for c in CLASSES)
    assert all((p.fn is None) != (p.module is None) and len(p.large) == len(p.small) for p in PROGRAMS)
    assert all(len(select(SUITE, [p.name])) == 1 for p in PROGRAMS), "a name is a pattern of others"


@pytest.mark.parametrize("family", CLASSES)
def test_small_programs_are_finite_and_near_float64(family):
    for p in PROGRAMS:
        if p.family != family:
            continue
        case = p.case(small=True).placed("cpu")
        with torch.no_grad():
            (part,) = references(case, case.args())
        results = tree_leaves(part.exact.result)
        assert len(results) == len(part.eager) > 0, p.name
        for own, exact in zip(part.eager, results, strict=True):
            assert exact.double().isfinite().all(), p.name
            found = judge(p.name, own, own, exact, selections=part.exact.selections)
            assert found.ok and found.max_rel_err < 0.2, (p.name, found)


def test_a_row_of_a_module_is_called_only_where_it_is_placed():
    case = next(p for p in PROGRAMS if p.module is not None).case(small=True)
    with pytest.raises(TypeError, match="placed"):
        case.fn(*case.args())
    again = [c.fn(*c.args()) for c in (case.placed("cpu"), case.placed("cpu"))]
    assert torch.equal(*again), "the same parameters each time"


def test_the_seed_of_a_module_is_its_own():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    next(p for p in PROGRAMS if p.module is not None).case(small=True).placed("cpu")
    assert torch.equal(torch.rand(3), expected)
