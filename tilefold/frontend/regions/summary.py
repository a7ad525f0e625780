"""What became of a model, in a line: regions, kernels, library calls, and what was left to PyTorch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tilefold.frontend.regions.assemble import CompiledGraph, Counts
from tilefold.frontend.regions.guard import Fallback
from tilefold.log import log, tell
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.steps import FusedStep


class Told:
    """The records of one model, told in a line when it is compiled; what is compiled later (a backward, when it is
    first run) in a line of its own."""

    def __init__(self, title: str):
        self.title, self.records = title, list[CompiledGraph]()
        self._began, self._told = time.monotonic(), False

    def add(self, record: CompiledGraph) -> None:
        """Called with what has been compiled."""
        self.records.append(record)
        if self._told:
            tell_summary(record.name, [record], record.seconds)

    def tell(self) -> None:
        """Now; nothing where nothing was compiled."""
        self._told = True
        if self.records:
            tell_summary(self.title, self.records, time.monotonic() - self._began)


def tell_summary(title: str, records: Sequence[CompiledGraph], seconds: float) -> None:
    """Say it once a job: of the processes of a distributed one, the first."""
    text = summary(title, records, seconds)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        log.debug("%s", text)
    else:
        tell(text)


def summary(title: str, records: Sequence[CompiledGraph], seconds: float) -> str:
    """`graph0: 12 regions, 87 kernels, 41 library calls in 5.2 s; 2 operators left to PyTorch, at FILE:LINE, because
    ...`. records: of the graphs that a model was compiled as."""
    found = counted(records)
    counts = _count(found.regions, "region"), _count(found.kernels, "kernel"), _count(found.calls, "library call")
    rest = f"; {_count(found.left, 'operator')} left to PyTorch{found.why}" if found.left else ""
    earlier = " as an earlier process compiled it," if any(g.earlier is not None for g in records) else ""
    return f"{title}:{earlier} {', '.join(counts)} in {seconds:.1f} s{rest}"


def counted(records: Sequence[CompiledGraph]) -> Counts:
    """What was made of all these."""
    before = [g.earlier for g in records if g.earlier is not None]
    regions = [r for g in records for r in g.regions]
    steps = [s for r in regions if isinstance(r.runner, CompiledProgram) for s in r.runner.steps]
    kernels = sum(isinstance(s, FusedStep) for s in steps)
    calls = len(steps) - kernels + sum(g.called for g in records)
    why = _reason([f for g in records for f in g.fallbacks if not f.meant])
    return Counts(
        len(regions) + sum(c.regions for c in before),
        kernels + sum(c.kernels for c in before),
        calls + sum(c.calls for c in before),
        sum(g.left for g in records),
        why or next((c.why for c in before if c.why), ""),
    )


def _reason(fallbacks: Sequence[Fallback]) -> str:
    """The first reason, with the user's line, and how many more there are."""
    kinds = list(dict.fromkeys((f.reason, f.loc) for f in fallbacks))
    if not kinds:
        return ""
    reason, loc = kinds[0]
    where = f", at {loc.file}:{loc.line}" if loc is not None else ""
    more = f" (and {_count(len(kinds) - 1, 'more reason')}: TORCH_LOGS=tilefold)" if len(kinds) > 1 else ""
    return f"{where}, because {reason}{more}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
