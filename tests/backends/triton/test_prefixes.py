"""Running sums of columns: how they are cut, and what they are compiled to (`interpreted.py` runs them)."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tilefold.backends.triton.build import module_of  # noqa: E402
from tilefold.backends.triton.prefixes import cut, source  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402


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


def compiled(kernel: str, lanes: int, rows: int, dtype: str = "fp32"):
    fn = getattr(module_of(source("sum"), "prefixes_sum"), kernel)
    names = fn.arg_names
    types = {n: "constexpr" if n.isupper() else "i32" for n in names} | {"p_x": f"*{dtype}", "p_total": "*fp32"}
    types |= {"p_y": f"*{dtype}"} if "p_y" in names else {}
    given = {"ROWS": rows, "LANES": lanes, "KIND": tl.float32}
    fixed = {(names.index(k),): v for k, v in given.items()}
    attrs = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(names) if not n.isupper()}
    made = ASTSource(fn, types, constexprs=fixed, attrs=attrs)
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_a_chunk_is_scanned_in_registers(dtype, nbytes, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    how = cut(1, 8192, 4096, nbytes, 132)
    text = compiled("prefixes", how.lanes, how.rows, dtype)
    assert "shfl" not in text and "ld.global.v4.b32" in text
    assert "shfl" in compiled("prefixes", how.lanes // 16, how.rows, dtype)  # fewer lanes: rows in several threads


def test_an_unknown_fold_is_refused():
    with pytest.raises(BackendError, match="no fold median"):
        source("median")
