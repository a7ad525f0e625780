"""Counters beside a graph: counted once a call, and only where nothing reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.frontend.check import randn
from tilefold.frontend.capture.counters import Counters


class Counting(nn.Module):
    def __init__(self, read: bool):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("by_two", torch.zeros(2))
        self.read = read

    def forward(self, x):
        self.calls.add_(1)
        self.by_two.add_(2.5)
        return x * self.calls if self.read else x * 2


def counted(module, *args, fails=False):
    """What a compiler that takes counters out sees of a module: the numbers, and the nodes that were left."""
    found: list[Counters] = []

    def backend(gm, _):
        found.append(Counters.taken_out(gm))
        left = [n.target for n in gm.graph.nodes].count("add_")
        seen.append(left)
        if fails:
            found[0].put_back()
            return gm.forward
        return found[0].around(gm.forward)

    seen: list[int] = []
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend)
    results = [run(*args) for _ in range(3)]
    return results, found[0], seen[0]


@pytest.mark.parametrize("fails", [False, True])
def test_counters_count_calls(fails):
    module, x = Counting(read=False), randn(4)
    results, found, left = counted(module, x, fails=fails)
    assert len(found.nodes) == 2 and left == 0
    assert module.calls.item() == 3 and module.by_two.tolist() == [7.5, 7.5]
    torch.testing.assert_close(results[-1], 2 * x)


def test_what_is_read_stays_in_the_graph():
    module, x = Counting(read=True), randn(4)
    results, found, left = counted(module, x)
    assert len(found.nodes) == 1 and left == 1
    torch.testing.assert_close(results, [x, 2 * x, 3 * x])


def test_shared_memory_stays_in_the_graph():
    memory = torch.zeros(4)
    module = Counting(read=False)
    module.by_two, x = memory[:2], memory.view(2, 2)
    results, found, _ = counted(module, x)
    assert len(found.nodes) == 1
    assert memory.tolist() == [7.5, 7.5, 0.0, 0.0] and results[-1][0].tolist() == [15.0, 15.0]


def test_a_parameter_is_no_counter():
    def step(w):
        with torch.no_grad():
            w.add_(1)
        return torch.ones(2)

    w = torch.zeros(2, requires_grad=True)
    _, found, _ = counted(step, w)
    assert not found.nodes and w.tolist() == [3.0, 3.0]
