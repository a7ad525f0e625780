"""The native module that runs tapes: built once a machine, torch and Python, in the background, kept in the cache.

Considered: `torch.utils.cpp_extension` (needs ninja, a folder of its own that any process of the user's may write, and
holds up the first call); Triton's launcher (knows kernels only); the C interface of AOTInductor (compiles in two
seconds, but prints errors instead of raising them and is called through handles). Here the compiler of the CPU's
kernels compiles one file against the headers that torch ships; calls run in Python until that is done, and where there
is no compiler, or no header of Python's, they always do.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import logging
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from tilefold import config
from tilefold.backends.cpp.compile import check, toolchain
from tilefold.backends.triton.driver import functions
from tilefold.errors import BackendError, TilefoldError
from tilefold.runtime import cublas
from tilefold.runtime.cache import find, get_or_build

log = logging.getLogger("tilefold")

SOURCE = Path(__file__).parent / "runner.cpp"
NAME = "tilefold_runner"
TIMEOUT_S = 600
#: Calls of a region after which the module is worth building: processes that call once need none.
WORTH = 2
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi")
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")


class Native:
    """The module, and the file it is in, as soon as there is one. `reason`: why there is none, once that is certain."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.path: Path | None = None
        self.reason = ""
        self._driver: bool | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._attempt(lambda recipe: find(recipe.parts))

    def start_building(self) -> None:
        """Have the module built meanwhile, if there is none yet."""
        if self.module is None and not self.reason and self._thread is None:
            self._thread = threading.Thread(target=self._attempt, args=(self._built,), name=NAME, daemon=True)
            atexit.register(self._stop)
            self._thread.start()

    def wait(self) -> ModuleType | None:
        """The module, built if need be."""
        self.start_building()
        if self._thread is not None:
            self._thread.join()
        return self.module

    def has_driver(self) -> bool:
        """Whether the module launches kernels of GPUs itself: it is told of CUDA's driver when this is first asked."""
        if self._driver is None and self.module is not None:
            addresses = functions()
            if addresses is not None:
                self.module.driver(addresses)
            self._driver = addresses is not None
        return bool(self._driver)

    def _attempt(self, path_of: Callable[[_Recipe], Path | None]) -> None:
        try:
            path = path_of(_recipe())
            self.module = None if path is None else module_at(path)
            self.path = path
        except (TilefoldError, OSError, ImportError) as err:
            self.reason = str(err)
            log.info("calls of regions run in Python: %s", err)

    def _built(self, recipe: _Recipe) -> Path:
        return get_or_build(NAME, recipe.parts, lambda out: self._build(recipe, out))

    def _build(self, recipe: _Recipe, out: Path) -> None:
        command = [*recipe.command, "-o", str(out), *recipe.libraries]
        if (nice := shutil.which("nice")) is not None:
            command = [nice, *command]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", env=config.compiling_in(out.parent)
        )
        try:
            _, words = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise BackendError(f"the C++ compiler took more than {TIMEOUT_S} s", hint=" ".join(command)) from None
        check(self._process.returncode, words, command, out)

    def _stop(self) -> None:
        """A process that ends does not leave its compiler behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


@dataclass(frozen=True, slots=True)
class Built:
    """A module that was built elsewhere."""

    module: ModuleType

    def start_building(self) -> None:
        """It is there."""


@cache
def native() -> Native:
    """The process's; only what an earlier process built is there at once."""
    return Native()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A command but for the file it makes, and the parts of its cache key."""

    command: tuple[str, ...]
    libraries: tuple[str, ...]
    parts: dict[str, str]


def _recipe() -> _Recipe:
    tools = toolchain()
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise BackendError(f"{python} has no Python.h", hint="install Python's headers (apt install python3-dev)")
    root = Path(torch.__file__).parent
    folders = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include", python)
    flags = (*_FLAGS, "-DAT_PER_OPERATOR_HEADERS", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    includes = [f"-isystem{path}" for path in folders]
    parts = {
        **{
            "source": _text(),
            "compiler": f"{tools} {tools.version}",
            "flags": " ".join(flags),
        },
        **{"torch": f"{torch.__version__} {torch.version.git_version}", "at": str(root)},
        **{"python": str(sysconfig.get_config_var("SOABI")), "standard library": standard_library()},
    }
    command = (*tools.command, *flags, *includes, str(SOURCE))
    return _Recipe(command, (f"-L{root / 'lib'}", *_LIBRARIES, standard_library()), parts)


def standard_library() -> str:
    """What the linker is given for C++'s standard library: the file that this process has loaded, where one is found.

    A module shares streams and exceptions with torch. A compiler that links a copy of its own (because it is told to,
    or has nothing else) gives it a second set of locales: printing a number then ends the process.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    files = (line.split(maxsplit=5)[5] for line in lines if "/libstdc++.so" in line)
    return next((f for f in files if Path(f).exists()), "-lstdc++")


def _text() -> str:
    """Everything that is compiled, headers first."""
    return "".join(path.read_text() for path in (*sorted(SOURCE.parent.glob("*.h")), SOURCE))


def module_at(path: Path) -> ModuleType:
    """The module in a file that was built for this torch and Python; it knows the library of products, if any."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    if spec is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if (products := cublas.functions()) is not None:
        module.products(products, "cuda")
    return module


def stream_of(device: int) -> int:
    """The current stream of a CUDA device: what regions of GPUs ask before a call."""
    return torch._C._cuda_getCurrentRawStream(device)
