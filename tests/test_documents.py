"""What documents list is what there is."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import tilefold

ROOT = Path(__file__).parents[1]


def test_every_environment_variable_is_documented_and_no_other():
    """In the docstring that the site makes its page of."""
    text = (ROOT / "tilefold/config.py").read_text()
    read = set(re.findall(r"\"(TILEFOLD_\w+)\"", text))
    described = set(re.findall(r"^\| `(TILEFOLD_\w+)`", text, re.MULTILINE))
    assert read and read == described


def test_every_function_is_in_the_reference_and_all_of_it_exists():
    asked = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    there = {name.rpartition(".")[2] for name in asked}
    for name in asked:
        module, _, member = name.rpartition(".")
        assert name == "tilefold.errors" or callable(getattr(import_module(module), member))
    functions = {n for n in tilefold.__all__ if n.islower() and callable(getattr(tilefold, n))}
    assert functions - there == set()
