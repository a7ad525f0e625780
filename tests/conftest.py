"""Failures of Tilefold are errors in tests; a test of what happens in their place asks for `lenient`.

Random numbers of a test depend on its name and `--seed` alone: a failure is the same again, alone or among others.
"""

from __future__ import annotations

import random
from zlib import crc32

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the tests' random numbers (default: 0)")


def pytest_report_header(config):
    return f"seed: {config.getoption('seed')}"


@pytest.fixture(autouse=True)
def _seeded(request):
    seed = crc32(f"{request.node.nodeid}:{request.config.getoption('seed')}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _strict(request, monkeypatch):
    lenient = "lenient" in request.fixturenames
    monkeypatch.setenv("TILEFOLD_STRICT", "0" if lenient else "1")


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    """No test finds what another run of the tests compiled."""
    monkeypatch.setenv("TILEFOLD_REUSE_GRAPHS", "0")


@pytest.fixture
def lenient():
    """What Tilefold fails at runs elsewhere, as it does for users."""
