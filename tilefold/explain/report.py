"""`tilefold.explain`: what was fused, why it is right, the code, and the memory traffic it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilefold.backends.cpp.render import render
from tilefold.errors import UnsupportedError
from tilefold.explain import html, terminal
from tilefold.explain.gather import Code, region
from tilefold.explain.model import FoldReport, KernelReport, Region, RejectionReport, alike
from tilefold.explain.traffic import Traffic
from tilefold.frontend.fuse import Fused, own_copy, translated
from tilefold.frontend.regions import CompiledGraph, Options
from tilefold.frontend.torch_compile import compile_captured
from tilefold.pipeline import CompiledProgram, KernelStep, compile_program
from tilefold.tensor.ir import Program
from tilefold.tile.text import show as show_tile

if TYPE_CHECKING:
    from tilefold.frontend.verify import VerifyReport


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one function or model. Print it, or write it with `to_html`.

    `regions`: the programs that were compiled (one, unless parts were left to PyTorch).
    `fallbacks`: those parts, with reasons. `verification`: shown on the page where given.
    """

    name: str
    regions: tuple[Region, ...]
    fallbacks: tuple[RejectionReport, ...] = ()
    verification: VerifyReport | None = None

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """Launches, in order."""
        return tuple(k for r in self.regions for k in r.kernels)

    @property
    def folds(self) -> tuple[FoldReport, ...]:
        """One a pass over shared axes."""
        return tuple(f for r in self.regions for f in r.folds)

    @property
    def rejections(self) -> tuple[RejectionReport, ...]:
        """What was not fused, and what was not compiled, each with a reason and the user's line."""
        return (*(j for r in self.regions for j in r.rejections), *self.fallbacks)

    @property
    def operators(self) -> int:
        """Pieces that eager runs for the compiled regions."""
        return sum(r.operators for r in self.regions)

    @property
    def source(self) -> str:
        """The generated C++ of all kernels; of kernels that differ in names only, the first."""
        return "\n".join(a.first.source for a in alike(self.regions) if a.first.source)

    @property
    def traffic(self) -> Traffic:
        """Bytes before and after, per tensor."""
        return Traffic(tuple(t for r in self.regions for t in r.traffic.rows))

    def __str__(self) -> str:
        return terminal.text(self)

    def to_html(self, path: str | Path) -> None:
        """Write the page: one file, no external resources."""
        Path(path).write_text(html.page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.fragment(self)


class _Recorded:
    """A compiled program that remembers the sizes it was called with."""

    def __init__(self, compiled: CompiledProgram):
        self.compiled = compiled
        self.syms: Mapping[str, int] = {}

    def __call__(self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        self.syms = dict(syms)
        return self.compiled(inputs, syms)


def _recorded(program: Program) -> _Recorded:
    return _Recorded(compile_program(program))


def explain(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = True,
    verification: VerifyReport | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile a function or module as `torch.compile(backend="tilefold")` does, call it once, and report.

    What is not covered is listed among the rejections. UnsupportedError: nothing was captured at all.
    """
    target = fn.fn if isinstance(fn, Fused) else fn
    graphs: list[CompiledGraph] = []
    options = Options(_recorded, leftover="eager", on_compiled=graphs.append)

    def capture(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        return compile_captured(gm, example_inputs, options)

    with torch.no_grad():
        translated(torch.compile(own_copy(target), backend=capture, dynamic=dynamic), *args, **kwargs)
    name = getattr(target, "__name__", type(target).__name__)
    if not graphs:
        raise UnsupportedError(f"{name} computes nothing on tensors", hint="it must take and return tensors")
    return explain_graphs(graphs, name, verification)


def explain_graphs(graphs: Iterable[CompiledGraph], name: str, verification: VerifyReport | None = None) -> Explanation:
    """Report what the torch.compile back end recorded, e.g. `frontend.regions.compilations`.

    Regions that something else than the pipeline runs are left out.
    """
    regions: list[Region] = []
    fallbacks: list[RejectionReport] = []
    for g in graphs:
        for r in g.regions:
            if isinstance(r.runner, _Recorded):
                regions.append(_region(r.runner.compiled, r.runner.syms, r.lowered.raw, r.name))
            elif isinstance(r.runner, CompiledProgram):
                regions.append(_region(r.runner, None, r.lowered.raw, r.name))
        fallbacks += [RejectionReport("fallback", f.node, f.reason, f.loc) for f in g.fallbacks]
    return Explanation(name, tuple(regions), tuple(fallbacks), verification)


def explain_compiled(
    compiled: CompiledProgram,
    *,
    syms: Mapping[str, int] | None = None,
    name: str = "",
    verification: VerifyReport | None = None,
) -> Explanation:
    """Report a compiled program. `syms`: values of its symbols for the byte counts (default: 512 each)."""
    one = _region(compiled, syms, compiled.program, name)
    return Explanation(one.name, (one,), (), verification)


def _region(compiled: CompiledProgram, syms: Mapping[str, int] | None, given: Program, name: str) -> Region:
    return region(given, compiled.program, compiled.fused, tuple(map(_code, compiled.steps)), syms, name)


def _code(step: object) -> Code:
    if not isinstance(step, KernelStep):
        return Code(library=True)
    used = tuple(step.kernels.values())
    kernel = used[0] if used else step.kernel()
    grid = " ".join(f"{t.dim}:{t.tile}" for t in kernel.grid)
    return Code(grid, show_tile(kernel), render(kernel))
