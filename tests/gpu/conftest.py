"""Tests on a GPU: skipped where there is none. `pytest tests/gpu --dry-device cpu` runs what a CPU can of them."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--dry-device", default=None, help="run the tests of tests/gpu on this device instead of cuda")


@pytest.fixture
def device(request):
    """Where tensors are made: "cuda"."""
    dry = request.config.getoption("--dry-device", default=None)
    if dry is not None:
        return dry
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is false")
    return "cuda"


@pytest.fixture
def cuda(device):
    """For what only a GPU has: streams, graphs, timers."""
    if device != "cuda":
        pytest.skip("needs an NVIDIA GPU: a dry run on another device")
    return device


@pytest.fixture(autouse=True)
def fresh_memory():
    """Give cached memory back after each test: the large ones need most of it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
