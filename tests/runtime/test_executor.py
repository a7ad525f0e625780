"""Policy of the executor: compiled where possible, interpreted with one warning where not."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.tile.kernels import SOFTMAX
from tilefold.backends.cpp.launch import CppKernel
from tilefold.errors import BackendError
from tilefold.runtime import executor
from tilefold.tile.text import parse


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(executor, "_warned", set())


def run(launch):
    x, y = torch.randn(5, 9), torch.empty(5, 9)
    launch({"x": x, "y": y}, {"R": 5, "C": 9})
    torch.testing.assert_close(y, x.softmax(-1))


def test_compiled_where_there_is_a_compiler():
    launch = executor.load_kernel(parse(SOFTMAX))
    assert isinstance(launch, CppKernel)
    run(launch)


def test_interpreted_with_one_warning_where_there_is_none(monkeypatch):
    monkeypatch.setenv("TILEFOLD_CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match="kernels run in the interpreter"):
        launch = executor.load_kernel(parse(SOFTMAX))
    run(launch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(executor.load_kernel(parse(SOFTMAX)))


def test_a_compiler_that_breaks_is_not_hidden(monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\ntest "$1" = --version && echo broken 1.0 && exit 0\necho error: no >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("TILEFOLD_CXX", str(broken))
    with pytest.raises(BackendError, match="failed"):
        executor.load_kernel(parse(SOFTMAX))


def test_a_damaged_library_is_compiled_again(tmp_path):
    run(executor.load_kernel(parse(SOFTMAX)))
    (library,) = (tmp_path / "kernels").glob("*.so")
    damaged = library.read_bytes()[:-100]
    library.unlink()
    library.write_bytes(damaged)
    run(executor.load_kernel(parse(SOFTMAX)))
    assert library.stat().st_size == len(damaged) + 100
