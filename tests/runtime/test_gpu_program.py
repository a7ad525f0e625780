"""Planned calls: scratch values alive at once never overlap, others share; kernels know who is ahead and behind."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tilefold.backends.triton.dependent import Place
from tilefold.backends.triton.launcher import Launcher, Plan
from tilefold.runtime import gpu_program
from tilefold.runtime.arena import ALIGNED, packed
from tilefold.runtime.gpu_program import GpuProgram, Launch, Made

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


class Recorded:
    """Stands for a kernel: remembers what it is planned as."""

    def __init__(self):
        self.places = []

    def plan(self, xs, syms, place):
        self.places.append(place)
        return Plan(Launcher(lambda *args: None, ()), 1, ())


def chain(shapes) -> tuple[GpuProgram, list[Recorded]]:
    """x -> a -> b ..., kernel by kernel; the last is the output."""
    names = ["x", *(f"t{n}" for n in range(len(shapes)))]
    found = [Recorded() for _ in shapes]
    launches = [
        Launch(k, (names[n], names[n + 1]), (), ((names[n + 1], torch.float32, lambda syms, s=shapes[n]: s),))
        for n, k in enumerate(found)
    ]
    return GpuProgram([names[-1]], launches), found


def planned(shapes) -> list[Place]:
    program, found = chain(shapes)
    made = {program.launches[-1].tensors[-1]: Made(shapes[-1], (1,), torch.float32)}
    program.plan({"x": torch.zeros(4)}, {}, made, {"x": 0, next(iter(made)): 1}, ())
    return [p for k in found for p in k.places]


def test_kernels_of_one_call_know_their_places(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_program, "enabled", lambda device: asked.append(device.type) or True)
    assert planned([(4,), (3,), (2,)]) == [Place(False, True), Place(True, True), Place(True, False)]
    assert planned([(4,)]) == [Place(False, False)] and asked == ["cpu", "cpu"]


def test_kernels_that_are_not_launched_are_no_one_to_wait_for(monkeypatch):
    """What is ahead on the stream might then be anybody's."""
    monkeypatch.setattr(gpu_program, "enabled", lambda device: True)
    assert planned([(0,), (3,), (2,)]) == [Place(False, False), Place(False, True), Place(True, False)]
    assert planned([(4,), (0,), (2,)]) == [Place(False, True), Place(False, False), Place(True, False)]


def test_plain_launches_where_the_device_has_no_other():
    assert planned([(4,), (3,), (2,)]) == [Place(False, False)] * 3
