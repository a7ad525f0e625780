"""The studies of errors, ablations and first calls, at small sizes on a CPU."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.suites.functions import softmax_by_hand
from tilefold.suites.gpu import ablation, numerics, startup
from tilefold.suites.gpu.measure import CpuTimer
from tilefold.suites.gpu.operators import attention


def silent(*words):
    """Nothing is shown."""


def entries_of(study):
    return [e for entries in study for e in entries]


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
    entries = ablation.with_relative(entries_of(ablation.study("cpu", CpuTimer(), silent, small=True)))
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


def test_what_is_known_is_not_made_again(monkeypatch):
    monkeypatch.setattr(ablation, "LEVELS", {n: ablation.LEVELS[n] for n in ("unfused", "fused")})
    monkeypatch.setattr(ablation, "MODES", {})
    known = [e for n in ("unfused", "fused") for e in ablation.blank("levels: 65 columns", n, "died", small=True)]
    known += ablation.blank("levels: 130 columns", "unfused", "died")
    (left,) = ablation.study("cpu", CpuTimer(), silent, small=True, known=known)
    assert [(e["point"], e["variant"], e["why"]) for e in left] == [("130 columns", "fused", "")]
    case = numerics.cases(small=True)[0]
    others = [c for c in numerics.cases(small=True) if c is not case]
    known = [e for c in others for e in numerics.blank(c.row, "", "died", small=True)]
    known += numerics.blank(case.row, "flash", "died", small=True)
    (left,) = numerics.study("cpu", silent, small=True, known=known)
    assert {e["contender"] for e in left} == {"tilefold", "cudnn", "flex"} and {e["row"] for e in left} == {case.row}
    assert not entries_of(startup.study("cpu", silent, small=True, known=startup.blank("V-small", "", "died")))


def test_first_calls_of_processes(monkeypatch):
    asked = []

    def process(words, seconds):
        asked.append(words)
        part = words[-5]
        return startup.Ran(
            {part: 2.0 / len(asked), "imports": 4.0, "host_us": 7.0, "fuse_us": 9.0, "torch_us": 5.0}, "", ""
        )

    monkeypatch.setattr(startup, "run_process", process)
    ((entry,),) = startup.study("cuda", silent, small=True)
    figures = {"cold": 2.0, "warm": 1.0, "capture": 2 / 3, "tuning": 0.5, "imports": 4.0}
    figures |= {"host_us": 7.0, "fuse_us": 9.0, "torch_us": 5.0}
    assert entry == {"row": "V-small", **figures, "why": "", "output": {}}
    assert [w[-5] for w in asked] == list(startup.PARTS) and asked[0][:3] == asked[1][:3] and asked[0][0] == "env"
    assert asked[0][-4:] == ("redfuser", "V-small", "cuda", "small")
    assert len(entries_of(startup.study("cpu", silent))) == len(startup.ROWS)
    some = entries_of(startup.study("cpu", silent, rows=("h2", "gqa-*")))
    assert [e["row"] for e in some] == ["H2", "gqa-decode-4096"]


def python(code):
    return (sys.executable, "-c", code)


def test_a_process_is_read_until_it_ends_or_is_ended():
    found = startup.run_process(python("print('noise'); print('{not}'); print('{\"cold\": 1.5}')"), 60)
    assert found == startup.Ran({"cold": 1.5}, "", "")
    failed = startup.run_process(python("print('{\"imports\": 2}'); raise SystemExit('no kernel')"), 60)
    assert failed == startup.Ran({"imports": 2}, "no kernel", "no kernel")
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    begin = time.monotonic()
    late = startup.run_process(python(f"{child}; print('{{\"cold\": 3}}', flush=True); time.sleep(60)"), 3)
    assert late.found == {"cold": 3} and late.why == "longer than 3 s" and time.monotonic() - begin < 30


def test_a_failed_start_is_an_entry(monkeypatch):
    asked = []

    def fails(words, seconds):
        asked.append(words[-5])
        return startup.Ran({"imports": 3.0}, "no kernel", "a trace\nno kernel")

    monkeypatch.setattr(startup, "run_process", fails)
    ((entry,),) = startup.study("cpu", silent, small=True)
    assert asked == ["cold", "capture"]  # without a first process a second has nothing to find
    assert entry["why"] == "cold: no kernel; capture: no kernel" and entry["cold"] is entry["warm"] is None
    assert entry["output"]["cold"] == "a trace\nno kernel" and entry["imports"] == 3.0


@pytest.mark.parametrize("part", ["cold", "warm", "capture"])
def test_the_process_says_what_it_found(part, capsys):
    startup.main([part, "redfuser", "V-small", "cpu", "small"], 1.25)
    found = startup._figures(capsys.readouterr().out)
    assert found["imports"] == 1.25 and found[part] > 0
    assert {"host_us", "fuse_us", "torch_us"} & found.keys() == (set() if part == "capture" else set(startup.HOST))


def test_tuning_without_a_gpu_is_a_reason():
    with pytest.raises(TilefoldError, match="CUDA"):
        startup.main(["tuning", "redfuser", "V-small", "cpu", "small"])
