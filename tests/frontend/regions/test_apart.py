"""What a scan reads that others read too is computed for it again where it is made of less, and stays right."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.regions.apart import scans_apart
from tilefold.frontend.regions.scans import SCANS, carried

ATEN = torch.ops.aten


def on_gpu(fn, *shapes, dtype=torch.bfloat16):
    """A graph of a fake GPU's tensors."""
    with FakeTensorMode():
        gm = make_fx(fn)(*(torch.empty(s, dtype=dtype) for s in shapes))
    for n in gm.graph.nodes:
        if isinstance(n.meta.get("val"), torch.Tensor):
            with n.meta["val"].fake_mode:
                n.meta["val"] = torch.empty_like(n.meta["val"], device="cuda")
    return gm


def sticks(q, k):
    z = (q @ k).float() / 8
    log = -torch.nn.functional.softplus(z)
    return z + log.flip(-1).cumsum(-1).flip(-1) - log


def test_a_scan_reads_what_is_smaller():
    gm = on_gpu(sticks, (16, 8), (8, 16))
    assert scans_apart(gm) == 1
    (scan,) = (n for n in gm.graph.nodes if n.target in SCANS)
    taken = carried(gm, [scan])
    assert {ATEN.neg.default, ATEN.softplus.default, ATEN._to_copy.default} <= {n.target for n in taken}
    read = {i.target for n in taken for i in n.all_input_nodes if i not in taken}
    assert read == {ATEN.mm.default}
    args = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(gm(*args), sticks(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fn", "copied"),
    [
        (lambda x: (y := x.float() * 2).cumsum(-1) * y.sum(), 1),
        (lambda x: (y := x * 2).cumsum(-1) * y.sum(), 0),  # of as much
        (lambda x: (x.float() * 2).cumsum(-1), 0),  # nobody else's
        (lambda x: (y := x.softmax(-1)).cumsum(-1) * y.sum(), 0),  # nothing elementwise
        (lambda x: (y := x.float() * 2).cumsum(-1) - y, 0),  # others go with the scan
        (lambda x: (y := x.float() * 2).cumsum(-1).flip(-1) - y, 1),  # or stand elsewhere in a row
    ],
)
def test_only_what_is_made_of_less(fn, copied):
    assert scans_apart(on_gpu(fn, (16, 16))) == copied


def test_on_a_cpu_nothing_is_computed_twice():
    gm = make_fx(sticks, tracing_mode="fake")(torch.empty(16, 8), torch.empty(8, 16))
    assert scans_apart(gm) == 0


def folded(x):
    """Rows are folded beside their running sums, which are folded as well."""
    wealth = torch.log1p(x).cumsum(-1)
    fall = 1 - torch.exp(wealth - wealth.cummax(-1).values)
    return fall.amax(-1), x.mean(-1) / x.std(-1), x.sort(-1).values.amin(-1)


def taken(fn, *shapes, others=()):
    gm = on_gpu(fn, *shapes)
    left = [n for n in gm.graph.nodes if n.target in (*SCANS, *others)]
    return {n.target for n in carried(gm, [n for n in left if n.target in SCANS], left)}


def test_reductions_of_the_rows_of_a_scan_go_with_it():
    sort = ATEN.sort.default
    assert {ATEN.amax.default, ATEN.mean.dim, ATEN.std.correction, ATEN.div.Tensor} <= taken(
        folded, (6, 16), others=[sort]
    )
    assert ATEN.mean.dim not in taken(folded, (6, 16))  # a region sorts the rows, and reads them in any case


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.cumsum(-1).sum(0),  # other rows
        lambda x: x.cumsum(-1).sum(),
        lambda x: x.cumsum(-1)[:, :4].sum(-1),  # parts of rows
        lambda x: x.cumsum(-1) * x.T.sum(-1),
    ],
)
def test_reductions_of_others_stay(fn):
    assert not {ATEN.sum.default, ATEN.sum.dim_IntList} & taken(fn, (16, 16))


@pytest.mark.parametrize(("length", "goes"), [(4096, True), (65536, False)])
def test_reductions_of_rows_that_several_blocks_scan_stay(length, goes):
    found = taken(lambda x: (x.cumsum(-1), x.sum(-1)), (16, length))
    assert (ATEN.sum.dim_IntList in found) == goes
