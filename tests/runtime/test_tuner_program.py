"""Tuning the kernels of a program, with a stand-in for the timing: each once, and winners are used from then on."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilefold.backends.triton.tiles import default_config
from tilefold.errors import BackendError
from tilefold.frontend.fuse import trace
from tilefold.frontend.regions import assemble
from tilefold.pipeline import compile_program
from tilefold.runtime.step import Code
from tilefold.runtime.tuner import program as tuner
from tilefold.runtime.tuner.table import Tuned


@pytest.fixture
def timed(monkeypatch):
    """Kernels that were timed; winners have 16 warps."""
    table = {}
    found = []
    known = SimpleNamespace(exact=lambda key: key in table, add=table.__setitem__)

    def tune(block, sizes, syms, effort, progress):
        found.append((block, dict(sizes), effort))
        return Tuned(replace(default_config(block, sizes), warps=16), 1.0, 2.0), ()

    monkeypatch.setattr(tuner, "table", lambda name: known)
    monkeypatch.setattr(tuner, "device_name", lambda: "a GPU")
    monkeypatch.setattr(tuner, "tune", tune)
    return found


def steps(rows=70):
    low = trace(lambda x: torch.softmax(x, -1) + x.amax(0), torch.randn(rows, 40))
    return compile_program(low.program, device="interpreter").steps


def test_every_kernel_is_timed_once_and_skipped_when_it_is_known(timed):
    given = steps()
    found = tuner.tune_steps([*given, *given], "quick")
    assert [k.name for k in found] == [s.name for s in given] and len(timed) == len(given)
    assert not tuner.tune_steps(given, "quick")
    assert len(tuner.tune_steps(given, "full", again=True)) == len(given) and timed[-1][2] == "full"


def test_library_calls_are_no_kernels(timed):
    assert not tuner.tune_steps([SimpleNamespace(name="mm", code=lambda units: Code())], "quick") and not timed


def test_kernels_ask_for_their_configuration_again(timed):
    given = steps(90)
    kernel = given[0].triton
    kernel._configs["old"] = kernel._plans["old"] = kernel._variants["old"] = None
    tuner.tune_steps(given, "quick")
    assert not kernel._configs and not kernel._plans and not kernel._variants


def test_a_region_that_cannot_be_tuned_runs_untuned(monkeypatch, caplog):
    def fails(steps, effort):
        raise BackendError("the worker died", hint="")

    monkeypatch.setattr(assemble, "tune_steps", fails)
    with caplog.at_level(logging.WARNING, logger="tilefold"):
        assemble.tuned(SimpleNamespace(steps=()), "graph0_0")
    assert "graph0_0 is not tuned: the worker died" in caplog.text
