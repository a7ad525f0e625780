"""What a user is told of a compilation: one line a model, warnings once, progress on a terminal alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import randn
from tilefold.errors import SourceLoc
from tilefold.frontend.regions import assemble, guard
from tilefold.frontend.regions.assemble import CompiledGraph
from tilefold.frontend.regions.guard import Fallback
from tilefold.frontend.regions.summary import Told, summary

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    guard._said.clear()
    assemble.compilations.clear()
    yield
    torch._dynamo.reset()


def softmax_inverse(x):
    y = torch.softmax(x * 3, -1)
    z = torch.linalg.inv(y @ y.t() + 10 * torch.eye(5))
    return z.sum(-1)


def test_one_line_with_what_was_left_and_where(caplog):
    with caplog.at_level(logging.INFO, logger="tilefold"):
        torch.compile(softmax_inverse, backend="tilefold", options={"leftover": "eager"})(randn(5, 5))
    (line,) = [r.message for r in caplog.records if " kernel" in r.message and " region" in r.message]
    inverse = softmax_inverse.__code__.co_firstlineno + 2
    assert "2 regions" in line and "2 operators left to PyTorch" in line and f"{HERE}:{inverse}," in line
    assert "because operator aten.linalg_inv_ex.default is not covered (and 1 more reason" in line


def test_nothing_is_said_of_what_was_not_left(caplog):
    x = randn(5, 5).requires_grad_()
    with caplog.at_level(logging.INFO, logger="tilefold"):
        torch.compile(lambda x: torch.softmax(x * 3, -1), backend="tilefold")(x).sum().backward()
    lines = [r.message for r in caplog.records if " region" in r.message]
    assert len(lines) == 2 and lines[1].split(":")[0] == lines[0].split(":")[0] + "_backward"
    assert all("1 region, 1 kernel, 0 library calls in " in line and "left" not in line for line in lines)


def test_several_reasons_are_counted():
    found = [Fallback("a", "no a", SourceLoc("m.py", 3)), Fallback("b", "no b"), Fallback("a", "no a", None)]
    line = summary("g", [CompiledGraph("g", [], found, 4)], 1.26)
    assert line.startswith("g: 0 regions, 0 kernels, 0 library calls in 1.3 s; 4 operators left to PyTorch, at m.py:3")
    assert line.endswith("because no a (and 2 more reasons: TORCH_LOGS=tilefold)")


def test_what_the_library_computes_by_choice_is_a_call_of_it_and_no_failure(caplog):
    table, at = randn(40, 6).requires_grad_(), torch.randint(0, 40, (3, 5))

    def picked(table):
        return torch.softmax(F.embedding(at, table), -1)

    with caplog.at_level(logging.INFO, logger="tilefold"):
        torch.compile(picked, backend="tilefold")(table).square().sum().backward()
    (line,) = [r.message for r in caplog.records if "_backward: 1 region" in r.message]
    assert "1 library call in" in line and "left" not in line
    (record,) = [r for r in assemble.compilations if r.name.endswith("backward")]
    assert record.called == 1 and not record.left and [f.meant for f in record.fallbacks] == [True]


def test_a_failure_beside_a_call_of_the_library_is_told():
    found = [Fallback("a", "no a", SourceLoc("m.py", 3), meant=True), Fallback("b", "no b")]
    line = summary("g", [CompiledGraph("g", [], found, 1, called=2)], 1.26)
    assert line == "g: 0 regions, 0 kernels, 2 library calls in 1.3 s; 1 operator left to PyTorch, because no b"


def test_what_is_compiled_later_has_a_line_of_its_own(caplog):
    told = Told("g")
    with caplog.at_level(logging.INFO, logger="tilefold"):
        told.tell()
        assert not caplog.records
        told.add(CompiledGraph("g_backward", [], []))
    assert [r.message for r in caplog.records] == ["g_backward: 0 regions, 0 kernels, 0 library calls in 0.0 s"]


def test_a_whole_graph_in_eager_mode_is_worth_a_warning(lenient, monkeypatch, caplog):
    def fails(*args, **how):
        raise AssertionError("not functional")

    monkeypatch.setattr("tilefold.frontend.torch_compile.aot_module_simplified", fails)
    with caplog.at_level(logging.WARNING, logger="tilefold"):
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(lambda x: x.sin() + 1, backend="tilefold")(randn(3))
    (line,) = [r.message for r in caplog.records]
    assert "the graph runs in eager mode: internal error: AssertionError: not functional" in line
