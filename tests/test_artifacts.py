"""What one process compiled, carried by torch's cache artifacts to a process whose caches are empty."""

from __future__ import annotations

import pytest
import torch
from torch.compiler import _cache

from tests.block.programs import ALL
from tilefold import artifacts, pipeline
from tilefold.plan import machine
from tilefold.runtime import executor
from tilefold.tensor.text import parse

X = {"x": torch.linspace(-3, 3, 70 * 40).view(70, 40), "g": torch.linspace(0.5, 1, 40), "w": torch.eye(24, 40)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Makes an empty cache the one that is used, as a new process has it."""

    def use(name):
        machine.this_machine.cache_clear()
        monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    with _cache.CacheArtifactManager.with_fresh_cache():
        yield use
    machine.this_machine.cache_clear()


def compiled():
    return pipeline.compile_program(parse(ALL["rmsnorm_gemm"]))(X, {"n": 70})["y"]


def files(folder):
    """Names but for locks; contents."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def test_an_empty_cache_is_filled_and_nothing_is_planned_or_compiled(place, monkeypatch):
    first = place("first")
    want = compiled()
    saved, info = torch.compiler.save_cache_artifacts()
    assert set(info.tilefold_artifacts) == set(files(first))
    assert {n.split("/")[0] for n in info.tilefold_artifacts} == {"machine.json", "plans", "kernels"}
    second = place("second")
    torch.compiler.load_cache_artifacts(saved)
    assert files(second) == files(first)
    for module, name in ((machine, "measure"), (pipeline, "plan_program"), (executor, "build")):
        monkeypatch.setattr(module, name, None)  # none is called
    assert torch.equal(compiled(), want)
    place("third")
    with pytest.raises(TypeError, match="NoneType"):
        compiled()


def test_what_was_only_read_is_carried_as_well(place):
    first = place("first")
    compiled()
    with _cache.CacheArtifactManager.with_fresh_cache():
        place("first")
        compiled()
        _, info = torch.compiler.save_cache_artifacts()
    assert set(info.tilefold_artifacts) == set(files(first))


@pytest.mark.parametrize("name", ["../outside.json", "kernels/../../x.so", "/etc/x", "kernels/x.so", "plans/x.plans"])
def test_other_names_are_not_written(name, place, tmp_path, caplog):
    folder = place("first")
    artifacts.TilefoldArtifact(name, b"x").populate_cache()
    assert not files(tmp_path) and "no file of Tilefold's cache" in caplog.text
    artifacts.TilefoldArtifact(f"plans/{'a' * 32}.plans", b"x").populate_cache()
    assert files(folder) == {f"plans/{'a' * 32}.plans": b"x"}


def test_what_is_there_stays_and_a_cache_that_cannot_be_written_is_no_error(place, caplog):
    folder = place("first")
    name = f"kernels/{'b' * 32}.so"
    for content in (b"own", b"another's"):
        artifacts.TilefoldArtifact(name, content).populate_cache()
    assert files(folder) == {name: b"own"}
    place("second").write_text("no folder")
    artifacts.TilefoldArtifact(name, b"x").populate_cache()
    assert "cannot be written" in caplog.text
