"""The gradient of running products: its launches, and what they are compiled to (`interpreted.py` runs them)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.product_gradient import launches, rows, turns


@pytest.mark.parametrize(("shape", "dim", "shuffled"), [((8192, 128), 1, True), ((2, 23, 4096), 1, False)])
def test_chunks_are_scanned_by_whole_blocks(shape, dim, shuffled, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = meta(*shape, dtype=torch.float32)
    made, (one,) = launches(x, x, x, dim)
    assert (made.shape, made.dtype, one.name) == (x.shape, x.dtype, "gradient")
    assert one.grid * 1024 // rows(shape[dim], one.numbers[1]) >= one.numbers[2]
    text = built(one.job(), Target("cuda", 90)).asm["ptx"]
    assert ("shfl" in text) == shuffled  # side by side: by several threads; else lanes are, and a thread has the chunk


def test_turns():
    assert (turns(128, 1), turns(129, 1), turns(24, 64), turns(5, 1)) == (1, 2, 3, 1)


def test_nothing_is_launched_for_nothing():
    x = meta(2, 0, 3)
    assert launches(x, x, x, 1)[1] == []
