"""The `tilefold` command: what it prints and how it ends."""

from __future__ import annotations

import pytest

from tests.cli import invoke

SOURCE = """
import torch

def softmax(x):
    return torch.softmax(x, -1)

def softmax_inputs():
    return (torch.randn(5, 33),)

def sort(x):
    return torch.sort(x).values

def sort_inputs():
    return (torch.randn(5, 33),)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "user_functions.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))


def test_help_names_every_command():
    result = invoke(["--help"])
    assert result.exit_code == 0
    for command in ("run", "explain", "verify", "bench", "derive", "cache", "doctor"):
        assert command in result.output


def test_an_unknown_command_is_a_usage_error():
    assert invoke(["melt"]).exit_code == 2


def test_derive_prints_the_fold_from_text_and_from_a_file(tmp_path):
    formula = "m = max[l] x[l]\nt = sum[l] exp(x[l] - m)\n"
    inline = invoke(["derive", formula.replace("\n", ";")])
    (tmp_path / "softmax.fold").write_text(formula)
    from_file = invoke(["derive", str(tmp_path / "softmax.fold")])
    piped = invoke(["derive", "-"], input=formula)
    assert inline.exit_code == from_file.exit_code == piped.exit_code == 0, inline.output
    assert inline.stdout == from_file.stdout == piped.stdout
    assert "identity" in inline.stdout.lower() and "merge" in inline.stdout.lower()


def test_derive_prints_latex():
    result = invoke(["derive", "m = max[l] x[l]; t = sum[l] exp(x[l] - m)", "--latex"])
    assert result.exit_code == 0
    assert "\\max" in result.stdout or "\\operatorname" in result.stdout


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("m = max[l] frobnicate(x[l])", "unknown function frobnicate"),
        ("r = sum[l] x[l] * x[l]; t = sum[l] exp(x[l] / sqrt(r))", "clos"),
        ("no_such_file.fold", "neither a formula nor a file"),
    ],
)
def test_derive_refuses_with_a_message_and_no_traceback(formula, message):
    result = invoke(["derive", formula])
    assert result.exit_code == 2
    assert "error:" in result.stderr and message in result.stderr
    assert "Traceback" not in result.output


def test_explain_prints_and_writes_the_page(file, tmp_path):
    page = tmp_path / "page.html"
    result = invoke(["explain", f"{file}:softmax", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "max" in result.stdout and "kernel" in result.stdout.lower()
    assert "<html" in page.read_text().lower()


def test_explain_takes_arguments_from_the_command_line(file):
    assert invoke(["explain", f"{file}:softmax", "--args", "x=f32[3, 70]"]).exit_code == 0
    wrong = invoke(["explain", f"{file}:softmax", "--args", "y=f32[3, 70]"])
    assert wrong.exit_code == 2 and "do not fit softmax" in wrong.stderr


def test_verify_a_function(file):
    result = invoke(["verify", f"{file}:softmax"])
    assert result.exit_code == 0, result.output


def test_verify_refuses_a_function_that_cannot_be_compiled_and_a_missing_one(file):
    uncovered = invoke(["verify", f"{file}:sort"])
    assert uncovered.exit_code == 2 and "sort" in uncovered.stderr and "Traceback" not in uncovered.output
    missing = invoke(["verify", f"{file}:absent"])
    assert missing.exit_code == 2 and "softmax" in missing.stderr


def test_verify_fails_with_status_1_when_a_result_is_wrong(file, monkeypatch):
    class Wrong:
        ok = False

    monkeypatch.setattr("tilefold.cli.commands.verify_function", lambda fn, *args: Wrong())
    assert invoke(["verify", f"{file}:softmax"]).exit_code == 1


def test_verify_needs_exactly_one_subject(file):
    for words in (["verify"], ["verify", f"{file}:softmax", "--suite", "cascades"]):
        result = invoke(words)
        assert result.exit_code == 2 and "FILE:FUNCTION or --suite" in result.stderr


def test_an_unknown_suite_is_refused():
    result = invoke(["verify", "--suite", "absent"])
    assert result.exit_code == 2 and "cascades" in result.stderr


def test_the_cache_lists_what_was_compiled_and_clears_it(file):
    assert "0 kernels" in invoke(["cache", "list"]).stdout
    assert invoke(["verify", f"{file}:softmax"]).exit_code == 0
    listed = invoke(["cache", "list"]).stdout
    assert "0 kernels" not in listed and "softmax" in listed
    cleared = invoke(["cache", "clear"])
    assert cleared.exit_code == 0 and "removed from" in cleared.stdout
    assert "0 kernels" in invoke(["cache", "list"]).stdout


def test_doctor_reports_compiler_cpu_threads_and_cache(tmp_path):
    result = invoke(["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("C++ compiler", "CPU", "PyTorch", "OpenMP", "CUDA", "Triton", str(tmp_path)[:10]):
        assert word in result.stdout


def test_doctor_says_why_there_is_no_compiler(monkeypatch):
    monkeypatch.setenv("TILEFOLD_CXX", "/nowhere/g++")
    result = invoke(["doctor"])
    assert "/nowhere/g++" in result.stdout.replace("\n", "")
    assert "interpreter" in result.stdout


def test_run_refuses_a_missing_file(tmp_path):
    result = invoke(["run", str(tmp_path / "absent.txt")])
    assert result.exit_code == 2 and "cannot read" in result.stderr
