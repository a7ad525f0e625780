"""From C++ source to a shared library: finding the compiler, its flags, the build itself.

Floating-point flags keep NaN, infinities and signed zeros: only errno, traps and the contraction of
a * b + c to a fused multiply-add are given up.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tilefold import config
from tilefold.errors import BackendError, NoRoomError

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-semantic-interposition", "-Wno-psabi",
)  # fmt: skip
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and everything else that decides what machine code comes out of a source.

    command: the program's path and what the user put behind its name (`ccache g++`).
    """

    command: tuple[str, ...]
    version: str
    arch: str
    cpu: str
    runtime: str

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def options(self) -> tuple[str, ...]:
        """Flags that change the machine code."""
        return (*FLAGS, *conversions(), f"-march={self.arch}")

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.options, f"-I{INCLUDE}")

    def identity(self) -> dict[str, str]:
        """The parts of a cache key; the headers are part of the compiler."""
        return {
            "compiler": f"{self} {self.version}", "flags": " ".join(self.options), "cpu": self.cpu,
            "headers": headers_digest(), "openmp": self.runtime,
        }  # fmt: skip


@lru_cache
def headers_digest() -> str:
    """Digest of the bundled headers."""
    digest = hashlib.sha256()
    for p in sorted(INCLUDE.glob("*.h")):
        digest.update(p.name.encode() + p.read_bytes())
    return digest.hexdigest()


@lru_cache
def conversions() -> tuple[str, ...]:
    """Macros for how this torch rounds: e4m3 beyond its range is NaN or saturates, by version."""
    huge = torch.tensor([1e9]).to(torch.float8_e4m3fn).float()
    return () if huge.isnan().any() else ("-DTF_E4M3_SATURATES",)


@lru_cache
def cpu_features() -> str:
    """What `-march=native` depends on: architecture, model and instruction sets."""
    info = Path("/proc/cpuinfo")
    wanted = ("flags", "Features", "model name", "CPU part")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = sorted({line for line in lines if line.split(":")[0].strip() in wanted})
    text = "\n".join([platform.machine(), platform.processor(), *facts])
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU by Linux' names; none where the system does not tell them so."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


@lru_cache
def openmp_runtime() -> str:
    """The OpenMP library that torch ships, which a kernel must share; `-lgomp` where it ships none."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for pattern in ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*"):
            for found in sorted(folder.glob(pattern)):
                return str(found)
    return "-lgomp"


def toolchain() -> Toolchain:
    """The compiler that the settings choose. BackendError where there is none that runs."""
    settings = config.load()
    return _toolchain(settings.compilers, settings.arch)


@lru_cache
def _toolchain(compilers: tuple[str, ...], arch: str) -> Toolchain:
    for name in compilers:
        command = _command(name)
        if not command:
            continue
        try:
            asked = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        version = asked.stdout.splitlines()[0] if asked.stdout else "unknown"
        return Toolchain(command, version, arch, cpu_features(), openmp_runtime())
    raise BackendError(
        f"no C++ compiler found (looked for {', '.join(compilers)})",
        hint="install g++ (apt install g++) or name one in TILEFOLD_CXX",
    )


def _command(name: str) -> tuple[str, ...]:
    """A compiler as words of a command line, the program by its path; none where there is no such program."""
    whole = shutil.which(name)
    if whole is not None:
        return (whole,)  # the path may contain spaces
    try:
        words = shlex.split(name)
    except ValueError:  # a quotation mark too few
        return ()
    path = shutil.which(words[0]) if words else None
    return () if path is None else (path, *words[1:])


#: Numbers of errors of a system that takes no file, and what compilers say of them, also of programs that they call.
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)
_LIMITS = ("File size limit exceeded", os.strerror(errno.EFBIG))
_NO_ROOM = (*_LIMITS, *map(os.strerror, NO_ROOM))


def build(source: str, out: Path, tools: Toolchain) -> None:
    """Compile `source` into the shared library `out`. BackendError with the compiler's words; NoRoomError where it
    cannot write."""
    cpp = out.with_suffix(".cpp")
    command = [*tools.command, *tools.flags, str(cpp), "-o", str(out), tools.runtime, "-lm"]
    try:
        cpp.write_text(source)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=config.compiling_in(out.parent),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"the C++ compiler took more than {TIMEOUT_S} s", hint=" ".join(command)) from None
    except OSError as err:
        if err.errno in NO_ROOM:
            raise no_room(out.parent, err.strerror or str(err)) from None
        raise BackendError(f"the C++ compiler does not run: {err}", hint="set TILEFOLD_CXX") from None
    finally:
        cpp.unlink(missing_ok=True)
    check(done.returncode, done.stderr, command, out)


def check(status: int, words: str, command: Sequence[str], out: Path) -> None:
    """BackendError where a compiler that was to make `out` ended with such a status: with what it said of errors."""
    if status == 0:
        return
    said = "\n".join(line for line in words.splitlines() if "error" in line)[:2000] or words[:2000]
    why = next((w for w in _NO_ROOM if w in words), None)
    if why is None and status == -signal.SIGXFSZ:
        why = _LIMITS[0]
    if why is not None:
        raise no_room(out.parent, why)
    how = f"failed ({status})" if status > 0 else f"was stopped by {signal.Signals(-status).name}"
    raise BackendError(f"the C++ compiler {how}:\n{said}", hint=" ".join(command))


def no_room(folder: Path, why: str) -> NoRoomError:
    """Of a compiler that could not write into a folder."""
    hint = "raise the limit on the size of files (ulimit -f)" if why in _LIMITS else "name a folder with room in TMPDIR"
    return NoRoomError(f"the C++ compiler cannot write to {folder.parent}: {why}", hint=hint)
