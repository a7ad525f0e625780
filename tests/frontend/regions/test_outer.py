"""Outer graphs: the same results with arguments that are given up, which are gone when nobody needs them any more."""

from __future__ import annotations

from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from tilefold.frontend.regions.guard import Guarded
from tilefold.frontend.regions.guard import Part as Told
from tilefold.frontend.regions.outer import Outer, item
from tilefold.frontend.regions.replay import Recorded


class Part(torch.nn.Module):
    """A part that notes what lives when it is called."""

    def __init__(self, run, boxed=None):
        super().__init__()
        self.run = run
        if boxed is not None:
            run.boxed = boxed


def graph(*runs):
    """(a, b, unread) -> parts in a row: first(a, b) -> (c, d); second(c, b) -> (e,); results [e, d + 1, None]."""
    g, root = torch.fx.Graph(), torch.nn.Module()
    a, b, _ = (g.placeholder(n) for n in ("a", "b", "unread"))
    for n, run in enumerate(runs):
        root.add_module(f"part_{n}", Part(run, getattr(run, "boxed", None)))
    first = g.call_module("part_0", (a, b))
    c, d = (g.call_function(item, (first, k)) for k in range(2))
    second = g.call_module("part_1", (c, b))
    e = g.call_function(item, (second, 0))
    more = g.call_function(torch.add, (d, 1))
    g.output([e, more, None])
    root.forward = lambda a, b, unread: NotImplemented
    return Outer(lambda a, b, unread: [a + b + b, a - b + 1, None], root, g)


def test_values_are_let_go_after_their_last_use():
    alive = []
    seen = {}

    def first(a, b):
        alive.append((seen["unread"]() is not None, seen["a"]() is not None))
        return a + b, a - b

    def second(c, b):
        raise AssertionError("its arguments are handed over")

    def handed(given):
        c, b = given
        given.clear()
        alive.append((seen["a"]() is not None, seen["b"]() is not None))
        y = c + b
        del b
        alive.append(seen["b"]() is not None)
        return (y,)

    second.boxed = handed
    run = graph(first, second)
    given = [torch.full((2,), float(n)) for n in (5, 3, 1)]
    want = run(*given)
    seen.update({n: ref(x) for n, x in zip(("a", "b", "unread"), given, strict=True)})
    got = run.boxed(given)
    assert not given and got[2] is None
    assert all(torch.equal(x, y) for x, y in zip(got[:2], want[:2], strict=True))
    assert alive == [(False, True), (False, True), False]


class Chunk(Recorded):
    """What runs in Python, and would be recorded if there were a module."""

    def __init__(self, asked):
        super().__init__("chunk", SimpleNamespace(module=None, start_building=lambda: asked.append(self._calls)))

    def in_python(self, args):
        return args


@pytest.mark.parametrize(("times", "begun"), [(None, [2]), (1, [2]), (3, [4])])
def test_what_runs_in_chunks_has_the_module_built_in_the_second_call_of_the_whole(times, begun):
    asked = []
    plain, guarded = Chunk(asked), Chunk(asked)
    whole = graph(plain, Guarded(Told("part", []), guarded, guarded))
    if times is not None:
        whole.often(times)
    for part in (plain, guarded):
        asked.clear()
        for _ in range(6):
            part(torch.ones(2), torch.ones(2))
        assert asked == begun


def test_an_error_of_a_part_is_the_calls():
    def fails(a, b):
        raise ValueError("no such part")

    with pytest.raises(ValueError, match="no such part"):
        graph(fails, fails).boxed([torch.ones(2)] * 3)


@torch._functorch.config.patch(donated_buffer=False)  # else torch refuses to keep a graph
def test_gradients_of_a_replayed_backward_are_eagers():
    """Tensors that a forward saved are handed to the backward's regions, in C++ from the second step on."""
    m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    run = torch.compile(m, backend="tilefold")
    for step in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        retain = step == 2  # the saved tensors of a graph that is kept are read twice
        loss = run(x).square().sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        got = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        m(x).square().sum().mul(2 if retain else 1).backward()
        for g, p in zip(got, m.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)
        m.zero_grad()
