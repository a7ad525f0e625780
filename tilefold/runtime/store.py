"""From a compiled program to its stored form (`runtime.stored`): what has run is what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilefold.algebra.dtypes import DType
from tilefold.backends.cpp.launch import CppKernel
from tilefold.backends.cpp.prebuilt import taken_down
from tilefold.errors import UnsupportedError
from tilefold.runtime.convolution import ConvolutionStep
from tilefold.runtime.convolution_gradient import GradientStep
from tilefold.runtime.executor import build_cached
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.step import Step
from tilefold.runtime.steps import KernelStep
from tilefold.runtime.stored import StoredCall, StoredKernel, StoredProgram, StoredStep

#: Keeps a file; its digest.
Keep = Callable[[Path], str]


def stored(compiled: CompiledProgram, keep: Keep) -> StoredProgram:
    """The program with the kernels that its calls so far have loaded. UnsupportedError: a step without such a form."""
    p = compiled.fused.program
    return StoredProgram(p, tuple(_step(s, keep) for s in compiled.steps), compiled.titles)


def _step(s: Step, keep: Keep) -> StoredStep | StoredCall:
    if isinstance(s, LibraryStep | ConvolutionStep | GradientStep):
        return StoredCall(s.members)
    if not isinstance(s, KernelStep):
        hint = "compile in the process that runs it: torch.compile(model, backend='tilefold')"
        raise UnsupportedError(f"{s.name} runs on a GPU, whose kernels cannot be packaged yet", hint=hint)
    kernels = []
    for units, launch in s.loaded.items():
        if not isinstance(launch, CppKernel):
            raise UnsupportedError("there is no C++ compiler, so there is nothing to package", hint="apt install g++")
        built, paths = taken_down(launch.kernel, build_cached)
        kernels.append(StoredKernel(units, built, {name: keep(path) for name, path in paths.items()}))
    block, named = s.fused.block, s.canonical.tensors
    results = tuple(
        (named[c.name], DType.of(dtype), tuple(block.sizes[d] for d in r.dims))
        for c, r, (_, dtype, _) in zip(s.canonical.block.results, block.results, s.results, strict=True)
    )
    tensors, syms = tuple(named.items()), tuple(s.canonical.syms.items())
    return StoredStep(s.name, s.members, s.reads, results, tensors, syms, tuple(kernels))
