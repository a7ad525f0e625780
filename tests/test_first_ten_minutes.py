"""The page of the first ten minutes, run as it is written: its files, its commands, what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/first-ten-minutes.md"
BLOCK = re.compile(r'^```(python|console)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
#: What differs from machine to machine: times, errors, tiles, versions.
VARIES = (
    (r"\b[\d.]+ (us|ms|s)\b", "# s"),
    (r"\b\d(\.\d+)?e[+-]\d\d\b", "#"),
    (r"grid( \w+:\d+)+", "grid #"),
    (r"tilefold [\w.+]+ \(torch [\w.+]+, Python [\w.+]+", "tilefold # (torch #, Python #"),
    (r" +", " "),
)


def normal(line: str) -> str:
    for pattern, other in VARIES:
        line = re.sub(pattern, other, line)
    return line.strip()


def agrees(printed: Sequence[str], page: Sequence[str]) -> bool:
    """Whether lines are those of the page, of which `...` is any number of lines."""
    if not page:
        return not printed
    if page[0] == "...":
        return any(agrees(printed[n:], page[1:]) for n in range(len(printed) + 1))
    return bool(printed) and normal(printed[0]) == normal(page[0]) and agrees(printed[1:], page[1:])


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a console with the lines that it should print."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(lines[0], lines[1:]) for lines in (p.rstrip("\n").splitlines() for p in parts)]


def run(command: str, folder: Path) -> list[str]:
    """What a command prints, both streams as a terminal shows them."""
    words = shlex.split(command)
    starts = {"tilefold": ["-c", "from tilefold.cli import app; app()"], "python": []}
    environment = os.environ | {
        "COLUMNS": "100",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "TILEFOLD_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "2",
        "TILEFOLD_STRICT": "0",
    }
    done = subprocess.run(
        [sys.executable, *starts[words[0]], *words[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.rstrip("\n").splitlines()


@pytest.mark.slow
def test_the_page_prints_what_it_says(tmp_path):
    for language, title, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            (tmp_path / title).write_text(text)
            continue
        for command, page in commands(text):
            printed = run(command, tmp_path)
            assert agrees(printed, page), "\n".join([command, *printed])


def test_the_page_has_files_and_commands():
    found = BLOCK.findall(PAGE.read_text())
    assert [title for language, title, _ in found if language == "python"] == ["mine.py", "times.py", "train.py"]
    assert sum(len(commands(text)) for language, _, text in found if language == "console") == 7


@pytest.mark.parametrize(
    ("printed", "page", "same"),
    [
        (["took 3.1 ms"], ["took 17 us"], True),
        (["grid i:1 j:128, 1 MB"], ["grid i:8 j:64, 1 MB"], True),
        (["max 2.6e-06  rms 1e-07"], ["max 1.1e-05 rms 3e-08"], True),
        (["a", "b", "c"], ["a", "..."], True),
        (["a", "b", "c"], ["...", "c"], True),
        (["a", "b", "c"], ["a", "...", "d"], False),
        (["1 kernel"], ["2 kernels"], False),
        (["a", "b"], ["a"], False),
        ([], ["a"], False),
    ],
)
def test_lines_agree(printed, page, same):
    assert agrees(printed, page) is same
