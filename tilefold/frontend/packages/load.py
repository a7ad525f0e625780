"""`tilefold.load`: a package of `tilefold.package`, ready to be called, in a process without a compiler."""

from __future__ import annotations

import logging
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_loads

from tilefold.algebra.expr import Const, Sym
from tilefold.backends.cpp.prebuilt import missing
from tilefold.backends.triton.driver import functions
from tilefold.errors import ParseError, TilefoldError
from tilefold.frontend.operators.bindings import InputBinding, Lowered
from tilefold.frontend.packages.archive import AGAIN, Reader, torch_dtype
from tilefold.frontend.packages.form import (
    FORMAT,
    PYTHON,
    Argument,
    Node,
    Package,
    Ref,
    Requires,
    StoredRegion,
    StoredTape,
    Value,
    operator_of,
    value_of,
)
from tilefold.frontend.packages.taped import TapedRegion, tape_of
from tilefold.frontend.regions.execute import Executable
from tilefold.frontend.regions.replay import Replayed
from tilefold.runtime.native.load import Built, module_at
from tilefold.runtime.stored import LoadedProgram
from tilefold.tensor.sizes import extent
from tilefold.version import version

log = logging.getLogger("tilefold")

#: Where the shared libraries of loaded packages are, as long as the process lives.
_folders: list[tempfile.TemporaryDirectory[str]] = []


def load(
    path: str | Path,
    weights: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    *,
    digest: str | None = None,
) -> Packaged:
    """The packaged function, called as the original. Nothing is compiled.

    weights: a module or its `state_dict()`, where the package refers to weights by name; those that it includes are
    replaced. digest: what `Packaged.digest` must be. A package is a program: load only those that you trust.
    TilefoldError: no package, damaged, or for another machine, torch or Tilefold.
    """
    reader = Reader(Path(path))
    if digest is not None and reader.digest != digest:
        raise TilefoldError(f"{path} has the digest {reader.digest}, not {digest}", hint=AGAIN)
    check_here(reader.manifest.requires, str(path))
    reader.check()
    package = reader.package(Package)
    try:
        return Packaged(package, reader, reader.libraries(folder_of_libraries()), weights)
    except (ParseError, KeyError, ValueError) as err:
        raise TilefoldError(f"{path} cannot be read: {err}", hint=AGAIN) from err


def folder_of_libraries() -> Path:
    """A new folder, of this process."""
    folder = tempfile.TemporaryDirectory(prefix="tilefold-package-")
    _folders.append(folder)
    return Path(folder.name)


def check_here(r: Requires, path: str) -> None:
    """TilefoldError where a package is for another machine, torch or Tilefold."""
    if r.format != FORMAT:
        raise TilefoldError(f"{path} has format {r.format}, this Tilefold reads {FORMAT}", hint=AGAIN)
    for what, wanted, here in (("Tilefold", r.tilefold, version()), ("torch", r.torch, torch.__version__)):
        if wanted != here:
            raise TilefoldError(
                f"{path} was made with {what} {wanted}, this is {here}",
                hint=f"install {what} {wanted}, or {AGAIN}",
            )
    _check_device(r, path)
    lacking = missing(r.cpu)
    if lacking:
        raise TilefoldError(
            f"{path} is for a CPU with {', '.join(lacking)}, which this one has not",
            hint="package it with TILEFOLD_ARCH=x86-64-v3 (or another architecture that both have)",
        )


def _check_device(r: Requires, path: str) -> None:
    if r.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise TilefoldError(f"{path} is for a GPU, and torch finds none", hint=AGAIN)
    here = torch.cuda.get_device_capability()
    if here != r.capability:
        wanted = ".".join(map(str, r.capability))
        raise TilefoldError(f"{path} is for GPUs of capability {wanted}, this one has {here[0]}.{here[1]}", hint=AGAIN)
    if python() != r.python:
        raise TilefoldError(f"{path} was made with Python {r.python}, this is {python()}", hint=AGAIN)


class Packaged:
    """A loaded package. `digest`: of all that it holds; `regions`: the compiled programs; `weights`: by name.

    TilefoldError: called with other arguments than it was packaged for.
    """

    def __init__(
        self,
        package: Package,
        reader: Reader,
        files: Mapping[str, Path],
        weights: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    ):
        self.digest, self._package = reader.digest, package
        self._device = reader.manifest.requires.device
        tensors = [reader.tensor(t).to(self._device) for t in package.tensors]
        self.regions = _regions(package, reader, tensors, files, self._device)
        self.weights = _weights(package, reader, weights)
        self._fixed = {w.name: self.weights[w.state] for w in package.weights}
        self._fixed |= {name: tensors[n] for name, n in package.constants.items()}
        self._in: TreeSpec = treespec_loads(package.in_tree)
        self._out: TreeSpec = treespec_loads(package.out_tree)
        last = {ref: n for n, node in enumerate(package.nodes) for ref in _refs((node.args, *node.kwargs.values()))}
        kept = {*self._fixed, *_refs(package.results)}
        self._steps = [
            (node.name, self._target(node), value_of(node.args), _keywords(node.kwargs), _dying(last, n, kept))
            for n, node in enumerate(package.nodes)
        ]
        self._results = value_of(package.results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        if tree != self._in:
            hint = "as many arguments, and by the same keywords, as tilefold.package was given"
            raise TilefoldError(f"the package takes arguments like {self._in}, not {tree}", hint=hint)
        values = {**self._fixed, **self._checked(flat)}
        with torch.no_grad():
            for name, run, given, keywords, done in self._steps:
                values[name] = run(*given(values), **keywords(values))
                for old in done:
                    del values[old]
        return tree_unflatten(self._results(values), self._out)

    def _checked(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name."""
        syms: dict[str, int] = {}
        for a, x in zip(self._package.arguments, flat, strict=True):
            _check(a, x, syms)
        for s, n in syms.items():
            low, high = self._package.ranges.get(s, (0, n))
            if not low <= n <= high:
                raise TilefoldError(f"the size {s} is {n}; the package is for {low} to {high}", hint=AGAIN)
        return {a.name: x for a, x in zip(self._package.arguments, flat, strict=True)}

    def _target(self, node: Node) -> Callable[..., Any]:
        match node.kind:
            case "region":
                return self.regions[int(node.target)]
            case "item":
                return PYTHON["getitem"]
            case "aten":
                return operator_of(node.target)
            case "python":
                return PYTHON[node.target]
        raise ParseError(f"no such kind of node: {node.kind}")


def _regions(
    package: Package, reader: Reader, tensors: Sequence[torch.Tensor], files: Mapping[str, Path], device: str
) -> list[Callable[..., Any]]:
    """The regions, ready to be called; of GPUs, on the current device."""
    module = _runner(package, reader, files)
    if device == "cpu":
        return [region_of(r, tensors, files, module) for r in package.regions if isinstance(r, StoredRegion)]
    if module is None:
        raise TilefoldError(f"{reader.path} has no module that runs it", hint=AGAIN)
    loaded = dict[tuple[str, str, int], int]()
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if (driver := functions()) is not None:
        module.driver(driver)
    found: list[Callable[..., Any]] = []
    for r in package.regions:
        assert isinstance(r, StoredTape)
        found.append(TapedRegion(tape_of(r, here, reader.code, tensors, loaded), r.arguments, module))
    return found


def _runner(package: Package, reader: Reader, files: Mapping[str, Path]) -> ModuleType | None:
    """The module that runs calls in C++; None of a package without one, or where it is for another Python: regions of
    CPUs then run in Python."""
    if package.runner is None or reader.manifest.requires.python != python():
        return None
    try:
        return module_at(files[package.runner])
    except ImportError as err:
        log.info("%s runs in Python: %s", reader.path, err)
        return None


def python() -> str:
    """What a module for Python is built for."""
    return str(sysconfig.get_config_var("SOABI"))


def region_of(
    r: StoredRegion, tensors: Sequence[torch.Tensor], files: Mapping[str, Path], module: ModuleType | None = None
) -> Executable:
    """A stored region, ready to be called with the arguments of its graph. module: what runs calls in C++."""
    inputs = tuple(
        InputBinding(i.name, i.position, i.axes, None if i.constant is None else tensors[i.constant], i.order)
        for i in r.inputs
    )
    program = LoadedProgram(r.program, files)
    lowered = Lowered(program.program, program.program, inputs, r.syms, r.outputs, r.placeholders)
    return Executable(lowered, program) if module is None else Replayed(lowered, program, Built(module))


def _weights(
    package: Package, reader: Reader, given: torch.nn.Module | Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The model's tensors by their names in its state."""
    device = reader.manifest.requires.device
    state = given.state_dict() if isinstance(given, torch.nn.Module) else dict(given or {})
    found: dict[str, torch.Tensor] = {}
    for w in package.weights:
        x = state.get(w.state)
        if x is None and w.included is not None:
            x = reader.tensor(w.included).to(device)
        if x is None:
            hint = "tilefold.load(path, model) or (path, state_dict), or tilefold.package(..., weights='included')"
            raise TilefoldError(f"the package refers to the weight {w.state}, which is not given", hint=hint)
        x = x.detach()
        if tuple(x.shape) != w.shape or x.dtype is not torch_dtype(w.dtype) or x.device.type != device:
            wanted = f"{w.dtype}{list(w.shape)} on {device}"
            raise TilefoldError(
                f"the weight {w.state} is {x.dtype}{list(x.shape)} on {x.device}, not {wanted}",
                hint=AGAIN,
            )
        found[w.state] = x
    return found


def _check(a: Argument, x: Any, syms: dict[str, int]) -> None:
    """TilefoldError: not an argument like `a`; symbols get their values."""
    if a.dtype is None:
        if type(x) is not type(a.value) or x != a.value:
            raise TilefoldError(f"the argument {a.name} is {x!r}; the package was made for {a.value!r}", hint=AGAIN)
        return
    if not isinstance(x, torch.Tensor) or x.dtype is not torch_dtype(a.dtype) or x.device.type != a.device:
        what = f"{x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        wanted = f"{a.dtype} on {a.device}"
        raise TilefoldError(f"the argument {a.name} is {what}; the package was made for {wanted}", hint=AGAIN)
    if x.requires_grad and torch.is_grad_enabled():
        raise TilefoldError(f"a package has no gradient, and {a.name} needs one", hint="call it under torch.no_grad()")
    fits = x.ndim == len(a.shape)
    for e, n in zip(a.shape, x.shape, strict=False):
        match e:
            case Const(known, _):
                fits = fits and int(known) == n
            case Sym(name):
                fits = fits and syms.setdefault(name, n) == n
            case _:
                fits = fits and extent(e, syms) == n
    if not fits:
        wanted = ", ".join(str(int(e.value)) if isinstance(e, Const) else str(e) for e in a.shape)
        raise TilefoldError(
            f"the argument {a.name} has shape {tuple(x.shape)}; the package was made for ({wanted})",
            hint="tilefold.package(..., dynamic_shapes=...) leaves sizes free",
        )


def _refs(x: object) -> set[str]:
    if isinstance(x, Ref):
        return {x.name}
    return set().union(*map(_refs, x)) if isinstance(x, tuple) else set()


def _dying(last: Mapping[str, int], at: int, kept: set[str]) -> tuple[str, ...]:
    return tuple(name for name, n in last.items() if n == at and name not in kept)


def _keywords(x: Mapping[str, Any]) -> Value:
    parts = {k: value_of(v) for k, v in x.items()}
    return lambda values: {k: p(values) for k, p in parts.items()}
