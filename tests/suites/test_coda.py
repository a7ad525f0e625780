"""The suite of products with epilogues: a forward and a backward case, its listing, and that it can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.block.epilogue.cost import Target
from tilefold.block.epilogue.search import rewrite
from tilefold.errors import TilefoldError
from tilefold.frontend.capture.joint import capture, in_float64
from tilefold.suites.blocks.coda import BLOCKS, TILE, cases, check, show, worst
from tilefold.tensor.interp import run


def block(name: str):
    return next(b for b in BLOCKS if b.name == name)


def test_the_backward_of_swiglu_is_made_of_the_papers_kernels():
    outcome = check(block("RMSNorm, SwiGLU: backward"))
    assert outcome.ok, outcome.detail
    assert outcome.detail.startswith("CODA's kernels 4 6 9 10; passes 3 -> 0")
    assert "transpose identity" in outcome.detail


@pytest.mark.parametrize("name", ["GEMM, residual, RMSNorm, GEMM", "RMSNorm, LM head, cross-entropy: backward"])
def test_in_bf16_the_laws_cost_no_accuracy(name):
    b = block(name)
    torch.manual_seed(0)
    module = b.module().bfloat16()
    args = tuple(narrow(a) for a in b.arguments())
    captured = capture(module, *args, training=b.training)
    after = rewrite(captured.lowered.program, Target(TILE, captured.parameters, b.training, captured.late))
    exact = in_float64(module, captured, args)

    def errors(p):
        got = captured.executable(p, lambda inputs, syms: run(p, inputs, syms=syms))(*map(narrow, exact.inputs))
        return [(a.double() - e).norm() / e.norm() for a, e in zip(got, exact.expected, strict=True) if e is not None]

    assert len(after.steps) > 2
    for before, now in zip(errors(captured.lowered.program), errors(after.result.program), strict=True):
        assert now <= 1.15 * before + 1e-6


def narrow(x):
    return x.detach().bfloat16().requires_grad_(x.requires_grad) if x.is_floating_point() else x


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
