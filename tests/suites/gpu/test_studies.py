"""The studies of errors, ablations and first calls, at small sizes on a CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tilefold.backends.triton.compile import Target, resources
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.suites.functions import softmax_by_hand
from tilefold.suites.gpu import ablation, numerics, startup
from tilefold.suites.gpu.measure import CpuTimer
from tilefold.suites.gpu.operators import attention


def silent(contender, doing):
    """Nothing is shown."""


def test_errors_by_hand():
    found = numerics._summary(torch.cat([torch.zeros(90), torch.ones(10)]).double())
    assert found["rms"] == pytest.approx(0.1**0.5) and found["p99"] == 1.0 and found["p90"] == pytest.approx(0.1)


def test_the_numerical_study_has_the_ten_operators():
    assert len(numerics.cases()) == len(numerics.cases(small=True)) == 10
    assert {c.length for c in numerics.cases()} == {numerics.LENGTH}


def test_errors_of_an_operator():
    case = next(c for c in numerics.cases(small=True) if c.row.startswith("causal-decode"))
    entries = {e["contender"]: e for e in numerics.errors_of(case, "cpu", silent)}
    assert set(entries) == {"tilefold", "cudnn", "flash", "flex"}
    for e in entries.values():
        assert e["why"] == "" and 0 < e["rms"] < 1e-3 and e["p90"] <= e["p99"] < 1e-2


def test_segments_give_the_whole():
    q, k, v = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 24, 16), torch.randn(2, 3, 24, 16)
    asked = []

    def mode(operator, keys):
        asked.append(keys)
        return operator

    for segments in (1, 2, 4):
        torch.testing.assert_close(ablation.segmented(segments, mode)(q, k, v), attention(q, k, v))
    assert asked == [24, 12, 6]


def test_ablations_are_relative_and_name_what_failed(monkeypatch):
    def broken():
        raise RuntimeError("no such level")

    wrong = {"unfused": ablation.unfused_softmax, "thread": broken, "warp": lambda: lambda x: torch.softmax(x, -1) * 2}
    monkeypatch.setattr(ablation, "LEVELS", wrong)
    monkeypatch.setattr(ablation, "MODES", {"plain": lambda operator, keys: operator})
    monkeypatch.setattr(ablation, "SEGMENTS", (1, 2))
    entries = ablation.study("cpu", CpuTimer(), silent, small=True)
    levels = {e["variant"]: e for e in entries if e["study"] == "levels" and e["point"] == "65 columns"}
    assert levels["unfused"]["relative"] == 1.0
    assert "no such level" in levels["thread"]["why"] and levels["warp"]["why"].startswith("wrong")
    slowest = [e["relative"] for e in entries if e["study"] == "incremental"]
    assert len(slowest) == 2 and max(slowest) == 1.0 and min(slowest) > 0


def test_levels_by_their_instructions():
    """Rows held by threads are reduced without a word between threads; warps shuffle; blocks have several warps."""
    triton = pytest.importorskip("triton")
    assert triton
    shuffles, layouts = {}, {}
    for holder, given in ablation.HOLDERS.items():
        program = trace(softmax_by_hand, torch.zeros(4096, 2048, dtype=torch.float16)).program
        (step,) = compile_program(program, goal="fused", device="cuda", given=given).steps
        v = step.triton.variant((1, 1), step.triton.sizes({}))
        found = resources(v.kernel, v.rendered, v.config, Target("cuda", 90)).assembly
        shuffles[holder] = found["ptx"].count("shfl.sync")
        layouts[holder] = found["ttgir"]
    assert shuffles["thread"] == 0 < shuffles["warp"] < shuffles["block"]
    assert "threadsPerWarp = [32, 1]" in layouts["thread"]
    assert "warpsPerCTA = [1]" in layouts["warp"] and "warpsPerCTA = [8]" in layouts["block"]


@pytest.mark.parametrize("level", ablation.LEVELS)
def test_levels_are_right(level):
    x = torch.randn(5, 300)
    torch.testing.assert_close(ablation.LEVELS[level]()(x), torch.softmax(x, -1))


@pytest.mark.parametrize("mode", ablation.MODES)
def test_modes_are_right(mode):
    q, k, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 24, 16), torch.randn(1, 2, 24, 16)
    torch.testing.assert_close(ablation.segmented(2, ablation.MODES[mode])(q, k, v), attention(q, k, v))


def test_first_calls_of_processes(monkeypatch):
    asked = []

    def process(words):
        asked.append(words)
        return {"first_call": 2.0 / len(asked), "host_us": 7.0}

    monkeypatch.setattr(startup, "run_process", process)
    (entry,) = startup.study("cpu", silent, small=True)
    assert entry == {"row": "V-small", "cold": 2.0, "warm": 1.0, "host_us": 7.0, "why": ""}
    assert asked[0] == asked[1] and asked[0][0] == "env" and asked[0][-4:] == ("redfuser", "V-small", "cpu", "small")
    assert len(startup.study("cpu", silent)) == len(startup.ROWS)


def test_a_process_reports_its_last_line_and_its_failure():
    found = startup.run_process(
        (sys.executable, "-c", "print('noise'); print('{\"first_call\": 1.5, \"host_us\": 3}')")
    )
    assert found == {"first_call": 1.5, "host_us": 3}
    with pytest.raises(TilefoldError, match="the process failed: no kernel"):
        startup.run_process((sys.executable, "-c", "raise SystemExit('no kernel')"))


def test_a_failed_start_is_an_entry(monkeypatch):
    def fails(words):
        raise TilefoldError("no kernel")

    monkeypatch.setattr(startup, "run_process", fails)
    (entry,) = startup.study("cpu", silent, small=True)
    assert entry["why"] == "no kernel" and entry["cold"] is None


def test_the_process_prints_an_entry(capsys):
    startup.main(["redfuser", "V-small", "cpu", "small"])
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert entry["first_call"] > 0 and 0 < entry["host_us"] < 1e6
