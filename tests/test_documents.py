"""What documents list is what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_environment_variable_is_documented_and_no_other():
    """In the docstring that the site makes its page of."""
    text = (ROOT / "tilefold/config.py").read_text()
    read = set(re.findall(r"\"(TILEFOLD_\w+)\"", text))
    described = set(re.findall(r"^\| `(TILEFOLD_\w+)`", text, re.MULTILINE))
    assert read and read == described
