"""A launch as the driver takes it: for callers that have the addresses and are no Python (`runtime/native`).

Triton's launcher is called from Python with every argument as an object. What it hands to `cuLaunchKernelEx` is the
same in every call but for the addresses and the stream; here it is written down once: a handle, extents, and the
parameters in order. A tensor map that Triton has encoded serves every address (`cuTensorMapReplaceAddress`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tilefold.errors import BackendError

#: Bytes of a tensor map, which the device reads as they are; and where one lies in the object that Triton makes.
MAP, MAP_AT, MAP_OBJECT = 128, 128, 256
#: Threads of a warp.
WARP = 32
#: Parameters after a kernel's own: memory of the launch's, which kernels here do not ask for.
SCRATCH = (0, 0)
LIBRARY = "libcuda.so.1"
#: Bytes of shared memory that every block may have; and the driver's numbers for what a kernel needs that wants more.
USUAL_SHARED, PREFER_SHARED, MOST_SHARED = 48 << 10, 1, 8
#: What a call needs of the driver, in the order of `driver.h`.
FUNCTIONS = (
    *("cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuGetErrorString"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain"),
)


@dataclass(frozen=True, slots=True)
class Address:
    """A parameter: the address of tensor `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parameter: a tensor map like `template`, of the address of tensor `position`."""

    position: int
    template: bytes


@dataclass(frozen=True, slots=True)
class Counter:
    """A parameter: the address of a counter of the stream's."""


#: A number is the parameter itself.
Parameter = int | Address | TensorMap | Counter


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code, and the kernel's name in it."""

    name: str
    code: bytes


@dataclass(frozen=True, slots=True)
class Handle:
    """A compiled kernel on its device. threads: of a block; shared: bytes. dependent: by programmatic dependent
    launch. image: what it was loaded from, where that is known."""

    function: int
    threads: int
    shared: int
    dependent: bool
    cooperative: bool
    image: Image | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Launched:
    """A handle, thread blocks, and the kernel's parameters in order."""

    handle: Handle
    grid: int
    parameters: tuple[Parameter, ...]


def handle_of(head: tuple[Any, ...], image: Image | None = None) -> Handle | None:
    """The kernel of what Triton's launcher takes before a kernel's own arguments; None for one in clusters."""
    function, cooperative, dependent = head[:3]
    warps, clusters, shared = head[5]
    if clusters != 1:
        return None
    return Handle(int(function), WARP * warps, shared, bool(dependent), bool(cooperative), image)


def template_of(made: object) -> bytes | None:
    """The bytes of a tensor map in the object that Triton made; None where it is no such object."""
    if type(made).__name__ != "PyCUtensorMap" or type(made).__basicsize__ != MAP_OBJECT or id(made) % MAP:
        return None
    return ctypes.string_at(id(made) + MAP_AT, MAP)


def function_of(image: Image, shared: int) -> int:
    """The kernel of an image, loaded on the current device, whose context must be current; for blocks with so many
    bytes of shared memory. BackendError: the driver refuses."""
    library = ctypes.CDLL(LIBRARY)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    codes = [library.cuModuleLoadData(ctypes.byref(module), image.code)]
    if not codes[-1]:
        codes.append(library.cuModuleGetFunction(ctypes.byref(function), module, image.name.encode()))
    if not any(codes) and shared > USUAL_SHARED:
        codes.append(library.cuFuncSetCacheConfig(function, PREFER_SHARED))
        codes.append(library.cuFuncSetAttribute(function, MOST_SHARED, shared))
    if any(codes):
        raise BackendError(f"CUDA's driver answers {max(codes)} where {image.name} is loaded")
    return function.value or 0


@cache
def functions() -> tuple[int, ...] | None:
    """Addresses of the driver's functions; None where it has not all of them."""
    try:
        library = ctypes.CDLL(LIBRARY)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
    except (OSError, AttributeError):
        return None
    return tuple(n for n in found if n is not None)
