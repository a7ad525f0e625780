"""Compile the groups of a partitioned graph and put the graph together again."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.frontend.direct import executable
from tilefold.frontend.execute import Executable, Runner
from tilefold.frontend.fx_to_tensor import Lowered
from tilefold.frontend.partition import Extracted, Fallback, Group, Partition, extract, is_trivial, partition
from tilefold.frontend.specialise import Sizes, lower_specialised
from tilefold.tensor.ir import Program

log = logging.getLogger("tilefold")

#: Leftovers of fewer nodes than this run op by op: compiling them costs more than it gives.
WORTH_INDUCTOR = 2
#: What a compiler that is not ours raises where it fails; its own errors are RuntimeErrors.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class CompileProgram(Protocol):
    """`pipeline.compile_program`, or a stand-in. `device`: type of the device that the tensors are on."""

    def __call__(self, program: Program, /, *, device: str) -> Runner: ...


@dataclass(frozen=True, slots=True)
class Options:
    """How a graph is compiled.

    strict: anything Tilefold cannot compile is an error (`fuse`), not a fallback.
    leftover: what runs the rest. on_compiled: called with the record of every compiled graph.
    specialise: guards may be added, so that head counts and head sizes may become numbers.
    """

    compile_program: CompileProgram
    strict: bool = False
    leftover: Literal["inductor", "eager"] = "inductor"
    on_compiled: Callable[[CompiledGraph], None] | None = None
    specialise: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """A compiled region: its lowering and what runs it."""

    name: str
    lowered: Lowered
    runner: Runner = field(repr=False)


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """The record of one compiled graph: regions that Tilefold runs, and what it left to others and why.

    A kernel that only fails to build when it is first run adds to `fallbacks` then.
    """

    name: str
    regions: tuple[Region, ...]
    fallbacks: list[Fallback]


#: Records of the latest compilations of this process, oldest first.
compilations: deque[CompiledGraph] = deque(maxlen=64)


class _Call(torch.nn.Module):
    """A callable as a module, so that a graph can hold it."""

    def __init__(self, run: Callable[..., Sequence[object]]):
        super().__init__()
        self.run = run

    def forward(self, *args: object) -> Sequence[object]:
        return self.run(*args)


class _Guarded:
    """A region that runs op by op from its first failure on (kernels are built when first needed)."""

    def __init__(self, name: str, run: Executable, module: torch.fx.GraphModule, fallbacks: list[Fallback]):
        self.name, self.run, self.module, self.fallbacks = name, run, module, fallbacks
        self.failed = False

    def __call__(self, *args: object) -> Sequence[object]:
        if not self.failed:
            try:
                return self.run(*args)
            except TilefoldError as err:
                self.failed = True
                self.fallbacks.append(Fallback(self.name, f"{type(err).__name__}: {err.message}", err.loc))
                log.warning("%s runs op by op: %s", self.name, err.message)
        return self.module(*args)


def compile_graph(
    gm: torch.fx.GraphModule, options: Options, *, name: str, titles: Sequence[str] | None = None
) -> Callable[..., Sequence[object]]:
    """A callable with the graph's signature, made of regions and leftovers.

    titles: names for the placeholders. With `options.strict` raises the first TilefoldError.
    """
    parts = partition(gm)
    if options.strict and parts.fallbacks:
        first = parts.fallbacks[0]
        raise UnsupportedError(first.reason, loc=first.loc, hint=STRICT_HINT)
    build = _Assembler(gm, parts, options, name, titles)
    whole = build.assemble()
    record = CompiledGraph(name, tuple(build.regions), build.fallbacks)
    for f in record.fallbacks:
        log.info("%s: left to %s: %s", name, options.leftover, f)
    compilations.append(record)
    if options.on_compiled is not None:
        options.on_compiled(record)
    return whole


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
        for group in self.parts.groups:
            self._scalars(group.level - 1)
            self._group(group)
            self._scalars(group.level)
        output = self.gm.graph.output_node()
        self.graph.output(torch.fx.map_arg(output.args[0], self.made.__getitem__))
        return self._alone() or torch.fx.GraphModule(self.root, self.graph).forward

    def _alone(self) -> Callable[..., Sequence[object]] | None:
        """The only part itself, if the outer graph hands it arguments and returns its results as they are."""
        calls = [n for n in self.graph.nodes if n.op == "call_module"]
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        results = self.graph.output_node().args[0]
        if len(calls) != 1 or not isinstance(results, tuple | list):
            return None
        call = calls[0]
        if any(not isinstance(r, torch.fx.Node) or r.target is not _item or r.args[0] is not call for r in results):
            return None
        if any(a not in placeholders for a in call.args):
            return None
        run = getattr(self.root, str(call.target)).run
        given = [placeholders.index(a) for a in call.args]
        wanted = [r.args[1] for r in results if isinstance(r, torch.fx.Node)]

        def alone(*args: object) -> Sequence[object]:
            out = run(*[args[k] for k in given])
            return [out[k] for k in wanted]

        return alone

    def _scalars(self, upto: int) -> None:
        for level, n in self.parts.scalars:
            if level <= upto and n not in self.made:
                self._copy(n)

    def _copy(self, n: torch.fx.Node) -> None:
        if n not in self.made:
            self.made[n] = self.graph.node_copy(n, self.made.__getitem__)

    def _group(self, group: Group) -> None:
        if is_trivial(group):
            self._eager(group)
            return
        part = extract(self.gm, group, self.parts.aliases)
        if not part.results:
            return
        run = self._region(part) if group.covered else None
        if run is None:
            run = self._leftover(group, part)
        if run is None:
            self._eager(group)
        else:
            self._call(part, run)

    def _eager(self, group: Group) -> None:
        for n in group.nodes:
            self._copy(n)

    def _call(self, part: Extracted, run: Callable[..., Sequence[object]]) -> None:
        target = f"part_{len(list(self.root.children()))}"
        self.root.add_module(target, _Call(run))
        call = self.graph.call_module(target, tuple(self.made[n] for n in part.inputs))
        for k, n in enumerate(part.results):
            self.made[n] = self.graph.call_function(_item, (call, k))

    def _region(self, part: Extracted) -> Callable[..., Sequence[object]] | None:
        """The group compiled by Tilefold; None (and a record of why) where that fails."""
        name = f"{self.name}_{len(self.regions)}"
        names = [self.titles.get(n, n.name) for n in part.inputs]
        try:
            lowered = lower_specialised(part.module, self.sizes, name=name, names=names)
            with _disable_current_modes():  # the proofs evaluate real tensors: not under AOT's fake mode
                runner = self.options.compile_program(lowered.program, device=device_of(part))
        except TilefoldError as err:
            if self.options.strict:
                raise
            self.fallbacks.append(Fallback(name, f"{type(err).__name__}: {err.message}", err.loc))
            return None
        self.regions.append(Region(name, lowered, runner))
        run = executable(lowered, runner)
        return run if self.options.strict else _Guarded(name, run, part.module, self.fallbacks)

    def _leftover(self, group: Group, part: Extracted) -> Callable[..., Sequence[object]] | None:
        """The group compiled by Inductor; None where op by op is better or the only way."""
        if self.options.leftover == "eager" or len(group.nodes) < WORTH_INDUCTOR or _draws_numbers(group):
            return None
        from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415 (a second to load)
        from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

        fakes = [n.meta["val"] for n in part.inputs]
        # a tensor that the part itself makes must be fake too; no mode is on while a backward graph is compiled
        mode = detect_fake_mode([n.meta.get("val") for n in self.gm.graph.nodes])
        try:
            with mode or nullcontext():
                module = make_fx(part.module, decomposition_table=select_decomp_table())(*fakes)
            output = module.graph.output_node()
            output.meta["user_visible_output_idxs"] = list(range(len(part.results)))
            with _no_strides_reported():
                compiled = compile_fx_inner(module, fakes)
        except _FAILURES as err:  # of another compiler: op by op it still runs
            self.fallbacks.append(Fallback(f"{self.name} leftover", f"Inductor failed, runs op by op: {_first(err)}"))
            return None
        return lambda *args: compiled(list(args))


@contextmanager
def _no_strides_reported() -> Iterator[None]:
    """Inductor tells AOTAutograd the strides of what it compiled, which takes them for those of the whole forward."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported


def device_of(part: Extracted) -> str:
    """The one kind of device that a region computes on. UnsupportedError: several, or one without a back end."""
    values = [n.meta.get("val") for n in (*part.inputs, *part.results)]
    found = {v.device for v in values if isinstance(v, torch.Tensor)}
    if len(found) > 1:
        raise UnsupportedError(f"tensors of {', '.join(sorted(map(str, found)))} in one region", hint="move them first")
    kind = next(iter(found)).type if found else "cpu"
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"there is no back end for {kind}")
    return kind


def _item(results: Sequence[object], k: int) -> object:
    return results[k]


def _draws_numbers(group: Group) -> bool:
    """Whether a random operator is in the group: op by op it draws eager's numbers."""
    tag = torch.Tag.nondeterministic_seeded
    return any(isinstance(n.target, torch._ops.OpOverload) and tag in n.target.tags for n in group.nodes)


def _first(err: Exception) -> str:
    return re.sub(r"\s+", " ", str(err).splitlines()[0]) if str(err) else type(err).__name__
