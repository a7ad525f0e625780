"""Which scans are of columns side by side, and what becomes of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.operators.prefix import prefixes_op
from tilefold.frontend.regions.partition import partition
from tilefold.frontend.regions.prefixes import own_prefixes

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")


def graph_of(fn, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> torch.fx.GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(torch.empty(shape, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("fn", "shape", "want"),
    [
        (lambda x: x.cumsum(0), (300, 64), (0, "sum", torch.float32)),
        (lambda x: x.cumprod(-2), (3, 300, 64), (1, "prod", torch.float32)),
        (lambda x: x.bfloat16().cumsum(1, dtype=torch.float32), (3, 300, 8, 8), (1, "sum", torch.float32)),
        (lambda x: x.cumsum(-1), (300, 64), None),  # few in a row
        (lambda x: x.cumprod(-1), (3, 200, 300), (2, "prod", torch.float32)),
        (lambda x: x.logcumsumexp(-1), (9, 30000), (1, "logsumexp", torch.float32)),
        (lambda x: x.logcumsumexp(-1) * 2, (9, 30000), None),
        (lambda x: x.bfloat16().cumsum(1, dtype=torch.float32), (9, 3001), None),  # what rounds is in the scan's kernel
        (lambda x: x.cumsum(1) - x, (9, 3001), None),
        (lambda x: (x.cumsum(1), x.sum(1)), (9, 3001), None),
        (lambda x: x.flip(1).cumsum(1), (9, 3001), None),
        (lambda x: x.long().cumsum(1), (9, 3001), None),
        (lambda x: x.cumsum(1), (9, 30001), None),  # few and long
        (lambda x: x.exp().logcumsumexp(1) * 2, (9, 30001), (1, "logsumexp", torch.float32)),
        (lambda x: x.cumsum(0), (300, 8), None),  # few columns
        (lambda x: x.cumsum(0), (8, 64), None),  # few rows
        (lambda x: x.t().cumsum(0), (64, 300), None),  # not side by side
        (lambda x: x.cummax(0).values, (300, 64), None),  # no fold of one number
    ],
)
def test_scans_of_columns_and_rows_are_found(fn, shape, want):
    gm = graph_of(fn, *shape)
    assert own_prefixes(gm) == (want is not None)
    found = gm.graph.find_nodes(op="call_function", target=prefixes_op)
    assert [n.args[1:] for n in found] == ([] if want is None else [want])


def test_what_was_made_wider_is_read_as_it_was():
    gm = graph_of(lambda x: x.float().cumsum(0), 300, 64, dtype=torch.bfloat16)
    own_prefixes(gm)
    (scan,) = gm.graph.find_nodes(op="call_function", target=prefixes_op)
    assert scan.args[0].op == "placeholder" and scan.args[-1] is torch.float32
    gm = graph_of(lambda x: x.half().cumsum(0), 300, 64)  # narrower: that rounds
    own_prefixes(gm)
    (scan,) = gm.graph.find_nodes(op="call_function", target=prefixes_op)
    assert scan.args[0].op == "call_function"


def test_they_are_no_fallback_and_a_part_of_their_own():
    gm = graph_of(lambda x: (x.exp().cumsum(0) * 2).relu(), 300, 64)
    own_prefixes(gm)
    gm.graph.eliminate_dead_code()
    p = partition(gm)
    assert [g.covered for g in p.groups] == [True, False, True] and not p.fallbacks


def test_a_cpu_has_no_such_kernels():
    assert own_prefixes(graph_of(lambda x: x.cumsum(0), 300, 64, device="cpu")) == 0
    x = torch.randn(300, 64)
    torch.testing.assert_close(prefixes_op(x, 0, "prod", torch.float32), x.cumprod(0))


def test_rows_are_turned_where_they_are_scanned():
    gm = graph_of(lambda x: x.exp().flip(0).cumsum(0).flip(0) * 2, 300, 64)
    own_prefixes(gm)
    made = [(g.covered, [n.name for n in g.nodes]) for g in partition(gm).groups]
    assert made == [(True, ["exp"]), (False, ["cumsum"]), (True, ["mul"])]
    (left,) = partition(graph_of(lambda x: x.exp().flip(0).cummax(0).values, 300, 64)).groups
    assert not left.covered  # another compiler reads it so


TURNED = {
    "before": (lambda x: x.flip(0).cumsum(0), "r"),
    "behind": (lambda x: x.cumprod(0).flip(0), "w"),
    "both": (lambda x: x.flip(0).logcumsumexp(0).flip(0), "rw"),
    "twice": (lambda x: x.flip(-2).flip(0).cumsum(0).flip(0).flip(0).flip(0), "w"),
    "widened": (lambda x: x.half().flip(0).float().cumsum(0).flip(0), "rw"),
    "read elsewhere": (lambda x: (lambda t: t.cumsum(0) + t)(x.flip(0)), "r"),
    "in another order": (lambda x: (lambda y: (y.flip(0), y))(x.cumsum(0)), ""),
    "along another axis": (lambda x: x.flip(1).cumsum(0).flip((0, 1)), ""),
}


@pytest.mark.parametrize(("fn", "turned"), TURNED.values(), ids=TURNED)
def test_turns_in_front_and_behind_go_along(fn, turned):
    gm = graph_of(fn, 300, 64)
    assert own_prefixes(gm) == 1
    (scan,) = gm.graph.find_nodes(op="call_function", target=prefixes_op)
    assert "".join(scan.args[4:]) == turned
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x = 1 + torch.randn(300, 64) * 0.01
    torch.testing.assert_close(gm(x), fn(x), rtol=1e-4, atol=1e-4)
