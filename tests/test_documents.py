"""What documents list is what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_environment_variable_is_documented_and_no_other():
    read = set(re.findall(r"\"(TILEFOLD_\w+)\"", (ROOT / "tilefold/config.py").read_text()))
    listed = set(re.findall(r"^\| `(TILEFOLD_\w+)`", (ROOT / "docs/log.md").read_text(), re.MULTILINE))
    described = set(re.findall(r"^\| `(TILEFOLD_\w+)`", (ROOT / "tilefold/config.py").read_text(), re.MULTILINE))
    assert read and read == listed == described
