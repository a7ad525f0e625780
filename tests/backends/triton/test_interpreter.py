"""The suites' operators on small hostile shapes, through the GPU's kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.triton.interpreted import CHECKS

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")
ROOT = Path(__file__).parents[3]
MUST_FAIL = {"a wrong program": "wrong", "reads outside of memory": "elements outside of memory are read or written"}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """Check -> what it found wrong, from one process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "TILEFOLD_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.triton.interpreted"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    found = {n: why for line in done.stdout.splitlines() for n, why in json.loads(line).items()}
    assert done.returncode == 0, f"ended with {done.returncode} after {list(found)[-1:]}:\n{done.stderr[-3000:]}"
    return found


@pytest.mark.parametrize("name", [n for n in CHECKS if n not in MUST_FAIL])
def test_right(name, said):
    assert said[name] == ""


@pytest.mark.parametrize("name", MUST_FAIL)
def test_what_is_wrong_is_found(name, said):
    assert said[name].endswith(MUST_FAIL[name])
