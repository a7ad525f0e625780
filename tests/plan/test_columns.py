"""Rows of few columns that are computed in ways of their own: the same values stored column by column."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Load, transform
from tilefold.algebra.expr import walk as nodes
from tilefold.block import interp
from tilefold.block.ir import Block, Let, Store, walk
from tilefold.block.text import parse, show
from tilefold.frontend.fuse import trace
from tilefold.plan import columns
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.targets import gpu


def put(v: torch.Tensor, t: int, n: int) -> torch.Tensor:
    """A column between zeros."""
    return F.pad(v[:, None], (t, n - 1 - t))


def recurrence(x, w):
    """What a step makes of a column, at its place; and a row's value beside it."""
    n, v, out = x.shape[1], w, 0
    for t in range(n):
        v = torch.tanh(v + x[:, t])
        out = out + put(v * 2.0, t, n)
    return out + w[:, None] * x


def rounded(x, w):
    return recurrence(x, w).bfloat16()


def sums(x, w):
    """Something else of the same columns."""
    out = recurrence(x, w)
    return out, out.sum(1)


def few(x, w):
    """Two of the columns."""
    n = x.shape[1]
    return torch.exp(x) + put(w.exp(), 3, n) + put(w.sin(), 5, n)


def kernels(fn, monkeypatch: pytest.MonkeyPatch, n: int) -> list[Block]:
    torch._dynamo.reset()
    p = trace(fn, torch.zeros(64, n), torch.zeros(64)).program
    torch._dynamo.reset()
    monkeypatch.setattr(gpu, "by_columns", lambda b: b)
    return [k.block for k in fuse_for_gpu(p).kernels]


def changed(fn, monkeypatch: pytest.MonkeyPatch, n: int) -> tuple[Block, Block]:
    """The kernel of columns, before and after."""
    (found,) = [(b, after) for b in kernels(fn, monkeypatch, n) if (after := columns.by_columns(b)) is not b]
    return found


def apart(b: Block) -> list[Store]:
    return [s for s in walk(b.body) if isinstance(s, Store) and any(isinstance(e, Const) for e in s.index)]


@pytest.mark.parametrize("fn", [recurrence, rounded])
@pytest.mark.parametrize("n", [8, 11])
def test_the_same_column_by_column(fn, n, monkeypatch):
    before, after = changed(fn, monkeypatch, n)
    assert len(apart(after)) == n and not apart(before)
    assert parse(show(after)) == after
    names = {i.name: i.shape for i in before.inputs}
    given = {k: torch.randn([int(e.value) for e in shape]).double() for k, shape in names.items()}
    sizes = dict.fromkeys(before.sizes, 16)
    was, now = (interp.run(b, given, {}, block_sizes=sizes, exact=True) for b in (before, after))
    for r in before.outputs:
        torch.testing.assert_close(now[r], was[r])


def test_a_column_is_stored_when_it_is_there(monkeypatch):
    """Vectors of four, the first of which waits for four steps, not for all."""
    _, after = changed(recurrence, monkeypatch, 16)
    body = list(walk(after.body))
    first = next(n for n, s in enumerate(body) if isinstance(s, Store))
    assert any(isinstance(s, Let) for s in body[first:])
    assert [s.index[-1].value for s in apart(after)] == list(range(16))


@pytest.mark.parametrize(("fn", "n"), [(sums, 8), (few, 8), (recurrence, 6), (recurrence, 65)])
def test_what_stays_as_it_is(fn, n, monkeypatch):
    """Something else has the columns; most are alike; fewer than a sector's, or more than code is held for."""
    for b in kernels(fn, monkeypatch, n):
        assert columns.by_columns(b) is b


def test_zeros_of_a_long_sum_are_looked_for_once(monkeypatch):
    """A term that is a sum itself has been looked at: not again for each sum that it is in."""
    asked, own = [], columns._without_zeros
    monkeypatch.setattr(columns, "_without_zeros", lambda e: asked.append(e) or own(e))
    zero, long = Const(0.0, DType.F32), Load("x", ())
    for n in range(16):
        long = Call("add", (long, zero if n % 2 else Load(f"y{n}", ())))
    left = transform(long, columns._without_zeros)
    assert len(asked) < 64 and not any(x == zero for x in nodes(left))
