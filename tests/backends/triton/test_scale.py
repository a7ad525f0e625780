"""A tensor times a number in place: what the kernel is compiled to (`interpreted.py` runs it)."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tilefold.backends.triton.build import module_of  # noqa: E402
from tilefold.backends.triton.scale import source  # noqa: E402


def test_one_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fn = module_of(source(), "scale").scale
    names = fn.arg_names
    types = {n: "i32" for n in names} | {"p_x": "*bf16", "p_factor": "*fp32", "STEP": "constexpr", "WIDE": "constexpr"}
    fixed = {(names.index(k),): v for k, v in {"STEP": 4096, "WIDE": tl.float32}.items()}
    attrs = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(names) if n in ("p_x", "n")}
    made = ASTSource(fn, types, constexprs=fixed, attrs=attrs)
    text = triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    factor, tensor = text.index("ld.global.b32"), text.index("ld.global.v4.b32")
    assert "bra" in text[factor:tensor]  # a branch around all of it
    assert "st.global.v4.b32" in text
