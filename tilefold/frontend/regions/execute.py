"""Run a lowered graph: bind arguments to program inputs, call the compiled program, view the results.

Everything that does not depend on the call is worked out once; with static shapes a call does no
arithmetic on sizes at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.expr import Expr
from tilefold.frontend.operators.bindings import InputBinding, Lowered, OutputBinding
from tilefold.tensor.index_simplify import const, is_one, same, simplify
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import extent, shape_function

#: What `pipeline.compile_program` returns: inputs and symbols -> results by name.
Runner = Callable[[Mapping[str, torch.Tensor], Mapping[str, int]], Mapping[str, torch.Tensor]]


def interpreted(program: Program, *, device: str = "cpu") -> Runner:
    """The program run by the tensor interpreter, on any device: slow, and the definition of what is right."""

    def call(inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        results = run(program, inputs, syms=syms)
        return {n: results[n].clone(memory_format=torch.contiguous_format) for n in program.outputs}  # never an input

    return call


class Executable:
    """A lowered graph with a runner; called with the graph's arguments, returns its results as a tuple."""

    def __init__(self, lowered: Lowered, runner: Runner):
        self.lowered, self.runner = lowered, runner
        self.inputs = [_input_reader(b) for b in lowered.inputs]
        self._outputs = [_output_view(lowered, o) for o in lowered.outputs]

    def __call__(self, *args: object) -> tuple[torch.Tensor | None, ...]:
        return self._run(args, self.runner)

    def _run(self, args: Sequence[object], runner: Runner) -> tuple[torch.Tensor | None, ...]:
        syms = self.symbols(args)
        inputs = {name: read(args, syms) for name, read in self.inputs}
        results = runner(inputs, syms) if self.lowered.program.outputs else {}
        return tuple([view(args, results, syms) for view in self._outputs])

    def symbols(self, args: Sequence[object]) -> dict[str, int]:
        """Values of the program's symbols."""
        syms: dict[str, int] = {}
        for b in self.lowered.syms:
            given = args[b.position]
            if b.axis is not None:
                assert isinstance(given, torch.Tensor)
                given = given.shape[b.axis]
            assert isinstance(given, int)
            syms[b.name] = given
        return syms


def _input_reader(b: InputBinding) -> tuple[str, Callable[[Sequence[object], Mapping[str, int]], torch.Tensor]]:
    if b.constant is not None:
        with _disable_current_modes():  # it is no tensor of the trace that may be under way
            constant = _ordered(b.constant, b.order)
            constant = _split(constant, b.axes, {}) if b.is_split else constant
        return b.name, lambda args, syms: constant
    position = b.position
    assert position is not None

    def plain(args: Sequence[object], syms: Mapping[str, int]) -> torch.Tensor:
        x = args[position]
        assert isinstance(x, torch.Tensor)
        return x.detach() if x.requires_grad else x

    def ordered(args: Sequence[object], syms: Mapping[str, int]) -> torch.Tensor:
        return plain(args, syms).permute(b.order)

    whole = ordered if b.order else plain

    def split(args: Sequence[object], syms: Mapping[str, int]) -> torch.Tensor:
        return _split(whole(args, syms), b.axes, syms)

    return b.name, split if b.is_split else whole


def _ordered(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return x.permute(tuple(order)) if order else x


def _split(x: torch.Tensor, axes: Sequence[Sequence[Expr]], syms: Mapping[str, int]) -> torch.Tensor:
    """A view of x with every axis cut into the given extents."""
    shape: list[int] = []
    strides: list[int] = []
    for group, n, stride in zip(axes, x.shape, x.stride(), strict=True):
        extents = [n] if len(group) == 1 else [extent(e, syms) for e in group]
        step = [stride]
        for inner in reversed(extents[1:]):
            step.append(step[-1] * inner)
        shape += extents
        strides += reversed(step)
    return x.as_strided(shape, strides, x.storage_offset())


_View = Callable[[Sequence[object], Mapping[str, torch.Tensor], Mapping[str, int]], torch.Tensor | None]


def _output_view(lowered: Lowered, o: OutputBinding) -> _View:
    if o.position is not None:
        position = o.position
        return lambda args, results, syms: args[position]  # type: ignore[return-value]
    if o.name is None:
        return lambda args, results, syms: None
    name = o.name
    if o.offset is None and _already(lowered, o):
        return lambda args, results, syms: results[name]
    shape, strides = shape_function(o.shape), shape_function(o.strides)
    if o.gaps:

        def copied(
            args: Sequence[object], results: Mapping[str, torch.Tensor], syms: Mapping[str, int]
        ) -> torch.Tensor:
            packed = results[name]
            size = shape(syms)
            out = torch.empty_strided(size, strides(syms), dtype=packed.dtype, device=packed.device)
            once, given = out, packed.reshape(size)
            for axis, step in enumerate(out.stride()):
                if step == 0 and size[axis] > 1:  # an expanded axis is one element in memory
                    once, given = once.narrow(axis, 0, 1), given.narrow(axis, 0, 1)
            once.copy_(given)
            return out

        return copied
    if o.offset is not None:
        first = shape_function([o.offset])

        def part(args: Sequence[object], results: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> torch.Tensor:
            whole = results[name]
            return whole.as_strided(shape(syms), strides(syms), whole.storage_offset() + first(syms)[0])

        return part
    return lambda args, results, syms: results[name].as_strided(shape(syms), strides(syms))


def _already(lowered: Lowered, o: OutputBinding) -> bool:
    """Whether the program's (contiguous) result has the wanted shape and strides as it is."""
    assert o.name is not None
    made = lowered.program.shape_of(o.name)
    if len(made) != len(o.shape) or any(not same(a, b) for a, b in zip(made, o.shape, strict=True)):
        return False
    expected: Expr = const(1)
    for size, stride in zip(reversed(o.shape), reversed(o.strides), strict=True):
        if not is_one(size) and not same(stride, expected):
            return False
        expected = simplify(expected * size, {})
    return True
