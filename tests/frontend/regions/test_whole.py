"""Graphs of several parts as one tape: regions, operators between them, what another compiler made; and what is not."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
import torch.nn.functional as F

from tilefold.frontend.regions import outer
from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.outer import Outer, item
from tilefold.runtime.native.load import native


@pytest.fixture
def made(monkeypatch):
    """The outer graphs that are compiled; the module that runs tapes is there."""
    assert native().wait() is not None, native().reason
    torch._dynamo.reset()
    found = []
    usual = Outer.__init__

    def init(self, *given, **more):
        usual(self, *given, **more)
        found.append(self)

    monkeypatch.setattr(Outer, "__init__", init)
    return found


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tapes(graph):
    return graph._module.count(graph._region)


def close(got, want):
    for y, z in zip(got, want, strict=True):
        if isinstance(z, torch.Tensor):
            torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
            assert y.stride() == z.stride()
        else:
            assert y == z


def sorted_experts(x, w):
    """Two regions, a sort between them (several results), views, a size."""
    p = torch.softmax(x @ w, -1)
    best, at = torch.sort(p, -1)
    return (torch.relu(best) * 2).sum(-1), torch.exp(p.gather(-1, at[:, :2])), x, x.shape[0]


def test_regions_and_operators_are_one_call(made):
    run = torch.compile(sorted_experts, backend="tilefold", dynamic=False)
    w = randn(8, 6, seed=9)
    with torch.no_grad():
        run(randn(5, 8), w), run(randn(5, 8), w)  # of the first call AOTAutograd looks at every operator
        (graph,) = made
        assert tapes(graph) == 1 and not graph.refused
        graph._run = None  # only the tape is left
        for seed in range(1, 4):
            x = randn(5, 8, seed=seed)
            got = run(x, w)
            close(got, sorted_experts(x, w))
            assert got[2] is x


def test_a_thousand_calls_with_changing_lengths(made):
    run = torch.compile(sorted_experts, backend="tilefold", dynamic=True)
    w = randn(8, 6, seed=9)
    with torch.no_grad():
        for call in range(1000):
            x = randn(2 + call * 7 % 60, 8, seed=call % 3)
            got = run(x, w)
            if call % 40 == 0:
                close(got, sorted_experts(x, w))
    (graph,) = made
    assert tapes(graph) == 60 and not graph.refused


@pytest.mark.parametrize("leftover", ["inductor", "eager"])
def test_gradients(made, leftover):
    """A backward with an operator that Tilefold does not cover (and Inductor compiles no single one) is one call."""

    def loss(at, table, w):
        y = torch.sort(torch.tanh(F.embedding(at, table)) @ w, -1)[0]
        return (torch.cumsum(torch.cumsum(y, 0) / 20, 0) / 20).square().mean()

    run = torch.compile(loss, backend="tilefold", options={"leftover": leftover})
    for seed in range(4):
        at = torch.randint(0, 9, (20,), generator=torch.Generator().manual_seed(seed))
        table, w = randn(9, 8, seed=seed).requires_grad_(), randn(8, 9, seed=seed).requires_grad_()
        got, want = (torch.autograd.grad(fn(at, table, w), [table, w]) for fn in (run, loss))
        close(got, want)
    assert all(tapes(graph) == 1 for graph in made if not graph.refused)
    assert "graph" in made[-1].name and "backward" in made[-1].name and not made[-1].refused


def test_what_depends_on_values_has_the_tapes_of_regions(made):
    def positive(x, w):
        y = torch.softmax(x @ w, -1)
        return torch.relu(y[y > 0.2] * 2) + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(positive, backend="tilefold", dynamic=False)
        with torch.no_grad():
            for seed in range(4):
                x, w = randn(5, 8, seed=seed), randn(8, 6, seed=seed)
                close([run(x, w)], [positive(x, w)])
    (graph,) = made
    assert graph.refused and graph._module is None


def test_an_index_out_of_range_is_eagers_error_and_later_calls_are_right(made, lenient):
    def look_up(table, at, x):
        return torch.relu(table[at]) @ torch.sort(torch.tanh(x), -1)[0]

    run = torch.compile(look_up, backend="tilefold", dynamic=False)
    table, x = randn(5, 4), randn(4, 3)
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 5])
    with torch.no_grad():
        run(table, good, x), run(table, good, x)
        with pytest.raises(IndexError, match="out of"):
            run(table, bad, x)
        close([run(table, good, x)], [look_up(table, good, x)])
    (graph,) = made
    assert tapes(graph) == 1 and not graph.refused


def chain(*parts):
    """x -> parts in a row, and 1 added between them."""
    g, root = torch.fx.Graph(), torch.nn.Module()
    x = g.placeholder("x")
    for n, run in enumerate(parts):
        root.add_module(f"part_{n}", torch.nn.Module())
        root.get_submodule(f"part_{n}").run = run
        x = g.call_function(torch.add, (g.call_function(item, (g.call_module(f"part_{n}", (x,)), 0)), 1))
    g.output([x])

    def by_parts(x):
        for run in parts:
            x = run(x)[0] + 1
        return [x]

    return Outer(by_parts, root, g, g, "chain")


def test_a_part_that_fails_in_a_tape_runs_part_by_part(lenient):
    """From then on: the part itself knows what to do."""
    assert native().wait() is not None, native().reason
    fails = [False]

    def part(x):
        if fails[0]:
            raise RuntimeError("out of resources")
        return [x * 2]

    run = chain(part, part)
    x = randn(3)
    for _ in range(3):
        assert torch.equal(run(x)[0], (2 * x + 1) * 2 + 1)
    assert tapes(run) == 1
    fails[0] = True
    with pytest.raises(RuntimeError, match="out of resources"):
        run(x)
    assert "RuntimeError" in run.refused
    fails[0] = False
    assert torch.equal(run(x)[0], (2 * x + 1) * 2 + 1)


def test_arguments_that_are_handed_over_are_gone_while_a_tape_runs():
    assert native().wait() is not None, native().reason
    alive = []

    def part(x):
        alive.append(seen() is not None)
        return [x * 2]

    run = chain(part, part)
    for call in range(3):
        x = randn(3)
        seen, given = ref(x), [x]
        want = (2 * x + 1) * 2 + 1
        del x
        (y,) = run.boxed(given)
        assert torch.equal(y, want) and not given
        assert alive[-1] is (call == 0), "the call that is recorded keeps its arguments: it could be repeated"


def test_few_calls_and_several_devices_are_not_recorded_whole():
    assert "one part" in chain().refused
    g = torch.fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(torch.ops.aten.sin.default, (x,))
    assert not outer._refused(g)
    y.target = torch.ops.higher_order.while_loop
    assert "runs functions" in outer._refused(g)
    y.target = torch.ops.aten.sin.default
    for n, index in ((x, 0), (y, 1)):
        n.meta["val"] = torch._subclasses.FakeTensorMode().fake_tensor_converter.from_meta_and_device(
            torch._subclasses.FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cuda", index)
        )
    assert "several devices" in outer._refused(g)


def test_strictness_raises_what_a_tape_raises(monkeypatch):
    assert not Part("graph", []).survives(RuntimeError("in C++"))
    run = chain(lambda x: [x * 2], lambda x: [x * 2])
    run(randn(3))

    def fails(*given):
        raise RuntimeError("in C++")

    monkeypatch.setattr(run, "replay", fails)
    with pytest.raises(RuntimeError, match=r"in C\+\+"):
        run(randn(3))
