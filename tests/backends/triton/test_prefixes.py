"""Running sums of columns: how they are cut, and what they are compiled to (`interpreted.py` runs them)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.prefix_rows import row_cut
from tilefold.backends.triton.prefixes import cut, launches
from tilefold.errors import BackendError


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(1, 8192, 4096), (8, 2048, 1024), (3, 65, 33), (1000, 64, 64), (1, 100_000, 32)])
def test_every_row_has_a_block(sizes, nbytes):
    outer, n, inner = sizes
    how = cut(outer, n, inner, nbytes, 132)
    assert how.blocks * how.height >= n > (how.blocks - 1) * how.height
    assert how.lanes & (how.lanes - 1) == 0 and how.lanes * nbytes <= 4 * 32 * 16
    assert how.grid(outer, inner) >= min(132, outer * -(-inner // how.lanes) * (n // 64))


def test_few_columns_are_cut_and_many_are_not():
    assert cut(1, 8192, 4096, 4, 132).blocks > 32
    assert cut(512, 8192, 4096, 4, 132).blocks == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_is_scanned_in_registers(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = meta(1, 8192, 4096, dtype=dtype)
    made, (first, last) = launches(x, 1, "sum", dtype, 132)
    assert (made.shape, made.dtype, first.name, last.name) == (x.shape, dtype, "totals", "prefixes")
    text = built(last.job(), Target("cuda", 90)).asm["ptx"]
    assert "shfl" not in text and "ld.global.v4.b32" in text
    (narrow,) = launches(meta(300, 8, 33, dtype=dtype), 1, "sum", dtype, 132)[1]  # few lanes: rows in several threads
    assert "shfl" in built(narrow.job(), Target("cuda", 90)).asm["ptx"]


@pytest.mark.parametrize("nbytes", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(1000, 4000), (1200, 3001), (16, 65536), (20000, 301), (1, 1_000_003), (7, 256)])
def test_all_of_a_row_is_in_its_blocks(sizes, nbytes):
    outer, n = sizes
    how = row_cut(outer, n, nbytes, 132)
    begins = how.even - 1 if n % how.even else 0
    assert how.blocks * how.height >= n + begins and how.height % how.lanes == 0
    assert how.grid(outer) * how.rows >= outer and how.lanes % how.even == 0 and 1 <= how.warps <= 8
    assert how.blocks == 1 or how.grid(outer) <= 2 * 4 * 132


@pytest.mark.parametrize("kind", ["sum", "prod", "logsumexp"])
@pytest.mark.parametrize(
    ("shape", "names"),
    [((1200, 3001), ["whole_rows"]), ((1024, 8191), ["prefixes"]), ((3, 65535), ["totals", "prefixes"])],
)
def test_rows_are_moved_in_vectors_wherever_they_begin(shape, names, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, made = launches(meta(*shape, dtype=torch.float32), 1, kind, torch.float32, 132)
    assert [x.name for x in made] == names
    text = built(made[-1].job(), Target("cuda", 90)).asm["ptx"]
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


def test_nothing_is_launched_for_nothing():
    assert launches(meta(2, 0, 3), 1, "sum", torch.float32, 132)[1] == []


def test_an_unknown_fold_is_refused():
    with pytest.raises(BackendError, match="no fold median"):
        launches(meta(2, 4, 3), 1, "median", torch.float32, 132)
