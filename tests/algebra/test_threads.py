"""Small tensors are computed with one thread, and others with as many as before."""

from __future__ import annotations

import pytest
import torch

from tests.algebra.cascades import SOFTMAX, cascade
from tilefold.algebra import check
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.threads import one_thread


@pytest.fixture
def several():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_are_as_before_behind_it(several):
    with pytest.raises(ValueError, match="inside"), one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            pass
        assert torch.get_num_threads() == 1
        raise ValueError("inside")
    assert torch.get_num_threads() == 3


def test_a_fold_is_checked_with_one(several, monkeypatch):
    seen = set()
    own = check._ways
    monkeypatch.setattr(check, "_ways", lambda *given: seen.add(torch.get_num_threads()) or own(*given))
    check._checks.cache_clear()
    c = cascade(SOFTMAX)
    check.check_fold(c, derive_fold(c), c.reductions)
    assert seen == {1} and torch.get_num_threads() == 3
