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
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.utils import counters as torch_counts
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from tilefold.frontend.capture import (
    cuda_graphs,
    first_use,  # noqa: F401 (for what it imports)
)
from tilefold.frontend.capture.as_stored import stored_otherwise
from tilefold.frontend.capture.counters import Counters
from tilefold.frontend.capture.cuda_graphs import Boxed, CudaGraphs, Kind
from tilefold.frontend.capture.decompose import decompositions, rewrite_attention
from tilefold.frontend.capture.in_place import written_in_place
from tilefold.frontend.capture.options import read_options
from tilefold.frontend.capture.random import eagers_numbers
from tilefold.frontend.capture.result_names import name_results
from tilefold.frontend.capture.written_back import Mixed, WrittenBack, check_not_mixed
from tilefold.frontend.regions.assemble import CompiledGraph, Options, compilations, compile_graph
from tilefold.frontend.regions.direct import expect_kernels
from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.layouts import channels_last
from tilefold.frontend.regions.one_chunk import in_one_piece
from tilefold.frontend.regions.replaced import PLACES
from tilefold.frontend.regions.summary import Told
from tilefold.frontend.registered import nested
from tilefold.frontend.training.saving import Partitioner, partitioner
from tilefold.frontend.warm.graphs import Again, Around, Session, session_of
from tilefold.garbage import collecting_later
from tilefold.log import progress

#: (ATen graph, names for its placeholders) -> a callable with the graph's signature.
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[str] | None], Callable[..., object]]

_numbers = itertools.count()


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Entry point for Dynamo.

    mode: one of Inductor's. options: `runner` ("pipeline" or "interpreter"), `leftover` ("inductor" or "eager"),
    `partition` ("folds" or "min_cut"), `activation_memory_budget` (0 to 1), and those of Inductor
    (`frontend.capture.options`). TilefoldError on an unknown one.
    """
    how = read_options(mode, options)
    undo = rewrite_attention(gm)
    counters = Counters.taken_out(gm)
    part, title = Part("the graph", []), f"graph{next(_numbers)}"
    told = Told(title)
    how = replace(how, on_compiled=told.add)
    with progress(title), collecting_later():
        made = part.attempt(lambda: compile_captured(gm, example_inputs, how, title))
    if made is None:  # AOTAutograd failed, with our decompositions or without
        calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        told.records[:] = [CompiledGraph(part.name, [], part.fallbacks, len(calls))]
        compilations.append(told.records[0])
        counters.put_back()
        undo()
    told.tell()
    return gm.forward if made is None else counters.around(made)


def compile_captured(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    options: Options,
    title: str | None = None,
) -> Callable[..., object]:
    """Compile a Dynamo graph: fused attention taken apart, AOTAutograd, then region by region.

    With `options.strict` the forward must be covered whole; the backward may fall back.
    """
    name = title or f"graph{next(_numbers)}"
    graphs = None if options.cuda_graphs is None else CudaGraphs(options.cuda_graphs)

    def compiler(kind: str, how: Options) -> GraphCompiler:
        def run(graph: torch.fx.GraphModule, titles: Sequence[str] | None) -> Callable[..., object]:
            if kind == "inference":
                channels_last(graph)
            return compile_graph(graph, how, name=f"{name}_{kind}", titles=titles)

        return run

    # guards are complete when the backward is compiled: it has the sizes that the forward made numbers, and no more
    lenient = replace(options, strict=False, specialise=False)

    def wrap(kind: Kind, graph: torch.fx.GraphModule, run: Boxed) -> Boxed:
        return run if graphs is None else graphs.wrapped(kind, graph, run, f"{name}_{kind}")

    compilers = compiler("inference", options), compiler("forward", options), compiler("backward", lenient)
    partition = partitioner(options.partition, options.memory_budget)
    eagers = eagers_numbers(options.inductor)
    alone = graphs is None

    def keep(again: Again) -> Session | None:
        return session_of(gm, example_inputs, options, again, name)

    return aot(
        gm,
        example_inputs,
        *compilers,
        wrap=wrap,
        partition=partition,
        eagers=eagers,
        in_place=alone and not options.strict,
        replacing=alone,
        keep=keep,
    )


def aot(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    inference: GraphCompiler,
    forward: GraphCompiler | None = None,
    backward: GraphCompiler | None = None,
    wrap: Callable[[Kind, torch.fx.GraphModule, Boxed], Boxed] = lambda kind, graph, run: run,
    partition: Partitioner | None = None,
    eagers: bool = False,
    in_place: bool = False,
    replacing: bool = False,
    keep: Callable[[Again], Session | None] = lambda again: None,
) -> Callable[..., object]:
    """Hand a Dynamo graph to AOTAutograd; each ATen graph goes to its compiler, which also gets readable
    names for the placeholders. `forward` and `backward` default to `inference`.

    wrap: what is put around a compiled graph. partition: what cuts forward and backward apart (None: Tilefold's).
    eagers: random numbers are eager's. in_place: parts of arguments are written where they lie (`in_place`).
    replacing: so may be whole ones, where nothing is differentiated (`regions.replaced`). keep: how the graph is kept
    for later processes (`warm.graphs`), given what compiles one of its ATen graphs.

    Inside DistributedDataParallel, Dynamo hands over one graph a bucket of gradients and has the first call of each
    return fake tensors. By torch's counter it knows that AOTAutograd does so; else that call would be the user's.
    """
    rewrite_attention(gm)
    titles = [readable(n) for n in gm.graph.find_nodes(op="placeholder")]

    compilers: Mapping[Kind, GraphCompiler] = {
        "inference": inference,
        "forward": forward or inference,
        "backward": backward or inference,
    }

    def compiled(kind: Kind, graph: torch.fx.GraphModule) -> tuple[Boxed, Around, object]:
        """A graph, compiled; what is done around that, and the compiled graph alone."""
        if kind == "forward":
            check_not_mixed()
        otherwise = stored_otherwise(graph.graph, gradients=kind == "backward")
        if in_place and not otherwise:
            written_in_place(graph)
        written = WrittenBack.taken_out(graph)
        if replacing and kind == "inference" and not otherwise:
            graph.meta[PLACES] = written.places
        name_results(graph.graph)
        names = backward_titles(graph, titles) if kind == "backward" else titles
        run = compilers[kind](graph, names)  # which may change the graph
        # a backward has the only references to what was saved; a forward's arguments live on with the caller
        given_up = getattr(run, "boxed", None) if kind == "backward" else None
        taking = make_boxed_func(run) if given_up is None else _marked_boxed(_function(given_up))
        return wrap(kind, graph, taking), Around(tuple(otherwise), written.places), run

    session = keep(lambda kind, graph: compiled(kind, graph)[::2])

    def boxed(kind: Kind) -> Callable[..., object]:
        def run(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Boxed:
            in_one_piece(graph)  # loops have no text
            text = None if session is None else session.text(kind, graph)
            with nullcontext() if session is None else session.aside():
                inner, around, alone = compiled(kind, graph)
            whole = _marked_boxed(around(inner))
            return whole if session is None else session.kept(kind, text, around, alone, whole)

        made = _untraced(run) if kind == "backward" else run
        return made if session is None else session.serializable(made)

    def made(*, writes: bool) -> Callable[..., object]:
        with nullcontext() if session is None else session.compiling(functools.partial(expect_kernels, example_inputs)):
            run = aot_module_simplified(
                gm,
                example_inputs,
                fw_compiler=boxed("forward"),
                bw_compiler=boxed("backward"),
                inference_compiler=boxed("inference"),
                decompositions=dict(_table(eagers)),
                keep_inference_input_mutations=writes,
                partition_fn=partition or partitioner(),
            )
        torch_counts["aot_autograd"]["total"] += 1
        return run

    if session is None:
        expect_kernels(example_inputs)
    with nested.taken_apart():
        try:
            return made(writes=True)
        except Mixed:
            return made(writes=False)


def _untraced(compiler: Callable[..., Boxed]) -> Callable[..., Boxed]:
    """A compiler of backwards that Dynamo does not look into, nor into what it makes: a compiled function may ask for
    gradients itself (`torch.autograd.grad`), while Dynamo is on. torch's own back ends do the same."""

    def compiled(*args: Any) -> Boxed:
        return _marked_boxed(torch._dynamo.disable(compiler(*args), reason="it is compiled"))

    made: Callable[..., Boxed] = torch._dynamo.disable(compiled, reason="it is the compiler")
    return made


def _function(run: Boxed) -> Boxed:
    """A method as a function, which can be marked."""
    return lambda args: run(args)


def _marked_boxed(run: Boxed) -> Boxed:
    """`run` with the mark by which AOTAutograd knows that it takes a list of arguments."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


#: Called by `torch._dynamo.reset()`.
backend.reset = cuda_graphs.reset  # type: ignore[attr-defined]


@functools.cache
def _table(eagers: bool) -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    return decompositions(eagers_numbers=eagers)


def backward_titles(graph: torch.fx.GraphModule, titles: Sequence[str]) -> list[str]:
    """Names for the placeholders of a backward graph: of arguments (`primals_3`) that of the third one, `titles[2]`; of
    gradients (`tangents_1`) `grad_1`; of what the forward saves its own."""

    def title(name: str) -> str:
        kind, _, number = name.rpartition("_")
        if kind == "primals" and number.isdigit() and int(number) <= len(titles):
            return titles[int(number) - 1]
        return f"grad_{number}" if kind == "tangents" else name

    return [title(n.name) for n in graph.graph.find_nodes(op="placeholder")]


def readable(node: torch.fx.Node) -> str:
    """A placeholder's name without Dynamo's mangling: `L_self_modules_fc_parameters_weight_` -> `fc_weight`."""
    name = re.sub(r"^[LlGg]_+", "", node.name)
    name = re.sub(r"(^|_)(self|modules|parameters|buffers|kwargs|args)_(?=.)", r"\1", name)
    name = re.sub(r"(^|_)(self|modules|parameters|buffers|kwargs|args)_(?=.)", r"\1", name)
    name = name.strip("_")
    return f"arg{name}" if name.isdigit() else name or node.name
