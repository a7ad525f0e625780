"""Capture a module's forward, or its forward and backward in one program, as AOTAutograd makes them.

AOTAutograd traces a joint graph (arguments and gradients of the results in, results and gradients
of the arguments out) before it is partitioned. Laws that move work between the passes need it:
what the backward may read is decided after them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import default_partition

from tilefold.errors import UnsupportedError
from tilefold.frontend.capture.decompose import decompositions, rewrite_attention
from tilefold.frontend.fuse import own_copy, translated
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.frontend.regions.execute import Executable, Runner
from tilefold.tensor.ir import Program

#: Prefix of the names of the results' gradients.
GRADIENT = "grad"


@dataclass(frozen=True, slots=True)
class Captured:
    """A lowered graph with what it was captured from.

    `arguments`: the graph's tensors in order, without gradients. `parameters`: program inputs that
    are parameters of the module; `late`: those that are gradients of results (none in inference).
    `results`: how many of the graph's results are the module's; the others are gradients of the
    arguments, in order, None where an argument has none.
    """

    lowered: Lowered
    arguments: tuple[torch.Tensor, ...]
    parameters: frozenset[str]
    late: frozenset[str]
    results: int

    def executable(self, program: Program, runner: Runner) -> Executable:
        """The graph with a program that computes the same results (axes may be cut)."""
        return Executable(replace(self.lowered, program=program), runner)


def capture(module: torch.nn.Module, *args: torch.Tensor, training: bool = False, name: str = "") -> Captured:
    """Trace a module on arguments; `training` gives the joint graph.

    UnsupportedError where the module cannot be captured whole, or an operator has no lowering.
    """
    found: list[tuple[torch.fx.GraphModule, int]] = []
    given: list[tuple[torch.Tensor, ...]] = []

    def partition(graph: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        found.append((graph, num_fwd_outputs))
        return default_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    def whole(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Any:
        if not training:
            output = next(iter(gm.graph.find_nodes(op="output")))
            found.append((gm, len(output.args[0])))
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, examples: Sequence[object]) -> Callable[..., object]:
        rewrite_attention(gm)
        compiled = aot_module_simplified(
            gm,
            examples,
            fw_compiler=whole,
            bw_compiler=whole,
            inference_compiler=whole,
            decompositions=dict(decompositions()),
            partition_fn=partition,
        )

        def call(*real: torch.Tensor) -> object:
            given.append(real)
            return compiled(*real)

        return call

    def forward(*real: torch.Tensor) -> object:  # Dynamo limits how often one code object is compiled: its own
        return module(*real)

    run = torch.compile(own_copy(forward), backend=backend, fullgraph=True, dynamic=False)
    with torch.set_grad_enabled(training):
        translated(run, *args)
    if not found:
        raise UnsupportedError(
            "the module computes nothing to differentiate", hint="give arguments that need gradients"
        )
    graph, results = found[0]
    titles = _titles(module, args, given[0])
    missing = len(graph.graph.find_nodes(op="placeholder")) - len(titles)
    names = [*titles, *(f"{GRADIENT}{n}" for n in range(missing))]
    lowered = lower(graph, name=name or type(module).__name__.lower(), names=names)
    return _described(lowered, names, len(titles), given[0], results)


def _titles(module: torch.nn.Module, args: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> list[str]:
    """Names of the graph's tensors: of parameters and buffers, and of the arguments of `forward`."""
    names = {id(t): n.replace(".", "_") for n, t in (*module.named_buffers(), *module.named_parameters())}
    signature = inspect.signature(module.forward).parameters.values()
    plain = [p.name for p in signature if p.kind is not p.VAR_POSITIONAL]
    for n, a in enumerate(args):
        names.setdefault(id(a), plain[n] if n < len(plain) else f"arg{n}")
    return [names.get(id(t), f"tensor{n}") for n, t in enumerate(real)]


def _described(
    lowered: Lowered, names: Sequence[str], arguments: int, real: Sequence[torch.Tensor], results: int
) -> Captured:
    """Names of the program's inputs that are parameters, and that are gradients."""
    parameters = {
        b.name
        for b in lowered.inputs
        if b.position is not None and b.position < arguments and isinstance(real[b.position], torch.nn.Parameter)
    }
    late = {b.name for b in lowered.inputs if b.position is not None and b.position >= arguments}
    return Captured(lowered, tuple(real), frozenset(parameters), frozenset(late), results)


@dataclass(frozen=True, slots=True)
class Exact:
    """A float64 run: what a captured graph has to be called with, and what it has to return."""

    inputs: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor | None, ...]


def in_float64(module: torch.nn.Module, captured: Captured, args: Sequence[torch.Tensor]) -> Exact:
    """The module run eagerly in float64; of a joint graph also its gradients, for random gradients of the results."""
    names: Mapping[int, str] = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    wide = {id(a): _wide(a) for a in (*args, *module.parameters(), *module.buffers())}
    state = {n: wide[i] for i, n in names.items()}
    made = torch.func.functional_call(module, state, tuple(wide[id(a)] for a in args))
    results = made if isinstance(made, tuple | list) else (made,)
    primals = [wide[id(a)] for a in captured.arguments]
    inputs = tuple(p.detach() for p in primals)
    expected = tuple(r.detach() for r in results)
    if captured.results == len(captured.lowered.outputs):
        return Exact(inputs, expected)
    gen = torch.Generator().manual_seed(7)
    wanted = [r for r in results if r.requires_grad]
    gradients = [torch.randn(r.shape, generator=gen, dtype=r.dtype) for r in wanted]
    needed = [p for p in primals if p.requires_grad]
    found = iter(torch.autograd.grad(wanted, needed, gradients, allow_unused=True))
    of_arguments = tuple(next(found) if p.requires_grad else None for p in primals)
    return Exact((*inputs, *gradients), (*expected, *of_arguments))


def _wide(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)
