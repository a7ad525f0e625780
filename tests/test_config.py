"""What the environment says, and what it says wrongly."""

from __future__ import annotations

import warnings

import pytest

from tilefold import config


@pytest.mark.parametrize(
    ("name", "value", "field", "found"),
    [
        ("TILEFOLD_RUNNER", "python", "runner", "python"),
        ("TILEFOLD_RUNNER", "", "runner", "all"),
        ("TILEFOLD_COMPILE_PROCESSES", "3", "compile_processes", 3),
        ("TILEFOLD_COMPILE_PROCESSES", "0", "compile_processes", 0),
        ("TILEFOLD_STRICT", "0", "strict", False),
        ("TILEFOLD_REUSE_GRAPHS", "0", "reuse_graphs", False),
        ("TILEFOLD_REUSE_GRAPHS", "", "reuse_graphs", True),
        ("TILEFOLD_CXX", "ccache g++", "compilers", ("ccache g++",)),
    ],
)
def test_values(name, value, field, found, monkeypatch):
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(config.load(), field) == found


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("TILEFOLD_RUNNER", "gpu", "all or cpu or python"),
        ("TILEFOLD_COMPILE_PROCESSES", "-2", "a number"),
        ("TILEFOLD_COMPILE_PROCESSES", "many", "a number"),
    ],
)
def test_values_that_mean_nothing_are_ignored_with_a_warning(name, value, wanted, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    plain = config.load()
    monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match=f"{name}='{value}' is ignored: it is {wanted}"):
        assert config.load() == plain
