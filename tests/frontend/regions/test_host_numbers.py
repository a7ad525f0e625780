"""Numbers that follow from sizes are computed on the device whose tensors they are for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.regions.host_numbers import numbers_on_device

ATEN = torch.ops.aten
GPU = torch.device("cuda", 0)


def both(x):
    n = ATEN.scalar_tensor.default(64)
    wide = torch.ops.prims.convert_element_type.default(n, torch.float64)
    y = x * torch.ops.prims.convert_element_type.default(wide**-0.5, torch.float32)
    return y, wide


def scaled(x):
    return both(x)[0]


def graph(fn, *, device=GPU):
    """Its graph for a tensor that is told to lie on `device`; what is made of it lies there too."""
    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 8))
    for n in gm.graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dim():
            val.fake_device = device
    return gm


def devices(gm):
    return {n.name: n.meta["val"].device for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}


def test_a_chain_of_numbers_goes_where_its_readers_are():
    gm = graph(scaled)
    assert numbers_on_device(gm) == 4
    assert set(devices(gm).values()) == {GPU}
    (made,) = gm.graph.find_nodes(op="call_function", target=ATEN.scalar_tensor.default)
    assert made.kwargs["device"] == GPU and isinstance(made.meta["val"].fake_mode, FakeTensorMode)
    dtypes = [n.meta["val"].dtype for n in gm.graph.nodes if n.op == "call_function"]
    assert dtypes[:2] == [torch.float32, torch.float64]


def test_a_number_that_the_caller_gets_stays():
    gm = graph(both)
    assert numbers_on_device(gm) == 2  # the root, and its type
    assert sum(d.type == "cpu" for d in devices(gm).values()) == 2


@pytest.mark.parametrize("fn", [scaled, lambda x: x * 2.0])
def test_of_a_graph_of_the_cpu_nothing_moves(fn):
    assert numbers_on_device(graph(fn, device=torch.device("cpu"))) == 0


def test_what_is_made_of_a_tensor_stays():
    def of_one(x):
        return x * torch.sqrt(ATEN.lift_fresh_copy.default(torch.tensor(2.0)))

    gm = graph(of_one)
    assert numbers_on_device(gm) == 0
