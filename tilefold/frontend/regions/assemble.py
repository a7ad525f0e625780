"""Compile the groups of a partitioned graph and put the graph together again."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import torch

from tilefold.backends.triton.refusals import refused
from tilefold.errors import SourceLoc, TilefoldError, UnsupportedError
from tilefold.frontend.capture.complex_parts import complex_parts
from tilefold.frontend.capture.random import gather_seeds
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.source import location
from tilefold.frontend.regions.added_rows import own_additions
from tilefold.frontend.regions.apart import scans_apart
from tilefold.frontend.regions.constants import fold_constants
from tilefold.frontend.regions.devices import constant_elsewhere, device_of, numbers_elsewhere
from tilefold.frontend.regions.direct import executable, start_building
from tilefold.frontend.regions.early import build_kernels_of
from tilefold.frontend.regions.execute import Runner
from tilefold.frontend.regions.extract import Extracted, extract
from tilefold.frontend.regions.guard import Fallback, Guarded, Part, say_once
from tilefold.frontend.regions.host_numbers import numbers_on_device
from tilefold.frontend.regions.leftover import compile_leftover
from tilefold.frontend.regions.one_a_row import one_a_row
from tilefold.frontend.regions.one_chunk import in_one_piece
from tilefold.frontend.regions.outer import Alone, Outer, item
from tilefold.frontend.regions.partition import (
    Group,
    Partition,
    count_operators,
    halves,
    is_meant,
    is_own,
    is_trivial,
    operators,
    partition,
)
from tilefold.frontend.regions.prefixes import own_prefixes
from tilefold.frontend.regions.real import on_real_tensors
from tilefold.frontend.regions.replaced import replace as replace_arguments
from tilefold.frontend.regions.replaced import replaced
from tilefold.frontend.regions.rows import Loop
from tilefold.frontend.regions.scans import fold_scans
from tilefold.frontend.regions.specialise import Sizes, lower_specialised
from tilefold.frontend.regions.spelled import spell_complex
from tilefold.garbage import collecting_later
from tilefold.log import at_part, progress, warn
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.tuner.program import tune_steps
from tilefold.tensor.ir import Program

log = logging.getLogger("tilefold")


class CompileProgram(Protocol):
    """`pipeline.compile_program`, or a stand-in. `device`: type of the device that the tensors are on."""

    def __call__(self, program: Program, /, *, device: str) -> Runner: ...


@dataclass(frozen=True, slots=True)
class Options:
    """How a graph is compiled.

    strict: anything Tilefold cannot compile is an error (`fuse`), not a fallback.
    leftover: what runs the rest. on_compiled: called with the record of every compiled graph.
    specialise: guards may be added, so that head counts and head sizes may become numbers. inductor: what leftovers
    are compiled with. cuda_graphs: Inductor's settings for them, where they are wanted. partition, memory_budget: who
    chooses what a forward saves, and how much of what is fastest (None: as torch's configuration has it). tune:
    configurations of kernels on GPUs are timed.
    """

    compile_program: CompileProgram
    strict: bool = False
    leftover: Literal["inductor", "eager"] = "inductor"
    on_compiled: Callable[[CompiledGraph], None] | None = None
    specialise: bool = True
    inductor: Mapping[str, object] = field(default_factory=dict)
    cuda_graphs: Mapping[str, object] | None = None
    partition: Literal["folds", "min_cut"] = "folds"
    memory_budget: float | None = None
    tune: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A compiled region: its lowering and what runs it."""

    name: str
    lowered: Lowered
    runner: Runner = field(repr=False)


@dataclass(frozen=True, slots=True)
class Counts:
    """What was made of graphs: regions, their kernels, calls of PyTorch's library, operators left to others, and
    why (a sentence's end)."""

    regions: int = 0
    kernels: int = 0
    calls: int = 0
    left: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """The record of one compiled graph: regions that Tilefold runs, and what it left to others and why. `left`: how
    many operators that is, with those that are better off in their company, but for `called`, which PyTorch's library
    computes by choice. `seconds`: of compilation. `earlier`: what an earlier process made of it, whose regions this one
    has not.

    A kernel that only fails to build when it is first run adds to `fallbacks` then, and what takes its place to
    `regions`.
    """

    name: str
    regions: list[Region]
    fallbacks: list[Fallback]
    left: int = 0
    seconds: float = 0.0
    called: int = 0
    earlier: Counts | None = None


#: Records of the latest compilations of this process, oldest first.
compilations: deque[CompiledGraph] = deque(maxlen=64)


class _Call(torch.nn.Module):
    """A callable as a module, so that a graph can hold it."""

    def __init__(self, run: Callable[..., object]):
        super().__init__()
        self.run = run

    def forward(self, *args: object) -> Sequence[object]:
        return self.run(*args)  # type: ignore[return-value]


def compile_graph(
    gm: torch.fx.GraphModule, options: Options, *, name: str, titles: Sequence[str] | None = None
) -> Callable[..., Sequence[object]]:
    """A callable with the graph's signature, made of regions and leftovers; the graph itself where that fails.

    titles: names for the placeholders. With `options.strict` raises the first TilefoldError.
    """
    with progress(name), collecting_later():
        if options.strict:
            return _compiled_graph(gm, options, name, titles)
        fallbacks: list[Fallback] = []
        found = Part(name, fallbacks).attempt(lambda: _compiled_graph(gm, options, name, titles))
    if found is None:
        record(CompiledGraph(name, [], fallbacks, count_operators(gm.graph.nodes)), options)
    return found or gm.forward


def record(found: CompiledGraph, options: Options) -> None:
    """Add a record to those of this process, and tell who wants to know."""
    compilations.append(found)
    if options.on_compiled is not None:
        options.on_compiled(found)


def _parted(gm: torch.fx.GraphModule) -> Partition:
    """The parts of a graph, once what concerns all of it has been rewritten."""
    spell_complex()
    in_one_piece(gm)
    complex_parts(gm)
    fold_scans(gm)
    fold_constants(gm)
    numbers_on_device(gm)
    gather_seeds(gm.graph)
    own_prefixes(gm)
    scans_apart(gm)
    one_a_row(gm)
    own_additions(gm)
    return partition(gm)


def _compiled_graph(
    gm: torch.fx.GraphModule, options: Options, name: str, titles: Sequence[str] | None
) -> Callable[..., Sequence[object]]:
    began = time.monotonic()
    parts = _parted(gm)
    if options.strict and parts.fallbacks:
        first = parts.fallbacks[0]
        raise UnsupportedError(first.reason, loc=first.loc, hint=STRICT_HINT)
    build = _Assembler(gm, parts, options, name, titles)
    build.replaced = replaced(gm, parts)
    whole = build.assemble()
    others = [g for g in parts.groups if not g.covered]
    called = sum(is_meant(n) for g in others for n in g.nodes)
    left = sum(map(operators, others)) - called + build.alone[0]
    made = CompiledGraph(name, build.regions, build.fallbacks, left, time.monotonic() - began, called)
    for f in made.fallbacks:
        log.info("%s: left to %s: %s", name, "PyTorch's library" if f.meant else options.leftover, f)
    record(made, options)
    return whole


def assembled(
    gm: torch.fx.GraphModule, options: Options, name: str, titles: Sequence[str] | None
) -> tuple[torch.fx.Graph, torch.nn.Module, Callable[..., Sequence[object]]]:
    """A graph of regions and operators, the modules that it calls (each `run`s a region), and both as a callable."""
    build = _Assembler(gm, _parted(gm), options, name, titles)
    run = build.assemble()
    return build.graph, build.root, run


STRICT_HINT = "use torch.compile(backend='tilefold'), which leaves such parts to another compiler"


class _Assembler:
    """Emits the outer graph, group by group."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        parts: Partition,
        options: Options,
        name: str,
        titles: Sequence[str] | None,
    ):
        self.gm, self.parts, self.options, self.name = gm, parts, options, name
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.made: dict[torch.fx.Node, torch.fx.Node] = {}
        self.regions: list[Region] = []
        self.fallbacks = list(parts.fallbacks)
        self.alone = [0]  # operators that no compiler takes; of the parts of parts as well
        self.replaced: Mapping[torch.fx.Node, torch.fx.Node] = {}
        self.writes = False  # over arguments
        self.sizes = Sizes.of(gm) if options.specialise else None
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.titles = dict(zip(nodes, titles, strict=True)) if titles and len(titles) == len(nodes) else {}

    def assemble(self) -> Callable[..., Sequence[object]]:
        for n in self.gm.graph.nodes:
            if n.op == "placeholder":
                self.made[n] = self.graph.node_copy(n)
            elif n.op == "get_attr":
                setattr(self.root, str(n.target), getattr(self.gm, str(n.target)))
                self.made[n] = self.graph.node_copy(n)
        self._scalars(-1)
        for n in self.parts.aliases:
            self._copy(n)
        for at, group in enumerate(self.parts.groups):
            at_part(f"part {at + 1} of {len(self.parts.groups)}")
            self._scalars(group.level - 1)
            self._group(group)
            self._scalars(group.level)
        output = self.gm.graph.output_node()
        self.graph.output(torch.fx.map_arg(output.args[0], self.made.__getitem__))
        run = self._alone() or torch.fx.GraphModule(self.root, self.graph).forward
        return Outer(run, self.root, self.graph, self.gm.graph, self.name, writes=self.writes)

    def _alone(self) -> Callable[..., Sequence[object]] | None:
        """The only part itself, if the outer graph hands it arguments and returns its results as they are."""
        calls = [n for n in self.graph.nodes if n.op == "call_module"]
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        results = self.graph.output_node().args[0]
        if len(calls) != 1 or not isinstance(results, tuple | list) or any(map(is_own, self.graph.nodes)):
            return None
        call = calls[0]
        wanted: list[int | None] = []
        for r in results:
            if isinstance(r, torch.fx.Node) and r.target is item and r.args[0] is call:
                wanted.append(r.args[1])  # type: ignore[arg-type]
            elif r is None or r in placeholders:
                wanted.append(None if r is None else -1 - placeholders.index(r))  # type: ignore[arg-type]
            else:
                return None
        if any(a not in placeholders for a in call.args):
            return None
        run = getattr(self.root, str(call.target)).run
        given = tuple(placeholders.index(a) for a in call.args)
        return Alone(run, given, tuple(wanted))

    def _scalars(self, upto: int) -> None:
        for level, n in self.parts.scalars:
            if level <= upto and n not in self.made:
                self._copy(n)

    def _copy(self, n: torch.fx.Node) -> None:
        if n not in self.made:
            for a in n.all_input_nodes:  # a size of a view of an argument, say
                self._copy(a)
            self.made[n] = self.graph.node_copy(n, self.made.__getitem__)
            build_kernels_of(n)
            if isinstance(n.target, Loop):
                self.made[n].target = n.target.compiled(partial(self._body, n.target.chunks))

    def _body(self, chunks: int, gm: torch.fx.GraphModule, rows: int) -> Callable[..., Sequence[object]]:
        run = compile_graph(gm, replace(self.options, specialise=False), name=f"{self.name}_rows{rows}")
        if isinstance(run, Outer):
            run.often(chunks)
        return run

    def _group(self, group: Group) -> None:
        if is_trivial(group) or (not group.results and any(map(is_own, group.nodes))):  # which write into arguments
            self._eager(group)
            return
        part = extract(self.gm, group)
        if not part.results:
            return
        if group.covered and constant_elsewhere(part):
            self._eager(group)
            return
        run, moves = self._region(part) if group.covered else (self._leftover(group, part), {})
        if run is None:
            self._eager(group)
        else:
            self._call(part, run, moves)

    def _eager(self, group: Group) -> None:
        for n in group.nodes:
            self._copy(n)

    def _call(self, part: Extracted, run: Callable[..., object], moves: Mapping[torch.fx.Node, torch.device]) -> None:
        target = f"part_{len(list(self.root.children()))}"
        self.root.add_module(target, _Call(run))
        given = tuple(self._moved(n, moves[n]) if n in moves else self.made[n] for n in part.inputs)
        call = self.graph.call_module(target, given)
        for k, n in enumerate(part.results):
            self.made[n] = self.graph.call_function(item, (call, k))

    def _moved(self, n: torch.fx.Node, device: torch.device) -> torch.fx.Node:
        """A number of the host on a region's device: a copy that waits for nothing."""
        copy = torch.ops.aten._to_copy.default
        return self.graph.call_function(copy, (self.made[n],), {"device": device, "non_blocking": True})

    def _region(self, extracted: Extracted) -> tuple[Callable[..., object], Mapping[torch.fx.Node, torch.device]]:
        """The group compiled by Tilefold, in smaller parts where that fails, at last op by op; and the arguments that
        it wants on another device (smaller parts see to theirs themselves)."""
        name = f"{self.name}_{len(self.regions)}"
        moves = numbers_elsewhere(extracted)
        if self.options.strict:
            return self._compiled(extracted, name), moves
        part = Part(name, self.fallbacks, _first_line(extracted), instead="in smaller parts")
        run = part.attempt(lambda: self._compiled(extracted, name))
        if run is None:
            return self._halves(extracted, self.sizes), {}

        def instead() -> Callable[..., object]:
            if moves:  # numbers have moved: op by op
                return extracted.module
            return self._halves(extracted, None)

        return self._again(part, run, extracted, instead), moves

    def _again(
        self, part: Part, run: Callable[..., object], extracted: Extracted, instead: Callable[[], Callable[..., object]]
    ) -> Guarded:
        """A region that is planned once more where one of its kernels cannot be launched: without it; else `instead`.
        An operator that is a kernel by itself is planned as before, which ends it."""
        known = refused()

        def without() -> Callable[..., object]:
            if len(refused()) == len(known):
                return instead()
            planned = part.attempt(lambda: self._compiled(extracted, part.name, again=True))
            return instead() if planned is None else self._again(part, planned, extracted, instead)

        return Guarded(part, run, extracted.module, without)

    def _compiled(self, extracted: Extracted, name: str, *, again: bool = False) -> Callable[..., object]:
        """again: the graph runs already, so that guards can no longer be added."""
        names = [self.titles.get(n, n.name) for n in extracted.inputs]
        lowered = lower_specialised(extracted.module, None if again else self.sizes, name=name, names=names)
        device = device_of(extracted)
        with on_real_tensors():  # the proofs evaluate some
            runner = self.options.compile_program(lowered.program, device=device)
            if self.options.tune and device == "cuda" and isinstance(runner, CompiledProgram):
                tuned(runner, name)
        self.regions.append(Region(name, lowered, runner))
        over = replace_arguments(extracted, lowered, runner, self.replaced)
        self.writes |= bool(over)
        run = executable(lowered, runner, over)
        start_building(run, [n.meta.get("val") for n in extracted.inputs])
        return run

    def _halves(self, extracted: Extracted, sizes: Sizes | None) -> Callable[..., object]:
        """The group as two regions. `sizes`: None where guards can no longer be added, for the graph runs already."""
        parts = halves(extracted.module)
        if parts is None:
            self._by_itself(extracted)
            return extracted.module
        titles = [self.titles.get(n, n.name) for n in extracted.inputs]
        build = _Assembler(extracted.module, parts, self.options, self.name, titles)
        build.regions, build.fallbacks, build.sizes, build.alone = self.regions, self.fallbacks, sizes, self.alone
        return build.assemble()

    def _by_itself(self, extracted: Extracted) -> None:
        """Count an operator that cannot be compiled even alone, and say that it runs in eager mode."""
        self.alone[0] += 1
        if self.fallbacks:
            why, loc = self.fallbacks[-1], _first_line(extracted)
            names = [str(n.target) for n in extracted.module.graph.nodes if n.op == "call_function"]
            say_once(logging.WARNING, f"{' and '.join(names)} runs in eager mode", why.reason, why.loc or loc)

    def _leftover(self, group: Group, extracted: Extracted) -> Callable[..., object] | None:
        """The group compiled by Inductor; None where op by op is better or the only way."""
        if self.options.leftover == "eager":
            return None
        part = Part(f"{self.name} leftover", self.fallbacks, _first_line(extracted), by="Inductor")
        return compile_leftover(group, extracted, part, self.options.inductor)


def tuned(program: CompiledProgram, name: str) -> None:
    """Tune a region's kernels; where that fails they run as they are."""
    try:
        found = tune_steps(program.steps, "quick")
    except (TilefoldError, OSError) as err:
        warn("%s is not tuned: %s", name, err)
    else:
        log.info("%s: %d kernels tuned", name, len(found))


def _first_line(extracted: Extracted) -> SourceLoc | None:
    """The user's line of the first operator that has one."""
    found = (location(n) for n in extracted.module.graph.nodes if n.op == "call_function")
    return next((loc for loc in found if loc is not None), None)
