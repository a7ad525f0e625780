"""Tests on a GPU: skipped where there is none.

`pytest tests/gpu --dry-device cpu` runs what a CPU can of them, on the CPU's kernels; `TRITON_INTERPRET=1 pytest
tests/gpu --dry-device interpreter` on the GPU's, in Triton's interpreter (3.6 has no right bf16 products there).
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from tilefold.frontend.regions.replay import Replayed
from tilefold.pipeline import compile_program
from tilefold.runtime.native.load import native


def pytest_addoption(parser):
    parser.addoption("--dry-device", default=None, help="run the tests of tests/gpu on this device instead of cuda")


def _interpreted(p, *, goal="fast", load=True, device="cpu", given=None):
    return compile_program(p, goal=goal, load=load, device="interpreter", given=given)


@pytest.fixture
def device(request, monkeypatch):
    """Where tensors are made: "cuda"."""
    dry = request.config.getoption("--dry-device", default=None)
    if dry == "interpreter":
        monkeypatch.setattr(importlib.import_module("tilefold.frontend.fuse"), "compile_program", _interpreted)
        monkeypatch.setattr(
            importlib.import_module("tilefold.frontend.capture.options"), "RUNNERS", {"pipeline": _interpreted}
        )
        return "cpu"
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


@pytest.fixture
def in_cpp(monkeypatch):
    """Regions of GPUs run in C++: those that were made (`regions`), and what they recorded (`tapes`)."""
    monkeypatch.setenv("TILEFOLD_RUNNER", "all")
    assert native().wait() is not None, native().reason
    regions, tapes = [], []
    usual, written = Replayed.__init__, Replayed._recorded

    def init(self, *given, **how):
        usual(self, *given, **how)
        regions.append(self)

    def recorded(self, args):
        write = self.written

        def keep(args):
            found = write(args)
            tapes.append(found[1])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(self, "written", keep, raising=False)
            return written(self, args)

    monkeypatch.setattr(Replayed, "__init__", init)
    monkeypatch.setattr(Replayed, "_recorded", recorded)
    return SimpleNamespace(regions=regions, tapes=tapes)
