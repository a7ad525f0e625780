"""Rows added to tables: which sums are, in which memory, and their error."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.operators.added_rows import added_rows_op, launches, rows_of_sums_op
from tilefold.frontend.regions import added_rows
from tilefold.frontend.regions.added_rows import CROWDED, EACH, FEW, SMALL, own_additions
from tilefold.frontend.regions.partition import partition
from tilefold.runtime.recorder import Recorder

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

aten = torch.ops.aten
ROWS, COLUMNS = 50, 6


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """No table is small for its indices, as those of models: most of these tests are of such."""
    monkeypatch.setattr(added_rows, "SMALL", 0)


def embedded(dy, at, rows=ROWS, padding=-1, scaled=False):
    return aten.embedding_dense_backward(dy, at, rows, padding, scaled)


def picked(dy, at, rows=ROWS):
    return aten.index_put(dy.new_zeros(rows, COLUMNS), [at], dy, True)


def graph(fn, *, dtype=torch.bfloat16, device="cuda", count=15, kind=torch.int64):
    """fn(dy [3, count / 3, COLUMNS], at, x [count, ROWS], y [count, COLUMNS])."""
    with FakeTensorMode():
        shapes = (3, count // 3, COLUMNS), (3, count // 3), (count, ROWS), (count, COLUMNS)
        types = dtype, kind, dtype, dtype
        args = [torch.empty(s, dtype=t, device=device) for s, t in zip(shapes, types, strict=True)]
        return make_fx(fn)(*args)


def given(dtype, count=15, most=ROWS):
    gen = torch.Generator().manual_seed(0)
    dy, x, y = (torch.randn(s, generator=gen).to(dtype) for s in ((3, 5, COLUMNS), (count, ROWS), (count, COLUMNS)))
    return dy, torch.randint(most, (3, 5), generator=gen), x, y


def on_cpu(gm):
    """The graph, which was traced for a GPU, makes what it makes on a CPU."""
    for n in gm.graph.nodes:
        n.kwargs = {**n.kwargs, "device": torch.device("cpu")} if "device" in n.kwargs else n.kwargs
    gm.recompile()


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda dy, at, x, y: embedded(dy, at),
        lambda dy, at, x, y: embedded(dy, at, padding=3),
        lambda dy, at, x, y: picked(dy, at),
        lambda dy, at, x, y: embedded(dy, at) + embedded(dy * 2, at),
        lambda dy, at, x, y: embedded(dy, at) + x.t() @ y,
        lambda dy, at, x, y: (x.t() @ y + embedded(dy, at)) + embedded(dy * 2, at + 1, rows=ROWS),
        lambda dy, at, x, y: embedded(dy, at) + (y.t() @ x).t(),  # rows of the product are columns of the table
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors_are_eagers_at_most(fn, dtype):
    gm = graph(fn, dtype=dtype)
    args = given(dtype, most=7)
    eager = fn(*args)
    want = fn(*[a.double() if a.is_floating_point() else a for a in args])
    assert own_additions(gm) and aten.embedding_dense_backward.default not in targets(gm)
    on_cpu(gm)
    got = gm(*args)
    assert got.dtype is dtype and got.shape == want.shape
    assert (got - want).norm() <= 1.1 * (eager - want).norm() + 1e-6 * want.norm()


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_indices_of_few_rows_are_a_fold_in_any_order(dtype, padding):
    def fn(dy, at, x, y):
        return embedded(dy, at, 4, padding)

    gm = graph(fn, dtype=dtype, count=3 * 2 * EACH)
    torch.use_deterministic_algorithms(True)
    try:
        assert own_additions(gm) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert [g.covered for g in partition(gm).groups] == [True] and not partition(gm).fallbacks
    gen = torch.Generator().manual_seed(0)
    dy = torch.randn(3, 2 * EACH, COLUMNS, generator=gen).to(dtype)
    at = torch.randint(4, (3, 2 * EACH), generator=gen)
    on_cpu(gm)
    got, want = gm(dy, at, None, None), fn(dy.double(), at, None, None)
    assert got.dtype is dtype and got.shape == want.shape
    assert (got - want).norm() <= torch.finfo(dtype).eps * want.norm()
    few = graph(lambda dy, at, x, y: embedded(dy, at, 4), count=3 * (4 * EACH // 3))
    assert own_additions(few) == 1 and rows_of_sums_op in targets(few)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_additions_at_indices_from_either_end_that_would_queue_are_a_fold(dtype):
    def fn(dy, at, x, y):
        return picked(dy, at, 3)

    count = 3 * CROWDED + 3
    gm = graph(fn, dtype=dtype, count=count)
    assert own_additions(gm) == 1 and rows_of_sums_op not in targets(gm)
    assert all(g.covered for g in partition(gm).groups)
    gen = torch.Generator().manual_seed(0)
    dy = torch.rand(3, count // 3, COLUMNS, generator=gen).to(dtype)
    at = torch.randint(-3, 3, (3, count // 3), generator=gen)
    on_cpu(gm)
    got, want = gm(dy, at, None, None), fn(dy.double(), at, None, None)
    assert got.dtype is dtype and (got - want).norm() <= torch.finfo(dtype).eps * want.norm()
    at[1, 2] = 3
    with pytest.raises(IndexError):
        gm(dy, at, None, None)


def pairs(dy, at, x, y):
    """Two indices [3, 5] and [5] of the first two axes, counted from either end."""
    return aten.index_put(dy.new_zeros(8, 9, COLUMNS), [at, at.select(0, 0) - 4], dy, True)


def numbers(dy, at, x, y):
    return aten.index_put(dy.new_zeros(8, 9), [at, at - 7], dy.select(-1, 0), True)


@pytest.mark.parametrize("small", [SMALL, 0])
@pytest.mark.parametrize("fn", [pairs, numbers])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_indices_are_compared_each_or_are_one(fn, dtype, small, monkeypatch):
    monkeypatch.setattr(added_rows, "SMALL", small)
    gm = graph(fn, dtype=dtype)
    args = given(dtype, most=8)
    eager = fn(*args)
    want = fn(*[a.double() if a.is_floating_point() else a for a in args])
    assert own_additions(gm) == 1 and aten.index_put.default not in targets(gm)
    assert (rows_of_sums_op in targets(gm)) == (not small)
    assert all(g.covered for g in partition(gm).groups)
    on_cpu(gm)
    got = gm(*args)
    assert got.dtype is dtype and got.shape == want.shape
    assert (got - want).norm() <= 1.1 * (eager - want).norm() + 1e-6 * want.norm()
    wrong = args[1].clone()
    wrong[1, 2] = 8
    with pytest.raises(IndexError):
        gm(args[0], wrong, *args[2:])


def test_few_indices_of_a_small_table_are_a_fold(monkeypatch):
    monkeypatch.setattr(added_rows, "SMALL", SMALL)
    for fn in (lambda dy, at, x, y: embedded(dy, at), lambda dy, at, x, y: picked(dy, at)):
        gm = graph(fn)
        assert own_additions(gm) == 1 and rows_of_sums_op not in targets(gm)
        assert [g.covered for g in partition(gm).groups] == [True]
        args = given(torch.bfloat16)
        on_cpu(gm)
        torch.testing.assert_close(gm(*args), fn(*args), rtol=0.02, atol=0.02)


def test_rows_are_added_to_a_weights_gradient_that_nothing_else_reads():
    gm = graph(lambda dy, at, x, y: (x.t() @ y).t().t() + embedded(dy, at, padding=0))
    own_additions(gm)
    found = targets(gm)
    assert found.count(added_rows_op) == 1 and rows_of_sums_op not in found and aten.add.Tensor not in found
    groups = partition(gm).groups
    assert [g.covered for g in groups] == [True, False] and not partition(gm).fallbacks


@pytest.mark.parametrize(
    "fn",
    [
        lambda dy, at, x, y: (p := x.t() @ y) + embedded(dy, at) + p.sum(),
        lambda dy, at, x, y: embedded(dy, at) + (x.t() @ y).relu(),
        lambda dy, at, x, y: embedded(dy, at) + (y.t() @ x).t(),
    ],
)
def test_nor_to_what_something_else_reads_or_lies_otherwise(fn):
    gm = graph(fn, count=60)
    assert own_additions(gm) == 1
    assert added_rows_op not in targets(gm) and targets(gm).count(rows_of_sums_op) == 1


@pytest.mark.parametrize("rows", [15, 20])
def test_rows_at_positions_are_the_gradient_itself(rows):
    def at_positions(dy, at, x, y):
        return embedded(y, torch.arange(15, device=y.device).unsqueeze(0).view(15), rows=rows)

    gm = graph(at_positions)
    own_additions(gm)
    assert rows_of_sums_op not in targets(gm) and not [g for g in partition(gm).groups if not g.covered]
    y = given(torch.bfloat16)[3]
    on_cpu(gm)
    assert torch.equal(gm(None, None, None, y), at_positions(None, None, None, y))


@pytest.mark.parametrize(
    ("fn", "how"),
    [
        (lambda dy, at, x, y: embedded(dy, at, scaled=True), {}),
        (lambda dy, at, x, y: embedded(dy, at), {"dtype": torch.float64}),
        (lambda dy, at, x, y: embedded(dy, at), {"device": "cpu"}),
        (lambda dy, at, x, y: embedded(dy, at, rows=FEW + 1), {"count": 3 * ((FEW + 1) * CROWDED // 3 + 1)}),
        (lambda dy, at, x, y: picked(dy, at, FEW + 1), {"count": 3 * ((FEW + 1) * CROWDED // 3 + 1)}),
        (lambda dy, at, x, y: aten.index_put(dy.new_zeros(ROWS, COLUMNS), [at], dy, False), {}),
        (lambda dy, at, x, y: aten.index_put(dy.new_ones(ROWS, COLUMNS), [at], dy, True), {}),
        (
            lambda dy, at, x, y: aten.index_put(dy.new_zeros(ROWS, COLUMNS), [at], dy.select(0, 0).select(0, 0), True),
            {},
        ),  # broadcast
        (
            lambda dy, at, x, y: aten.index_put(
                dy.new_zeros(7, ROWS, COLUMNS), [None, at], dy.new_ones(7, 3, 5, 6), True
            ),
            {},
        ),
    ],
)
def test_others_are_not(fn, how):
    assert own_additions(graph(fn, **how)) == 0


def test_nor_where_torch_is_to_be_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert own_additions(graph(lambda dy, at, x, y: embedded(dy, at))) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_indices_that_lie_apart_are_read_where_they_are():
    """A column of a matrix of tokens, as a loop over time takes it."""
    tokens, rows = torch.arange(12).view(4, 3), torch.ones(4, 8)
    (launch,) = launches(torch.zeros(12, 8), tokens[:, 1], rows, -1)
    at = launch.tensors[0]
    assert at.is_contiguous() and at.tolist() == [1, 4, 7, 10]


def test_it_is_recorded_as_one_operator():
    dy, at, x, y = given(torch.bfloat16)
    recorder = Recorder((dy, at, x, y), ())
    with recorder:
        table = torch.mm(x.t(), y)
        made = [added_rows_op(table, at, dy, -1), rows_of_sums_op(at, dy, [ROWS, COLUMNS], 0)]
    tape = recorder.tape(made)
    assert tape is not None and not recorder.refused and len(tape.code) == 3
