"""From Triton source to a compiled kernel, for the GPU at hand or, without one, for a named target.

Considered: letting `triton.jit` specialise at every call. It costs tens of microseconds a call in
Python; compiling ahead for a signature and calling the launcher costs a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.build import DIVISOR, Job, Target, built
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.dependent import ALONE
from tilefold.backends.triton.gluon_text import WARPS
from tilefold.backends.triton.prelude import ASSERTING
from tilefold.backends.triton.render import Rendered
from tilefold.backends.triton.values import POINTER_TYPE
from tilefold.backends.triton.words import build_own
from tilefold.tile.ir import Kernel

try:
    import triton
except ImportError:  # Triton is optional: without it there is no GPU back end
    triton = None

try:
    from triton.experimental.gluon import language as gl
except ImportError:
    gl = None


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def toolchain() -> str:
    """What turns source into machine code: part of the identity of tuned results."""
    return f"triton {triton.__version__}" if triton is not None else "none"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: bytes of shared memory, and text of its assembly."""

    shared: int
    assembly: Mapping[str, Any]

    def has(self, instruction: str) -> bool:
        """Whether the PTX (or AMD assembly) contains an instruction."""
        return any(isinstance(t, str) and instruction in t for t in self.assembly.values())


def signature(kernel: Kernel, r: Rendered, *, wide: bool) -> dict[str, str]:
    """Types of the kernel's arguments."""
    number = "i64" if wide else "i32"
    types = {a: POINTER_TYPE[t.dtype] for a, t in zip(r.arguments, kernel.tensors, strict=False)}
    element = {t.name: POINTER_TYPE[t.dtype][1:] for t in kernel.tensors}
    for a, (t, box) in r.descriptors.items():
        how = f",{_swizzled(box, element[t])!r}" if r.groups else ""
        types[a] = f"tensordesc<{element[t]}{list(box)}{how}>"
    if r.draws:
        types["counter"] = POINTER_TYPE[DType.I32]
    return {a: types.get(a, number) for a in r.arguments}


def _swizzled(box: Sequence[int], element: str) -> Any:
    """The layout of a box in shared memory that the matrix unit reads."""
    kinds = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[element])


def job_of(kernel: Kernel, r: Rendered, config: TritonConfig, divisors: Sequence[int], *, wide: bool) -> Job:
    """What is to be compiled; `divisors[n]`: a power of two, up to 16, that argument n is a multiple of."""
    pointers_and_numbers = len(r.arguments) - len(r.descriptors)
    vectors = tuple((n, d) for n, d in enumerate(divisors) if d > 1 and n < pointers_and_numbers)
    # without assertions, checks of overflow are built beside each sum and product, and dropped again
    options: dict[str, int] = {"num_stages": config.stages, "sanitize_overflow": False}
    options["num_warps"] = WARPS if r.groups else config.warps
    if config.registers:
        options["maxnreg"] = config.registers
    if ASSERTING in r.source:
        options["debug"] = True
    if r.place.follows:
        options["launch_pdl"] = True
    types = signature(kernel, r, wide=wide)
    return Job(r.name, r.source, types, vectors, options, bool(r.groups), r.place != ALONE)


def compiled(
    kernel: Kernel, r: Rendered, config: TritonConfig, divisors: Sequence[int], *, wide: bool, target: Target | None
) -> Any:
    """The compiled kernel; `divisors[n]`: what argument n is a multiple of. Errors as of `built`.

    target None: the current GPU, for which the C function that launches groups of warps is compiled while their machine
    code is looked through.
    """
    beside = _launched_by if target is None and r.groups else None
    return built(job_of(kernel, r, config, divisors, wide=wide), target, beside=beside)


def _launched_by(done: Any) -> None:
    """Have Triton's cache hold the C function that launches a kernel, which stays as it is."""
    build_own(SimpleNamespace(src=done.src, metadata=done.metadata))


def resources(kernel: Kernel, r: Rendered, config: TritonConfig, target: Target, *, wide: bool = False) -> Resources:
    """Cross-compile (no GPU needed), all arguments divisible by 16."""
    done = compiled(kernel, r, config, [DIVISOR] * len(r.arguments), wide=wide, target=target)
    return Resources(int(done.metadata.shared), dict(done.asm))
