"""Failures of Tilefold are errors in tests; a test of what happens in their place asks for `lenient`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _strict(request, monkeypatch):
    lenient = "lenient" in request.fixturenames
    monkeypatch.setenv("TILEFOLD_STRICT", "0" if lenient else "1")


@pytest.fixture
def lenient():
    """What Tilefold fails at runs elsewhere, as it does for users."""
