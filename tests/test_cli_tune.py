"""`tilefold tune`: what it says without a GPU, and the table that it prints."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

import tilefold
from tests.cli import invoke
from tilefold.backends.triton.config import TritonConfig
from tilefold.cli.tune import table
from tilefold.errors import BackendError
from tilefold.runtime.tuner.program import TunedKernel
from tilefold.runtime.tuner.table import Tuned
from tilefold.runtime.tuner.tune import Trial


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "functions.py"
    path.write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    return path


def test_without_a_gpu_it_says_so(file):
    result = invoke(["tune", f"{file}:softmax", "--args", "f32[3, 70]"])
    assert result.exit_code == 2
    assert "CUDA device" in result.stderr and "Traceback" not in result.output


def test_an_unknown_effort_is_refused(file):
    result = invoke(["tune", f"{file}:softmax", "--args", "f32[3, 70]", "--effort", "heroic"])
    assert result.exit_code == 2
    assert "no effort 'heroic'" in result.stderr and "quick or full" in result.stderr


def test_the_function_refuses_as_well(file):
    with pytest.raises(BackendError, match="CUDA device"):
        tilefold.tune(torch.sin, torch.zeros(3))


def test_the_table_has_winner_default_and_failures():
    c = TritonConfig({"i": 64}, warps=8)
    trials = (Trial(TritonConfig(), 9.0), Trial(c, 4.5), Trial(c, None, "wrong"))
    console = Console(width=120, file=io.StringIO())
    console.print(table((TunedKernel("softmax", Tuned(c, 4.5, 9.0), trials),)))
    text = console.file.getvalue()
    assert all(x in text for x in ("softmax", "9.0", "4.5", "i:64; warps 8")) and " 3 " in text and " 1 " in text
