"""A compiled program without what compiled it: the steps in order, with compiled kernels beside them.

    program ::= tensor program, step*, titles              records (`runtime.records`), as plans are kept
    step    ::= kernel: names, results, one library a pattern of unit strides
              | a call of torch's library: the statements that it stands for

`runtime.store` makes one of a `CompiledProgram`; here it is run. Nothing here imports what plans, renders or compiles:
a process that only runs stored programs starts in less than a tenth of a second more than torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.backends.cpp.prebuilt import Built, PrebuiltKernel
from tilefold.runtime.calls import library_step
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.spans import profiled, span
from tilefold.runtime.step import Code, Result, Step, Units
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import shape_function

NO_SPAN = nullcontext()


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """A compiled kernel for these axes of stride 1 of what it reads. libraries: names of its parts, and the digests of
    the files that hold them."""

    units: Units
    built: Built
    libraries: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A kernel of the CPU. results: name, type and extents; tensors, syms: the kernel's names, and the program's."""

    name: str
    members: tuple[str, ...]
    reads: tuple[str, ...]
    results: tuple[tuple[str, DType, tuple[Expr, ...]], ...]
    tensors: tuple[tuple[str, str], ...]
    syms: tuple[tuple[str, str], ...]
    kernels: tuple[StoredKernel, ...]


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call of torch's library, by the statements that it computes."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """What runs of a program, in order; titles: in a profiler."""

    program: Program
    steps: tuple[StoredStep | StoredCall, ...]
    titles: tuple[str, ...]


class PrebuiltStep:
    """A stored kernel as a step. Operands with strides that no compiled kernel is for are copied into the first's."""

    def __init__(self, stored: StoredStep, files: Mapping[str, Path]):
        self.name, self.members, self.reads = stored.name, stored.members, stored.reads
        self.results: tuple[Result, ...] = tuple(
            (name, dtype.torch_dtype, shape_function(shape)) for name, dtype, shape in stored.results
        )
        self._tensors, self._syms = stored.tensors, stored.syms
        self._kernels = tuple(
            (k.units, PrebuiltKernel(k.built, {name: files[digest] for name, digest in k.libraries.items()}))
            for k in stored.kernels
        )

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """See `Step`."""
        launch, own = self._ready(tensors, syms)
        launch(own, {new: syms[old] for new, old in self._syms})

    def record(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
        """`run`, and say what it called: no operator of torch that the recorder would see."""
        launch, own = self._ready(tensors, syms)
        numbers = {new: syms[old] for new, old in self._syms}
        with recorder.aside():
            launch(own, numbers)
        bound, xs = launch.bound(own, numbers)
        recorder.kernel(bound.address, bound.outside, bound.numbers, xs)

    def _ready(
        self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]
    ) -> tuple[PrebuiltKernel, dict[str, torch.Tensor]]:
        """The kernel for such tensors, and what it is called with, the results among them."""
        read = [tensors[t] for t in self.reads]
        own, found = tensors, next((k for k in self._kernels if all(map(_fits, read, k[0]))), None)
        units, launch = self._kernels[0] if found is None else found
        if found is None:
            own = tensors | {t: _laid_out(x, u) for t, x, u in zip(self.reads, read, units, strict=True)}
        for name, dtype, shape in self.results:
            if name not in tensors:
                own[name] = tensors[name] = torch.empty(shape(syms), dtype=dtype)
        return launch, {new: own[old] for new, old in self._tensors}

    def code(self, units: Mapping[str, int | None]) -> Code:
        """Machine code alone."""
        return Code()


def _fits(x: torch.Tensor, unit: int | None) -> bool:
    return unit is None or x.stride(unit) == 1 or x.shape[unit] <= 1


def _laid_out(x: torch.Tensor, unit: int | None) -> torch.Tensor:
    return x if unit is None or _fits(x, unit) else x.movedim(unit, -1).contiguous().movedim(-1, unit)


class LoadedProgram:
    """A stored program, called as `runtime.program.CompiledProgram`. files: of shared libraries, by their digests."""

    def __init__(self, stored: StoredProgram, files: Mapping[str, Path]):
        self.program, self.titles = stored.program, stored.titles
        self.steps: tuple[Step, ...] = tuple(
            PrebuiltStep(s, files) if isinstance(s, StoredStep) else _call(stored.program, s.members)
            for s in stored.steps
        )
        kept = {*self.program.outputs, *(i.name for i in self.program.inputs)}
        last = {t: at for at, s in enumerate(self.steps) for t in s.reads if t not in kept}
        self._done = [tuple(t for t, at in last.items() if at == n) for n in range(len(self.steps))]

    def __call__(self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Outputs by name."""
        return self._run(inputs, syms)

    def recorded(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder
    ) -> dict[str, torch.Tensor]:
        """The same call, written down: the recorder has been entered."""
        return self._run(inputs, syms, recorder)

    def _run(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        tensors, named = dict(inputs), profiled()
        for s, title, done in zip(self.steps, self.titles, self._done, strict=True):
            with span(title) if named else NO_SPAN:
                if recorder is None:
                    s.run(tensors, syms)
                else:
                    recorder.step(title, f"in {s.name}")
                    _record(s, tensors, syms, recorder)
            for t in done:
                del tensors[t]
        return {name: tensors[name] for name in self.program.outputs}


def _record(s: Step, tensors: dict[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
    if isinstance(s, PrebuiltStep):
        s.record(tensors, syms, recorder)
    else:
        s.run(tensors, syms)


def _call(p: Program, members: Sequence[str]) -> Step:
    found = library_step(Graph.of(p), members)
    if found is None:
        raise ValueError(f"{p.name} has no library call of {', '.join(members)}")
    return found
