"""Settings from the environment: the only module that reads it.

| variable | meaning |
|---|---|
| `TILEFOLD_CACHE_DIR` | directory of compiled kernels (default: the platform's user cache) |
| `TILEFOLD_CACHE_SHARED` | 1: another user who owns that directory is trusted (default: only you and root) |
| `TILEFOLD_CXX`, `CXX` | C++ compiler, as `ccache g++` (default: the first of g++, clang++, c++ on PATH) |
| `TILEFOLD_ARCH` | `-march` value of generated code (default: native) |
| `TILEFOLD_COMPILE_PROCESSES` | processes that compile kernels for GPUs (default: one a core, at most 32; 0: none) |
| `TILEFOLD_STRICT` | 1: `torch.compile` raises what it would leave to eager: failures of Tilefold (default: 0) |
| `TILEFOLD_INDEX_CHECKS` | 0: kernels do not check indices that data choose (default: 1) |
| `TILEFOLD_QUIET` | 1: neither a summary a model nor a line of progress; warnings stay (default: 0) |
| `TILEFOLD_RUNNER` | what runs compiled regions: all (default: C++), cpu (C++ for CPUs, Python for GPUs), python |
| `TILEFOLD_REUSE_GRAPHS` | 0: what an earlier process compiled of a model is captured and planned again (default: 1) |
| `TILEFOLD_PDL` | 0: no programmatic dependent launch on GPUs (default: where there is one) |
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

#: Kernels that are compiled at once, however many cores there are.
MOST_PROCESSES = 32
COMPILERS = ("g++", "clang++", "c++")
#: The first is the default.
RUNNERS = ("all", "cpu", "python")


@dataclass(frozen=True, slots=True)
class Config:
    """One reading of the environment. `compilers`: commands, in order of preference. `shared`: whoever owns the cache
    is trusted."""

    cache_dir: Path
    shared: bool
    compilers: tuple[str, ...]
    arch: str
    dependent_launch: bool
    compile_processes: int
    strict: bool
    index_checks: bool
    quiet: bool
    runner: str
    reuse_graphs: bool


def triton_settings() -> list[tuple[str, str]]:
    """What the environment tells Triton, but for where it keeps its cache."""
    told = ((k, v) for k, v in os.environ.items() if k.startswith("TRITON_") or k == "PTXAS_OPTIONS")
    return sorted((k, v) for k, v in told if k != "TRITON_CACHE_DIR")


def tell_triton(settings: Sequence[tuple[str, str]]) -> None:
    """Have the environment tell Triton what it tells another process (its `triton_settings`)."""
    for name, _ in triton_settings():
        del os.environ[name]
    os.environ.update(settings)


def compiling_in(folder: Path) -> dict[str, str]:
    """The environment of a compiler whose own files lie in a folder and whose words are English."""
    return {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}


def load() -> Config:
    """The settings as they are now; tests change the environment and call again."""
    chosen = os.environ.get("TILEFOLD_CXX") or os.environ.get("CXX")
    cache = os.environ.get("TILEFOLD_CACHE_DIR")
    return Config(
        cache_dir=Path(cache) if cache else Path(platformdirs.user_cache_dir("tilefold")),
        shared=os.environ.get("TILEFOLD_CACHE_SHARED") == "1",
        compilers=(chosen,) if chosen else COMPILERS,
        arch=os.environ.get("TILEFOLD_ARCH", "native"),
        dependent_launch=os.environ.get("TILEFOLD_PDL") != "0",
        compile_processes=_processes(os.environ.get("TILEFOLD_COMPILE_PROCESSES", "")),
        strict=os.environ.get("TILEFOLD_STRICT", "0") not in ("", "0"),
        runner=_runner(os.environ.get("TILEFOLD_RUNNER", "")),
        index_checks=os.environ.get("TILEFOLD_INDEX_CHECKS") != "0",
        reuse_graphs=os.environ.get("TILEFOLD_REUSE_GRAPHS") != "0",
        quiet=os.environ.get("TILEFOLD_QUIET", "0") not in ("", "0"),
    )


def _processes(given: str) -> int:
    if given.isdecimal():
        return int(given)
    if given:
        _ignored("TILEFOLD_COMPILE_PROCESSES", given, "a number")
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _runner(given: str) -> str:
    if given and given not in RUNNERS:
        _ignored("TILEFOLD_RUNNER", given, " or ".join(RUNNERS))
    return given if given in RUNNERS else RUNNERS[0]


def _ignored(name: str, given: str, wanted: str) -> None:
    """Say (once: Python does not repeat a warning) that a value means nothing: no run should end for that."""
    warnings.warn(f"{name}={given!r} is ignored: it is {wanted}", RuntimeWarning, stacklevel=4)
