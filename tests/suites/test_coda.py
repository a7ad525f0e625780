"""The suite of products with epilogues: a forward and a backward case, its listing, and that it can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.errors import TilefoldError
from tilefold.suites.blocks.coda import BLOCKS, cases, check, show, worst


def block(name: str):
    return next(b for b in BLOCKS if b.name == name)


def test_the_backward_of_swiglu_is_made_of_the_papers_kernels():
    outcome = check(block("RMSNorm, SwiGLU: backward"))
    assert outcome.ok, outcome.detail
    assert outcome.detail.startswith("CODA's kernels 4 6 9 10; passes 3 -> 0")
    assert "transpose identity" in outcome.detail


def test_a_case_fails_where_a_kernel_is_missing():
    assert not check(replace(block("GEMM, SwiGLU"), kernels=frozenset({9}))).ok


def test_the_suite_covers_all_ten_kernels():
    assert set().union(*(b.kernels for b in BLOCKS)) == set(range(1, 11))
    assert [c.name for c in cases()] == [b.name for b in BLOCKS]


def test_a_listing_by_name():
    text = show("GEMM, residual, LayerNorm, GEMM")
    assert "rank one" in text and "Blockbuster rule 5" in text
    with pytest.raises(TilefoldError, match="no block 'nothing'"):
        show("nothing")


def test_a_missing_or_wrong_result_counts():
    x = torch.ones(3, dtype=torch.float64)
    assert worst([x], [x]) == 0.0 and worst([x * 1.5], [x]) == 0.5
    assert worst([None], [x]) == worst([x], []) == worst([x * float("nan")], [x]) == float("inf")
