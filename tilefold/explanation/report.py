"""`tilefold.explain`: what was fused, why it is right, the code, and the memory traffic it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.explanation import html, terminal
from tilefold.explanation.gather import region
from tilefold.explanation.model import FoldReport, KernelReport, Region, RejectionReport, alike
from tilefold.explanation.timed import bandwidth, run_timed
from tilefold.explanation.traffic import Traffic
from tilefold.frontend.fuse import (
    check_arguments,
    check_dynamic,
    check_function,
    check_goal,
    goal_of,
    own_copy,
    plain,
    translated,
)
from tilefold.frontend.regions.assemble import CompiledGraph, Options, Runner
from tilefold.frontend.torch_compile import compile_captured
from tilefold.pipeline import Goal, compile_program
from tilefold.runtime.program import CompiledProgram
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import shape_function
from tilefold.tile.layout import single_axes, unit_axis

if TYPE_CHECKING:
    from tilefold.frontend.verify import VerifyReport


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one function or model. Print it, or write it with `to_html`.

    `regions`: the programs that were compiled (one, unless parts were left to PyTorch).
    `fallbacks`: those parts, with reasons; `left`: how many operators they are. `verification`: shown on the page where
    given. `code`: printed too.
    """

    name: str
    regions: tuple[Region, ...]
    fallbacks: tuple[RejectionReport, ...] = ()
    verification: VerifyReport | None = None
    code: bool = False
    left: int = 0

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
        """The generated code of all kernels; of kernels that differ in names only, the first."""
        return "\n".join(a.first.source for a in alike(self.regions) if a.first.source)

    @property
    def traffic(self) -> Traffic:
        """Bytes before and after, per tensor."""
        return Traffic(tuple(t for r in self.regions for t in r.traffic.rows))

    def __str__(self) -> str:
        return terminal.text(self, code=self.code)

    def text(self, *, code: bool = False) -> str:
        """What `print` shows; code: also the generated code of each kernel."""
        return terminal.text(self, code=code)

    def to_html(self, path: str | Path) -> None:
        """Write the page: one file, no external resources."""
        Path(path).write_text(html.page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.fragment(self)


class _Recorded:
    """A compiled program that remembers what it was called with: values of symbols, unit strides of inputs.

    It computes only where `real()` gives what does; otherwise its results are zeros, which the caller of
    `explain` never sees, and no C++ is compiled. `measured`: its kernels are built and timed, step by step.
    """

    def __init__(
        self, compiled: CompiledProgram, device: str, real: Callable[[], Runner | None], measured: bool = False
    ):
        self.compiled, self.device, self.real, self.measured = compiled, device, real, measured
        self.seconds: tuple[float, ...] = ()
        self.syms: Mapping[str, int] = {}
        self.units: dict[str, int | None] = {}

    def __call__(self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        self.syms = dict(syms)
        for name, x in inputs.items():
            self.units[name] = unit_axis(x, single_axes(self.compiled.program.shape_of(name)))
        if self.measured:
            results, self.seconds = run_timed(self.compiled, inputs, syms)
            return results
        run = self.real()
        if run is not None:
            return run(inputs, syms)
        p = self.compiled.program
        here = next((x.device for x in inputs.values()), None)

        def zeros(t: str) -> torch.Tensor:
            return torch.zeros(shape_function(p.shape_of(t))(syms), dtype=p.dtype_of(t).torch_dtype, device=here)

        return {t: zeros(t) for t in p.outputs}


def explain(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    goal: Goal | None = None,
    device: str | None = None,
    verification: VerifyReport | None = None,
    measure: bool = False,
    code: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Compile, as far as the report needs, and report.

    goal: "fused" as `tilefold.fuse` compiles (default for functions), or "fast" as
    `torch.compile(backend="tilefold")` does (default for modules); of what is fused, its own.
    What is not covered is listed among the rejections. `dynamic`: all sizes are symbolic (True), or those given are
    used. device: "cpu" or "cuda",
    whose kernels are shown (by default the arguments' own); no GPU is needed to look at its kernels. measure: build and
    run them, and say how long each takes on its own, next to the least time that its bytes take. code: `print` shows
    the generated code too.
    UnsupportedError: nothing was captured at all.
    """
    target = plain(fn)
    check_function(target, "explain")
    check_arguments(target, args, kwargs)
    check_dynamic(dynamic)
    if goal is not None:
        check_goal(goal)
    if device not in (None, "cpu", "cuda"):
        raise TilefoldError(f"no kernels are made for {device!r}", hint="cpu or cuda")
    if measure and device not in (
        None,
        *(x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)),
    ):
        raise TilefoldError(f"nothing here runs on {device!r}", hint="measure with arguments on that device")
    name = getattr(target, "__name__", type(target).__name__)
    goal = goal or goal_of(fn) or ("fast" if isinstance(target, torch.nn.Module) else "fused")
    broken: tuple[RejectionReport, ...] = ()
    try:
        graphs = _captured(target, args, kwargs, dynamic, goal, device, whole=True, measure=measure)
    except UnsupportedError as why:  # a graph break: the parts need each other's values
        graphs = _captured(target, args, kwargs, dynamic, goal, device, whole=False, measure=measure)
        if not graphs:
            raise why from None
        broken = (RejectionReport("fallback", "what lies between its graphs", why.message, why.loc),)
    if not graphs:
        raise UnsupportedError(f"{name} computes nothing on tensors", hint="it must take and return tensors")
    found = explain_graphs(graphs, name, verification)
    return replace(found, fallbacks=(*broken, *found.fallbacks), code=code)


def _captured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: bool | None,
    goal: Goal,
    shown: str | None,
    *,
    whole: bool,
    measure: bool,
) -> list[CompiledGraph]:
    """The graphs that one call compiles. Nothing is computed if the function is captured and covered whole."""
    graphs: list[CompiledGraph] = []

    def compiled(p: Program, /, *, device: str) -> _Recorded:
        looked_at = shown or device
        program = compile_program(p, goal=goal, load=False, device=looked_at)

        def real() -> Runner | None:
            if whole and not any(g.fallbacks for g in graphs):
                return None
            return program if looked_at == device else compile_program(p, goal=goal, load=False, device=device)

        return _Recorded(program, looked_at, real, measure)

    options = Options(compiled, leftover="eager", on_compiled=graphs.append)

    def capture(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        return compile_captured(gm, example_inputs, options)

    run = torch.compile(own_copy(fn), backend=capture, fullgraph=whole, dynamic=dynamic)
    with torch.no_grad():
        translated(run, *args, **kwargs)
    return graphs


def explain_graphs(graphs: Iterable[CompiledGraph], name: str, verification: VerifyReport | None = None) -> Explanation:
    """Report what the torch.compile back end recorded, e.g. `frontend.regions.assemble.compilations`.

    Regions that something else than the pipeline runs are left out.
    """
    regions: list[Region] = []
    fallbacks: list[RejectionReport] = []
    graphs = tuple(graphs)
    for g in graphs:
        for r in g.regions:
            if isinstance(r.runner, _Recorded):
                x = r.runner
                regions.append(_region(x.compiled, x.syms, x.units, r.lowered.raw, r.name, x.device, x.seconds))
            elif isinstance(r.runner, CompiledProgram):
                regions.append(_region(r.runner, None, {}, r.lowered.raw, r.name))
        fallbacks += [RejectionReport("fallback", f.node, f.reason, f.loc) for f in g.fallbacks]
        if g.earlier is not None:
            what = f"{g.earlier.kernels} kernels, {g.earlier.calls} library calls"
            fallbacks.append(RejectionReport("earlier", g.name, f"{what}: shown with TILEFOLD_REUSE_GRAPHS=0"))
    left = sum(g.left + g.called for g in graphs)
    return Explanation(name, tuple(regions), tuple(fallbacks), verification, left=left)


def explain_compiled(
    compiled: CompiledProgram,
    *,
    syms: Mapping[str, int] | None = None,
    name: str = "",
    verification: VerifyReport | None = None,
) -> Explanation:
    """Report a compiled program. `syms`: values of its symbols for the byte counts (default: 512 each)."""
    one = _region(compiled, syms, {}, compiled.program, name)
    return Explanation(one.name, (one,), (), verification)


def _region(
    compiled: CompiledProgram,
    syms: Mapping[str, int] | None,
    units: Mapping[str, int | None],
    given: Program,
    name: str,
    device: str = "cpu",
    seconds: Sequence[float] = (),
) -> Region:
    codes = tuple(step.code(units) for step in compiled.steps)
    return region(given, compiled.program, compiled.fused, codes, syms, name, bandwidth(device), seconds)
