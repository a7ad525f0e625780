"""Names that are made are not taken, and block programs of unlucky programs define nothing twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import tilefold
from tilefold.names import free, fresh

NAMES = st.text("ab_2", min_size=1, max_size=4)


@given(NAMES, st.sets(NAMES))
def test_a_made_name_is_new_and_then_taken(wanted: str, taken: set[str]) -> None:
    before = set(taken)
    assert free(wanted, taken) == fresh(wanted, taken)
    (made,) = taken - before
    assert made not in before and made.startswith(wanted)
    assert made == wanted or wanted in before  # no number where none is needed


@pytest.mark.parametrize("shape", [(128, 3000), (3, 5)])
def test_what_varies_in_a_loop_and_before_it_has_two_names(shape: tuple[int, int]) -> None:
    """`s / 2` is read tile by tile by the sum, and as whole rows by the softmax inside it."""

    def fn(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (F.log_softmax(s / 2.0, -1) * F.log_softmax(t / 2.0, -1)).sum()

    s, t = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(tilefold.fuse(fn)(s, t).double(), fn(s.double(), t.double()), rtol=1e-5, atol=0.0)


def test_names_are_made_in_one_place() -> None:
    """A loop that looks for a free name stands in `names.py` only."""
    maker = re.compile(r"while .*\bin (self\.)?(taken|used|names|dims|sizes)\b")
    root = Path(tilefold.__file__).parent
    found = [str(f.relative_to(root)) for f in sorted(root.rglob("*.py")) if maker.search(f.read_text())]
    assert found == ["names.py", "tensor/laws/stack.py"]  # the latter looks for a dim of a certain extent
