"""A second process loads what the first compiled, without asking Triton; anything that decides the code counts."""

from __future__ import annotations

import json
import shutil

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels, variant  # noqa: E402
from tilefold.backends.triton import compile as compiler  # noqa: E402
from tilefold.backends.triton import known  # noqa: E402
from tilefold.backends.triton.compile import Target, resources  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402

HOPPER = Target("cuda", 90)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Own caches; the list grows by every kernel that Triton is asked for."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "tilefold"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
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


@pytest.mark.parametrize("name", ["TRITON_PTXAS_PATH", "TRITON_ALWAYS_COMPILE"])
def test_an_assembler_of_the_users_own_goes_to_triton(name, asked, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert known.key_of("source", {}, [], {}, ("cuda", 90, 32)) is None


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
    with pytest.raises(BackendError, match="cannot be made"):
        known.folder()
    built()
    assert len(asked) == 1
