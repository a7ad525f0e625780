"""Tensors that are written part by part and depend on no argument are constants; all others stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.operators.bindings import InputBinding
from tilefold.frontend.regions import constants
from tilefold.frontend.regions.constants import WRITES, fold_constants
from tilefold.frontend.regions.execute import _input_reader
from tilefold.tensor.index_simplify import const

ATEN = torch.ops.aten


def graph(fn, *args):
    """Its graph, without writes in place."""
    gm = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    return gm


def parts(x):
    """Numbers of an image's parts, as windowed attention assigns them."""
    n = x.new_zeros((6, 5))
    for k, (rows, cols) in enumerate(
        [(slice(0, 4), slice(0, -2)), (slice(0, 4), slice(-2, None)), (slice(4, None), 0)]
    ):
        n[rows, cols] = k + 1
    return n


def masked(x):
    n = parts(x).view(2, 3, 5).flatten(1)
    return x + (n[:, None] - n[:, :, None]).masked_fill(n[:, None] != n[:, :, None], -100.0)[:, 0, :6].T


def test_a_mask_that_is_written_part_by_part_is_a_constant_of_the_graph():
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    gm = graph(masked, x)
    assert any(n.target in WRITES for n in gm.graph.nodes)
    assert fold_constants(gm) == 1
    left = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert not any(n.target in WRITES or n.target is ATEN.lift_fresh_copy.default for n in left), left
    assert torch.equal(gm(x), masked(x))
    (made,) = gm.graph.find_nodes(op="get_attr")
    held = getattr(gm, made.target)
    assert (held.shape, held.stride()) == (made.meta["val"].shape, made.meta["val"].stride())


def test_a_compiled_function_reads_it():
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    run = torch.compile(masked, backend="tilefold")
    assert torch.equal(run(x), masked(x)) and torch.equal(run(-x), masked(-x))


def pairs(x):
    i, j = torch.tril_indices(4, 4, -1)
    return x[:, i, j] * 2.0


def test_pairs_below_a_diagonal_are_a_constant():
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    gm = graph(pairs, x)
    assert fold_constants(gm) >= 1
    assert not gm.graph.find_nodes(op="call_function", target=ATEN.tril_indices.default)
    assert torch.equal(gm(x), pairs(x))


def returned(x):
    n = parts(x)
    return x + 1, n.view(30)


def of_an_argument(x):
    n = x.new_zeros(6, 2)
    n[0] = x[1]
    return n * x


def large(x):
    n = x.new_zeros(2**20 + 1)
    n[3] = 1
    return x + n[3]


@pytest.mark.parametrize("fn", [returned, of_an_argument, large, lambda x: x + torch.ones(6, 2).tril()])
def test_what_the_graph_returns_or_an_argument_decides_stays(fn):
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    gm = graph(fn, x)
    operators = [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target in WRITES]
    assert fold_constants(gm) == 0
    assert [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target in WRITES] == operators
    torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0)


def test_a_returned_number_is_another_tensor_at_each_call():
    x = torch.randn(3)
    gm = graph(lambda x: (x * torch.tensor(2.0), torch.tensor(3.0).view(1)), x)
    fold_constants(gm)
    lifted = gm.graph.find_nodes(op="call_function", target=ATEN.lift_fresh_copy.default)
    assert len(lifted) == 1  # what is only read needs no copy
    gm(x)[1].zero_()
    assert gm(x)[1].item() == 3.0 and torch.equal(gm(x)[0], x * 2)


def test_a_view_of_a_number_is_the_number():
    """PyTorch makes one of what is assigned where a mask is true, and a device would be sent it at each call."""

    def zeroed(x):
        return torch.where(x > 1, torch.tensor(0.0).view(()), x)

    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    gm = graph(zeroed, x)
    fold_constants(gm)
    (number,) = gm.graph.find_nodes(op="get_attr")
    assert {u.target for u in number.users} == {ATEN.where.self}
    assert torch.equal(gm(x), zeroed(x))


def spelled(x):
    levels = torch.tensor([8, 8, 5]).to(x.device, x.dtype)
    return x * ((levels - 1) / 2) + torch.where(levels % 2 == 0, 0.5, 0.0)


def grown(x):
    slopes = torch.tensor([0.5, 0.25]).to(x.device)
    return x + slopes[:, None] * torch.arange(3, device=x.device)


def sent_and_returned(x):
    levels = torch.tensor([8.0, 8.0, 5.0]).to(x.device)
    return x * levels, levels


@pytest.fixture
def elsewhere(monkeypatch):
    """A function's folded graph for another device, that runs on the CPU: its constants are kept there."""
    monkeypatch.setattr(constants, "on_device", lambda x, like: x)

    def made(fn, x):
        gm = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(torch.empty_like(x, device="meta"))
        gm.graph.eliminate_dead_code()
        return gm, fold_constants(gm)

    return made


@pytest.mark.parametrize(("fn", "held"), [(spelled, 3), (grown, 2)])
def test_what_is_spelled_out_is_held_on_the_device_and_what_grows_of_it_is_computed(fn, held, elsewhere):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    gm, made = elsewhere(fn, x)
    assert made == (2 if fn is spelled else 1)
    called = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    assert not called & {ATEN.lift_fresh_copy.default, ATEN._to_copy.default}
    assert ATEN.mul.Tensor in called and (ATEN.arange.default in called) == (fn is grown)
    assert {getattr(gm, n.target).numel() for n in gm.graph.find_nodes(op="get_attr")} == {held}
    if fn is spelled:  # what is left makes nothing on the other device
        torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0)


def test_a_spelled_tensor_that_is_returned_is_sent_at_each_call(elsewhere):
    gm, made = elsewhere(sent_and_returned, torch.randn(2, 3))
    assert made == 0 and gm.graph.find_nodes(op="call_function", target=ATEN._to_copy.default)


def test_a_spelled_tensor_of_the_same_device_stays():
    x = torch.randn(2, 3)
    gm = graph(spelled, x)
    assert fold_constants(gm) == 0 and torch.equal(gm(x), spelled(x))


@pytest.mark.parametrize("order", [(), (1, 0)])
def test_a_constant_whose_axes_are_cut_is_bound_while_a_trace_is_under_way(order):
    x = torch.arange(24.0).view(4, 6)
    axes = ((const(2), const(2)), (const(6),)) if not order else ((const(6),), (const(2), const(2)))
    with FakeTensorMode():
        name, read = _input_reader(InputBinding("mask", None, axes, x, order))
    want = x.view(2, 2, 6) if not order else x.T.unflatten(1, (2, 2))
    assert name == "mask" and torch.equal(read((), {}), want)
