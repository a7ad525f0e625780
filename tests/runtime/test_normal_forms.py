"""Normalised programs are kept on disk: found by an equal program, and by no other."""

from __future__ import annotations

import pytest

from tilefold.runtime import normal_forms
from tilefold.runtime.normal_forms import LEAST, NORMAL, normal_form
from tilefold.tensor.ir import Program
from tilefold.tensor.passes import normalise
from tilefold.tensor.text import parse, show

TEXT = "\n".join(
    [
        "program named()",
        "  input x: f32[8, 12]",
        "  input y: f32[8, 3, 4]",
        *(f"  dim {d} = {n}" for d, n in {"i": 8, "h": 3, "d": 4}.items()),
        *(f"  a{k}[i, h, d]: f32 = {f'a{k - 1}' if k else 'y'}[i, h, d] * {k + 2}.0" for k in range(LEAST)),
        f"  s[i]: f32 = sum[h, d] a{LEAST - 1}[i, h, d] * x[i, h * 4 + d]",
        "  return s",
    ]
)


@pytest.fixture(autouse=True)
def empty(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def made(monkeypatch):
    """Programs that were normalised."""
    seen: list[Program] = []

    def counted(p, contiguous):
        seen.append(p)
        return normalise(p, contiguous)

    monkeypatch.setattr(normal_forms, "normalise", counted)
    return seen


def test_what_is_found_is_what_was_made(made):
    p = parse(TEXT)
    first, second = normal_form(p), normal_form(p)
    want, layouts = normalise(p)
    assert len(made) == 1 and first[0] == second[0] == want and show(second[0]) == show(want)
    assert dict(second[1]) == dict(first[1]) == dict(layouts) and len(layouts["x"][1]) == 2
    assert second[0].name == p.name and [c.loc for c in second[0].body] == [c.loc for c in want.body]


def test_another_program_or_memory_order_is_made_anew(made):
    normal_form(parse(TEXT))
    normal_form(parse(TEXT.replace("x: f32", "x: f16")))
    normal_form(parse(TEXT), {"x": 0})
    normal_form(parse(TEXT), {"x": 1})
    assert len(made) == 4
    other, _ = normal_form(parse(TEXT.replace("named", "other")))
    assert other.name == "other" and len(made) == 4


@pytest.mark.parametrize("damage", [lambda t: t[:-20], lambda t: t.replace(b"f32", b"f16"), lambda t: b""])
def test_a_damaged_file_is_made_anew(made, damage):
    normal_form(parse(TEXT))
    (path,) = NORMAL.folder().iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert normal_form(parse(TEXT))[0] == normalise(parse(TEXT))[0] and len(made) == 2


def test_small_programs_leave_no_files(made):
    few = TEXT.splitlines()
    p = parse("\n".join([*few[:8], "  return a1"]))
    assert normal_form(p)[0] == normalise(p)[0] and not NORMAL.folder().exists()
