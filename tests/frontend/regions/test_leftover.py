"""What Inductor compiles of what is left, and what eager runs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tilefold.frontend.regions import assemble as assembled
from tilefold.frontend.regions import leftover as left_over
from tilefold.frontend.regions.added_rows import CROWDED
from tilefold.frontend.regions.extract import extract
from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.leftover import compile_leftover
from tilefold.frontend.regions.partition import Group

ROWS = 2


def leftover(indices: int, *, other: bool) -> tuple[torch.fx.GraphModule, Group]:
    """Gradients of embeddings of ROWS and of many rows of four columns; `other`: and an operator besides."""
    g = torch.fx.Graph()
    dy, few, many = (g.placeholder(name) for name in ("dy", "few", "many"))
    made = [
        g.call_function(torch.ops.aten.embedding_dense_backward.default, (dy, at, rows, -1, False))
        for at, rows in ((few, ROWS), (many, indices))
    ]
    if other:
        made.append(g.call_function(torch.ops.aten.sin.default, (dy,)))
    g.output(tuple(made))
    with FakeTensorMode():
        for n in (dy, *made):
            n.meta["val"] = torch.empty(ROWS if n is made[0] else indices, 4)
        for n in (few, many):
            n.meta["val"] = torch.empty(indices, dtype=torch.int64)
    return torch.fx.GraphModule({}, g), Group(0, False, tuple(made), tuple(made))


@pytest.mark.parametrize(
    ("indices", "other", "by_inductor"),
    [(ROWS * CROWDED + 1, False, False), (ROWS * CROWDED, False, True), (ROWS * CROWDED + 1, True, True)],
)
def test_many_indices_of_few_rows_are_added_by_eager(indices, other, by_inductor):
    gm, group = leftover(indices, other=other)
    run = compile_leftover(group, extract(gm, group), Part("left", []), {})
    assert (run is not None) is by_inductor
    if run is not None:
        dy, few, many = torch.randn(indices, 4), torch.randint(ROWS, (indices,)), torch.randint(indices, (indices,))
        got = run(dy, few, many)
        for made, at, rows in ((got[0], few, ROWS), (got[1], many, indices)):
            torch.testing.assert_close(made, torch.zeros(rows, 4).index_add_(0, at, dy), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("dtype", "by_inductor"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_inductor_rounds_after_every_addition_is_eagers(dtype, by_inductor):
    g = torch.fx.Graph()
    x, at, y = (g.placeholder(name) for name in ("x", "at", "y"))
    put = g.call_function(torch.ops.aten.index_put.default, (x, [at], y, True))
    made = put, g.call_function(torch.ops.aten.sin.default, (y,)), g.call_function(torch.ops.aten.cos.default, (y,))
    g.output(made)
    with FakeTensorMode():
        for n in (x, put):
            n.meta["val"] = torch.empty(4, 2, dtype=dtype)
        for n in (y, *made[1:]):
            n.meta["val"] = torch.empty(500, 2, dtype=dtype)
        at.meta["val"] = torch.empty(500, dtype=torch.int64)
    gm, group = torch.fx.GraphModule({}, g), Group(0, False, made, made)
    assert (compile_leftover(group, extract(gm, group), Part("left", []), {}) is not None) is by_inductor


def test_gradients_of_convolutions_and_copies_for_them_are_the_librarys():
    aten = torch.ops.aten
    g = torch.fx.Graph()
    dy, x, w = (g.placeholder(name) for name in ("dy", "x", "w"))
    copy = g.call_function(aten.clone.default, (w,), {"memory_format": torch.channels_last})
    settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    both = [g.call_function(aten.convolution_backward.default, (dy, x, copy, *settings)) for _ in range(2)]
    g.output(tuple(both))
    with FakeTensorMode():
        for n, shape in ((dy, (2, 4, 8, 8)), (x, (2, 4, 8, 8)), (w, (4, 4, 3, 3)), (copy, (4, 4, 3, 3))):
            n.meta["val"] = torch.empty(shape)
        for n in both:
            n.meta["val"] = (torch.empty(2, 4, 8, 8), torch.empty(4, 4, 3, 3), None)
    gm = torch.fx.GraphModule({}, g)
    group = Group(0, False, (copy, *both), ())
    assert compile_leftover(group, extract(gm, group), Part("left", []), {}) is None


@pytest.mark.parametrize("others", [1, 2])
def test_what_inductor_would_only_call_runs_by_itself(others):
    """Products of experts beside one more operator; with two more there is something to compile."""
    g = torch.fx.Graph()
    x, w, ends = (g.placeholder(name) for name in ("x", "w", "ends"))
    made = [g.call_function(torch.ops.aten._grouped_mm.default, (x, w, ends))]
    made += [g.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(others)]
    g.output(tuple(made))
    with FakeTensorMode():
        for n, shape in ((x, (16, 16)), (w, (2, 16, 16)), *((n, (16, 16)) for n in made)):
            n.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
        ends.meta["val"] = torch.empty(2, dtype=torch.int32)
    gm, group = torch.fx.GraphModule({}, g), Group(0, False, tuple(made), tuple(made))
    run = compile_leftover(group, extract(gm, group), Part("left", []), {})
    assert (run is not None) is (others == 2)


@pytest.mark.parametrize(
    ("device", "extent", "by_inductor"), [("cuda", 196, True), ("cuda", 500, False), ("cpu", 196, False)]
)
def test_short_rows_are_sorted_in_a_kernel_of_inductors(monkeypatch, device, extent, by_inductor):
    monkeypatch.setattr(left_over, "_compiled", lambda *given: lambda *args: ())
    g = torch.fx.Graph()
    x = g.placeholder("x")
    made = g.call_function(torch.ops.aten.sort.default, (x, 1))
    g.output(made)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x.meta["val"] = torch.empty(128, extent, 3, device=device)
        made.meta["val"] = (torch.empty(128, extent, 3, device=device), torch.empty(128, extent, 3, device=device))
    gm, group = torch.fx.GraphModule({}, g), Group(0, False, (made,), (made,))
    assert (compile_leftover(group, extract(gm, group), Part("left", []), {}) is not None) is by_inductor


def test_a_leftover_that_reads_a_padded_length_is_told_the_length():
    """Nothing that it makes has a symbolic size: Inductor wants to know what 8 * ((n + 7) // 8) is made of."""

    def fn(x):
        padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8)).exp()
        return padded.median(0).values + padded.kthvalue(2, 0).values

    assembled.compilations.clear()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="tilefold", dynamic=True)
    for n in (12, 19):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), fn(x))
    assert not any("Inductor" in f.reason for c in assembled.compilations for f in c.fallbacks)


def test_a_size_that_is_another_has_the_others_symbol():
    """Two lengths were found to be one; of the second's argument Inductor learns what the first is."""
    mode, context = FakeTensorMode(shape_env=ShapeEnv()), StatelessSymbolicContext([DimDynamic.DYNAMIC])
    given = [(torch.empty(9), ConstantSource(name)) for name in ("first", "second")]
    first, second = (mode.from_tensor(t, source=s, symbolic_context=context).shape[0] for t, s in given)
    with mode:
        assert bool(first == second)
        g = torch.fx.Graph()
        length, x = g.placeholder("length"), g.placeholder("x")
        made = [x]
        for _ in range(2):
            made.append(g.call_function(torch.ops.aten.cumsum.default, (made[-1], 0)))
        g.output(tuple(made[1:]))
        length.meta["val"] = second
        for n in made:
            n.meta["val"] = torch.empty((first // 2 + 1,))
        gm, group = torch.fx.GraphModule({}, g), Group(0, False, tuple(made[1:]), tuple(made[1:]))
        failures = []
        run = compile_leftover(group, extract(gm, group), Part("left", failures), {})
    assert run is not None, failures
    torch.testing.assert_close(run(torch.arange(5.0), 9)[0], torch.arange(5.0).cumsum(0))
