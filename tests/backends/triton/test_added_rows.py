"""Rows added to a table: what the kernels are compiled to (`interpreted.py` runs them)."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tilefold.backends.triton.added_rows import source  # noqa: E402
from tilefold.backends.triton.build import module_of  # noqa: E402

FIXED = {"STEP": 256, "ROWS": 2, "COLUMNS": 1024, "SHARED": False, "WIDE": tl.float32}
POINTERS = {"p_at": "*i64", "p_count": "*i32", "p_owner": "*i32", "p_sum": "*fp32"}


def compiled(name: str, *, checked: bool = True, table: str = "*bf16") -> str:
    fn = getattr(module_of(source(checked=checked), "added_rows"), name)
    names = fn.arg_names
    pointers = {**POINTERS, "p_table": table}
    types = {n: "constexpr" if n in FIXED else pointers.get(n, "*bf16" if n.startswith("p_") else "i32") for n in names}
    fixed = {(k,): FIXED[n] for k, n in enumerate(names) if n in FIXED}
    attrs = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(names) if n not in FIXED and n != "skipped"}
    made = ASTSource(fn, types, constexprs=fixed, attrs=attrs)
    options = {"num_warps": 4, **({"debug": True, "sanitize_overflow": False} if name in ("counted", "added") else {})}
    text: str = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def test_rows_move_as_vectors_and_sums_of_shared_ones_are_atomic(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    begun, gathered, ended = (compiled(n) for n in ("begun", "gathered", "ended"))
    assert all(text.count(".local") == 0 for text in (begun, gathered, ended))
    assert begun.count("ld.global.v4.b32") >= 4 and "st.global.v4.b32" in begun and "atom" not in begun
    assert "red.global" in gathered or "atom.global" in gathered
    added = compiled("added", table="*fp32")
    assert "ld.global.v4.b32" in added and ("red.global" in added or "atom.global" in added)
    assert "ld.global.v4.b32" in ended and "st.global.v4.b32" in ended


@pytest.mark.parametrize("checked", [True, False])
def test_an_index_that_does_not_exist_stops_the_device_where_that_is_wanted(tmp_path, monkeypatch, checked):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert ("__assertfail" in compiled("counted", checked=checked)) is checked
    assert ("__assertfail" in compiled("added", checked=checked, table="*fp32")) is checked
