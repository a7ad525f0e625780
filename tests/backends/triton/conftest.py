"""What tests of the Triton back end share."""

from __future__ import annotations

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Plans and machine code of a test of its own."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))
