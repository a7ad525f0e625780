"""The few functions of CUDA's library that most kernels call, for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402

from tilefold.backends.triton import build, device_library  # noqa: E402
from tilefold.backends.triton.build import Job, Target, built  # noqa: E402
from tilefold.backends.triton.prelude import HEADER  # noqa: E402

HOPPER = Target("cuda", 90)


@pytest.fixture(autouse=True)
def settings(own_cache, monkeypatch):
    monkeypatch.setenv("TILEFOLD_COMPILE_PROCESSES", "0")
    device_library._taken.cache_clear()


def job(function: str) -> Job:
    source = f"""{HEADER}

@triton.jit
def tf_high(x):
    x = x.to(tl.uint32)
    return tl.umulhi(x, x).to(tl.float32)


@triton.jit
def called(x, y):
    at = tl.arange(0, 128)
    tl.store(y + at, {function}(tl.load(x + at)))
"""
    return Job("called", source, {"x": "*fp32", "y": "*fp32"}, ((0, 16), (1, 16)), {"num_warps": 4})


def libraries(monkeypatch) -> list[str]:
    """What Triton links from now on."""
    found = []
    link = device_library.llvm.link_extern_libs

    def linking(module, paths):
        found.extend(paths)
        link(module, paths)

    monkeypatch.setattr(device_library.llvm, "link_extern_libs", linking)
    return found


@pytest.mark.parametrize("name", ["ceil", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sqrt", "umulhi"])
def test_usual_functions_are_the_library_s_to_the_byte(monkeypatch, tmp_path, name):
    found = libraries(monkeypatch)
    function = "tf_high" if name == "umulhi" else f"tl.{name}"
    quick = built(job(function), HOPPER)
    whole = dict(make_backend(GPUTarget("cuda", 90, 32)).parse_options({}).extern_libs)["libdevice"]
    part = device_library.usual(whole)
    assert part is not None and found[0] == whole and found[1:] in ([part], [])  # made of the whole, then read
    assert name in ("exp", "log2") or found[1:] == [part]  # Triton may have instructions of its own
    monkeypatch.setattr(build, "_part_of_library", lambda *given: {})
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other triton"))
    assert built(job(function), HOPPER).asm["cubin"] == quick.asm["cubin"]


def test_other_functions_take_the_whole_library():
    assert device_library.suffices(job("tl.rsqrt").source, ("*fp32",))
    assert not device_library.suffices(job("tl.rsqrt").source, ("*fp64",))
    assert not device_library.suffices(job("libdevice.expm1").source, ("*fp32",))
    assert not device_library.suffices(job("tl.sin").source, ("*fp32",))
    assert "cubin" in built(job("libdevice.expm1"), HOPPER).asm


def test_a_function_that_is_missed_is_found_in_the_whole_library(monkeypatch):
    monkeypatch.setattr(device_library, "suffices", lambda source, types: True)
    assert "cubin" in built(job("libdevice.expm1"), HOPPER).asm


def test_without_the_part_kernels_are_compiled_with_the_whole(monkeypatch):
    """Another version of Triton may have no such functions."""
    monkeypatch.setattr(device_library, "ir", None)
    assert "cubin" in built(job("tl.rsqrt"), HOPPER).asm


def test_a_part_that_is_gone_is_kept_again_and_a_damaged_one_is_not_taken(tmp_path):
    whole = dict(make_backend(GPUTarget("cuda", 90, 32)).parse_options({}).extern_libs)["libdevice"]
    part = device_library.usual(whole)
    Path(part).unlink()
    assert device_library.usual(whole) == part and Path(part).exists()
    Path(part).write_text("; no module")
    assert "cubin" in built(job("tl.rsqrt"), HOPPER).asm
