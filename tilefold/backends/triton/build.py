"""What a compiled kernel is made from, as text and numbers, and its compilation by Triton.

Nothing here needs torch, whose import takes most of the time in which a process that only compiles (`serve`) starts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tilefold import config
from tilefold.backends.triton import ahead, device_library, known
from tilefold.backends.triton.machine_code import disassembled, strays
from tilefold.backends.triton.outline import outlined
from tilefold.backends.triton.poison import kept_apart, promises
from tilefold.backends.triton.straight import layouts
from tilefold.errors import BackendError
from tilefold.files import read_trusted
from tilefold.garbage import collecting_later
from tilefold.log import progress

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler.errors import CompilationError
    from triton.runtime import cache, driver
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
#: The architecture whose matrix and copy instructions they use, and the first one with programmatic dependent launch.
HOPPER, DEPENDENT = 90, 90
#: Pointers and integers that are multiples of this load and store whole vectors.
DIVISOR = 16
#: What tells Triton to compile without lines of the source.
LINES = "TRITON_DISABLE_LINE_INFO"
_alone = threading.Lock()
_driver = threading.Lock()
_modules: dict[str, ModuleType] = {}
#: Keys of jobs that other processes were given: when a kernel is needed, the environment may tell Triton of another
#: assembler than when it was planned (Inductor does, once it compiles), and the key is another.
_given: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for: ("cuda", 90, 32), ("hip", "gfx942", 64) ..."""

    backend: str
    arch: int | str
    warp_size: int = 32


def has_triton() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def has_gluon() -> bool:
    """Whether the installed Triton has the Gluon that kernels are generated for."""
    return gl is not None and triton.__version__.startswith(GLUON)


def has_groups(target: Target) -> bool:
    """Whether kernels for a target may share their work among groups of warps (`roles`)."""
    return has_gluon() and target.backend == "cuda" and target.arch == HOPPER


def has_dependent_launch(target: Target) -> bool:
    """Whether a target has the instructions of programmatic dependent launch."""
    return target.backend == "cuda" and int(target.arch) >= DEPENDENT


def module_of(source: str, name: str) -> ModuleType:
    """The source as a module. What runs is this text, never a file's; a copy of it is in the cache for its reader.

    Triton asks `inspect` for the text of a kernel, which asks `linecache`: there it is given, without a time of change,
    so that it is not looked for on the disk.
    """
    key = hashlib.sha256(source.encode()).hexdigest()[:24]
    if key not in _modules:
        path = known.folder() / f"{name}_{key}.py"
        if not _is(path, source):
            known.keep(path.name, source)
        linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
        module = ModuleType(f"tilefold_kernels.{name}_{key}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        exec(compile(source, str(path), "exec"), module.__dict__)
        _modules[key] = module
    return _modules[key]


def _is(path: Path, source: str) -> bool:
    """Whether a file holds just this text."""
    try:
        return read_trusted(path) == source.encode()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides a compiled kernel's code, as text and numbers: it can be built in another process.

    types: of the arguments. vectors: positions of arguments, and powers of two that they are multiples of. groups:
    written in Gluon, for groups of warps. dependent: needs programmatic dependent launch.
    """

    name: str
    source: str
    types: Mapping[str, str]
    vectors: tuple[tuple[int, int], ...]
    options: Mapping[str, int]
    groups: bool = False
    dependent: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """What launching asks of the source of a kernel that is compiled already, in place of Triton's form of it, for
    which Triton takes the text apart (12 ms a kernel). signature: types of the arguments."""

    name: str
    signature: Mapping[str, str]

    @property
    def constants(self) -> Mapping[tuple[int, ...], object]:
        """Arguments that are numbers of the source: none."""
        return {}


def built(job: Job, target: Target | None = None, *, beside: Callable[[Any], None] | None = None) -> Any:
    """The compiled kernel of a job. BackendError where Triton refuses, or where groups of warps get in each other's way
    (`machine_code`).

    target None: the current GPU. What an earlier process compiled is loaded from Triton's cache; what another process
    is compiling ahead (`ahead`) is waited for. beside: what else is done with a kernel that was compiled here, while
    its machine code is looked through.
    """
    if triton is None:
        raise BackendError("Triton is not installed", hint="pip install triton")
    try:
        where = _where(target)
        if job.dependent and not has_dependent_launch(Target(where.backend, where.arch)):
            raise BackendError(
                f"{where.backend} {where.arch} has no programmatic dependent launch, as {job.name} needs"
            )
        key, src = key_of(job, target), Declared(job.name, job.types)
        found = known.find(key, src) if key is not None else None
        if found is not None:
            return found
        with progress(f"kernel {job.name}"):
            early = _given.get(_digest(job, where), key) if key is not None else None
            if early is not None and ahead.waited(early):
                found = known.find(early, src)
            if found is not None:
                return found
            apart = contextlib.nullcontext() if job.groups else layouts(job.source, job.name)
            with _without_lines(), collecting_later(), apart:
                done = _compiled(job, where)
    except SyntaxError as err:  # of the text that is rendered here
        said = f"{err.msg}: {(err.text or '').strip()}"
        raise BackendError(f"the source of {job.name} is no Python: {said}") from err
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as err:
        text = str(err).strip().splitlines()
        raise BackendError(f"Triton does not compile {job.name}: {text[-1] if text else type(err).__name__}") from err
    with _beside(beside, done), collecting_later():
        if job.groups and (wrong := strays(disassembled(done.asm["cubin"]))):
            raise BackendError(f"{job.name} is assembled wrongly: {wrong[0]}")
    if key is not None:
        known.remember(key, done)
    return done


@contextlib.contextmanager
def _beside(work: Callable[[Any], None] | None, done: Any) -> Iterator[None]:
    """Have a thread do something with a kernel meanwhile."""
    thread = None if work is None else threading.Thread(target=work, args=(done,))
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def _as_triton(job: Job, source: str) -> Any:
    """What Triton takes for a job, from this form of its source."""
    fn = getattr(module_of(source, job.name), job.name)
    attrs = {(n,): [["tt.divisibility", power]] for n, power in job.vectors}
    return (GluonASTSource if job.groups else ASTSource)(fn, dict(job.types), constexprs={}, attrs=attrs)


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """Have Triton compile without lines of the source, which profilers show, unless the environment says whether it
    should: it is the same code in a twelfth less time. Triton keeps this in the environment of the process: one at a
    time."""
    with _alone, triton.knobs.compilation.scope():
        if LINES not in dict(config.triton_settings()):
            triton.knobs.compilation.disable_line_info = True
        yield


def _compiled(job: Job, target: Any) -> Any:
    """Compiled from the form that is read fastest, and with the part of CUDA's library that it seems to call; else from
    the source as it is, with all of it."""
    quick, part = outlined(job.source), _part_of_library(job, target)
    ways = [(quick, part), (job.source, {})] if part or quick != job.source else [(quick, {})]
    for source, library in ways:
        try:
            return _by_triton(_as_triton(job, source), target, {**job.options, **library})
        except (CompilationError, SyntaxError, PTXASError, ValueError) as err:
            refused = err
    raise refused


def _by_triton(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """Compiled, without what `poison` describes: again, where Triton's cache has it of a process that did not know."""
    with kept_apart() as can_be:
        done = triton.compile(source, target=target, options=options)
        if not (can_be and promises(done.asm.get("llir", ""))):
            return done
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            return triton.compile(source, target=target, options=options)


def _part_of_library(job: Job, target: Any) -> dict[str, Any]:
    """The option that has Triton link the usual part of CUDA's library; none where there might be need of more."""
    if target.backend != "cuda" or not device_library.suffices(job.source, job.types.values()):
        return {}
    whole = dict(make_backend(target).parse_options({}).extern_libs)
    part = device_library.usual(whole["libdevice"]) if set(whole) == {"libdevice"} else None
    return {} if part is None else {"extern_libs": {"libdevice": part}}


def key_of(job: Job, target: Target | None = None) -> str | None:
    """What `known` calls the kernel of a job; None where it keeps none."""
    where = _where(target)
    return known.key_of(job.source, job.types, job.vectors, job.options, (where.backend, where.arch, where.warp_size))


def start_building(job: Job, target: Target | None = None) -> None:
    """Have another process compile a job meanwhile; nothing where that is done, cannot be, or is not worth it."""
    where = _seen(target)
    key = key_of(job, target) if where is not None else None
    if key is not None and not known.exists(key):
        _given[_digest(job, where)] = key
        message = {"job": asdict(job), "target": [where.backend, where.arch, where.warp_size]}
        ahead.submit(key, {**message, "settings": config.triton_settings()})


def _digest(job: Job, target: Any) -> str:
    """A digest of a job and its target, without what else decides a kernel."""
    text = json.dumps([asdict(job), target.backend, target.arch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def expect_jobs(target: Target | None = None) -> None:
    """Have the processes that compile start meanwhile: a program that was never planned may have kernels that were
    never compiled. And have this process's Triton work out what it asks for when it compiles or launches its first
    kernel (`_make_ready`). Nothing where Triton sees no device."""
    where = _seen(target)
    if where is not None:
        ahead.expect([where.backend, where.arch, where.warp_size])
        _get_ready()


@functools.cache
def _get_ready() -> None:
    """Have a thread do so, once a process."""
    threading.Thread(target=_make_ready, daemon=True).start()


def _make_ready() -> None:
    """Triton's own part of the driver, which a C compiler makes (a second), and its digest of its installation (a third
    of a second of reading)."""
    with contextlib.suppress(Exception):  # who needs them raises it again; other versions of Triton may have neither
        with _driver:
            _ = driver.active
        cache.triton_key()


def _seen(target: Target | None) -> Any:
    """What Triton compiles for, as `_where`; None where it sees no device."""
    if triton is not None:
        with contextlib.suppress(RuntimeError):  # of Triton's: no driver, or several
            return _where(target)
    return None


def _where(target: Target | None) -> Any:
    if target is None:
        with _driver:
            active = driver.active
        return active.get_current_target()
    return GPUTarget(target.backend, target.arch, target.warp_size)


def told(settings: Sequence[Sequence[str]]) -> None:
    """Do as the process that gave a job is told to by its environment, which may be told of an assembler later on."""
    wanted = [(name, value) for name, value in settings]
    if triton is None or wanted == config.triton_settings():
        return
    config.tell_triton(wanted)
    with contextlib.suppress(ImportError, AttributeError):
        from triton.backends.nvidia.compiler import get_ptxas_version  # noqa: PLC0415 (other devices have none)

        get_ptxas_version.cache_clear()


def prepare(target: Target) -> None:
    """What Triton works out once a process, before others are forked: digests of its own installation (a third of a
    second) and of its assembler. What another version of Triton calls otherwise, each of them works out itself."""
    if triton is None:
        return
    known.stamp(Path(triton.__file__).parent)
    with contextlib.suppress(AttributeError, OSError, RuntimeError):
        backend = make_backend(_where(target))
        backend.hash()
        cache.triton_key()
        if target.backend == "cuda":
            device_library.usual(dict(backend.parse_options({}).extern_libs)["libdevice"])
