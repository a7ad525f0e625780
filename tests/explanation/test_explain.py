"""`tilefold.explain` on functions: what it collects from a real compilation."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import SOFTMAX
from tilefold.errors import UnsupportedError
from tilefold.explanation.report import explain, explain_compiled
from tilefold.pipeline import compile_program
from tilefold.tensor.text import parse


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_a_function():
    x = explain(softmax, torch.randn(6, 40))
    (k,) = x.kernels
    assert x.name == "softmax" and k.kind == "fused" and x.operators == 1 and not x.rejections
    assert k.bytes == x.traffic.after == 2 * 6 * 40 * 4
    assert "tilefold_kernel" in x.source and "forall" in k.listing and k.grid
    (f,) = x.folds
    assert [v.reducer for v in f.fold.state] == ["max", "sum"]
    assert f.checks and all(c.ok for c in f.checks)


def test_what_is_not_covered_is_listed(tmp_path):
    def sorted_softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sort(x).values, -1)

    x = explain(sorted_softmax, torch.randn(6, 40))
    (found,) = [r for r in x.rejections if r.kind == "fallback"]
    assert "sort" in found.subject + found.reason
    assert len(x.kernels) == 1
    x.to_html(tmp_path / "page.html")
    assert "left to PyTorch" in (tmp_path / "page.html").read_text()


def test_a_graph_break_gives_two_regions():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return torch.var(y, -1)

    assert len(explain(broken, torch.randn(6, 40)).regions) == 2


def test_nothing_to_explain_is_an_error():
    with pytest.raises(UnsupportedError, match="computes nothing on tensors"):
        explain(lambda: 3)


def test_a_compiled_program_takes_sizes_for_its_symbols():
    compiled = compile_program(parse(SOFTMAX))
    assert explain_compiled(compiled, syms={"n": 10}).traffic.after == 2 * 5 * 10 * 4
    assert explain_compiled(compiled).traffic.after == 2 * 5 * 512 * 4
