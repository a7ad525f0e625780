"""`tilefold plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import invoke


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "user_functions.py"
    path.write_text("import torch\n\n\ndef softmax(x):\n    return torch.softmax(x * 2.0, -1)\n")
    return path


@pytest.mark.parametrize("machine", ["nominal", "h100"])
def test_a_plan_is_printed(file: Path, machine: str) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[300, 700]", "--machine", machine])
    assert result.exit_code == 0, result.output
    assert "one pass" in result.output and "unfused" in result.output and "no other plan is cheaper" in result.output


def test_an_unknown_machine_is_an_error(file: Path) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[3, 7]", "--machine", "abacus"])
    assert result.exit_code == 2
    assert "no machine 'abacus'" in result.output


def test_bench_has_a_planner_suite() -> None:
    result = invoke(["bench", "planner", "--only", "nothing"])
    assert result.exit_code == 2
    assert "no program is called" in result.output
