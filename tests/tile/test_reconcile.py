"""Dimension order reconciliation against einops-like indexing written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilefold.algebra.expr import Index, Load, Sym
from tilefold.tile.reconcile import Irreconcilable, Reconciled, reconcile

SIZES = {"i": 2, "j": 3, "k": 4, "l": 5}


def test_the_papers_example():
    """Neptune, figure 5: y3[vi, vj] = x1d[i0, vi] * xtrans[vj, vi], loops (i, j)."""
    x1d = reconcile(Load("x1d", (Index("i0"), Index("i"))), ("i", "j"))
    assert x1d == Reconciled(order=(None, "i"), squeezed=(0,), permutation=(0,), new_axes=(1,))
    xtrans = reconcile(Load("xtrans", (Index("j"), Index("i"))), ("i", "j"))
    assert xtrans == Reconciled(order=("j", "i"), squeezed=(), permutation=(1, 0), new_axes=())


@given(st.lists(st.sampled_from([*SIZES, "scalar"]), max_size=4), st.permutations(list(SIZES)))
def test_apply_is_index_notation(axes, loops):
    dims = [d for n, d in enumerate(axes) if d == "scalar" or d not in axes[:n]]
    loops = [d for d in loops if d in dims or d < "k"]
    access = Load("x", tuple(Sym("s") if d == "scalar" else Index(d) for d in dims))
    form = reconcile(access, loops)
    assert isinstance(form, Reconciled)
    x = torch.randn([1 if d == "scalar" else SIZES[d] for d in dims])
    y = form.apply(x)
    assert y.shape == tuple(SIZES[d] if d in dims else 1 for d in loops)
    for point in itertools.product(*(range(n) for n in y.shape)):
        at = dict(zip(loops, point, strict=True))
        assert y[point] == x[tuple(0 if d == "scalar" else at[d] for d in dims)]
    assert torch.equal(form.invert(y), x)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ((Index("i"), Index("i")), "axes 0 and 1 are both indexed by i"),
        ((Index("i") + Index("j"),), "the index of axis 0 is a formula in i, j"),
        ((Index("k"), Index("i") * 2), "the index of axis 1 is a formula in i"),
    ],
)
def test_accesses_without_an_array_form(index, reason):
    form = reconcile(Load("x", index), ("i", "j"))
    assert isinstance(form, Irreconcilable) and form.reason == f"x: {reason}"


def test_a_formula_over_outer_dims_is_squeezed():
    assert reconcile(Load("x", (Index("b") * 2 + 1, Index("i"))), ("i",)) == Reconciled((None, "i"), (0,), (0,), ())
