"""The long mode finds what is wrong, accepts what is right, and means the same program by every way to store inputs."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import long
from tests.fuzz.long import Case, stored, wrong
from tests.fuzz.programs import programs
from tilefold.algebra.dtypes import DType
from tilefold.tensor import interp
from tilefold.tensor.text import parse

PROGRAM = parse(
    "program p(n)\n  input x: f32[3, n]\n  dim i = 3\n  dim j = n\n  v[i]: f32 = sum[j] x[i, j] * x[i, j]\n  return v\n"
)
CASE = Case(PROGRAM, 13, DType.F32, 100.0, "inside", 0)


def compiled(change):
    return lambda p, **_: lambda x, syms: {k: change(v) for k, v in interp.run(p, x).items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda v: v, ""),
        (lambda v: v * (1 + 1e-4), "v is off"),
        (lambda v: v * torch.nan, "v is not finite"),
    ],
)
def test_a_wrong_result_is_told(change, why, monkeypatch):
    monkeypatch.setattr(long, "compile_program", compiled(change))
    assert wrong(CASE, "cpu", "fused").startswith(why) and bool(wrong(CASE, "cpu", "fused")) == bool(why)


@pytest.mark.parametrize(("relative", "told"), [(1e-5, False), (1e-3, True)])
def test_what_inputs_leave_open_is_not_wrong(relative, told, monkeypatch):
    """An exponential of a large number, of which float32 knows fewer digits."""
    steep = parse(
        "program p(n)\n  input x: f32[3, n]\n  dim i = 3\n  dim j = n\n  s[i]: f32 = sum[j] x[i, j] * x[i, j]\n"
        "  v[i]: f32 = exp(-s[i])\n  return v\n"
    )
    monkeypatch.setattr(long, "compile_program", compiled(lambda v: v * (1 + relative)))
    assert bool(wrong(Case(steep, 70, DType.F32, 0.0, "contiguous", 0), "cpu", "fused")) is told


@pytest.mark.parametrize("how", ["contiguous", "permuted", "inside"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 1)])
def test_values_are_the_same_however_they_are_stored(how, shape):
    x = torch.randn(shape)
    y = stored(x, how)
    assert torch.equal(x, y) and (how != "inside" or y.storage_offset() == 1)


def test_a_program_runs_compiled():
    assert wrong(CASE, "cpu", "fused") == ""


@pytest.mark.parametrize(("minutes", "ran"), [("0", 0), ("60", 5)])
def test_programs_are_counted_that_ran(minutes, ran, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(long, "wrong", lambda c, device, goal: seen.append(c) or ("bad" if len(seen) == 2 else ""))
    assert long.main(["5", "--minutes", minutes]) == bool(ran)
    assert len(seen) == ran and capsys.readouterr().out.endswith(f"{bool(ran) + 0} of {ran} programs are wrong\n")


def test_when_the_time_is_over_no_more_programs_are_drawn(monkeypatch, capsys):
    """All of them would be drawn, for hours, and none of them run."""
    drawn = []
    monkeypatch.setattr(long, "unlucky", lambda: programs().map(lambda p: drawn.append(p) or p))
    monkeypatch.setattr(long, "programs", long.unlucky)
    assert long.main(["200", "--minutes", "0"]) == 0
    assert len(drawn) < 20 and capsys.readouterr().out.endswith("0 of 0 programs are wrong\n")


def test_parts_that_are_done_are_left_out_by_the_next_run(monkeypatch, capsys, tmp_path):
    """Each part is the same programs as ever; one that the clock cut is run again."""
    seen: list[str] = []
    monkeypatch.setattr(long, "wrong", lambda c, device, goal: seen.append(str(c)) or "")
    record = ["--record", str(tmp_path / "parts.txt")]
    assert long.main(["4", "--seeds", "3", *record]) == 0
    third = seen.copy()
    assert long.main(["4", "--seeds", "2-4", "--minutes", "0", *record]) == 0
    assert seen == third and capsys.readouterr().out.endswith("0 of 0 programs are wrong\n")
    assert long.main(["4", "--seeds", "2-4", *record]) == 0
    assert len(seen) == 12 and seen[:4] == third and seen[4:8] != third
    assert len((tmp_path / "parts.txt").read_text().splitlines()) == 3
    long.main(["4", "--seeds", "3"])
    assert seen[12:] == third
