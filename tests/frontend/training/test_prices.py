"""What computing products again costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.training import prices
from tilefold.frontend.training.prices import FLOPS_A_BYTE, Prices, Product


def again(monkeypatch, rows, depth, *, dtype=torch.float32, device="cuda", precision="ieee"):
    """Bytes for computing distances' products of rows with as many again, and for keeping them."""
    node = SimpleNamespace(op="call_function", target=torch.ops.aten.mm.default, users={}, all_input_nodes=[])
    val = SimpleNamespace(dtype=dtype, device=torch.device(device), shape=(rows, rows))
    node.meta, node.graph = {"val": val}, SimpleNamespace(nodes=[node])
    p = Product((node, node), (rows * depth, rows * depth, rows * rows), (rows, rows, depth), 1)
    for name, given in {
        "repeatable": lambda n: True, "is_view": lambda n: False, "widens": lambda n: False, "product": lambda n: p,
        "_tensors": lambda n: [n], "_results": lambda n: [n], "nbytes": lambda n: rows * rows * dtype.itemsize,
        "matmul_precision": lambda: precision,
    }.items():  # fmt: skip
        monkeypatch.setattr(prices, name, given)
    found = Prices(*(frozenset[torch.fx.Node]() for _ in range(4))).again(node)
    assert p.streamed == 2 and found is not None
    return found, 1.5 * rows * rows * dtype.itemsize


def test_products_that_no_matrix_unit_takes_are_kept(monkeypatch):
    cost, kept = again(monkeypatch, 3000, 128)
    assert cost > kept
    cost, kept = again(monkeypatch, 4000, 10)  # little is contracted
    assert cost < kept


@pytest.mark.parametrize(
    "rows, change",
    [
        (3000, {"precision": "tf32"}),
        (3000, {"dtype": torch.bfloat16}),
        (3000, {"device": "cpu"}),
        (32768, {}),  # much more memory than what it is made of
    ],
)
def test_others_are_computed_again(monkeypatch, rows, change):
    cost, kept = again(monkeypatch, rows, 128, **change)
    assert cost == 2 * rows * rows * 128 / FLOPS_A_BYTE < kept


def scores(q, k):
    return (q.float() * 0.3) @ k.float().transpose(-1, -2)


@pytest.mark.parametrize("dtypes, exact", [(("bf16", "bf16"), False), (("f16", "f16"), False), (("f32", "bf16"), True)])
def test_widened_floats_are_no_float32(monkeypatch, dtypes, exact):
    """Attention's scores are products of what was 16 bits: matrix units take them, and they are not kept."""
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    q, k = (torch.zeros(2, 512, 64, dtype=kinds[name]) for name in dtypes)
    gm = make_fx(scores, tracing_mode="fake")(q, k)
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.bmm.default)
    p = prices.product(node)
    monkeypatch.setattr(prices, "matmul_precision", lambda: "ieee")
    node.meta["val"] = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert p.streamed == 2 and prices._exact(node, p) is exact


def pooled(x, w):
    return torch.nn.functional.conv2d(torch.nn.functional.avg_pool2d(x, 3, 1, 1).clone(), w)


@pytest.mark.parametrize("called", [True, False])
def test_means_of_windows_that_a_library_call_needs_are_kept(called):
    """Made again they are written and read once more; a map of the backward computes them out of what it reads."""
    gm = make_fx(pooled, tracing_mode="fake")(torch.zeros(4, 8, 16, 16), torch.zeros(8, 8, 1, 1))
    nodes = {n.target: n for n in gm.graph.nodes}
    means, copy = nodes[torch.ops.aten.avg_pool2d.default], nodes[torch.ops.aten.clone.default]
    call = nodes[torch.ops.aten.convolution.default]
    of = Prices(frozenset({means, copy}), frozenset({call} if called else ()), frozenset(), frozenset())
    assert (of.keep(copy) is not None) == called
    assert not called or of.again(means) + of.again(copy) > of.keep(copy)
