"""Scratch memory of planned calls: values alive at once never overlap, others share."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tilefold.runtime.gpu_program import ALIGNED, packed

VALUES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 6), st.integers(0, 4)), max_size=8)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(VALUES)
def test_values_alive_at_once_do_not_overlap(values):
    sizes = {str(k): n for k, (n, _, _) in enumerate(values)}
    lives = {str(k): (at, at + more) for k, (_, at, more) in enumerate(values)}
    offsets, total = packed(sizes, lives)
    assert total <= sum(-(-n // ALIGNED) * ALIGNED for n in sizes.values())
    for a, at in offsets.items():
        assert at % ALIGNED == 0 and at + sizes[a] <= total
        for b, other in offsets.items():
            together = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
            if a != b and together and sizes[a] and sizes[b]:
                assert at + sizes[a] <= other or other + sizes[b] <= at


def test_values_of_different_times_share_memory():
    offsets, total = packed({"a": 1000, "b": 900, "c": 800}, {"a": (0, 1), "b": (2, 3), "c": (1, 2)})
    assert offsets == {"a": 0, "b": 0, "c": 1024} and total == 1824
    assert packed({}, {}) == ({}, 0)
