"""Calling a compiled kernel on torch tensors, in a few microseconds."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tilefold.backends.cpp.affine import SIZE_LIMIT
from tilefold.backends.cpp.compile import build, toolchain
from tilefold.backends.cpp.contract import GEMM_ENTRY, gemm_name, gemm_source
from tilefold.backends.cpp.render import ENTRY, OUTSIDE, TAKE_OUTSIDE, Rendered, render_linked
from tilefold.errors import BackendError
from tilefold.tensor.sizes import extent
from tilefold.tile.ir import Kernel

#: (C++ source, a name for it) to the path of its shared library.
Builder = Callable[[str, str], Path]
#: Argument layouts remembered a kernel; dynamic shapes make new ones.
LAYOUTS = 4096

_folder: list[tempfile.TemporaryDirectory[str]] = []
_loaded: dict[Path, ctypes.CDLL] = {}


def build_uncached(source: str, name: str) -> Path:
    """A builder without a cache: into a directory of this process, once a source."""
    if not _folder:
        _folder.append(tempfile.TemporaryDirectory(prefix="tilefold-"))
    tools = toolchain()
    key = hashlib.sha256(f"{source}{tools}".encode()).hexdigest()[:20]
    path = Path(_folder[0].name) / f"{name}-{key}.so"
    if not path.exists():
        build(source, path, tools)
    return path


def _library(path: Path) -> ctypes.CDLL:
    if path not in _loaded:
        try:
            _loaded[path] = ctypes.CDLL(str(path))
        except OSError as err:
            raise BackendError(f"the compiled library does not load: {err}") from None
    return _loaded[path]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A loaded kernel: its function, and the addresses of the multiplications it calls.

    address: of the function. outside: of the one that says whether an index was out of range; 0 where none can be.
    """

    call: Callable[[bytes, int], None]
    gemms: tuple[int, ...]
    address: int
    outside: int


#: What one set of shapes and strides needs: the kernel, how arguments are packed, all but the addresses.
_Layout = tuple[_Entry, struct.Struct, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel for tensors of certain extents and strides: a C function of the address of 64-bit integers (addresses of
    the tensors, then `numbers`) and a number of threads. `outside`: as of `_Entry`."""

    address: int
    outside: int
    numbers: tuple[int, ...]


def _checking(
    entry: Callable[[bytes, int], None], outside: Callable[[], int], name: str
) -> Callable[[bytes, int], None]:
    """`entry`, after which an index that does not exist is an error. Another thread that runs the kernel at the same
    time may be told instead."""

    def run(arguments: bytes, threads: int) -> None:
        entry(arguments, threads)
        if outside():
            raise IndexError(f"index out of range in {name} (TILEFOLD_INDEX_CHECKS=0 leaves the check out)")

    return run


class CppKernel:
    """A tile kernel compiled for this machine. Compiles at construction; BackendError if it cannot."""

    def __init__(self, kernel: Kernel, builder: Builder = build_uncached):
        self.kernel, self._builder = kernel, builder
        self.source = self._rendered(wide=False).source
        self._entry = self._load(wide=False)
        self._params = tuple((t.name, t.dtype.torch_dtype) for t in kernel.tensors)
        self._layouts: dict[tuple[object, ...], _Layout] = {}

    def _rendered(self, wide: bool) -> Rendered:
        return render_linked(self.kernel, wide)

    def _load(self, wide: bool) -> _Entry:
        rendered = self._rendered(wide)
        library = _library(self._builder(rendered.source, self.kernel.name))
        entry, outside = getattr(library, ENTRY), 0
        entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_int64), None
        address = _address(entry)
        if TAKE_OUTSIDE in rendered.source:
            outside = _address(getattr(library, OUTSIDE))
            entry = _checking(entry, getattr(library, OUTSIDE), self.kernel.name)
        libraries = (_library(self._builder(gemm_source(types), gemm_name(types))) for types in rendered.gemms)
        return _Entry(entry, tuple(_address(getattr(x, GEMM_ENTRY)) for x in libraries), address, outside)

    @cached_property
    def _wide_entry(self) -> _Entry:
        return self._load(wide=True)

    def __call__(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Run on `tensors` (outputs are written in place) with the run-time integers `syms`.

        ValueError: a tensor of another dtype, device or shape than the kernel is for.
        """
        xs = [tensors[name] for name, _ in self._params]
        entry, packer, numbers = self._layout_of(xs, syms)
        for x, (name, dtype) in zip(xs, self._params, strict=True):
            if x.dtype is not dtype or not x.is_cpu:
                raise ValueError(f"{self.kernel.name}: {name} is {x.dtype} on {x.device}, not {dtype} on cpu")
        entry.call(packer.pack(*[x.data_ptr() for x in xs], *numbers), torch.get_num_threads())

    def bound(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> tuple[Bound, list[torch.Tensor]]:
        """What a call on such tensors calls, and the tensors in the order of their addresses."""
        xs = [tensors[name] for name, _ in self._params]
        entry, _, numbers = self._layout_of(xs, syms)
        return Bound(entry.address, entry.outside, numbers), xs

    def _layout_of(self, xs: list[torch.Tensor], syms: Mapping[str, int]) -> _Layout:
        key = (*[(x.shape, x.stride()) for x in xs], *[syms[s] for s in self.kernel.syms])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layout(xs, syms)
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def _layout(self, xs: list[torch.Tensor], syms: Mapping[str, int]) -> _Layout:
        """Check shapes, and lay out what does not change from call to call: strides and symbols."""
        k = self.kernel
        sizes: dict[str, int] = {}
        for d, e in k.sizes.items():
            sizes[d] = extent(e, syms, sizes)
        strides: list[int] = []
        for x, t in zip(xs, k.tensors, strict=True):
            want = tuple(extent(e, syms, sizes) for e in t.shape)
            if tuple(x.shape) != want:
                raise ValueError(f"{k.name}: {t.name} has shape {tuple(x.shape)}, not {want}")
            if t.unit_axis is not None and x.shape[t.unit_axis] > 1 and x.stride(t.unit_axis) != 1:
                raise ValueError(f"{k.name}: {t.name} has stride {x.stride(t.unit_axis)} on axis {t.unit_axis}, not 1")
            strides += x.stride()
        large = any(abs(n) >= SIZE_LIMIT for n in (*sizes.values(), *(syms[s] for s in k.syms)))
        entry = self._wide_entry if large else self._entry
        numbers = (*strides, *(syms[s] for s in k.syms), *entry.gemms)
        return entry, struct.Struct(f"{len(xs) + len(numbers)}q"), numbers


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
