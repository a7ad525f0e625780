"""What becomes a region, and what stays PyTorch's because no kernel could run it."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilefold.errors import UnsupportedError
from tilefold.frontend.regions.assemble import Options, _Assembler
from tilefold.frontend.regions.devices import constant_elsewhere, device_of, numbers_elsewhere
from tilefold.frontend.regions.extract import Extracted, extract
from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.leftover import compile_leftover
from tilefold.frontend.regions.partition import partition

aten = torch.ops.aten


def part(device: str, op: torch._ops.OpOverload, *more: torch._ops.OpOverload) -> Extracted:
    """A graph of operators one after the other; a ramp is made of nothing, others of a tensor."""
    g = torch.fx.Graph()
    with FakeTensorMode():
        made = torch.empty(4, device=device)
    x = None if op is aten.arange.default else g.placeholder("x")
    y = g.call_function(op, (4 if x is None else x,))
    for o in more:
        y = g.call_function(o, (y,))
    for n in g.nodes:
        n.meta["val"] = made
    g.output((y,))
    return Extracted(torch.fx.GraphModule({}, g), () if x is None else (x,), (y,))


@pytest.mark.parametrize(
    ("device", "ops", "left"),
    [
        ("cuda", [aten.arange.default], True),
        ("cuda", [aten.arange.default, aten.exp.default], True),
        ("cuda", [aten.exp.default], False),
        ("cuda", [aten.ones_like.default, aten.exp.default], True),
        ("cuda", [aten.detach.default, aten.ones_like.default], True),
        ("cuda", [aten.exp.default, aten.ones_like.default], True),
        ("cuda", [aten.detach.default, aten.exp.default], False),
        ("cpu", [aten.arange.default], False),
    ],
)
def test_constants_of_another_device_are_no_region(device, ops, left):
    """Of what reads the sizes of a tensor alone nothing tells the device either."""
    assert constant_elsewhere(part(device, *ops)) is left


def test_parts_of_a_tensor_are_elements_of_it():
    """A gate and what it scales, one behind the other in a tensor."""
    whole = part("cuda", aten.exp.default)
    graph, (x,) = whole.module.graph, whole.inputs
    (exp,) = graph.find_nodes(op="call_function", target=aten.exp.default)
    with graph.inserting_before(exp):
        parts = graph.call_function(aten.split.Tensor, (exp.args[0], 2))
        one = graph.call_function(operator.getitem, (parts, 0))
    exp.replace_input_with(exp.args[0], one)
    parts.meta["val"], one.meta["val"] = (x.meta["val"],) * 2, x.meta["val"]
    assert not constant_elsewhere(whole)


def mixed(shape: tuple[int, ...], result: str) -> Extracted:
    """A graph that adds a tensor of the CPU to one of a GPU."""
    g = torch.fx.Graph()
    with FakeTensorMode():
        x, s, y = g.placeholder("x"), g.placeholder("s"), None
        x.meta["val"], s.meta["val"] = torch.empty(4, device="cuda"), torch.empty(shape, dtype=torch.float64)
        y = g.call_function(torch.ops.aten.add.Tensor, (x, s))
        y.meta["val"] = torch.empty(4, device=result)
    g.output((y,))
    return Extracted(torch.fx.GraphModule({}, g), (x, s), (y,))


def test_numbers_of_the_host_move_to_the_device_of_a_region():
    part = mixed((), "cuda")
    assert {n.name: d.type for n, d in numbers_elsewhere(part).items()} == {"s": "cuda"}
    assert device_of(part) == "cuda"


@pytest.mark.parametrize(("shape", "result"), [((4,), "cuda"), ((), "cpu")])
def test_tensors_of_two_devices_are_no_region(shape, result):
    with pytest.raises(UnsupportedError, match="in one region"):
        device_of(mixed(shape, result))


def scaled() -> torch.fx.GraphModule:
    """A tensor of a GPU divided by a root that is computed on the CPU."""
    g = torch.fx.Graph()
    with FakeTensorMode():
        x = g.placeholder("x")
        size = g.call_function(torch.ops.aten.full.default, ([], 16.0), {"device": "cpu"})
        tripled = g.call_function(torch.ops.aten.mul.Tensor, (size, 3))
        root = g.call_function(torch.ops.aten.sqrt.default, (tripled,))
        y = g.call_function(torch.ops.aten.div.Tensor, (x, root))
        x.meta["val"] = y.meta["val"] = torch.empty(4, device="cuda")
        for n in (size, tripled, root):
            n.meta["val"] = torch.empty(())
    g.output((y,))
    return torch.fx.GraphModule({}, g)


def test_numbers_that_the_host_computes_are_no_part_of_a_region_on_a_gpu():
    gm = scaled()
    found = partition(gm)
    names = {g.covered: {n.name for n in g.nodes} for g in found.groups}
    assert (
        names == {False: {"full_default", "mul_tensor", "sqrt_default"}, True: {"div_tensor"}} and not found.fallbacks
    )
    (left,) = [g for g in found.groups if not g.covered]
    assert compile_leftover(left, extract(gm, left), Part("left", []), {}) is None
    (region,) = [g for g in found.groups if g.covered]
    assert device_of(extract(gm, region)) == "cuda"


def test_smaller_parts_of_a_region_get_numbers_as_they_are(lenient):
    """They move them by themselves: a part that computes with numbers alone runs on the CPU."""
    gm = scaled()
    region = next(g for g in partition(gm).groups if g.covered)

    def refuses(program, *, device):
        raise UnsupportedError("no")

    build = _Assembler(gm, partition(gm), Options(refuses, leftover="eager"), "f", None)
    _, moves = build._region(extract(gm, region))
    assert moves == {}
    made = _Assembler(gm, partition(gm), Options(lambda p, device: lambda *a: {}, leftover="eager"), "f", None)
    _, moves = made._region(extract(gm, region))
    assert {n.name: d.type for n, d in moves.items()} == {"sqrt_default": "cuda"}
