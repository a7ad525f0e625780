"""`tilefold.package`: a function or model compiled now, into a file that another process loads without a compiler.

`torch.export` captures it, with sizes that `dynamic_shapes` leaves free; the graph then goes the way of
`torch.compile(backend="tilefold")`. What Tilefold does not cover is kept as ATen operators, which run one by one. The
graph is called once on the arguments, and the kernels that this loads are what the package holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import treespec_dumps

from tilefold.backends.cpp.compile import toolchain
from tilefold.backends.cpp.prebuilt import needed
from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.files import put
from tilefold.frontend.capture.decompose import attention, decompositions
from tilefold.frontend.fuse import check_arguments, check_function, plain
from tilefold.frontend.operators import sizes as fx_sizes
from tilefold.frontend.operators.table import TABLE
from tilefold.frontend.packages.archive import Writer
from tilefold.frontend.packages.form import (
    FORMAT,
    PYTHON,
    Argument,
    Node,
    Package,
    Requires,
    StoredInput,
    StoredRegion,
    StoredTape,
    Weight,
    written,
)
from tilefold.frontend.packages.load import python
from tilefold.frontend.packages.tapes import stored_tape
from tilefold.frontend.regions.assemble import Options, assembled
from tilefold.frontend.regions.execute import Executable
from tilefold.frontend.regions.outer import item
from tilefold.frontend.regions.replay import Replayed
from tilefold.frontend.registered import nested
from tilefold.log import progress
from tilefold.pipeline import compile_program
from tilefold.runtime.native.load import native
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.store import stored
from tilefold.runtime.tape import Tape
from tilefold.version import version

#: Of checks that the loaded package makes of its arguments itself.
_CHECKS = ("aten::_assert_scalar", "aten::_assert_tensor_metadata", "aten::sym_constrain_range_for_size",
           "aten::sym_constrain_range", "aten::_assert_async")  # fmt: skip
#: Mode of the file: others may load it.
READABLE = 0o644
_PYTHON = {f: name for name, f in PYTHON.items()}


def package(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    weights: Literal["by name", "included"] = "by name",
) -> Path:
    """Compile `fn(*args, **kwargs)` for inference and write it to `path`, for `tilefold.load`.

    dynamic_shapes: as of `torch.export.export`; extents are fixed without. weights: only named, and given to
    `tilefold.load` as a model or `state_dict`, or kept in the file. UnsupportedError: what `torch.export` cannot
    capture, what changes a buffer or an argument, and on GPUs sizes that are left free.
    """
    if weights not in ("by name", "included"):
        raise TilefoldError(f"unknown weights={weights!r}", hint="'by name' or 'included'")
    if not isinstance(args, tuple | list):
        raise TilefoldError(f"args is a {type(args).__name__}, not a tuple", hint="package(fn, (x,), path)")
    fn = plain(fn)
    check_function(fn, "package")
    check_arguments(fn, args, kwargs or {})
    place = Path(path)
    if place.is_dir() or not place.parent.is_dir():
        why = "it is a folder" if place.is_dir() else f"there is no folder {place.parent}"
        raise TilefoldError(f"{place} cannot be written: {why}", hint="an existing folder of yours")
    with progress("a package"), nested.taken_apart(), torch.no_grad():
        exported = _exported(fn, tuple(args), dict(kwargs or {}), dynamic_shapes)
        writer = Writer()
        packing = _Packing(exported, writer, weights == "included")
        made = packing.package()
    try:
        put(place, writer.archive(requires(packing.device), made))
        os.chmod(place, READABLE)
    except OSError as err:
        raise TilefoldError(f"{place} cannot be written: {err}", hint="an existing folder of yours") from None
    return place


class _Function(torch.nn.Module):
    """A function as a module, which is what `torch.export` takes."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self._fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def _exported(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any) -> ExportedProgram:
    module = fn if isinstance(fn, torch.nn.Module) else _Function(fn)
    if dynamic is not None and module is not fn:
        dynamic = _of_function(dynamic, args, kwargs)
    try:
        found = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
    # Hidden: nothing. Errors of torch.export, of all its kinds, are the user's to read, under our name.
    except Exception as err:
        first = next((line for line in str(err).splitlines() if line.strip()), type(err).__name__)
        raise UnsupportedError(f"torch.export does not capture it: {first}", hint="torch.export.draft_export") from err
    table = {**default_decompositions(), **decompositions()}
    for op in TABLE:
        table.pop(op, None)
    table[torch.ops.aten.scaled_dot_product_attention.default] = attention
    found = found.run_decompositions(table)
    changed = [s.target for s in found.graph_signature.output_specs if s.kind is not OutputKind.USER_OUTPUT]
    if changed:
        what = ", ".join(map(str, changed))
        raise UnsupportedError(f"it changes {what}", hint="model.eval(), or return a new tensor")
    return found


def _of_function(dynamic: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dynamic shapes of a function with named arguments as those of one with `*args` and `**kwargs`."""
    if not isinstance(dynamic, dict):
        return {"args": tuple(dynamic), "kwargs": {}} if kwargs else {"args": tuple(dynamic)}
    found: dict[str, Any] = {"args": tuple(v for k, v in dynamic.items() if k not in kwargs)}
    return found | ({"kwargs": {k: v for k, v in dynamic.items() if k in kwargs}} if kwargs else {})


@dataclass
class _Packing:
    """An exported program on its way into a package."""

    exported: ExportedProgram
    writer: Writer
    include: bool
    arguments: list[Argument] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    values: list[object] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The kind of device that the program runs on."""
        return "cuda" if any(isinstance(x, torch.Tensor) and x.is_cuda for x in self.values) else "cpu"

    def package(self) -> Package:
        """The package of the graph, whose kernels have run once."""
        gm, spec = self.exported.graph_module, self.exported.call_spec
        for n in [n for n in gm.graph.nodes if str(getattr(n.target, "_schema", "")).startswith(_CHECKS)]:
            gm.graph.erase_node(n)
        gm.graph.eliminate_dead_code()
        options = Options(compile_program, leftover="eager", specialise=False)
        graph, root, run = assembled(gm, options, "package", self._placeholders())
        for given, made in zip(gm.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
            self._rename(given.name, made.name)
        regions: dict[str, StoredRegion | StoredTape] = {}
        if self.device == "cuda":
            regions = self._taped(graph, root)
        else:
            run(*self.values)
            regions = {str(n.target): region(root.get_submodule(str(n.target)).run, self.writer) for n in _parts(graph)}
        nodes = [self._node(n, list(regions)) for n in graph.nodes if n.op in ("call_function", "call_module")]
        for n in graph.find_nodes(op="get_attr"):
            self.constants[n.name] = self.writer.constant(getattr(root, str(n.target)))
        results = written(graph.output_node().args[0])
        ranges = {str(s): (int(r.lower), _upper(r.upper)) for s, r in self.exported.range_constraints.items()}
        return Package(
            tuple(self.arguments), tuple(self.weights), self.constants, tuple(nodes), results, tuple(regions.values()),
            tuple(self.writer.tensors), ranges, treespec_dumps(spec.in_spec), treespec_dumps(spec.out_spec),
            self._runner(),
        )  # fmt: skip

    def _taped(self, graph: torch.fx.Graph, root: torch.nn.Module) -> dict[str, StoredRegion | StoredTape]:
        """The regions' tapes, of a call that runs them. UnsupportedError: sizes are left free, or one has no tape."""
        if self.exported.range_constraints:
            raise UnsupportedError("a package for a GPU has fixed sizes", hint="leave dynamic_shapes out")
        if native().wait() is None or not native().has_driver():
            why = native().reason or "there is no CUDA driver"
            raise UnsupportedError(
                f"the module that runs packages for GPUs is not built: {why}", hint="apt install g++"
            )
        taping = _Taping(root, graph)
        taping.run(*self.values)
        writer = self.writer
        return {n: stored_tape(tape, args, writer.code, writer.constant) for n, (tape, args) in taping.tapes.items()}

    def _runner(self) -> str | None:
        """The digest of the module that runs calls in C++; None where it cannot be built."""
        native().wait()
        path = native().path
        return None if path is None else self.writer.library(path)

    def _placeholders(self) -> list[str]:
        """Sort the graph's arguments into weights, constants and the user's; readable names for them."""
        ep, titles = self.exported, []
        flat = iter(torch.utils._pytree.tree_leaves(ep.example_inputs, is_leaf=lambda x: x is None))
        nodes = {n.name: n for n in ep.graph_module.graph.find_nodes(op="placeholder")}
        for s in ep.graph_signature.input_specs:
            name = s.arg.name
            titles.append(str(s.target or name).replace(".", "_"))
            if s.kind is InputKind.USER_INPUT:
                x = next(flat)
                self.arguments.append(_argument(name, nodes[name].meta.get("val"), x))
            else:
                x = ep.state_dict[str(s.target)] if str(s.target) in ep.state_dict else ep.constants[str(s.target)]
                self._held(name, str(s.target), x, s.kind is InputKind.PARAMETER or s.persistent is True)
            if name in nodes:
                self.values.append(x)
        return titles

    def _rename(self, old: str, new: str) -> None:
        """Of a placeholder, which a graph calls otherwise where its name is one of Python's (`input`)."""
        if old != new:
            self.arguments = [replace(a, name=new) if a.name == old else a for a in self.arguments]
            self.weights = [replace(w, name=new) if w.name == old else w for w in self.weights]
            self.constants = {new if name == old else name: n for name, n in self.constants.items()}

    def _held(self, name: str, state: str, x: torch.Tensor, in_state: bool) -> None:
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{state} is no tensor", hint="make it an argument")
        if in_state:
            kept = self.writer.tensor(x) if self.include else None
            self.weights.append(Weight(name, state, str(x.dtype), tuple(x.shape), kept))
        else:
            self.constants[name] = self.writer.constant(x)

    def _node(self, n: torch.fx.Node, regions: Sequence[str]) -> Node:
        try:
            args, kwargs = written(n.args), {k: written(v) for k, v in n.kwargs.items()}
        except TypeError as err:
            raise UnsupportedError(f"{n.target} cannot be packaged: {err}") from None
        if n.op == "call_module":
            return Node(n.name, "region", str(regions.index(str(n.target))), args, kwargs)
        if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten":
            return Node(n.name, "aten", str(n.target).removeprefix("aten."), args, kwargs)
        if n.target in _PYTHON:
            return Node(n.name, "python", _PYTHON[n.target], args, kwargs)
        if n.target is item:
            return Node(n.name, "item", "", args, kwargs)
        raise UnsupportedError(f"{n.target} cannot be packaged", hint="torch.compile(model, backend='tilefold')")


class _Taping(torch.fx.Interpreter):
    """Runs a graph of regions once and keeps their tapes, with the arguments that they were recorded for."""

    def __init__(self, root: torch.nn.Module, graph: torch.fx.Graph):
        super().__init__(torch.fx.GraphModule(root, graph))
        self.tapes: dict[str, tuple[Tape, tuple[object, ...]]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.fetch_attr(target).run
        run = getattr(run, "run", run)  # within its guard
        if not isinstance(run, Replayed):
            raise UnsupportedError("a part of the graph does not compile", hint="TORCH_LOGS=tilefold says why")
        made, tape, why = run.written(args)
        if tape is None:
            raise UnsupportedError(f"{run.lowered.program.name} cannot be packaged: {why}")
        self.tapes[str(target)] = tape, args
        return made


def _parts(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The regions of a graph."""
    return [n for n in graph.nodes if n.op == "call_module"]


def region(run: object, writer: Writer) -> StoredRegion:
    """A part of a graph that has run. UnsupportedError: it is not compiled, or for a GPU."""
    run = getattr(run, "run", run)  # within its guard
    if not isinstance(run, Executable) or not isinstance(run.runner, CompiledProgram):
        raise UnsupportedError("a part of the graph does not compile", hint="TORCH_LOGS=tilefold says why")
    low = run.lowered
    inputs = tuple(
        StoredInput(b.name, b.position, b.axes, None if b.constant is None else writer.constant(b.constant), b.order)
        for b in low.inputs
    )
    return StoredRegion(stored(run.runner, writer.library), inputs, low.syms, low.outputs, low.placeholders)


def requires(device: str = "cpu") -> Requires:
    """What a package of this machine needs of another."""
    if device == "cpu":
        return Requires(FORMAT, version(), torch.__version__, device, needed(toolchain()), (), python())
    return Requires(FORMAT, version(), torch.__version__, device, (), torch.cuda.get_device_capability(), python())


def _argument(name: str, fake: object, x: object) -> Argument:
    if isinstance(fake, torch.Tensor):
        if fake.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{name} is on {fake.device}: packages are for CPUs and GPUs")
        return Argument(name, str(fake.dtype), fx_sizes.shape(fake.shape), device=fake.device.type)
    if isinstance(x, bool | int | float | str | None) and not isinstance(fake, torch.SymInt):
        return Argument(name, None, value=x)
    raise UnsupportedError(f"the argument {name} is a {type(x).__name__}", hint="bind it: functools.partial")


def _upper(n: Any) -> int:
    """The largest value of a symbol; of one without a limit, what a size can be."""
    try:
        return min(int(n), 2**63 - 1)
    except (TypeError, OverflowError):
        return 2**63 - 1
