"""The notebooks run from top to bottom, without Jupyter, and print what is stored in them."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs/notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def printed(code: str, names: dict[str, object], where: str) -> str:
    """What a cell prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_prints_what_it_says(path):
    names: dict[str, object] = {"__name__": "__main__"}
    for n, cell in enumerate(cells(path)):
        stored = "".join("".join(o["text"]) for o in cell["outputs"])
        assert printed("".join(cell["source"]), names, f"{path.name}, cell {n}") == stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_what_print_showed(path):
    """Neither errors nor progress, nor outputs that only a browser shows."""
    found = [o for c in cells(path) for o in c["outputs"]]
    assert found and all((o["output_type"], o["name"]) == ("stream", "stdout") for o in found)


def test_there_are_notebooks():
    assert [p.stem for p in NOTEBOOKS] == ["by-hand", "one-pass"]
