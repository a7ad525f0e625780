"""From a tile kernel to something that can be called: C++ if this machine can, else the interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from tilefold.backends.cpp.compile import build, toolchain
from tilefold.backends.cpp.launch import CppKernel
from tilefold.errors import BackendError
from tilefold.runtime.cache import get_or_build
from tilefold.tile.interp import run_kernel
from tilefold.tile.ir import Kernel

#: `launch(tensors, syms)` runs the kernel in place on its `out` and `scratch` tensors.
Launch = Callable[[Mapping[str, torch.Tensor], Mapping[str, int]], None]

_warned: set[str] = set()


def build_cached(source: str, name: str) -> Path:
    """Compile C++ through the on-disk cache. BackendError without a compiler, or where it fails."""
    tools = toolchain()
    return get_or_build(name, {"source": source, **tools.identity()}, lambda out: build(source, out, tools))


def load_kernel(kernel: Kernel) -> Launch:
    """`kernel`, ready to be called; compiled once a machine for equal kernels and settings.

    Without a C++ compiler the tile interpreter runs it, slowly: that is said once a process.
    BackendError: the compiler is there but the kernel does not compile.
    """
    try:
        toolchain()
    except BackendError as err:
        if err.message not in _warned:
            _warned.add(err.message)
            warnings.warn(
                f"{err.message}: kernels run in the interpreter, which is very slow ({err.hint})",
                RuntimeWarning,
                stacklevel=2,
            )
        return partial(run_kernel, kernel)
    return CppKernel(kernel, build_cached)
