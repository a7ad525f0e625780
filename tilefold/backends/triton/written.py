"""Kernels that are written by hand, launched as generated ones are.

`triton.jit` would compile each when it is first called, in the process that waits for it, and a C function for its
types of arguments. Here a launch is a `Job` as well: known before the call, compiled by another process meanwhile
(`build.start_building`), and started by a C function that kernels share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.build import DIVISOR, Job, built, module_of, start_building
from tilefold.backends.triton.launcher import Launcher, launcher_of
from tilefold.backends.triton.prelude import ASSERTING
from tilefold.backends.triton.values import POINTER_TYPE
from tilefold.backends.triton.views import Like, Seen

#: Integers beyond this have 64 bits.
_NARROW = 1 << 31

_launchers: dict[tuple[object, ...], Launcher] = {}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of kernel `name` of a source, which has all constants in it: tensors first, then numbers. grid: thread
    blocks."""

    source: str
    name: str
    tensors: tuple[Seen, ...]
    numbers: tuple[int, ...]
    grid: int
    warps: int

    def job(self) -> Job:
        """What is to be compiled, for tensors that may not exist yet. Numbers that are multiples of 16 load and store
        whole vectors."""
        parameters = _parameters(self.source, self.name)
        types = [POINTER_TYPE[DType.of(x.dtype)] for x in self.tensors]
        types += ["i32" if -_NARROW <= n < _NARROW else "i64" for n in self.numbers]
        options: dict[str, int] = {"num_warps": self.warps, "sanitize_overflow": False}
        if ASSERTING in self.source:
            options["debug"] = True
        vectors = tuple((n, DIVISOR) for n, whole in enumerate(self._whole()) if whole)
        return Job(self.name, self.source, dict(zip(parameters, types, strict=True)), vectors, options)

    def _whole(self) -> tuple[bool, ...]:
        found = (*[x.data_ptr() for x in self.tensors], *self.numbers)
        return tuple(n % DIVISOR == 0 for n in found)

    def run(self) -> None:
        """Launch on the current stream of the tensors' device, which must be the current one; tensors of a CPU by
        Triton's interpreter. BackendError: it does not compile."""
        device = self.tensors[0].device
        if device.type == "cpu":
            kernel = getattr(module_of(self.source, self.name), self.name)
            kernel[(self.grid,)](*self.tensors, *self.numbers, num_warps=self.warps)
            return
        wide = tuple(not -_NARROW <= n < _NARROW for n in self.numbers)
        key = (device.index, self.source, self.name, *[x.dtype for x in self.tensors], self._whole(), wide)
        launcher = _launchers.get(key)
        if launcher is None:
            launcher = _launchers[key] = launcher_of(built(self.job()))
        stream, pointers = torch._C._cuda_getCurrentRawStream(device.index), [x.data_ptr() for x in self.tensors]
        launcher.call(self.grid, 1, 1, stream, *launcher.head, *pointers, *self.numbers, *launcher.tail)


def build_ahead(launches: Sequence[Launch]) -> None:
    """Have the kernels of launches on tensors that do not exist yet compiled by another process."""
    for x in launches:
        start_building(replace(x, tensors=tuple(Like.of(t) for t in x.tensors)).job())


@cache
def _parameters(source: str, name: str) -> tuple[str, ...]:
    """What a kernel of the source takes."""
    found = re.search(rf"def {name}\(([^)]*)\)", source)
    assert found is not None
    return tuple(x.strip() for x in found[1].split(",") if x.strip())
