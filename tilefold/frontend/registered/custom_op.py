"""`tilefold.custom_op`: a function compiled once, as an operator that other graphs may contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.frontend.fuse import Fn, check_arguments, check_function, own_copy, plain, transformed, translated
from tilefold.frontend.operators.bindings import Lowered, SymBinding
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.frontend.regions.direct import executable
from tilefold.frontend.registered.operator import Checked, Operator, name_of, operator_of
from tilefold.frontend.torch_compile import aot
from tilefold.pipeline import compile_program


class CustomOp:
    """A compiled function of tensors, for inference. Called eagerly it runs at once, with no guards but on
    dtypes, devices and extents; under torch.compile, torch.export, torch.vmap, fake tensors or another dispatch
    mode it is the operator `op`, whose last arguments are the tensors `held` (parameters, closures).

    TilefoldError: arguments that it was not made for, or that need gradients.
    """

    def __init__(self, run: Checked, op: Operator, captured: Captured):
        self.name, self.op, self.held = f"tilefold::{run.name}", op, captured.held
        self._run, self._single = run, captured.single
        self._count = len(captured.vals) - len(self.held)
        self._trained = any(x.requires_grad for x in self.held)

    def __call__(self, *xs: torch.Tensor) -> Any:
        if len(xs) != self._count:
            raise TilefoldError(
                f"{self.name} takes {self._count} tensors, not {len(xs)}", hint="as many as custom_op was given"
            )
        if torch.is_grad_enabled() and (self._trained or any([x.requires_grad for x in xs])):
            raise TilefoldError(
                f"{self.name} has no gradient",
                hint="call it under torch.no_grad(), or train with torch.compile(backend='tilefold')",
            )
        if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() != 0:
            return self.op(*xs, *self.held)
        args = (*xs, *self.held)
        made = self._run.again(args)
        if made is None:
            if not all([type(x) is torch.Tensor for x in xs]):
                return self.op(*args)
            made = self._run(*args)
        return made[0] if self._single else made


def custom_op(fn: Fn, *examples: torch.Tensor, name: str | None = None, dynamic: bool | None = None) -> CustomOp:
    """Compile `fn` for tensors like `examples` and register it as an operator `tilefold::<name>_<digest>`.

    Extents are fixed, but for those marked by `torch._dynamo.mark_dynamic` (or all: `dynamic=True`). `name`: the
    operator's whole name instead. Results are new tensors, also where `fn` returns views of its arguments.
    UnsupportedError: the function changes or returns an argument, or is not covered whole.
    """
    if not examples or not all(isinstance(x, torch.Tensor) for x in examples):
        raise TilefoldError("an operator takes tensors", hint="bind other arguments: functools.partial(fn, scale=0.5)")
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
        raise TilefoldError(f"an operator cannot be called {name!r}", hint="letters, digits and _: my_softmax")
    fn = plain(fn)
    check_function(fn, "custom_op")
    check_arguments(fn, examples, {})
    captured = capture(fn, distinct(examples), dynamic)
    kinds = {v.device.type for v in captured.vals}
    if len(kinds) > 1:
        raise UnsupportedError(f"arguments on {' and '.join(sorted(kinds))}", hint="move them to one device")
    compiled = compile_program(captured.lowered.program, goal="fused", device=kinds.pop())
    base = name or name_of(captured.lowered, captured.vals, identifier(fn))
    run = Checked.of(base, executable(captured.lowered, compiled), captured.vals)
    return CustomOp(run, operator_of(run, captured.vals), captured)


def identifier(fn: Fn) -> str:
    return re.sub(r"\W+", "_", str(getattr(fn, "__name__", type(fn).__name__))).strip("_") or "program"


def distinct(examples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """No tensor twice: Dynamo would take the second for the first in all later calls."""
    out: list[torch.Tensor] = []
    for x in examples:
        if any(x is y for y in out):
            free = getattr(x, "_dynamo_dynamic_indices", ())
            x = x.detach()
            for axis in free:
                torch._dynamo.mark_dynamic(x, axis)
        out.append(x)
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Captured:
    """A lowered function of tensors: the arguments `vals` (fake), of which the last are always `held`."""

    lowered: Lowered
    vals: tuple[torch.Tensor, ...]
    held: tuple[torch.Tensor, ...]
    single: bool


def capture(fn: Fn, examples: tuple[torch.Tensor, ...], dynamic: bool | None) -> Captured:
    """Run `fn` on the examples once, as the graph that Dynamo and AOTAutograd make of it."""
    found: list[tuple[torch.fx.GraphModule, Lowered]] = []
    given: list[tuple[object, ...]] = []
    made: list[Sequence[object]] = []

    def inference(graph: torch.fx.GraphModule, titles: Sequence[str] | None) -> Fn:
        placeholders = graph.graph.find_nodes(op="placeholder")
        fits = titles is not None and len(titles) == len(placeholders)
        found.append((graph, lower(graph, name=identifier(fn), names=titles if fits else None)))

        def call(*args: object) -> Sequence[object]:
            given.append(args)
            made.append(graph.forward(*args))
            return list(made[-1])

        return call

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Fn:
        return aot(gm, inputs, inference)

    before = [x._version for x in examples]
    with torch.no_grad():
        run = torch.compile(own_copy(fn), backend=backend, fullgraph=True, dynamic=dynamic)
        results = translated(run, *examples)
    if not found:
        raise UnsupportedError(f"{identifier(fn)} computes nothing on tensors", hint="it must compute new tensors")
    if before != [x._version for x in examples]:
        raise UnsupportedError(f"{identifier(fn)} changes an argument", hint="return a new tensor instead")
    graph, lowered = found[-1]
    flat = [results] if isinstance(results, torch.Tensor) else tree_flatten(results)[0]
    if not isinstance(results, torch.Tensor | tuple | list) or not all(isinstance(y, torch.Tensor) for y in flat):
        raise UnsupportedError(f"{identifier(fn)} returns other things than tensors", hint="return a tuple of tensors")
    order = [_source(n, y, made[-1]) for n, y in enumerate(flat)]
    lowered = replace(lowered, outputs=tuple(lowered.outputs[k] for k in order))
    return _bound(graph, lowered, examples, given[-1], isinstance(results, torch.Tensor))


def _source(n: int, y: torch.Tensor, made: Sequence[object]) -> int:
    """Which result of the graph is the function's result n."""
    for k, x in enumerate(made):
        if not isinstance(x, torch.Tensor) or (y.numel() == 0 and k != n):
            continue
        if (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride()):
            return k
    raise UnsupportedError(
        f"result {n} is an argument, or a view of one or of another result", hint="return its clone()"
    )


def _bound(
    graph: torch.fx.GraphModule,
    lowered: Lowered,
    examples: tuple[torch.Tensor, ...],
    given: tuple[object, ...],
    single: bool,
) -> Captured:
    """Arguments in the function's order, then held tensors; symbols read from extents."""
    fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    tensors = {k: x for k, x in enumerate(given) if isinstance(x, torch.Tensor)}
    own = {id(x): n for n, x in enumerate(examples)}
    held = [k for k, x in tensors.items() if id(x) not in own]
    at = {k: own.get(id(x), len(examples) + (held.index(k) if k in held else 0)) for k, x in tensors.items()}
    vals = [*examples, *(fakes[k] for k in held)]
    for k, n in at.items():
        vals[n] = fakes[k]
    syms = tuple(_extent(b, fakes, at) for b in lowered.syms)
    inputs = tuple(b if b.position is None else replace(b, position=at[b.position]) for b in lowered.inputs)
    if any(o.position is not None for o in lowered.outputs):
        raise UnsupportedError("a result is one of the arguments", hint="return x.clone()")
    lowered = replace(lowered, inputs=inputs, syms=syms, placeholders=len(vals))
    return Captured(lowered, tuple(vals), tuple(tensors[k] for k in held), single)


def _extent(b: SymBinding, fakes: Sequence[object], at: dict[int, int]) -> SymBinding:
    """The symbol as an extent of an argument."""
    if b.axis is not None:
        return replace(b, position=at[b.position])
    for k, v in enumerate(fakes):
        if isinstance(v, torch.Tensor):
            for axis, n in enumerate(v.shape):
                if isinstance(n, torch.SymInt) and str(n.node.expr) == b.name:
                    return SymBinding(b.name, at[k], axis)
    raise UnsupportedError(f"the size {b.name} is no extent of an argument", hint="fix it: functools.partial")
