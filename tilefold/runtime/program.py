"""A compiled program: its steps in order, and everything that they were made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from tilefold.backends.triton.dependent import places
from tilefold.backends.triton.views import Like
from tilefold.block.fuse import Fused
from tilefold.block.ir import work_of
from tilefold.errors import PlanError
from tilefold.runtime.attention import AttentionStep
from tilefold.runtime.gpu_program import GpuProgram
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.orders import strides_in
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.reuse import replaceable
from tilefold.runtime.spans import profiled, span, titles
from tilefold.runtime.step import Step
from tilefold.runtime.steps import AddedStep, FusedStep, GpuStep, KernelStep
from tilefold.runtime.writing import writing
from tilefold.tensor.ir import Program

NO_SPAN = nullcontext()


@dataclass(frozen=True)
class CompiledProgram:
    """A program ready to run: what it was made from, and the steps in order. `planned`: by prices, not greedily.

    `whole`: the steps for `frontend.regions.direct`, which runs them with less work for Python. `titles`: of the steps,
    in a profiler. `replacing_inputs`: results, and the inputs that they are written over.
    """

    program: Program
    fused: Fused
    steps: tuple[Step, ...]
    planned: bool = False
    whole: GpuProgram | None = None
    titles: tuple[str, ...] = field(default=(), init=False)
    _last_use: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _over: dict[int, list[tuple[str, str]]] = field(default_factory=dict, init=False, repr=False)
    replacing_inputs: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _made_before_read(self.program, self.steps)
        object.__setattr__(self, "titles", titles(self.fused.program, self.steps))
        for at, s in enumerate(self.steps):
            self._last_use.update(dict.fromkeys(s.reads, at))
        for name in (*self.program.outputs, *(i.name for i in self.program.inputs)):
            self._last_use.pop(name, None)
        _rows_apart(self.steps, (*self.program.outputs, *(i.name for i in self.program.inputs)))
        _as_read(self.steps, self.program.outputs)
        if not self.program.syms:
            _one_after_the_other(self.steps)
        for at, s in enumerate(self.steps):
            pairs = [(new, old) for new, old in s.over if new not in s.orders] if isinstance(s, GpuStep) else ()
            self._over[at] = [(new, old) for new, old in pairs if self._last_use.get(old) == at]

    def replacing(self, wanted: Collection[tuple[str, str]]) -> dict[str, str]:
        """Those of (result, input) pairs of which the result can take the input's place: it is written by a kernel that
        may (`runtime.reuse.replaceable`), and no later step reads the input. No result and no input is in two pairs.

        On a GPU, of programs that are planned before their first launch: a kernel that does not compile then fails
        while all is as it was. On a CPU `prepare` sees to it.
        """
        last = {t: at for at, s in enumerate(self.steps) for t in s.reads}
        found: dict[str, str] = {}
        for at, s in enumerate(self.steps):
            if isinstance(s, KernelStep) or (self.whole is not None and isinstance(s, GpuStep)):
                pairs = [pair for pair in replaceable(s.fused.block) if pair in wanted]
                found |= {new: old for new, old in pairs if last[old] == at and new not in s.orders}
        return found

    def replace(self, pairs: Mapping[str, str]) -> None:
        """Have every call write these results over these inputs (`replacing`), which are contiguous."""
        self.replacing_inputs.update(pairs)
        for at, s in enumerate(self.steps):
            self._over[at] = [*((new, pairs[new]) for new, _, _ in s.results if new in pairs), *self._over[at]]

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        syms: Mapping[str, int],
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs by name. `out` gives tensors (any strides) that named results are written into."""
        return self._run({**inputs, **(out or {})}, syms)

    def recorded(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder
    ) -> dict[str, torch.Tensor]:
        """The same call, written down: the recorder has been entered."""
        return self._run(dict(inputs), syms, recorder)

    def _run(
        self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        if not self.replacing_inputs:
            return self._stepped(tensors, syms, recorder)
        for s in self.steps:
            if isinstance(s, KernelStep):
                s.prepare(tensors)
        with writing():
            return self._stepped(tensors, syms, recorder)

    def _stepped(
        self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder | None
    ) -> dict[str, torch.Tensor]:
        named = profiled()
        for at, s in enumerate(self.steps):
            self._write_over(at, tensors, syms)
            if recorder is not None:
                recorder.step(self.titles[at], self.where[at])
            with span(self.titles[at]) if named else NO_SPAN:
                if recorder is not None and isinstance(s, FusedStep):
                    s.record(tensors, syms, recorder)
                else:
                    s.run(tensors, syms)
            for t in s.reads:
                if self._last_use.get(t) == at:
                    tensors.pop(t, None)
        return {name: tensors[name] for name in self.program.outputs}

    @cached_property
    def where(self) -> tuple[str, ...]:
        """For errors: what each step computes, and for which line of the user's."""
        lines = {c.name: c.loc for c in self.program.body}
        found = [next((lines[n] for n, _, _ in s.results if lines.get(n) is not None), None) for s in self.steps]
        return tuple(f"in {s.name}" + (f", from {at}" if at else "") for s, at in zip(self.steps, found, strict=True))

    def start_building(self, inputs: Mapping[str, Like], syms: Mapping[str, int]) -> None:
        """Have the kernels that a call on such tensors needs compiled meanwhile, by other processes (GPUs)."""
        device = next((x.device for x in inputs.values()), None)
        if device is None or device.type != "cuda":
            return
        if self.whole is not None:
            self.whole.start_building(inputs, syms, device)
            return
        tensors, kernels = dict(inputs), list[GpuStep]()
        for s in self.steps:
            made = ((name, Like.packed(shape(syms), dtype, device)) for name, dtype, shape in s.results)
            tensors |= {name: _made(s, name, like, syms) for name, like in made}
            kernels += [s] if isinstance(s, GpuStep) else []
        for s in sorted(kernels, key=lambda s: -work_of(s.triton.block)):
            s.start_building(tensors, syms)

    def _write_over(self, at: int, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Let a step's result have the memory of what it reads last (`runtime.reuse`)."""
        made = {name: (dtype, shape) for name, dtype, shape in self.steps[at].results}
        taken: set[str] = set()
        for new, old in self._over[at]:
            (dtype, shape), x = made[new], tensors[old]
            if new in tensors or old in taken:
                continue
            if x.dtype is dtype and x.shape == shape(syms) and x.is_contiguous():
                tensors[new] = x
                taken.add(old)


def _made_before_read(p: Program, steps: Sequence[Step]) -> None:
    """PlanError where a step reads what no step in front of it makes: kernels would read memory that nobody wrote."""
    known = {i.name for i in p.inputs}
    for s in steps:
        missing = set(s.reads) - known
        if missing:
            raise PlanError(f"{s.name} reads {', '.join(sorted(missing))} before it is made")
        known.update(name for name, _, _ in s.results)


def _rows_apart(steps: Sequence[Step], kept: Collection[str]) -> None:
    """Tell products of the library which of their results may have their rows apart: those that steps of a GPU read,
    which all take any strides. kept: names that callers see."""
    readers: dict[str, list[Step]] = {}
    for s in steps:
        for t in s.reads:
            readers.setdefault(t, []).append(s)
    for s in steps:
        if isinstance(s, LibraryStep):
            mine = readers.get(s.name, ())
            s.apart = s.name not in kept and bool(mine) and all(isinstance(r, GpuStep) for r in mine)


def _as_read(steps: Sequence[Step], kept: Collection[str]) -> None:
    """Have kernels write their results as products of the library read them. kept: names that callers see. Other
    kernels may read them too, which take any strides."""
    readers: dict[str, list[Step]] = {}
    for s in steps:
        for t in s.reads:
            readers.setdefault(t, []).append(s)
    for s in steps:
        if isinstance(s, AttentionStep):
            mine = readers.get(s.name, ())
            s.packed = s.name in kept or not all(isinstance(r, LibraryStep | FusedStep | AttentionStep) for r in mine)
        for name in [name for name, _, _ in s.results if name not in kept] if isinstance(s, FusedStep) else ():
            mine = readers.get(name, ())
            orders = [r.wanted_order(name) for r in mine if isinstance(r, LibraryStep)]
            wanted = next((order for order in orders if order is not None), None)
            if wanted is not None and all(isinstance(r, LibraryStep | FusedStep | AttentionStep) for r in mine):
                assert isinstance(s, FusedStep)
                s.orders[name] = wanted


def _one_after_the_other(steps: Sequence[Step]) -> None:
    """Tell kernels of ours with nothing between them that they are (`backends.triton.dependent`): each run of them is
    to others what a call is. Sizes are known, so that all are launched that have something to write."""
    runs: list[list[GpuStep]] = [[]]
    for s in steps:
        if not isinstance(s, GpuStep):
            runs.append([])
        elif isinstance(s, AddedStep) and not s.zeroed:  # what it adds to is filled in front of it
            runs.append([s])
        else:
            runs[-1].append(s)
    for run in runs:
        launched = [any(0 not in shape({}) for _, _, shape in s.results) for s in run]
        for s, place in zip(run, places(launched), strict=True):
            s.place = place


def _made(s: Step, name: str, like: Like, syms: Mapping[str, int]) -> Like:
    """What a step's result of this name will be."""
    strides = s.rows_apart(syms) if isinstance(s, LibraryStep) else None
    if isinstance(s, FusedStep) and name in s.orders:
        strides = strides_in(s.orders[name], like.shape)
    return like if strides is None else replace(like, strides=strides)
