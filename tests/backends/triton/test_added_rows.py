"""Rows added to a table: what the kernels are compiled to (`interpreted.py` runs them)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton.added_rows import launches
from tilefold.backends.triton.build import Target, built


def compiled(name: str, *, checked: bool = True, dtype: torch.dtype = torch.bfloat16) -> str:
    given = meta(50_000, 768, dtype=dtype), meta(4096, dtype=torch.int64), meta(4096, 768, dtype=dtype)
    (launch,) = [x for x in launches(*given, -1, checked=checked) if x.name == name]
    text: str = built(launch.job(), Target("cuda", 90)).asm["ptx"]
    return text


def test_rows_move_as_vectors_and_sums_of_shared_ones_are_atomic(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    begun, gathered, ended = (compiled(n) for n in ("begun", "gathered", "ended"))
    assert all(text.count(".local") == 0 for text in (begun, gathered, ended))
    assert begun.count("ld.global.v4.b32") >= 4 and "st.global.v4.b32" in begun and "atom" not in begun
    assert "red.global" in gathered or "atom.global" in gathered
    added = compiled("added", dtype=torch.float32)
    assert "ld.global.v4.b32" in added and ("red.global" in added or "atom.global" in added)
    assert "ld.global.v4.b32" in ended and "st.global.v4.b32" in ended


@pytest.mark.parametrize("checked", [True, False])
def test_an_index_that_does_not_exist_stops_the_device_where_that_is_wanted(tmp_path, monkeypatch, checked):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert ("__assertfail" in compiled("counted", checked=checked)) is checked
    assert ("__assertfail" in compiled("added", checked=checked, dtype=torch.float32)) is checked
