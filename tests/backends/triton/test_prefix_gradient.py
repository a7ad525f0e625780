"""The gradient of running products and log-sum-exps: launches, and what they are compiled to (`interpreted.py` runs
them)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.prefix_gradient import cut, launches, rows
from tilefold.errors import BackendError


@pytest.mark.parametrize("fold", ["prod", "logsumexp"])
@pytest.mark.parametrize(("shape", "dim", "shuffled"), [((8192, 128), 1, True), ((2, 23, 4096), 1, False)])
def test_chunks_are_scanned_by_whole_blocks(shape, dim, shuffled, fold, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = meta(*shape, dtype=torch.float32)
    made, (one,) = launches(x, x, x, dim, fold, 132)
    assert (made.shape, made.dtype, one.name) == (x.shape, x.dtype, "gradient")
    assert one.grid * 1024 // rows(shape[dim], one.numbers[1]) >= one.numbers[2]
    text = built(one.job(), Target("cuda", 90)).asm["ptx"]
    assert ("shfl" in text) == shuffled  # side by side: by several threads; else lanes are, and a thread has the chunk


@pytest.mark.parametrize("units", [8, 132])
@pytest.mark.parametrize("sizes", [(8, 1024, 256), (1, 1_000_000, 1), (16384, 256, 1), (1, 5, 1), (3, 4097, 33)])
def test_every_place_has_a_block_of_whole_chunks(sizes, units):
    outer, n, inner = sizes
    blocks, height = cut(outer, n, inner, units)
    assert blocks * height >= n > (blocks - 1) * height and height % rows(n, inner) == 0
    assert blocks == 1 or height >= 8 * rows(n, inner)


def test_few_lanes_are_cut_and_many_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cut(8, 1024, 256, 132)[0] == 16 and cut(16384, 256, 1, 132)[0] == 1
    x = meta(8, 1024, 256, dtype=torch.float32)
    first, last = launches(x, x, x, 1, "logsumexp", 132)[1]
    assert (first.name, last.name, first.grid) == ("totals", "gradient", last.grid)
    for one in (first, last):
        assert "shfl" not in built(one.job(), Target("cuda", 90)).asm["ptx"]


def test_an_unknown_fold_is_refused():
    x = meta(2, 4, 3)
    with pytest.raises(BackendError, match="no gradient of median"):
        launches(x, x, x, 1, "median", 132)


def test_nothing_is_launched_for_nothing():
    x = meta(2, 0, 3)
    assert launches(x, x, x, 1, "prod", 132)[1] == []
