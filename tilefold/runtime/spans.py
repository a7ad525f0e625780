"""Names under which the steps of a program show in a profiler.

`torch.profiler` and `torch.autograd.profiler.emit_nvtx` (Nsight) show ranges on the host, and tie to them the kernels
that are launched within. A range is only made while a profiler runs in the calling thread, which a call asks once
(35 ns; a range costs 0.7 us even where nobody records it).

A step is called after the operators that it computes: `tilefold::softmax_sum_12` is step 12 of its region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tilefold.tensor.ir import Compute, Program

PREFIX = "tilefold::"
#: Operators that a name tells; reductions and products before maps where there are more.
MOST_OPERATORS = 4

#: Whether a profiler records what this thread does.
profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class Named(Protocol):
    """A step: its own name, and the statements of its program that it computes."""

    @property
    def name(self) -> str: ...
    @property
    def members(self) -> tuple[str, ...]: ...


def span(title: str) -> AbstractContextManager[object]:
    """A range of that name in the profiler that runs."""
    found: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(title)
    return found


def titles(p: Program, steps: Sequence[Named]) -> tuple[str, ...]:
    """A name for each of a program's steps, no two the same."""
    by_name = {r: c for c in p.body for r in c.results}
    found = []
    for at, s in enumerate(steps):
        computed = [by_name[m] for m in s.members if m in by_name]
        found.append(f"{PREFIX}{'_'.join(_operators(computed)) or s.name}_{at}")
    return tuple(found)


def _operators(computed: Sequence[Compute]) -> list[str]:
    """The operators that statements come from, each once, in program order."""
    names = dict.fromkeys(short for c in computed if (short := _short(c.origin)))
    if len(names) > MOST_OPERATORS:
        first = dict.fromkeys(short for c in computed if c.reducer is not None and (short := _short(c.origin)))
        kept = [*first, *(n for n in names if n not in first)][:MOST_OPERATORS]
        return [n for n in names if n in kept]
    return list(names)


def _short(origin: str) -> str:
    """`aten.native_layer_norm.default` -> `layer_norm`."""
    parts = origin.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_").removeprefix("native_")
