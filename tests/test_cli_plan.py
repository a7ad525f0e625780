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


def test_a_plan_is_printed(file: Path) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[300, 700]", "--machine", "nominal"])
    assert result.exit_code == 0, result.output
    assert "one pass" in result.output and "unfused" in result.output and "no other plan is cheaper" in result.output


@pytest.mark.parametrize("options", [["--machine", "h200"], ["--device", "cuda", "--machine", "h200"]])
def test_both_plans_of_a_gpu_are_printed_with_their_prices(file: Path, options: list[str]) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[300, 700]", *options])
    assert result.exit_code == 0, result.output
    assert "softmax on h200, as it runs" in result.output and "selected by predicted time (off)" in result.output
    assert result.output.count("1 kernels") == 2 and "predicted, not measured" in result.output


@pytest.mark.parametrize("device, machine", [("cuda", "nominal"), ("cpu", "h100"), ("abacus", "this")])
def test_machines_belong_to_a_device(file: Path, device: str, machine: str) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[3, 7]", "--device", device, "--machine", machine])
    assert result.exit_code == 2 and ("no machine" in result.output or "no plans for 'abacus'" in result.output)


def test_an_unknown_machine_is_an_error(file: Path) -> None:
    result = invoke(["plan", f"{file}:softmax", "--args", "x=f32[3, 7]", "--machine", "abacus"])
    assert result.exit_code == 2
    assert "no machine 'abacus'" in result.output


def test_bench_has_a_planner_suite() -> None:
    result = invoke(["bench", "planner", "--only", "nothing"])
    assert result.exit_code == 2
    assert "no program is called" in result.output
