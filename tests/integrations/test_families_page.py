"""The tables of the families are those of the measurements in the repository; what is missing is named."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/transformers.md"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("bench_families_page", ROOT / "bench/families_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(family, contender, gpu=2.0, step=4.0, why="", rows=(), mode="train"):
    figures = {"error": 0.01, "gpu_ms": gpu, "step_ms": step, "compile_s": 1.0}
    if why:
        figures = dict.fromkeys(figures, math.nan)
    return {"family": family, "mode": mode, "contender": contender, **figures, "why": why, "rows": list(rows)}


def measured(*rows, commit="abc"):
    return {"device": "GPU", "versions": "torch 2", "commit": commit, "rows": rows}


def test_the_page_shows_what_was_measured(made, tmp_path):
    files = sorted((ROOT / "bench/results/families").glob("*.json"))
    assert files
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    made.write(copy, made.tables(json.loads(f.read_text()) for f in files))
    assert copy.read_text() == PAGE.read_text()


def test_ratios_means_and_what_is_left_out(made):
    eager, ours = row("a", "eager"), row("a", "apply", 1.0, 8.0, rows=["norm fused x ", "loss left y no head"])
    late = row("b", "apply", why="InductorError: TimeoutError: not compiled")
    text = made.tables([measured(eager, ours), measured(row("b", "eager", 3.0), late)])["train"]
    assert "| a | 2.00 | 1.00 (2.00x) | 4.00 | 8.00 (0.50x) | 1.0e-02 | 1.0e-02 | 1 / 1 |" in text
    assert "| b | 3.00 | - | 4.00 | - | 1.0e-02 | - | - |" in text
    assert "- `apply`: 2.00x eager's speed on the GPU, 0.50x in plain calls (1 families)." in text
    assert text.endswith("- Not measured: `apply` of b (not compiled).")


def test_a_table_is_of_one_commit(made):
    with pytest.raises(ValueError, match="train was measured twice"):
        made.tables([measured(row("a", "eager")), measured(row("b", "eager"), commit="def")])
    both = [measured(row("a", "eager")), measured(row("a", "eager", mode="infer"), commit="def")]
    assert list(made.tables(both)) == ["train", "infer"]


def test_a_page_without_a_place_is_refused(made, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    with pytest.raises(ValueError, match="no place for train"):
        made.write(page, made.tables([measured(row("a", "eager"))]))
