"""The Dynamo backend "tilefold": `torch.compile(model, backend="tilefold")`.

Automatic use never fails: what Tilefold does not cover, or cannot compile, runs elsewhere, and the
`tilefold` logger and the records in `regions.compilations` say what and why. AOTAutograd hands
over inference, forward and backward graphs alike. Sizes stay symbolic, so that a function compiled
with dynamic shapes serves every length.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tilefold.errors import TilefoldError
from tilefold.frontend import first_use  # noqa: F401 (for what it imports)
from tilefold.frontend.decompose import decompositions, rewrite_attention
from tilefold.frontend.execute import interpreted
from tilefold.frontend.regions import CompileProgram, Options, compile_graph
from tilefold.pipeline import compile_program

#: (ATen graph, names for its placeholders) -> a callable with the graph's signature.
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[str] | None], Callable[..., object]]

_numbers = itertools.count()
#: Ways to run a program, by the name that `options={"runner": ...}` takes.
RUNNERS: Mapping[str, CompileProgram] = {
    "pipeline": compile_program,
    "interpreter": interpreted,
}


def backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], *, options: Mapping[str, object] | None = None
) -> Callable[..., object]:
    """Entry point for Dynamo.

    options: `runner` ("pipeline" or "interpreter"), `leftover` ("inductor" or "eager").
    TilefoldError on an unknown option.
    """
    given = dict(options or {})
    runner, leftover = given.pop("runner", "pipeline"), given.pop("leftover", "inductor")
    if given or runner not in RUNNERS or leftover not in ("inductor", "eager"):
        wrong = next(iter(given), runner if runner not in RUNNERS else leftover)
        raise TilefoldError(
            f"unknown option {wrong!r} of the tilefold backend",
            hint=f"runner: {' or '.join(RUNNERS)}; leftover: inductor or eager",
        )
    return compile_captured(gm, example_inputs, Options(RUNNERS[str(runner)], leftover=leftover))  # type: ignore[arg-type]


def compile_captured(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], options: Options
) -> Callable[..., object]:
    """Compile a Dynamo graph: fused attention taken apart, AOTAutograd, then region by region.

    With `options.strict` the forward must be covered whole; the backward may fall back.
    """
    name = f"graph{next(_numbers)}"

    def compiler(kind: str, how: Options) -> GraphCompiler:
        def run(graph: torch.fx.GraphModule, titles: Sequence[str] | None) -> Callable[..., object]:
            return compile_graph(graph, how, name=f"{name}_{kind}", titles=titles)

        return run

    # guards are complete when the backward is compiled: it has the sizes that the forward made numbers, and no more
    lenient = replace(options, strict=False, specialise=False)
    return aot(
        gm, example_inputs, compiler("inference", options), compiler("forward", options), compiler("backward", lenient)
    )


def aot(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    inference: GraphCompiler,
    forward: GraphCompiler | None = None,
    backward: GraphCompiler | None = None,
) -> Callable[..., object]:
    """Hand a Dynamo graph to AOTAutograd; each ATen graph goes to its compiler, which also gets readable
    names for the placeholders (None for a backward graph). `forward` and `backward` default to `inference`.
    """
    rewrite_attention(gm)
    titles = [readable(n) for n in gm.graph.find_nodes(op="placeholder")]

    def boxed(compiler: GraphCompiler, names: Sequence[str] | None) -> Callable[..., object]:
        return lambda graph, inputs: make_boxed_func(compiler(graph, names))

    return aot_module_simplified(
        gm,
        example_inputs,
        fw_compiler=boxed(forward or inference, titles),
        bw_compiler=boxed(backward or inference, None),
        inference_compiler=boxed(inference, titles),
        decompositions=dict(_table()),
        partition_fn=min_cut_rematerialization_partition,
    )


@functools.cache
def _table() -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    return decompositions()


def readable(node: torch.fx.Node) -> str:
    """A placeholder's name without Dynamo's mangling: `L_self_modules_fc_parameters_weight_` -> `fc_weight`."""
    name = re.sub(r"^[LlGg]_+", "", node.name)
    name = re.sub(r"(^|_)(self|modules|parameters|buffers|kwargs|args)_(?=.)", r"\1", name)
    name = re.sub(r"(^|_)(self|modules|parameters|buffers|kwargs|args)_(?=.)", r"\1", name)
    name = name.strip("_")
    return f"arg{name}" if name.isdigit() else name or node.name
