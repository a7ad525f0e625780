"""The graph of a model's parts: one call in C++ where it can be recorded, else part by part.

Torch hands a backward pass the only references to what the forward saved. `torch.fx.GraphModule.forward` keeps every
argument until it returns; here values are let go after their last use, and parts that can (`boxed`) let theirs go while
they run, so that saved tensors make room for gradients as with Inductor.

A graph of several parts and operators is recorded whole (`regions.replay`): its tape has the steps of all regions, the
operators between them, and what another compiler made as calls of Python. Where that fails or is not possible, every
region has a tape of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tilefold.frontend.operators.source import location
from tilefold.frontend.regions.guard import Part, say_once
from tilefold.frontend.regions.replay import Heard, Recorded, recorded
from tilefold.frontend.regions.rows import Loop, scaled
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import NOTHING, Kind, Slot, Tape
from tilefold.runtime.writing import writing

#: What a node computes: from all values so far.
Compute = Callable[[list[Any]], Any]
#: Fewer calls than this are as well off with the tapes of regions.
WORTH_A_TAPE = 2
_SIZED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node: where its value goes, how it is computed and (a callable of a part, and its arguments' places) written
    down, the values that nobody needs afterwards, its name and the user's line."""

    at: int
    compute: Compute
    drops: tuple[int, ...]
    part: Callable[..., object] | None
    given: tuple[int, ...]
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class Alone:
    """A graph's only part, as the graph. given: positions of the arguments that it takes; wanted: what the graph
    returns, results of the part by their positions, its own n-th argument as -1 - n, or None."""

    run: Callable[..., Any]
    given: tuple[int, ...]
    wanted: tuple[int | None, ...]

    def __call__(self, *args: object) -> Sequence[object]:
        out = self.run(*[args[k] for k in self.given])
        return [None if k is None else out[k] if k >= 0 else args[-1 - k] for k in self.wanted]

    def tape(self, of_part: Tape) -> Tape:
        """The graph's tape."""
        slots = [replace(s, source=self.given[s.source]) if s.kind is Kind.ARGUMENT else s for s in of_part.slots]
        outputs = []
        for k in self.wanted:
            if k is not None and k < 0:
                slots.append(Slot(Kind.ARGUMENT, -1 - k))
            outputs.append(NOTHING if k is None else of_part.outputs[k] if k >= 0 else len(slots) - 1)
        return replace(of_part, slots=tuple(slots), outputs=tuple(outputs))


class Outer(Recorded):
    """A graph and its modules: `run` with arguments, as any callable; `boxed` with a list of them, which it empties.

    traced: what the graph was made of, named `name`; without it, it is not recorded whole. writes: parts write over
    arguments. A call that cannot be recorded could then not run once more part by part: the first call is none, so that
    what fails to build has failed before.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[object]],
        root: torch.nn.Module,
        graph: torch.fx.Graph,
        traced: torch.fx.Graph | None = None,
        name: str = "",
        *,
        writes: bool = False,
    ):
        super().__init__(name)
        self.writes = self._first = writes
        self._run = run
        nodes = list(graph.nodes)
        at = {n: k for k, n in enumerate(nodes)}
        last = {a: n for n in nodes for a in n.all_input_nodes}
        self._given = [at[n] for n in nodes if n.op == "placeholder"]
        self._unread = [at[n] for n in nodes if n.op == "placeholder" and n not in last]
        self._values = [getattr(root, str(n.target)) if n.op == "get_attr" else None for n in nodes]
        self._steps: list[_Step] = []
        for n in nodes:
            if n.op in ("call_module", "call_function"):
                drops = tuple(at[a] for a in n.all_input_nodes if last[a] is n)
                part = getattr(root, str(n.target)).run if n.op == "call_module" else None
                given = tuple(at[a] for a in n.args) if part is not None else ()
                compute = _operator(n, at) if part is None else _part(part, given, drops)
                self._steps.append(_Step(at[n], compute, drops, part, given, str(n.target), _line(n)))
        self.graph = graph
        values = zip(nodes, self._values, strict=True)
        self.constants = {str(n.target): x for n, x in values if isinstance(x, torch.Tensor)}
        self._results = graph.output_node().args[0]
        self._at = at
        self._sized = [k for k, n in enumerate(n for n in nodes if n.op == "placeholder") if _symbolic(n)]
        calls = [n for n in nodes if n.op == "call_module" or (n.op == "call_function" and n.target is not item)]
        whole = traced is not None and len(calls) >= WORTH_A_TAPE
        self.refused = _refused(traced) if traced is not None and whole else "it is one part, which has a tape"

    def __call__(self, *args: object) -> Sequence[Any]:
        made = self._by_tape(args)
        return self.in_python(args) if made is None else made

    def in_python(self, args: Sequence[object]) -> Sequence[Any]:
        """See `Recorded`."""
        return self._run(*args)

    def boxed(self, args: list[Any]) -> Sequence[object]:
        """The results; values are let go after their last use."""
        made = self._by_tape(args)
        if made is not None:
            args.clear()
            return made
        values = self._begun(args)
        args.clear()
        for s in self._steps:
            values[s.at] = s.compute(values)
            for d in s.drops:
                values[d] = None
        return self._ended(values)

    def listen(self, heard: Heard, of_parts: Callable[[str], Heard]) -> None:
        """Have the graph's first tape heard of: its own, or that of its only part; of a graph that is not recorded
        whole those of its parts, by the names that `graph` has for them, if all can have some."""
        run, count = self._run, len(self._given)
        part = _within(run.run) if isinstance(run, Alone) else None
        if not isinstance(run, Alone) or not isinstance(part, Recorded):
            inner = {s.name: _within(s.part) for s in self._steps if s.part is not None}
            parts = {name: p for name, p in inner.items() if isinstance(p, Recorded)}
            if not self.refused:
                self.heard = heard
            elif len(parts) == len(inner):
                for name, p in parts.items():
                    p.heard = of_parts(name)
            return

        def of_part(args: Sequence[object], tape: Tape) -> None:
            given = dict(zip(run.given, args, strict=True))
            heard([given.get(k) for k in range(count)], run.tape(tape))

        part.heard = of_part

    def often(self, times: int) -> None:
        """See `Recorded`; its parts run as often."""
        super().often(times)
        for part in (_within(s.part) for s in self._steps):
            if isinstance(part, Recorded):
                part.often(times)

    def sizes(self, args: Sequence[object]) -> tuple[int, ...]:
        """See `Recorded`."""
        found: list[int] = []
        for k in self._sized:
            x = args[k]
            found += x.shape if isinstance(x, torch.Tensor) else [x]  # type: ignore[list-item]
        return tuple(found)

    def written(self, args: Sequence[object]) -> tuple[Sequence[Any], Tape | None, str]:
        """See `Recorded`."""
        recorder = Recorder(args, ())
        with writing(self.writes):
            with recorder:
                made = self.record(args, recorder)
            tape = recorder.tape(made)
        return made, tape, recorder.refused

    def record(self, args: Sequence[object], recorder: Recorder) -> Sequence[Any]:
        """The results of a call, written down by a recorder that has been entered."""
        recorder.constants(self.constants.values())
        values = self._begun(args)
        for s in self._steps:
            recorder.step(s.name, s.where)
            if s.part is None:
                values[s.at] = s.compute(values)
            else:
                values[s.at] = recorded(s.part, [values[k] for k in s.given], recorder)
            for d in s.drops:
                values[d] = None
        return self._ended(values)

    def _due(self, args: Sequence[object]) -> bool:
        """See `Recorded`."""
        if self._first:
            self._first = False
            return False
        return super()._due(args)

    def _by_tape(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """The results of a tape, old or new (a list of arguments may then be empty); None, and arguments as they were,
        where there is none."""
        if self.refused:
            return None
        whole = len(args)
        try:
            made = self.replay(args)  # type: ignore[arg-type]
            return self._recorded(tuple(args)) if made is None and self._due(args) else made
        # Hidden: an error of a part, which the part itself then meets: it runs op by op, and says so. A user's mistake
        # is raised there. Arguments that a tape has given up are gone; that error is raised here.
        except Exception as err:
            if len(args) < whole or not Part(self.name, []).survives(err):
                raise
            if not isinstance(err, IndexError):
                self.refused, self._module = f"{type(err).__name__} in C++", None
                say_once(logging.INFO, f"{self.name} runs part by part", self.refused, None)
            return None

    def _begun(self, args: Sequence[Any]) -> list[Any]:
        values = list(self._values)
        for k, x in zip(self._given, args, strict=True):
            values[k] = x
        for k in self._unread:
            values[k] = None
        return values

    def _ended(self, values: list[Any]) -> list[Any]:
        found: Any = torch.fx.map_arg(self._results, lambda n: values[self._at[n]])
        return list(found)


def _within(part: Any) -> Any:
    """A part without its guard."""
    return getattr(part, "run", part)


def item(results: Any, k: Any) -> Any:
    """One of a part's results."""
    return results[k]


def _refused(traced: torch.fx.Graph) -> str:
    """Why a graph is not recorded whole: what it does, or how large its tensors are, is not the same in every call."""
    values = [n.meta.get("val") for n in traced.nodes]
    for n in traced.nodes:
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            return f"{n.target} runs functions"
        if isinstance(n.target, Loop) or n.target is scaled:
            return "its losses run a chunk of rows at a time"
    if any(isinstance(v, _SIZED) and free_unbacked_symbols(v) for v in values):
        return "some sizes depend on values of tensors"
    if len({v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"}) > 1:
        return "it has tensors on several devices"
    return ""


def _symbolic(n: torch.fx.Node) -> bool:
    """Whether an argument is a size, or has sizes, that may change."""
    v = n.meta.get("val")
    return isinstance(v, torch.SymInt) or (
        isinstance(v, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in v.shape)
    )


def _line(n: torch.fx.Node) -> str:
    """For errors."""
    at = location(n)
    return f"in {n.target}" + (f", from {at}" if at else "")


def _part(run: Callable[..., object], places: Sequence[int], drops: Sequence[int]) -> Compute:
    boxed: Callable[[list[Any]], object] | None = getattr(run, "boxed", None)

    def call(values: list[Any]) -> object:
        given = [values[k] for k in places]
        if boxed is None:
            return run(*given)
        for d in drops:
            values[d] = None
        return boxed(given)

    return call


def _operator(n: torch.fx.Node, at: dict[torch.fx.Node, int]) -> Compute:
    if n.target is item and isinstance(n.args[0], torch.fx.Node):
        source, k = at[n.args[0]], n.args[1]
        return lambda values: item(values[source], k)

    def call(values: list[Any]) -> object:
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda a: values[at[a]])
        return n.target(*args, **kwargs)  # type: ignore[operator]

    return call
