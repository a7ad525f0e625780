"""Running sums of constants are constants; other scans take what is elementwise around them along, and stay right."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend import torch_compile
from tilefold.frontend.regions import assemble as regions
from tilefold.frontend.regions.partition import partition
from tilefold.frontend.regions.scans import SCANS, carried, fold_scans

ATEN = torch.ops.aten


def graph(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def packed(x):
    """Numbers of packed sequences, as Hugging Face's decoders find them."""
    at = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    steps = torch.diff(at, prepend=at[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def test_sequences_that_are_not_packed_are_found_out():
    gm = graph(lambda x: x + packed(x), torch.randn(3, 7))
    assert fold_scans(gm) == 1
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == [ATEN.full.default, ATEN.add.Tensor]
    x = torch.randn(3, 7)
    assert torch.equal(gm(x), x) and gm.graph.find_nodes(op="call_function", target=ATEN.full.default)[0].args[1] == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + torch.arange(7).cumsum(-1),  # not all equal
        lambda x: x + (x > 0).cumsum(-1),  # of an argument
        lambda x: x + (torch.rand(7) > 2).cumsum(-1),  # random, whatever comes of it
        lambda x: x[0] + torch.zeros(2**20 + 1).cumsum(-1)[:7],  # large
        lambda x: x.sum() + torch.zeros(0).cumsum(-1).sum(),  # nothing
    ],
)
def test_scans_that_stay(fn):
    gm = graph(fn, torch.randn(3, 7))
    before = str(gm.graph)
    assert fold_scans(gm) == 0 and str(gm.graph) == before


def test_sizes_that_are_not_known_are_left_alone():
    gm = make_fx(packed, tracing_mode="symbolic")(torch.randn(3, 7))
    assert fold_scans(gm) == 0


def names(nodes):
    return {n.target for n in nodes}


def scans_of(gm):
    return [n for n in gm.graph.nodes if n.target in SCANS]


def test_what_goes_with_a_scan():
    gm = graph(lambda x: (torch.exp(x * 2).cumsum(-1) - 1).relu(), torch.randn(3, 7))
    assert names(carried(gm, scans_of(gm))) == {ATEN.mul.Tensor, ATEN.exp.default, ATEN.sub.Tensor, ATEN.relu.default}


def exclusive(x):
    return torch.cat((torch.zeros_like(x[:, :1]), x), 1)[:, :-1].cumsum(1)


def test_what_is_joined_in_front_of_a_scan_alone_goes_with_it():
    gm = graph(exclusive, torch.randn(3, 7))
    assert {ATEN.cat.default, ATEN.zeros_like.default} <= names(carried(gm, scans_of(gm)))
    read_again = graph(lambda x: (y := torch.cat((x[:, 1:], x), 1)).cumsum(1) + y, torch.randn(3, 7))
    assert ATEN.cat.default not in names(carried(read_again, scans_of(read_again)))
    after = graph(lambda x: torch.cat((x[:, :1], x.cumsum(1)), 1), torch.randn(3, 7))
    assert ATEN.cat.default not in names(carried(after, scans_of(after)))


def test_what_does_not_go_with_a_scan():
    def fn(x, w):
        y = torch.exp(x)
        c = y.cumsum(-1)
        wide = c[:, :, None] * torch.ones(5)  # larger than what was left over
        return y + c.sum(), wide, torch.tanh(c) @ w, (x @ w).cumsum(0), c + y.sum()

    gm = graph(fn, torch.randn(3, 7), torch.randn(7, 7))
    assert names(carried(gm, scans_of(gm))) - {ATEN.unsqueeze.default} == {ATEN.tanh.default}


def test_what_reads_what_a_scan_reads_goes_with_it_at_its_places():
    gm = graph(lambda x: (y := x.softmax(-1)).cumsum(-1) * y, torch.randn(3, 7))
    assert names(carried(gm, scans_of(gm))) == {ATEN.mul.Tensor}
    for elsewhere in (lambda x: x.cumsum(-1).flip(-1).exp(), lambda x: x.cumsum(-1)[:, 1:].exp()):
        gm = graph(elsewhere, torch.randn(3, 7))
        assert not {ATEN.exp.default, ATEN.flip.default} & names(carried(gm, scans_of(gm)))


def smoothed(x):
    """Exponential smoothing in closed form."""
    decay = 0.9 ** torch.arange(7)
    return (x / decay[None, :]).cumsum(-1) * decay[None, :]


def test_what_shapes_give_is_read_by_no_kernel_of_its_own():
    """The decay's second view had kept the product after the scan apart: one kernel more, and what it reads."""
    gm = graph(smoothed, torch.randn(3, 7))
    operators = {n for n in gm.graph.nodes if n.op == "call_function"}
    assert carried(gm, scans_of(gm)) == operators - {*scans_of(gm)}
    gm = graph(lambda x: (smoothed(x), 0.9 ** torch.arange(7)), torch.randn(3, 7))  # powers apart: still those of it
    assert ATEN.mul.Tensor in names(carried(gm, scans_of(gm)))

    def read_elsewhere(x):
        decay = 0.9 ** torch.arange(7)
        return (x @ x.t()).cumsum(-1) * decay[:3], decay * x.sum()

    gm = graph(read_elsewhere, torch.randn(3, 7))
    assert ATEN.mul.Tensor not in names(carried(gm, scans_of(gm)))


def fallen(x):
    wealth = x.exp()
    return (wealth / wealth.cummax(-1).values - 1).amin(-1)


def test_what_a_scan_and_those_after_it_read_is_not_written_for_them():
    gm = graph(fallen, torch.randn(3, 7))
    assert ATEN.exp.default in names(carried(gm, scans_of(gm)))
    gm = graph(
        lambda x: fallen(x) + x.exp().amax(-1) + (y := x.exp()).cumsum(-1).sum(-1) + (y @ y.t()).sum(-1),
        torch.randn(3, 7),
    )
    assert sum(n.target == ATEN.exp.default for n in carried(gm, scans_of(gm))) == 1


def test_what_is_written_in_any_case_may_be_wider_than_a_comparison():
    def chosen(x):
        return torch.where(x.cumsum(-1) < 1, x, 0.0)

    gm = graph(chosen, torch.randn(3, 7))
    assert names(carried(gm, scans_of(gm))) >= {ATEN.lt.Scalar, ATEN.where.self}
    gm = graph(lambda x: chosen(x).sum(-1), torch.randn(3, 7))
    assert ATEN.where.self not in names(carried(gm, scans_of(gm)))


def linear(x, a):
    la = torch.nn.functional.logsigmoid(a).cumsum(1)
    return torch.exp(la) * (x * torch.exp(-la)).cumsum(1)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (linear, ((2, 5, 4), (2, 5, 4))),
        (lambda x: (x.cumsum(-1) - 1).softmax(-1), ((3, 9),)),
        (lambda x: torch.sin(x).cummax(-1).values * 2, ((3, 9),)),
        (lambda x: (1 + 0.01 * x).cumprod(0).sum(0), ((5, 4),)),
        (lambda x: x.logcumsumexp(-1) @ x.t(), ((4, 6),)),
        (lambda x: x + packed(x), ((3, 7),)),
        (exclusive, ((3, 7),)),
        (smoothed, ((3, 7),)),
        (fallen, ((3, 7),)),
    ],
)
def test_compiled_programs_are_right(fn, shapes):
    torch._dynamo.reset()
    regions.compilations.clear()
    args = [torch.randn(s) for s in shapes]
    with torch.no_grad():
        found = torch.compile(lambda *a: fn(*a), backend=torch_compile.backend)(*args)
        torch.testing.assert_close(found, fn(*args))
    (record,) = regions.compilations
    assert [f.node for f in record.fallbacks] == [str(s) for s in _scans(fn, args)]


def _scans(fn, args):
    """Scans that are left over, in the order of the program."""
    gm = graph(fn, *args)
    fold_scans(gm)
    return [n.target for n in gm.graph.nodes if n.target in SCANS]


def test_nothing_goes_with_a_scan_that_is_covered():
    """Running sums of few integers: what is around them stays in their region."""
    gm = graph(lambda x: (x * 2).cumsum(-1) - 1, torch.arange(21).view(3, 7))
    (group,) = partition(gm).groups
    assert group.covered and ATEN.cumsum.default in names(group.nodes)
