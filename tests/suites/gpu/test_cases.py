"""The rows are the papers', parts give what the whole gives, floors and counts are right by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tilefold.errors import TilefoldError
from tilefold.suites.gpu import neptune, redfuser
from tilefold.suites.gpu.case import Attention, Work, attended, leading
from tilefold.suites.gpu.cases import SMALL, SUITES, select
from tilefold.suites.gpu.floors import Rates

EVERY = [*SMALL["redfuser"], *SMALL["neptune"], *SMALL["neighbours"]]


def test_the_tables_have_every_row():
    rows = [c.row for c in SUITES["redfuser"]]
    for letter, count in (("H", 9), ("L", 9), ("R", 8), ("Q", 10), ("V", 8), ("I", 8), ("X", 3), ("N", 3)):
        assert sum(r.startswith(letter) for r in rows) == count
    assert len(rows) == 58 == len(set(rows))
    names = [c.row for c in SUITES["neptune"]]
    assert len(names) == 161 == len(set(names))
    assert sum(c.attention is not None for c in SUITES["neptune"]) == 10 * 9
    assert {c.length for c in select("neptune", ["causal decode"])} == {2**n for n in range(7, 16)}


def test_shapes_by_the_papers():
    shape = {c.row: c.shape for suite in SUITES.values() for c in suite}
    assert shape["H6"] == "q 32 x 16 x 256 x 80, 256 keys"
    assert shape["L9"] == "q 1 x 128 x 576, 4096 keys"
    assert shape["R5"] == "2048 x 8192, 64 experts, top 8"
    assert shape["Q3"] == "4096 x 8192 times 8192 x 3584"
    assert shape["gqa-decode-32768"] == "q 1 x 64 x 1 x 128, 8 x 32768 keys"
    assert shape["performer-512"] == "8 x 512 x 64, 256 features"


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.row)
def test_arguments_have_the_stated_dtypes_and_parts_are_the_whole(case):
    args = case.args()
    assert all(torch.equal(a, b) for a, b in zip(args, case.args(), strict=True) if a.element_size() > 1)
    results = tree_leaves(case.fn(*args))
    for part in case.parts(args):
        mine = tree_leaves(case.fn(*part.args))
        for whole, own in zip(results, mine, strict=True):
            torch.testing.assert_close(part.select(whole), own, rtol=2e-2, atol=2e-2)


def by_hand(spec, queries, keys):
    i = torch.arange(queries).unsqueeze(-1) + keys - queries
    j = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if spec.causal:
        seen &= j <= i
    if spec.window is not None:
        seen &= i - j < spec.window
    return int(seen.sum())


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("queries, keys", [(1, 40), (7, 7), (7, 40), (40, 40)])
def test_pairs_of_a_query_and_a_key(window, queries, keys):
    spec = Attention(causal=True, window=window)
    assert spec.pairs(queries, keys) == by_hand(spec, queries, keys)
    assert Attention().pairs(queries, keys) == queries * keys


def test_parts_of_long_attention_are_blocks_of_queries_that_end_at_their_own_key(monkeypatch):
    monkeypatch.setattr("tilefold.suites.gpu.case.PART_QUERIES", 8)
    monkeypatch.setattr("tilefold.suites.gpu.case.PART_ELEMENTS", 8 * 50)
    spec = Attention(causal=True)
    q, kv = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    fn = next(v.fn for v in neptune.VARIANTS if v.name == "gqa")
    parts = attended(spec)((q, kv, kv))
    whole = fn(q, kv, kv)
    assert [p.args[1].shape[2] for p in parts] == [8, 26, 50]  # keys after the block's last query are left out
    for p in parts:
        torch.testing.assert_close(p.select(whole), fn(*p.args))
    # a mask that is not causal must keep every key
    assert all(p.args[1].shape[2] == 50 for p in attended(Attention())((q, kv, kv)))


def test_parts_of_many_rows_are_the_first_and_the_last(monkeypatch):
    monkeypatch.setattr("tilefold.suites.gpu.case.PART_ELEMENTS", 30)
    x, w = torch.arange(200.0).view(20, 10), torch.ones(10)
    first, last = leading(0)((x, w))
    assert first.args[0].shape == (3, 10) and torch.equal(first.args[1], w)
    assert torch.equal(last.select(x), x[-3:])
    assert len(leading(0)((x[:5], w))) == 1


def test_work_by_hand():
    h1 = next(c for c in redfuser.ROWS if c.row == "H1").work
    assert h1 == Work(4.0 * 32 * 8 * 512 * 512 * 64, 2.0 * 32 * 8 * 512 * 64 * 4, "f16")
    v4 = next(c for c in redfuser.ROWS if c.row == "V4").work
    assert v4 == Work(0.0, 128 * 32768 * 4 + 128 * 4)
    decode = next(c for c in neptune.ROWS if c.row == "gqa-decode-32768").work
    assert decode.nbytes == 2 * (2 * 8 * 32768 * 128 + 2 * 64 * 128)


def test_the_floor_is_the_longer_of_arithmetic_and_traffic():
    rates = Rates(f16=8e14, f8=0.0, memory=3e12)
    assert rates.floor(Work(8e14, 3e12 / 2, "f16")) == (1.0, "f16")
    assert rates.floor(Work(8e14, 6e12, "f16")) == (2.0, "memory")
    assert rates.floor(Work(8e14, 3e12, "f8")) == (1.0, "memory")  # no such product on the device


def test_rows_are_chosen_by_name_family_and_pattern():
    assert [c.row for c in select("redfuser", ["h1", "L2"])] == ["H1", "L2"]
    assert len(select("redfuser", ["mla"])) == 9
    assert {c.row for c in select("neptune", ["causal-*-4096"])} == {"causal-prefill-4096", "causal-decode-4096"}
    with pytest.raises(TilefoldError, match="no row of neptune is called H1"):
        select("neptune", ["H1"])
    with pytest.raises(TilefoldError, match="no suite 'nothing'"):
        select("nothing")
