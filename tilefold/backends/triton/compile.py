"""From Triton source to a compiled kernel, for the GPU at hand or, without one, for a named target.

Considered: letting `triton.jit` specialise at every call. It costs tens of microseconds a call in
Python; compiling ahead for a signature and calling the launcher costs a few.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tilefold.backends.triton import known
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.dependent import ALONE, supported
from tilefold.backends.triton.gluon import WARPS
from tilefold.backends.triton.machine_code import disassembled, strays
from tilefold.backends.triton.render import Rendered
from tilefold.backends.triton.values import POINTER_TYPE
from tilefold.errors import BackendError
from tilefold.files import put
from tilefold.tile.ir import Kernel

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources, PTXASError
except ImportError:  # Triton is optional: without it there is no GPU back end
    triton = None

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
except ImportError:
    gl = None

#: Versions of Triton whose Gluon, an experiment that changes, has run what is generated here.
GLUON = ("3.6.",)
#: The architecture whose matrix and copy instructions they use.
HOPPER = 90
#: Pointers and integers that are multiples of this load and store whole vectors.
DIVISOR = 16
_modules: dict[str, ModuleType] = {}


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def has_gluon() -> bool:
    """Whether the installed Triton has the Gluon that kernels are generated for."""
    return gl is not None and triton.__version__.startswith(GLUON)


def has_groups(target: Target) -> bool:
    """Whether kernels for a target may share their work among groups of warps (`roles`)."""
    return has_gluon() and target.backend == "cuda" and target.arch == HOPPER


def toolchain() -> str:
    """What turns source into machine code: part of the identity of tuned results."""
    return f"triton {triton.__version__}" if triton is not None else "none"


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for: ("cuda", 90, 32), ("hip", "gfx942", 64) ..."""

    backend: str
    arch: int | str
    warp_size: int = 32


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: bytes of shared memory, and text of its assembly."""

    shared: int
    assembly: Mapping[str, Any]

    def has(self, instruction: str) -> bool:
        """Whether the PTX (or AMD assembly) contains an instruction."""
        return any(isinstance(t, str) and instruction in t for t in self.assembly.values())


def module_of(source: str, name: str) -> ModuleType:
    """The source as an imported module; its file stays in the cache for the reader and the compiler."""
    key = hashlib.sha256(source.encode()).hexdigest()[:24]
    if key not in _modules:
        path = _written(source, f"{name}_{key}")
        spec = importlib.util.spec_from_file_location(f"tilefold_kernels.{name}_{key}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[key] = module
    return _modules[key]


def _written(source: str, stem: str) -> Path:
    try:
        folder = known.folder()
    except BackendError:
        folder = Path(tempfile.mkdtemp(prefix="tilefold-"))
    path = folder / f"{stem}.py"
    if not path.exists():
        put(path, source)
    return path


def signature(kernel: Kernel, r: Rendered, *, wide: bool) -> dict[str, str]:
    """Types of the kernel's arguments."""
    number = "i64" if wide else "i32"
    types = {a: POINTER_TYPE[t.dtype] for a, t in zip(r.arguments, kernel.tensors, strict=False)}
    element = {t.name: POINTER_TYPE[t.dtype][1:] for t in kernel.tensors}
    for a, (t, box) in r.descriptors.items():
        how = f",{_swizzled(box, element[t])!r}" if r.groups else ""
        types[a] = f"tensordesc<{element[t]}{list(box)}{how}>"
    return {a: types.get(a, number) for a in r.arguments}


def _swizzled(box: Sequence[int], element: str) -> Any:
    """The layout of a box in shared memory that the matrix unit reads."""
    return gl.NVMMASharedLayout.get_default_for(list(box), {"fp16": gl.float16, "bf16": gl.bfloat16}[element])


def compiled(
    kernel: Kernel, r: Rendered, config: TritonConfig, divisible: Sequence[bool], *, wide: bool, target: Target | None
) -> Any:
    """The compiled kernel; `divisible[n]`: argument n is a multiple of 16. BackendError where Triton refuses, or where
    groups of warps get in each other's way (`machine_code`).

    target None: the current GPU. What an earlier process compiled is loaded from Triton's cache.
    """
    if triton is None:
        raise BackendError("Triton is not installed", hint="pip install triton")
    fn = getattr(module_of(r.source, r.name), r.name)
    pointers_and_numbers = len(r.arguments) - len(r.descriptors)
    vectors = [n for n, d in enumerate(divisible) if d and n < pointers_and_numbers]
    types = signature(kernel, r, wide=wide)
    attrs = {(n,): [["tt.divisibility", DIVISOR]] for n in vectors}
    src = (GluonASTSource if r.groups else ASTSource)(fn, types, constexprs={}, attrs=attrs)
    options: dict[str, Any] = {"num_warps": WARPS if r.groups else config.warps, "num_stages": config.stages}
    if config.registers:
        options["maxnreg"] = config.registers
    if r.place.follows:
        options["launch_pdl"] = True
    try:
        where = driver.active.get_current_target() if target is None else _gpu(target)
        if r.place != ALONE and not supported(where.backend, where.arch):
            raise BackendError(f"{where.backend} {where.arch} has no programmatic dependent launch, as {r.name} needs")
        key = known.key_of(r.source, types, vectors, options, (where.backend, where.arch, where.warp_size))
        found = known.find(key, src) if key is not None else None
        if found is not None:
            return found
        done = triton.compile(src, target=where, options=options)
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as err:
        text = str(err).strip().splitlines()
        raise BackendError(f"Triton does not compile {r.name}: {text[-1] if text else type(err).__name__}") from err
    if r.groups and (wrong := strays(disassembled(done.asm["cubin"]))):
        raise BackendError(f"{r.name} is assembled wrongly: {wrong[0]}")
    if key is not None:
        known.remember(key, done)
    return done


def _gpu(target: Target) -> Any:
    return GPUTarget(target.backend, target.arch, target.warp_size)


def resources(kernel: Kernel, r: Rendered, config: TritonConfig, target: Target, *, wide: bool = False) -> Resources:
    """Cross-compile (no GPU needed), all arguments divisible by 16."""
    done = compiled(kernel, r, config, [True] * len(r.arguments), wide=wide, target=target)
    return Resources(int(done.metadata.shared), dict(done.asm))
