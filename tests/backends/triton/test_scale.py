"""A tensor times a number in place: what the kernel is compiled to (`interpreted.py` runs it)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.scale import launches


def test_one_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (launch,) = launches(meta(1 << 20, dtype=torch.bfloat16), meta(dtype=torch.float32), 132)
    text = built(launch.job(), Target("cuda", 90)).asm["ptx"]
    factor, tensor = text.index("ld.global.b32"), text.index("ld.global.v4.b32")
    assert "bra" in text[factor:tensor]  # a branch around all of it
    assert "st.global.v4.b32" in text
