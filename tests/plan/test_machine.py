"""The measured description of this machine, and where it is kept."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tilefold.plan import machine
from tilefold.plan.machine import NOMINAL, Rates, cache_sizes, describe, measure, this_machine


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    this_machine.cache_clear()
    return tmp_path


def test_measuring_is_quick_and_leaves_the_threads() -> None:
    threads = torch.get_num_threads()
    begin = time.process_time()
    found = measure()
    assert time.process_time() - begin < 3.0
    assert torch.get_num_threads() == threads
    assert all(1e8 < x < 1e14 for x in (found.f32, found.f64, found.bf16, found.near, found.shared, found.memory))


def test_it_is_measured_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Rates] = []
    monkeypatch.setattr(machine, "measure", lambda: made.append(NOMINAL) or NOMINAL)
    first = this_machine()
    this_machine.cache_clear()
    assert this_machine() == first and len(made) == 1
    held = fresh / "machine.json"
    held.write_text(json.dumps({**json.loads(held.read_text()), "identity": "another machine"}))
    this_machine.cache_clear()
    assert this_machine() == first and len(made) == 2


def test_a_broken_file_is_measured_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda: NOMINAL)
    (fresh / "machine.json").write_text("{")
    assert this_machine().gemm_rate(machine.DType.F32, library=True) == NOMINAL.f32


def test_an_unwritable_cache_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(fresh / "file"))
    monkeypatch.setattr(machine, "measure", lambda: NOMINAL)
    assert this_machine().bandwidth == NOMINAL.memory


def test_rates_become_tiers() -> None:
    m = describe(NOMINAL, "here", cores=4, caches=(1 << 15, 1 << 19, 1 << 25))
    assert [t.sharing for t in m.tiers] == [1, 1, 4, 4]
    assert m.tiers[2].capacity == 1 << 25 and m.tiers[2].source == "here"
    first, second, third = cache_sizes()
    assert 0 < first < second <= third
