"""Groups are cut where a program takes less memory for it, and hardly more time."""

from __future__ import annotations

from itertools import pairwise

import torch

from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.lighter import GIVEN, Lighter
from tilefold.plan.targets.gpu import GpuTarget

ROWS = 65536
WIDE, NARROW, OUT = 32, 16, 96


def narrowed(y, u, v):
    """One kernel: 32 columns to 16, those to 96."""
    return torch.relu(torch.relu(torch.relu(y) @ u) @ v)


def behind_a_product(a, b, u, v):
    """What the kernel reads is the program's own, and nobody else's."""
    return narrowed(a @ b, u, v)


def read_again(a, b, u, v):
    """What the kernel reads is wanted later."""
    y = a @ b
    return narrowed(y, u, v), y


def summed(a, b, u, v):
    """What the kernel writes is small."""
    return narrowed(a @ b, u, v).float().sum(-1)


def planned(f, *columns, cut=1.0, calls=1):
    """Members of the groups behind library calls, and refusals of those. The whole takes a millisecond, the parts of a
    cut together `cut`."""
    weights = [(WIDE, NARROW), (NARROW, OUT)]
    shapes = [(ROWS, columns[0]), *pairwise(columns), *weights]
    p = trace(f, *(torch.zeros(s, dtype=torch.bfloat16) for s in shapes)).program
    own = len(p.body) - calls

    def predict(k):
        whole = len(k.plan.group.members) == own
        return Predicted(1e-3 if whole else cut * 1e-3 / 2, 1e-3)

    found = fuse_for_gpu(p, GpuTarget(predict=predict), calls=[(c.name,) for c in p.body[:calls]])
    apart = [r for r in found.grouping.refusals if "library" not in r.reason]
    return [k.plan.group.members for k in found.kernels][calls:], apart


def test_a_kernel_that_holds_most_is_cut_and_says_why():
    groups, (apart,) = planned(behind_a_product, 64, WIDE)
    assert [len(x) for x in groups] == [2, 3]
    assert (apart.producer, apart.consumer) == (groups[0][-1], groups[1][0])
    assert "most memory" in apart.reason
    assert apart.loc is not None


def test_arguments_are_the_callers_and_stay():
    assert [len(x) for x in planned(narrowed, WIDE, calls=0)[0]] == [5]


def test_what_others_read_is_there_all_the_same():
    assert [len(x) for x in planned(read_again, 64, WIDE)[0]] == [5]


def test_a_kernel_of_less_than_the_worst_moment_stays_whole():
    assert len(planned(summed, 64, WIDE)[0]) == 1


def test_little_memory_is_worth_little_time():
    made = 2 * ROWS * (WIDE + OUT)
    whole = made + 2 * (ROWS * 64 + 64 * WIDE + WIDE * NARROW + NARROW * OUT)
    most = 1 + GIVEN * 2 * ROWS * (WIDE - NARROW) / whole  # of the kernel's time alone; the call's is some more
    assert len(planned(behind_a_product, 64, WIDE, cut=most)[0]) == 2
    assert len(planned(behind_a_product, 64, WIDE, cut=1 + 1.1 * (most - 1))[0]) == 1
    assert len(planned(behind_a_product, 2048, WIDE)[0]) == 1  # arguments take most of it


def test_only_cuts_that_save_memory_are_asked_whether_they_are_legal(monkeypatch):
    """A cost volume of 81 shifts has 160 cuts, of which none saves any: asking took a third of its planning."""
    asked = []

    def counted(g, calls, seconds, legal, bandwidth):
        return Lighter(g, calls, seconds, lambda *parts: asked.append(parts) or legal(*parts), bandwidth)

    monkeypatch.setattr("tilefold.plan.gpu.Lighter", counted)
    planned(read_again, 64, WIDE)
    assert not asked
    planned(behind_a_product, 64, WIDE)
    assert asked
