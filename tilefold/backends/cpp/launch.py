"""Calling a compiled kernel on torch tensors, in a few microseconds."""

from __future__ import annotations

import ctypes
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import torch

from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Expr
from tilefold.backends.cpp.affine import SIZE_LIMIT
from tilefold.backends.cpp.compile import build, toolchain
from tilefold.backends.cpp.render import ENTRY, render
from tilefold.errors import BackendError
from tilefold.tile.ir import Kernel

#: Source to the path of its shared library.
Builder = Callable[[str, Kernel], Path]
#: Argument layouts remembered a kernel; dynamic shapes make new ones.
LAYOUTS = 4096

_folder: tempfile.TemporaryDirectory[str] | None = None


def build_uncached(source: str, kernel: Kernel) -> Path:
    """A builder without a cache: into a directory of this process."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="tilefold-")
    handle = tempfile.NamedTemporaryFile(dir=_folder.name, prefix=kernel.name, suffix=".so", delete=False)
    handle.close()
    build(source, Path(handle.name), toolchain())
    return Path(handle.name)


class CppKernel:
    """A tile kernel compiled for this machine. Compiles at construction; BackendError if it cannot."""

    def __init__(self, kernel: Kernel, builder: Builder = build_uncached):
        self.kernel, self._builder = kernel, builder
        self.source = render(kernel)
        self._entry = self._load(self.source)
        self._params = tuple((t.name, t.dtype.torch_dtype) for t in kernel.tensors)
        self._layouts: dict[tuple[object, ...], tuple[Callable[..., None], struct.Struct, tuple[int, ...]]] = {}

    def _load(self, source: str) -> Callable[..., None]:
        path = self._builder(source, self.kernel)
        try:
            entry = getattr(ctypes.CDLL(str(path)), ENTRY)
        except (OSError, AttributeError) as err:
            raise BackendError(f"kernel {self.kernel.name}: the compiled library does not load: {err}") from None
        entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_int64), None
        return entry

    @cached_property
    def _wide_entry(self) -> Callable[..., None]:
        return self._load(render(self.kernel, wide=True))

    def __call__(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Run on `tensors` (outputs are written in place) with the run-time integers `syms`.

        ValueError: a tensor of another dtype, device or shape than the kernel is for.
        """
        xs = [tensors[name] for name, _ in self._params]
        shape_key = (*[(x.shape, x.stride()) for x in xs], *[syms[s] for s in self.kernel.syms])
        layout = self._layouts.get(shape_key)
        if layout is None:
            layout = self._layout(xs, syms)
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            self._layouts[shape_key] = layout
        entry, packer, numbers = layout
        for x, (name, dtype) in zip(xs, self._params, strict=True):
            if x.dtype is not dtype or not x.is_cpu:
                raise ValueError(f"{self.kernel.name}: {name} is {x.dtype} on {x.device}, not {dtype} on cpu")
        entry(packer.pack(*[x.data_ptr() for x in xs], *numbers), torch.get_num_threads())

    def _layout(
        self, xs: list[torch.Tensor], syms: Mapping[str, int]
    ) -> tuple[Callable[..., None], struct.Struct, tuple[int, ...]]:
        """Check shapes, and lay out what does not change from call to call: strides and symbols."""
        k = self.kernel
        sizes: dict[str, int] = {}
        for d, e in k.sizes.items():
            sizes[d] = _integer(e, sizes, syms)
        strides: list[int] = []
        for x, t in zip(xs, k.tensors, strict=True):
            want = tuple(_integer(e, sizes, syms) for e in t.shape)
            if tuple(x.shape) != want:
                raise ValueError(f"{k.name}: {t.name} has shape {tuple(x.shape)}, not {want}")
            if t.unit_axis is not None and x.shape[t.unit_axis] > 1 and x.stride(t.unit_axis) != 1:
                raise ValueError(f"{k.name}: {t.name} has stride {x.stride(t.unit_axis)} on axis {t.unit_axis}, not 1")
            strides += x.stride()
        large = any(abs(n) >= SIZE_LIMIT for n in (*sizes.values(), *(syms[s] for s in k.syms)))
        numbers = (*strides, *(syms[s] for s in k.syms))
        packer = struct.Struct(f"{len(xs) + len(numbers)}q")
        return (self._wide_entry if large else self._entry), packer, numbers


def _integer(e: Expr, sizes: Mapping[str, int], syms: Mapping[str, int]) -> int:
    env = Env(lambda name, at: torch.zeros(()), sizes, syms)
    return int(evaluate(e, Grid({}), env))
