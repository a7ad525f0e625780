"""Building: other instruction sets, missing and failing compilers, rendering."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.backends.cpp.harness import compiled
from tests.tile.kernels import ATTENTION, SOFTMAX
from tilefold.algebra.dtypes import DType
from tilefold.backends.cpp.affine import SIZE_LIMIT
from tilefold.backends.cpp.compile import build, openmp_runtime, toolchain
from tilefold.backends.cpp.contract import gemm_source
from tilefold.backends.cpp.launch import CppKernel
from tilefold.backends.cpp.render import render
from tilefold.errors import BackendError
from tilefold.tile.text import parse


def test_avx512_code_compiles(monkeypatch, tmp_path):
    """Compiled only: the machine need not have it."""
    monkeypatch.setenv("TILEFOLD_ARCH", "sapphirerapids")
    build(render(parse(ATTENTION)), tmp_path / "attention.so", toolchain())
    out = tmp_path / "gemm.so"
    build(gemm_source((DType.BF16, DType.BF16, DType.F32)), out, toolchain())
    text = subprocess.run(["objdump", "-d", str(out)], capture_output=True, text=True, check=True).stdout
    assert "vdpbf16ps" in text and "zmm" in text


def test_portable_code_runs(monkeypatch):
    monkeypatch.setenv("TILEFOLD_ARCH", "x86-64")
    x, y = torch.randn(7, 30), torch.empty(7, 30)
    CppKernel(parse(SOFTMAX))({"x": x, "y": y}, {"R": 7, "C": 30})
    torch.testing.assert_close(y, x.softmax(-1))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("TILEFOLD_CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"no C\+\+ compiler found.*\n.*TILEFOLD_CXX"):
        toolchain()


@pytest.mark.parametrize("name", [" ", "'g++", "'' g++", "no-such-wrapper g++"])
def test_what_is_no_command(name, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CXX", name)
    with pytest.raises(BackendError, match=r"no C\+\+ compiler found"):
        toolchain()


@pytest.mark.parametrize("program", ["ccache", "my wrapper"])
def test_a_compiler_behind_another_program(program, monkeypatch, tmp_path):
    """`CXX="ccache g++"`, and options of the user's own."""
    wrapper, seen = tmp_path / program, tmp_path / "seen"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> "{seen}"\nexec "$@"\n')
    wrapper.chmod(0o755)
    plain = toolchain()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", f"{shlex.quote(program)} g++ -DUNUSED=1")
    tools = toolchain()
    assert tools.version == plain.version and tools.identity() != plain.identity()
    build(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42 * UNUSED; }',
        tmp_path / "x.so",
        tools,
    )
    assert ctypes.CDLL(str(tmp_path / "x.so")).answer() == 42 and "x.cpp" in seen.read_text()


def test_a_compiler_whose_path_has_a_space(monkeypatch, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "cxx").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("TILEFOLD_CXX", str(tmp_path / "a b" / "cxx"))
    assert toolchain().command == (str(tmp_path / "a b" / "cxx"),)


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    with pytest.raises(BackendError, match="failed"):
        build("this is not C++", tmp_path / "x.so", toolchain())
    assert not (tmp_path / "x.so").exists()


def test_the_source_is_readable():
    source = render(parse(ATTENTION))
    assert source.startswith("// attention")
    for word in ("const float* const q", "N_i", "gemm_f32_f32_f32(", "tf::exp", "mn_acc"):
        assert word in source
    assert "torch" not in source


def test_one_openmp_runtime():
    """Kernels run on the OpenMP library that torch has loaded."""
    kernel = compiled(SOFTMAX)
    kernel({"x": torch.randn(40, 9), "y": torch.empty(40, 9)}, {"R": 40, "C": 9})
    maps = Path("/proc/self/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    assert len(loaded) == 1
    assert openmp_runtime() == "-lgomp" or Path(openmp_runtime()).resolve() in {Path(p).resolve() for p in loaded}


WIDE = """
kernel wide(N, K)
  dim i = N
  out y: i64[N]
  out z: f32[N]
  grid i:64
    store y[i] over i = (i + K) * 3
    store z[i] over i = where(i + K < K + 2, 1.0, 0.0)
"""


@pytest.mark.parametrize("k", [5, SIZE_LIMIT, 2**40])
def test_large_integers_take_the_wide_variant(k):
    y, z = torch.empty(9, dtype=torch.int64), torch.empty(9)
    compiled(WIDE)({"y": y, "z": z}, {"N": 9, "K": k})
    assert torch.equal(y, (torch.arange(9) + k) * 3)
    assert torch.equal(z, (torch.arange(9) < 2).float())
