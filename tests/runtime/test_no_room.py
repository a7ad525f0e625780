"""Disks that are full, cannot be written or take only small files: what cannot be compiled runs in PyTorch."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilefold.backends.cpp.compile import check
from tilefold.errors import BackendError, NoRoomError
from tilefold.runtime import cache

PROGRAM = """
import resource, sys
import torch, tilefold

limit, how = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
def f(x):
    return torch.softmax(x * 2, -1) + 1
def run(x):
    f_ = tilefold.fuse(f) if how == "fuse" else torch.compile(f, backend="tilefold", options={"leftover": "eager"})
    return f_(x)
for rows in (4, 5):
    x = torch.randn(rows, 7, requires_grad=True)
    y = run(x)
    torch.testing.assert_close(y, f(x))
    (g,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(g, torch.autograd.grad(f(x).square().sum(), x)[0])
"""


@pytest.mark.parametrize("how", ["fuse", "compile"])
@pytest.mark.parametrize("limit", [512, 8192])
def test_a_limit_on_the_size_of_files(limit, how, tmp_path):
    """At 8192 bytes the compiler starts and is killed where it writes: Python ignores that signal, it does not."""
    temporary, home = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    around = {**os.environ, "TMPDIR": str(temporary), "TILEFOLD_CACHE_DIR": str(home), "TILEFOLD_STRICT": "0"}
    words = [sys.executable, "-c", PROGRAM, str(limit), how]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=around)
    assert done.returncode == 0, done.stderr
    why = "File size limit exceeded" if limit == 8192 else "File too large"
    assert f"the C++ compiler cannot write to {temporary}: {why}" in done.stderr
    if how == "fuse":
        assert done.stderr.count("runs operator by operator") == 1 and done.stderr.count("ulimit -f") == 1
    left = [p.name for folder in (temporary, home) for p in folder.rglob("*")]
    assert not [n for n in left if n.endswith((".tmp", ".so", ".cpp")) or n.startswith("tilefold-")]


def places(monkeypatch, tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
    found = tuple(str(tmp_path / name) for name in names)
    monkeypatch.setattr(cache, "PLACES", found)
    monkeypatch.setattr(cache, "_apart", {})
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    return found


def test_what_has_no_room_is_compiled_in_memory(monkeypatch, tmp_path):
    full, _ = places(monkeypatch, tmp_path, "full", "memory")

    def build(path):
        if full in str(path):
            raise NoRoomError("the disk is full")
        path.write_bytes(b"library")

    assert cache.get_or_build("k", {"source": "a"}, build).read_bytes() == b"library"
    monkeypatch.setattr(cache, "PLACES", (full, str(tmp_path / "no such folder")))
    with pytest.raises(NoRoomError, match=r"^the disk is full$"):
        cache.get_or_build("k", {"source": "b"}, build)
    monkeypatch.setattr(cache, "PLACES", (str(tmp_path / "no such folder"),))
    with pytest.raises(NoRoomError, match=r"nothing can be compiled: .*No such file(.|\n)*hint: name a folder"):
        cache.get_or_build("k", {"source": "b"}, build)
    assert not list((tmp_path / "full").iterdir()) and not list((tmp_path / "memory").iterdir())


def test_what_the_cache_and_the_disk_do_not_take_is_kept_in_memory(monkeypatch, tmp_path):
    full, memory = places(monkeypatch, tmp_path, "full", "memory")
    real, refused = cache.put, [str(tmp_path / "cache"), full]

    def put(path, data):
        if any(str(path).startswith(place) for place in refused):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(cache, "put", put)
    with pytest.warns(RuntimeWarning, match="No space left") as said:
        library = cache.get_or_build("k", {"source": "a"}, lambda path: path.write_bytes(b"library"))
    assert len(said) == 1 and library.is_relative_to(memory) and library.read_bytes() == b"library"
    assert cache.get_or_build("k", {"source": "a"}, lambda path: pytest.fail("built again")) == library
    refused.append(memory)
    with pytest.raises(NoRoomError, match=r"a compiled kernel cannot be kept: .*No space left"):
        cache.get_or_build("k", {"source": "b"}, lambda path: path.write_bytes(b"library"))


@pytest.mark.parametrize(
    ("status", "words", "kind", "said"),
    [
        (4, "g++: internal compiler error: File size limit exceeded signal terminated program cc1plus", NoRoomError,
         "cannot write to /t: File size limit exceeded\n  hint: raise the limit"),
        (1, "/usr/bin/ld: final link failed: No space left on device", NoRoomError,
         "cannot write to /t: No space left on device\n  hint: name a folder with room in TMPDIR"),
        (1, "cannot create /t/a.s: Read-only file system", NoRoomError, "Read-only file system\n  hint: name a folder"),
        (-signal.SIGXFSZ, "", NoRoomError, "File size limit exceeded\n  hint: raise the limit"),
        (-signal.SIGKILL, "", BackendError, "was stopped by SIGKILL"),
        (1, "a.cpp:1: error: expected ';'\nnote: here", BackendError, r"failed \(1\):\na.cpp:1: error: expected ';'$"),
    ],
)  # fmt: skip
def test_compilers_that_fail_are_told_as_what_they_are(status, words, kind, said):
    with pytest.raises(BackendError, match=f"(?m){said}") as error:
        check(status, words, ["g++", "a.cpp"], Path("/t/tilefold-1/kernel.so"))
    assert type(error.value) is kind
    check(0, words, ["g++"], Path("/t/tilefold-1/kernel.so"))
