"""How the native module is built."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from tilefold.backends.cpp.compile import toolchain
from tilefold.runtime.native.load import standard_library

PRINTS = r"""
#include <sstream>
#include <cstring>
extern "C" __attribute__((visibility("default"))) void print(int n, char* out) {
  std::ostringstream s;
  s << "code " << n;
  std::strcpy(out, s.str().c_str());
}
"""


@pytest.mark.parametrize("more", [(), ("-static-libstdc++",)], ids=["usual", "a compiler with a copy of its own"])
def test_numbers_are_printed_by_the_process_s_standard_library(tmp_path, more):
    """With a second copy in the module the driver's errors, which have a number in them, ended the process."""
    source, out = tmp_path / "prints.cpp", tmp_path / "prints.so"
    source.write_text(PRINTS)
    flags = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    subprocess.run([*toolchain().command, *more, *flags, str(source), "-o", str(out), standard_library()], check=True)
    text = ctypes.create_string_buffer(64)
    ctypes.CDLL(str(out)).print(7, text)
    assert text.value == b"code 7"
