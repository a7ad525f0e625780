"""ATen graphs as records (`runtime.records`): what a later process compiles again where their calls do not fit.

    graph ::= node*                                        in order, with what compilation reads of a node's metadata
    node  ::= op name target args kwargs value trace tags
    value ::= Fake (a tensor without elements) | number | None | Several

Sizes are numbers. A target is an operator of torch, a function of sizes, or one of Tilefold's own functions, by name:
`warm.graphs` has the text of Tilefold in its key. What has no form here is not kept (UnsupportedError).
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from tilefold.errors import ParseError, UnsupportedError
from tilefold.frontend.packages import form
from tilefold.frontend.packages.archive import torch_dtype
from tilefold.frontend.packages.form import Of, Ref, of_torch
from tilefold.runtime import records

Node = torch.fx.Node
#: Elements that a constant of a graph may have.
MOST = 4096
#: Of a node's metadata, beside its value and trace.
_TAGS = ("recompute", "partitioner_tag")
#: Modules whose functions a graph may call by name.
_MODULES = ("operator", "math", "torch", "tilefold.frontend.")
_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True, slots=True)
class Listed:
    """A list, which operators tell from a tuple."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Fake:
    """A tensor of a traced graph."""

    dtype: str
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that belongs to a graph: its elements in order."""

    dtype: str
    device: str
    shape: tuple[int, ...]
    elements: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A node."""

    op: str
    name: str
    target: str
    args: Any
    kwargs: Mapping[str, Any]
    value: Any
    trace: str | None
    tags: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in order; constants by their names."""

    nodes: tuple[Written, ...]
    constants: Mapping[str, Constant]


_CLASSES = (Listed, Fake, Constant, Written, Graph, Ref, Of, CheckpointPolicy)


def written(gm: torch.fx.GraphModule) -> str:
    """The text of a graph. UnsupportedError: it holds what has no form."""
    constants = {str(n.target): _constant(gm, n) for n in gm.graph.find_nodes(op="get_attr")}
    nodes = tuple(_node(n) for n in gm.graph.nodes)
    if any(w.op == "call_module" for w in nodes):
        raise UnsupportedError("parts have no form")
    return _dumped(Graph(nodes, constants))


def outer(graph: torch.fx.Graph) -> str:
    """The text of a graph of parts (`regions.outer`), without values, parts and constants."""
    return _dumped(Graph(tuple(_node(n, bare=True) for n in graph.nodes), {}))


def _dumped(graph: Graph) -> str:
    try:
        return records.dump(graph)
    except (TypeError, RecursionError) as err:
        raise UnsupportedError(str(err)) from None


def read(text: str) -> torch.fx.GraphModule:
    """The graph of a text, whose tensors are fake. ParseError: it is none."""
    found = _loaded(text)
    root = torch.nn.Module()
    for name, c in found.constants.items():
        root.register_buffer(name, _tensor(c))
    return torch.fx.GraphModule(root, _graph(found))


def read_outer(text: str) -> torch.fx.Graph:
    """A graph of parts. ParseError: it is none."""
    return _graph(_loaded(text))


def _loaded(text: str) -> Graph:
    found = records.load(text, _CLASSES)
    if not isinstance(found, Graph):
        raise ParseError("not a graph")
    return found


def _graph(found: Graph) -> torch.fx.Graph:
    graph, made = torch.fx.Graph(), dict[str, Node]()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[int, Any] = {}
    for w in found.nodes:
        args, kwargs = _given(w.args, made), {k: _given(v, made) for k, v in w.kwargs.items()}
        target = _target(w.target) if w.op == "call_function" else w.target
        n = made[w.name] = graph.create_node(w.op, target, args, kwargs, name=w.name)
        n.meta.update(w.tags)
        if w.trace is not None:
            n.meta["stack_trace"] = w.trace
        if w.op != "output":
            n.meta["val"] = _value(w.value, fakes, values)
    return graph


def _node(n: Node, *, bare: bool = False) -> Written:
    target = _name(n.target) if n.op == "call_function" else str(n.target)
    if n.op == "call_method":
        raise UnsupportedError(f"{n.op} has no form")
    if bare:
        return Written(n.op, n.name, target, _form(n.args), {k: _form(v) for k, v in n.kwargs.items()}, None, None, ())
    tags = tuple((k, n.meta[k]) for k in _TAGS if n.meta.get(k) is not None)
    value = None if n.op == "output" else _shown(n.meta.get("val"))
    kwargs = {k: _form(v) for k, v in n.kwargs.items()}
    return Written(n.op, n.name, target, _form(n.args), kwargs, value, n.meta.get("stack_trace"), tags)


def _form(x: object) -> Any:
    """As packages write it, but for lists, which stay lists."""
    match x:
        case list():
            return Listed(tuple(map(_form, x)))
        case tuple():
            return tuple(map(_form, x))
    try:
        if type(x) in _PLAIN or not isinstance(x, int | float | str):
            return form.written(x)
    except TypeError:
        pass
    raise UnsupportedError(f"{type(x).__name__} has no form in graphs")


def _given(x: Any, made: Mapping[str, Node]) -> Any:
    match x:
        case Ref(name):
            return made[name]
        case Listed(items):
            return [_given(y, made) for y in items]
        case tuple():
            return tuple(_given(y, made) for y in x)
        case Of():
            return of_torch(x)
    return x


def _name(target: Any) -> str:
    """An operator's name, or a function's with its module."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    module = "operator" if module == "_operator" else module
    known = isinstance(target, FunctionType | type(operator.add)) and module.startswith(_MODULES)
    if not known or getattr(importlib.import_module(module), name, None) is not target:
        raise UnsupportedError(f"{target} has no form in graphs")
    return f"{module}:{name}"


def _target(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Any = torch.ops
    if function:
        if not module.startswith(_MODULES):
            raise ParseError(f"no function of a graph: {name}")
        found = getattr(importlib.import_module(module), function, None)
    else:
        for part in name.removeprefix("torch.ops.").split("."):
            found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload | FunctionType | type(operator.add)):
        raise ParseError(f"there is no {name}")
    return found


def _shown(x: object) -> Any:
    """The value of a node."""
    if type(x) in _PLAIN:
        return x
    if isinstance(x, tuple | list):
        return Listed(tuple(map(_shown, x)))
    if not isinstance(x, torch.Tensor) or x._has_symbolic_sizes_strides or x.layout is not torch.strided:
        raise UnsupportedError(f"a value of type {type(x).__name__}, or of a size that is not known")
    if x.is_neg() or x.is_conj() or x._is_zerotensor():
        raise UnsupportedError("memory that holds something else than values")
    device, offset = str(x.device), int(x.storage_offset())
    return Fake(str(x.dtype), device, tuple(x.shape), tuple(x.stride()), offset, x.requires_grad)


def _value(x: Any, fakes: FakeTensorMode, known: dict[int, Any]) -> Any:
    """A node's value again; equal ones, which are one record, are one tensor."""
    match x:
        case Listed(items):
            return [_value(y, fakes, known) for y in items]
        case Fake():
            if id(x) not in known:
                known[id(x)] = _fake(x, fakes)
            return known[id(x)]
    return x


def _fake(x: Fake, fakes: FakeTensorMode) -> torch.Tensor:
    dtype = torch_dtype(x.dtype)
    with fakes:
        made = torch.empty_strided(x.shape, x.strides, dtype=dtype, device=x.device)
        if x.offset:
            last = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if n)
            base = torch.empty(x.offset + last + 1, dtype=dtype, device=x.device)
            made = base.as_strided(x.shape, x.strides, x.offset)
    return made.requires_grad_(x.gradient)


def _constant(gm: torch.fx.GraphModule, n: Node) -> Constant:
    x = getattr(gm, str(n.target), None)
    if not isinstance(x, torch.Tensor) or x.numel() > MOST or x.is_complex() or x.layout is not torch.strided:
        raise UnsupportedError(f"{n.target} is no small tensor")
    with _disable_current_modes():  # of AOTAutograd's, which makes fake tensors of all
        elements = x.detach().cpu().flatten().tolist()
    return Constant(str(x.dtype), str(x.device), tuple(x.shape), tuple(elements))


def _tensor(c: Constant) -> torch.Tensor:
    dtype = torch_dtype(c.dtype)
    return torch.tensor(c.elements, dtype=dtype, device=c.device).reshape(c.shape)
