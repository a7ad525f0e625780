"""The on-disk cache: sharing, damage, read-only directories, concurrency."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from tests.tile.kernels import SOFTMAX
from tilefold import files
from tilefold.errors import BackendError, CacheError
from tilefold.runtime import cache, executor
from tilefold.tile.text import parse


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_apart", {})
    monkeypatch.setattr(files, "_warned", set())
    return tmp_path / "cache"


class Builder:
    """Writes a fixed library and counts how often it is asked."""

    def __init__(self, data: bytes = b"library"):
        self.data, self.calls = data, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.data)


def test_an_entry_is_built_once_and_listed():
    b = Builder()
    first = cache.get_or_build("softmax", {"source": "a\nb", "flags": "-O2"}, b)
    assert first == cache.get_or_build("softmax", {"source": "a\nb", "flags": "-O2"}, b)
    assert b.calls == 1 and first.read_bytes() == b"library"
    (entry,) = cache.list_entries()
    assert (entry.name, entry.nbytes, entry.parts["flags"]) == ("softmax", 7, "-O2")
    assert cache.clear() == 1 and cache.list_entries() == ()


@pytest.mark.parametrize("other", [{"source": "b"}, {"flags": "-O3"}, {"cpu": "y"}, {"extra": ""}])
def test_any_other_part_is_another_entry(other):
    parts = {"source": "a", "flags": "-O2", "cpu": "x"}
    b = Builder()
    assert cache.get_or_build("k", parts, b) != cache.get_or_build("k", {**parts, **other}, b)
    assert b.calls == 2


def test_the_version_is_part_of_the_key(monkeypatch):
    before = cache.key_of({"source": "a"})
    monkeypatch.setattr(cache, "version", lambda: "99")
    assert cache.key_of({"source": "a"}) != before


@pytest.mark.parametrize("damage", ["truncate", "flip", "no json", "bad json", "no library"])
def test_a_damaged_entry_is_built_again(damage):
    b = Builder(b"x" * 1000)
    path = cache.get_or_build("k", {"source": "a"}, b)
    meta = path.with_suffix(".json")
    match damage:
        case "truncate":
            path.write_bytes(path.read_bytes()[:500])
        case "flip":
            path.write_bytes(b"y" + path.read_bytes()[1:])
        case "no json":
            meta.unlink()
        case "bad json":
            meta.write_text(meta.read_text()[:40])
        case "no library":
            path.unlink()
    again = cache.get_or_build("k", {"source": "a"}, b)
    assert b.calls == 2 and again.read_bytes() == b"x" * 1000
    assert json.loads(again.with_suffix(".json").read_text())["nbytes"] == 1000


def test_a_failed_build_leaves_nothing(home):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise BackendError("no")

    with pytest.raises(BackendError, match="no"):
        cache.get_or_build("k", {"source": "a"}, fail)
    assert cache.list_entries() == () and not list((home / "kernels").glob("*.tmp"))
    assert cache.get_or_build("k", {"source": "a"}, Builder()).read_bytes() == b"library"


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    b = Builder()
    with pytest.warns(RuntimeWarning, match="cannot be used") as said:
        first = cache.get_or_build("k", {"source": "a"}, b)
    assert len(said) == 1 and first.read_bytes() == b"library"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build("k", {"source": "a"}, b) == first
        cache.get_or_build("k", {"source": "b"}, b)
    assert b.calls == 2


def test_entries_are_of_their_user_alone(home):
    old = os.umask(0)  # the friendliest there is
    try:
        library = cache.get_or_build("k", {"source": "a"}, Builder())
    finally:
        os.umask(old)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (home, home / "kernels", *library.parent.iterdir())}
    assert {modes.pop(n) for n in (home.name, "kernels")} == {0o700}
    assert set(modes.values()) == {0o600} and len(modes) == 3  # the library, what it is, the lock


def by_another(path: Path) -> None:
    os.chown(path, 54321, -1)


def writable(path: Path) -> None:
    path.chmod(0o666)


def linked(path: Path) -> None:
    target = path.parent.parent / f"elsewhere{path.suffix}"
    path.rename(target)
    path.symlink_to(target)


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize("poisoned", [pytest.param(by_another, marks=root), writable, linked])
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_what_others_can_write_is_built_again(poisoned, suffix, home):
    b = Builder()
    library = cache.get_or_build("k", {"source": "a"}, b)
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 1
    poisoned(library.with_suffix(suffix))
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 2
    again = library.with_suffix(suffix).lstat()
    assert stat.S_ISREG(again.st_mode) and stat.S_IMODE(again.st_mode) == 0o600 and again.st_uid == os.geteuid()
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 2


def test_an_entry_under_anothers_name_is_not_it(home):
    b = Builder()
    right = cache.get_or_build("k", {"source": "a"}, b)
    evil = cache.get_or_build("k", {"source": "b"}, Builder(b"evil"))
    for suffix in (".so", ".json"):
        right.with_suffix(suffix).write_bytes(evil.with_suffix(suffix).read_bytes())
    assert cache.get_or_build("k", {"source": "a"}, b).read_bytes() == b"library" and b.calls == 2


@pytest.mark.parametrize("text", ["", "null", "[]", "3", "{}", "[" * 10**5, "\0", '{"key": 1}'])
def test_a_malformed_entry_is_built_again_and_not_listed(text, home):
    b = Builder()
    library = cache.get_or_build("k", {"source": "a"}, b)
    library.with_suffix(".json").write_text(text)
    assert cache.list_entries() == ()
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 2


def test_a_folder_that_leads_elsewhere_is_not_used(home, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    home.mkdir()
    (home / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        library = cache.get_or_build("k", {"source": "a"}, Builder())
    assert library.read_bytes() == b"library" and home not in library.parents
    assert not list((tmp_path / "elsewhere").iterdir())


@root
def test_somebody_elses_cache_is_used_only_if_shared(home, monkeypatch):
    b = Builder()
    library = cache.get_or_build("k", {"source": "a"}, b)
    for p in (home, home / "kernels", *library.parent.iterdir()):
        by_another(p)
    with pytest.warns(RuntimeWarning, match="belongs to user 54321; TILEFOLD_CACHE_SHARED=1"):
        assert cache.get_or_build("k", {"source": "a"}, b) != library
    monkeypatch.setenv("TILEFOLD_CACHE_SHARED", "1")
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 2
    os.chown(library, 54322, -1)
    assert cache.get_or_build("k", {"source": "a"}, b) != library  # neither the user's nor the owner's


def test_a_cache_that_can_only_be_read_serves_what_it_has(home, monkeypatch):
    b = Builder()
    library = cache.get_or_build("k", {"source": "a"}, b)
    before = sorted(library.parent.iterdir())

    def refused(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "mkstemp", refused)
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 1
    monkeypatch.undo()
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(home))
    real = tempfile.mkstemp
    monkeypatch.setattr(files.tempfile, "mkstemp", lambda **k: refused() if home in k["dir"].parents else real(**k))
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        other = cache.get_or_build("k", {"source": "b"}, b)
    assert (
        other.read_bytes() == b"library" and home not in other.parents and b.calls == 2
    )  # built once, stored elsewhere
    assert sorted(p for p in library.parent.iterdir() if p.suffix != ".lock") == [
        p for p in before if p.suffix != ".lock"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("full", [".so", ".json"])
def test_a_full_disk_leaves_nothing_behind(full, home, monkeypatch):
    real = os.replace

    def replace(src, dst):
        if Path(dst).suffix == full and home in Path(dst).parents:
            with open("/dev/full", "wb", buffering=0) as f:
                f.write(b"x")
        real(src, dst)

    monkeypatch.setattr(files.os, "replace", replace)
    b = Builder()
    with pytest.warns(RuntimeWarning, match="No space left"):
        library = cache.get_or_build("k", {"source": "a"}, b)
    assert library.read_bytes() == b"library" and b.calls == 1
    assert [p.suffix for p in (home / "kernels").iterdir()] == [".lock"]
    assert cache.get_or_build("k", {"source": "a"}, b) == library and b.calls == 1


def test_what_cannot_be_removed_is_an_error(home):
    cache.get_or_build("k", {"source": "a"}, Builder())
    (home / "kernels" / "stuck.so").mkdir()
    with pytest.raises(CacheError, match="cannot clear"):
        cache.clear()


def test_clearing_takes_gpu_kernels_too(home):
    for name in ("triton/a.known", "triton/a_1.py", "fused/b.fused", "tuned.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    assert cache.clear() == 1
    assert [p.name for p in home.rglob("*") if p.is_file()] == ["tuned.json"]


def compile_and_run(start, report) -> None:
    """In a process of its own: compile when all are ready, run, report how often the compiler ran."""
    torch.set_num_threads(1)
    built, real = [], executor.build
    executor.build = lambda *a: (built.append(1), real(*a))
    x, y = torch.randn(5, 9), torch.empty(5, 9)
    start.wait()
    executor.load_kernel(parse(SOFTMAX))({"x": x, "y": y}, {"R": 5, "C": 9})
    report.put((len(built), torch.allclose(y, x.softmax(-1))))


def test_eight_processes_compile_the_same_kernel_into_an_empty_cache():
    context = multiprocessing.get_context("fork")
    start, report = context.Barrier(8), context.Queue()
    workers = [context.Process(target=compile_and_run, args=(start, report)) for _ in range(8)]
    for w in workers:
        w.start()
    said = [report.get(timeout=900) for _ in workers]
    for w in workers:
        w.join()
    assert all(right for _, right in said) and sorted(n for n, _ in said) == [0] * 7 + [1]
    assert [e.name for e in cache.list_entries()] == ["softmax"]
