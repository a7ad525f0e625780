"""Calls of whole graphs between processes: what they did, in a file of the cache, in the form of packages.

A graph's first tape is written when it is recorded; of a graph that is not recorded whole, those of its parts and what
is between them. A later process reads the file, loads the kernels' machine code and runs the call in C++: it plans,
renders and compiles nothing. Kernels of CPUs are known by their addresses: their calls are not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from tilefold import artifacts, config
from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.files import cache_folder, put, read_trusted, warn_unusable
from tilefold.frontend.packages.archive import Reader, Writer, torch_dtype
from tilefold.frontend.packages.form import FORMAT, Requires, StoredGraph, StoredTape, TapeArgument
from tilefold.frontend.packages.load import check_here, python
from tilefold.frontend.packages.taped import TapedRegion, lies_as, tape_of
from tilefold.frontend.packages.tapes import stored_tape
from tilefold.frontend.regions.outer import Outer
from tilefold.frontend.regions.replay import Heard
from tilefold.frontend.warm.text import outer, read_outer
from tilefold.runtime.native.load import native, stream_of
from tilefold.runtime.tape import Kind, Tape
from tilefold.runtime.writing import writing
from tilefold.version import version

log = logging.getLogger("tilefold")
T = TypeVar("T")

FOLDER = "calls"
#: Bytes of constants that a file may hold.
MOST_CONSTANTS = 64 << 20
#: Whose operators are known to whoever reads a file.
_NAMESPACES = ("aten", "tilefold")
#: Gives the results of a list of arguments, which it empties; or None, and the list as it was.
Call = Callable[[list[Any]], "Sequence[Any] | None"]
#: Machine code that is loaded, by name, digest and bytes of shared memory, of each device.
_loaded: dict[str, dict[tuple[str, str, int], int]] = {}


def unless_it_fails(name: str, make: Callable[[], T]) -> T | None:
    """What is kept of a graph; None, said at the level of details, where it has no form."""
    try:
        return make()
    except UnsupportedError as err:
        why = err.message
    # Hidden: a bug of what keeps graphs. The user's program does not need it.
    except Exception as err:
        if config.load().strict:
            raise
        why = f"internal error: {type(err).__name__}: {err}"
    log.info("%s is not kept for other processes: %s", name, why)
    return None


def path_of(name: str) -> Path:
    """Where the calls of a graph are."""
    return config.load().cache_dir / FOLDER / f"{name}.{FOLDER}"


class Keeper:
    """Writes the call of a compiled graph, named by what it was compiled from, once its tapes are there."""

    def __init__(self, name: str, compiled: Outer):
        self._name, self._outer = name, compiled
        self._writer = Writer()
        self._parts: dict[str, StoredTape] = {}
        self._wanted = {str(n.target) for n in compiled.graph.find_nodes(op="call_module")}
        compiled.listen(self._whole, self._part)

    def _whole(self, args: Sequence[object], tape: Tape) -> None:
        def write() -> None:
            stored = self._stored(args, tape)
            if stored is not None:
                self._write(tape.like.device, stored, "")

        unless_it_fails(self._outer.name, write)

    def _part(self, target: str) -> Heard:
        def write(args: Sequence[object], tape: Tape) -> None:
            stored = self._stored(args, tape)
            if stored is None:
                return
            self._parts[target] = stored
            if self._parts.keys() == self._wanted:
                self._write(tape.like.device, None, outer(self._outer.graph))

        def heard(args: Sequence[object], tape: Tape) -> None:
            unless_it_fails(self._outer.name, lambda: write(args, tape))

        return heard

    def _stored(self, args: Sequence[object], tape: Tape) -> StoredTape | None:
        device = tape.like.device
        constants = [s.like for s in tape.slots if s.kind is Kind.CONSTANT and s.like is not None]
        elsewhere = {x.device for x in args if isinstance(x, torch.Tensor)} - {device, torch.device("cpu")}
        if elsewhere or sum(x.nbytes for x in constants) > MOST_CONSTANTS:
            return None
        return stored_tape(tape, args, self._writer.code, self._writer.constant, _NAMESPACES)

    def _write(self, device: torch.device, tape: StoredTape | None, text: str) -> None:
        path, fixed = path_of(self._name), self._outer.constants if text else {}
        constants = {n: self._writer.constant(x) for n, x in fixed.items()}
        made = StoredGraph(
            str(device), self._outer.writes, tape, text, self._parts, constants, tuple(self._writer.tensors)
        )
        try:
            cache_folder(FOLDER)
            put(path, self._writer.archive(_requires(device), made))
        except OSError as err:
            warn_unusable(path.parent, err, "the next process plans again")
        else:
            artifacts.used(path)


def _requires(device: torch.device) -> Requires:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    return Requires(FORMAT, version(), torch.__version__, device.type, (), capability, python())


class Taped:
    """The call of a graph that is one tape."""

    def __init__(self, tape: Tape, wanted: Sequence[TapeArgument], module: ModuleType, *, writes: bool):
        self._tape, self._wanted, self._module, self._writes = tape, wanted, module, writes
        self._region = module.region(True, stream_of if tape.like.is_cuda else None)
        self._bound = False

    def __call__(self, args: list[Any]) -> Sequence[Any] | None:
        if not self._bound:
            if not all(map(self._fits, args, self._wanted)):
                return None
            self._bound = bool(self._module.add(self._region, tuple(args), *self._tape.packed()))
        with writing(self._writes):
            made: Sequence[Any] | None = self._module.run(self._region, args)
        return made

    def _fits(self, x: object, wanted: TapeArgument) -> bool:
        if wanted.dtype is None or not isinstance(x, torch.Tensor):
            return wanted.dtype is None
        return (
            x.dtype is torch_dtype(wanted.dtype)
            and x.device in (self._tape.like.device, torch.device("cpu"))
            and tuple(x.shape) == wanted.shape
            and lies_as(x, wanted)
        )


class _Part(torch.nn.Module):
    """A part of a graph."""

    def __init__(self, run: TapedRegion):
        super().__init__()
        self.run = run

    def forward(self, *args: object) -> Sequence[object]:
        return self.run(*args)


def kept(name: str) -> Call | None:
    """The call of a graph that an earlier process made; None where there is none that runs here."""
    path, module = path_of(name), native().module
    if module is None or config.load().runner != "all":
        return None
    try:
        reader = Reader(path, memoryview(bytearray(read_trusted(path))))
        check_here(reader.manifest.requires, str(path))
        reader.check()
        stored = reader.package(StoredGraph)
        device = torch.device(stored.device)
        on_gpu = device.type == "cuda"
        if on_gpu and not native().has_driver():
            return None
        with torch.cuda.device(device) if on_gpu else nullcontext():
            torch.zeros((), device=device)  # gives autograd's thread, which may be new, the device's context
            made = _call(stored, reader, name, module)
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, RuntimeError, TilefoldError) as err:
        log.info("%s: the call that was kept is of no use: %s", name, err)
        with suppress(OSError):
            path.unlink()
        return None
    artifacts.used(path)
    return made


def _call(stored: StoredGraph, reader: Reader, name: str, module: ModuleType) -> Call:
    device = torch.device(stored.device)
    tensors = [reader.tensor(t).to(device) for t in stored.tensors]

    def tape(of: StoredTape) -> Tape:
        return tape_of(of, device, reader.code, tensors, _loaded.setdefault(stored.device, {}))

    if stored.tape is not None:
        return Taped(tape(stored.tape), stored.tape.arguments, module, writes=stored.writes)
    root, graph = torch.nn.Module(), read_outer(stored.outer)
    for target, part in stored.parts.items():
        root.add_module(target, _Part(TapedRegion(tape(part), part.arguments, module)))
    for target, n in stored.constants.items():
        root.register_buffer(target, tensors[n])
    run = Outer(torch.fx.GraphModule(root, graph).forward, root, graph, None, name, writes=stored.writes)
    return run.boxed
