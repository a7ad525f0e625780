"""A second process loads what the first compiled, without asking Triton; anything that decides the code counts."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import py_compile
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels, variant  # noqa: E402
from tilefold import files  # noqa: E402
from tilefold.backends.triton import build as compiler  # noqa: E402
from tilefold.backends.triton import known  # noqa: E402
from tilefold.backends.triton.build import Target  # noqa: E402
from tilefold.backends.triton.compile import job_of, resources  # noqa: E402

HOPPER = Target("cuda", 90)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Own caches; the list grows by every kernel that Triton is asked for."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "tilefold"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(files, "_warned", set())
    found, ask = [], triton.compile

    def compile(src, target, options):
        found.append(src.name)
        return ask(src, target=target, options=options)

    monkeypatch.setattr(compiler.triton, "compile", compile)
    return found


def built(target=HOPPER):
    (k,) = kernels("softmax")
    v = variant(k)
    return resources(v.kernel, v.rendered, v.config, target)


def test_a_kernel_is_compiled_once(asked):
    first, second = built(), built()
    assert len(asked) == 1
    assert second.assembly["cubin"] == first.assembly["cubin"] and second.shared == first.shared


def test_a_kernel_that_is_found_is_launched_alike_without_taking_its_source_apart(asked, monkeypatch):
    from triton.backends.nvidia.driver import make_launcher  # noqa: PLC0415 (without Triton nothing here runs)

    (k,) = kernels("softmax")
    v = variant(k)
    job = job_of(v.kernel, v.rendered, v.config, [16] * len(v.rendered.arguments), wide=False)
    first = compiler.built(job, HOPPER)
    monkeypatch.setattr(compiler, "module_of", lambda source, name: pytest.fail("the source is read again"))
    second = compiler.built(job, HOPPER)
    made, found = (make_launcher(x.src.constants, dict(x.src.signature), None) for x in (first, second))
    assert found == made and second.kernel == first.kernel and second.name == first.name
    with pytest.raises(pytest.fail.Exception, match="read again"):
        compiler.built(replace(job, source=job.source + "\n"), HOPPER)


def test_another_target_or_setting_is_another_kernel(asked, monkeypatch):
    built()
    built(Target("cuda", 80))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    built()
    assert len(asked) == 3


def test_a_cache_that_lost_the_kernel_is_filled_again(asked, tmp_path):
    built()
    shutil.rmtree(tmp_path / "triton")
    built()
    (entry,) = (tmp_path / "tilefold" / "triton").glob("*.known")
    entry.write_text("{")
    built()
    assert len(asked) == 3 and json.loads(entry.read_text())["hash"]
    built()
    assert len(asked) == 3


def test_who_asks_for_compilation_gets_it(asked, monkeypatch):
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert known.key_of("source", {}, [], {}, ("cuda", 90, 32)) is None


def test_an_assembler_that_the_environment_names_counts_by_its_file(asked, tmp_path, monkeypatch):
    """As Inductor names torch's, and images of containers CUDA's: kernels are kept, another assembler's apart."""
    ptxas = shutil.copy2(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas", tmp_path / "ptxas")
    usual = built()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    assert built().assembly["cubin"] == usual.assembly["cubin"] and len(asked) == 2
    built()
    assert len(asked) == 2
    os.utime(ptxas, ns=(0, 0))
    built()
    assert len(asked) == 3
    ptxas.unlink()  # Triton takes its own
    built()
    assert len(asked) == 4
    assert len(files_of(tmp_path / "tilefold", ".known")) == 4


def test_options_of_the_assembler_count(asked, monkeypatch):
    usual = known.key_of("source", {}, [], {}, ("cuda", 90, 32))
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    assert known.key_of("source", {}, [], {}, ("cuda", 90, 32)) != usual


def test_a_changed_installation_has_another_stamp(tmp_path):
    file = tmp_path / "language" / "core.py"
    file.parent.mkdir()
    file.write_text("a")
    first = known.stamp(tmp_path)
    known.stamp.cache_clear()
    file.write_text("ab")
    assert known.stamp(tmp_path) != first
    known.stamp.cache_clear()


def test_without_a_directory_kernels_are_compiled_all_the_same(asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="kept in memory"):
        built()
    assert len(asked) == 1


def files_of(folder, suffix):
    return [p for p in folder.rglob(f"*{suffix}") if p.is_file()]


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[: len(d) // 2], lambda d: d[:-1] + b"x"])
def test_damaged_machine_code_is_compiled_again(damage, asked, tmp_path):
    first = built()
    (code,) = files_of(tmp_path / "triton", ".cubin")
    code.write_bytes(damage(code.read_bytes()))
    again = built()
    assert len(asked) == 2 and again.assembly["cubin"] == first.assembly["cubin"] == code.read_bytes()
    built()
    assert len(asked) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda e: {**e, "hash": "../../elsewhere"},
        lambda e: {**e, "group": "../x.json"},
        lambda e: {**e, "key": "0" * 32},
        lambda e: {**e, "hash": ["a"]},
        lambda e: {**e, "code": None},
        lambda e: {k: v for k, v in e.items() if k != "code"},
        lambda e: [e],
        lambda e: None,
    ],
)
def test_what_is_known_is_read_with_care(change, asked, tmp_path):
    built()
    (entry,) = files_of(tmp_path / "tilefold", ".known")
    right = json.loads(entry.read_text())
    entry.write_text(json.dumps(change(right)))
    built()
    assert len(asked) == 2 and json.loads(entry.read_text()) == right


def test_what_others_can_write_is_not_known(asked, tmp_path):
    built()
    (entry,) = files_of(tmp_path / "tilefold", ".known")
    entry.chmod(0o666)
    built()
    assert len(asked) == 2 and entry.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("poison", ["append", "truncate", "empty", "byte code", "link"])
def test_what_runs_is_the_source_and_not_a_file(poison, tmp_path, monkeypatch):
    """Text that somebody put into the copy on disk, or into byte code beside it, never runs."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_modules", {})
    source, evil = "def kernel():\n    return 'mine'\n", tmp_path / "evil"
    first = compiler.module_of(source, "k")
    assert inspect.getsource(first.kernel) == source
    copy = Path(first.__file__)
    match poison:
        case "append":
            copy.write_text(source + f"open({str(evil)!r}, 'w')\n")
        case "truncate":
            copy.write_text(source[:15])
        case "empty":
            copy.write_text("")
        case "byte code":
            (tmp_path / "x.py").write_text(f"open({str(evil)!r}, 'w')\n")
            cached = importlib.util.cache_from_source(str(copy))
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(tmp_path / "x.py", cached, invalidation_mode=mode)
        case "link":
            copy.rename(tmp_path / "elsewhere.py")
            copy.symlink_to(tmp_path / "elsewhere.py")
    monkeypatch.setattr(compiler, "_modules", {})  # as a second process
    again = compiler.module_of(source, "k")
    assert again.kernel() == "mine" and not evil.exists()
    assert inspect.getsource(again.kernel) == source == copy.read_text() and not copy.is_symlink()
