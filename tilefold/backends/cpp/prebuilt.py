"""Kernels of the CPU that were compiled before: loaded from shared libraries, with nothing rendered or compiled."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilefold.algebra.expr import Expr
from tilefold.backends.cpp.compile import Toolchain, cpu_features, cpu_flags
from tilefold.backends.cpp.contract import GemmTypes, gemm_name, gemm_source
from tilefold.backends.cpp.launch import Builder, CppKernel
from tilefold.backends.cpp.render import TAKE_OUTSIDE, Rendered, render_linked
from tilefold.errors import BackendError
from tilefold.tile.ir import Kernel, TensorParam


@dataclass(frozen=True, slots=True)
class Built:
    """What a launch of a compiled kernel checks and packs. gemms: the multiplications that it calls, each a library of
    its own. checks: whether it tells of indices that do not exist."""

    name: str
    syms: tuple[str, ...]
    sizes: Mapping[str, Expr]
    tensors: tuple[TensorParam, ...]
    gemms: tuple[GemmTypes, ...]
    checks: bool


def taken_down(kernel: Kernel, builder: Builder) -> tuple[Built, dict[str, Path]]:
    """A kernel as compiled by `builder`, for sizes within 32 bits: what to keep of it, and its libraries by name."""
    rendered = render_linked(kernel)
    checks = TAKE_OUTSIDE in rendered.source
    built = Built(kernel.name, kernel.syms, kernel.sizes, kernel.tensors, rendered.gemms, checks)
    paths = {kernel.name: builder(rendered.source, kernel.name)}
    paths |= {gemm_name(t): builder(gemm_source(t), gemm_name(t)) for t in rendered.gemms}
    return built, paths


class PrebuiltKernel(CppKernel):
    """Such a kernel, called like any. `libraries`: of its own name and of its multiplications. BackendError where one
    does not load, or a call has sizes that it was not compiled for."""

    def __init__(self, built: Built, libraries: Mapping[str, Path]):
        self._built = built
        kernel = Kernel(built.name, built.syms, built.sizes, built.tensors, (), ())
        super().__init__(kernel, lambda source, name: libraries[name])

    def _rendered(self, wide: bool) -> Rendered:
        if wide:
            hint = "compile it in the process: torch.compile(model, backend='tilefold')"
            raise BackendError(f"{self._built.name} was packaged for sizes within 32 bits", hint=hint)
        return Rendered(TAKE_OUTSIDE if self._built.checks else "", self._built.gemms)


#: What a compiler defines for instructions that it may use, and what Linux calls them.
_INSTRUCTIONS = {
    **{"__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__POPCNT__": "popcnt"},
    **{"__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c", "__LZCNT__": "abm"},
    **{"__BMI__": "bmi1", "__BMI2__": "bmi2", "__MOVBE__": "movbe", "__ADX__": "adx", "__GFNI__": "gfni"},
    **{"__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw", "__AVX512CD__": "avx512cd", "__AVX512DQ__": "avx512dq"},
    **{"__AVX512VL__": "avx512vl", "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16"},
    **{"__AVX512FP16__": "avx512_fp16", "__AVX512IFMA__": "avx512ifma", "__AVX512VBMI__": "avx512vbmi"},
    **{"__AVX512VBMI2__": "avx512_vbmi2", "__AVX512BITALG__": "avx512_bitalg", "__AVXVNNI__": "avx_vnni"},
    **{"__AVX512VPOPCNTDQ__": "avx512_vpopcntdq", "__AMX_TILE__": "amx_tile", "__AMX_BF16__": "amx_bf16"},
}


def needed(tools: Toolchain) -> tuple[str, ...]:
    """What a CPU must have to run what these tools compile: its architecture, and instruction sets by Linux' names; of
    other architectures than x86-64, the very same model."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64") or not cpu_flags():
        return (cpu_features(),)
    command = [*tools.command, f"-march={tools.arch}", "-dM", "-E", "-x", "c++", "-"]
    try:
        asked = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as err:
        raise BackendError(f"the C++ compiler does not say what it compiles for: {err}") from None
    defined = {line.split()[1] for line in asked.stdout.splitlines() if line.startswith("#define ")}
    return (machine, *sorted(flag for macro, flag in _INSTRUCTIONS.items() if macro in defined))


def missing(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """What this CPU has not."""
    here = {platform.machine(), cpu_features(), *cpu_flags()}
    return tuple(w for w in wanted if w not in here)
