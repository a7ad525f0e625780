"""From a fused program to the data of an explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.context import Options
from tilefold.algebra.derive import build_fold
from tilefold.algebra.expr import type_of
from tilefold.algebra.fold import Fold
from tilefold.block.fuse import Fused, FusedKernel
from tilefold.block.stages import Stage, inline_maps, value_name
from tilefold.block.text import show_nodes
from tilefold.errors import NotFusibleError
from tilefold.explanation import dataflow
from tilefold.explanation.model import FoldReport, KernelReport, Region, RejectionReport
from tilefold.explanation.names import signature
from tilefold.explanation.rules import rules_of
from tilefold.explanation.traffic import Sizes, block_access, compare, operator_access, operators
from tilefold.runtime.step import Code
from tilefold.tensor.analysis import Graph
from tilefold.tensor.extremes import is_exact
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import TYPICAL_EXTENT
from tilefold.tensor.text import show as show_program


def region(
    program: Program,
    simple: Program,
    fused: Fused,
    code: Sequence[Code],
    syms: Mapping[str, int] | None = None,
    name: str = "",
    bandwidth: float = 0.0,
    seconds: Sequence[float] = (),
) -> Region:
    """Everything about one program. `code`: for each kernel of `fused`; `syms`: values for sizes and traffic.
    `bandwidth`: bytes/s of memory, 0 where no time is predicted; `seconds`: measured, of each kernel."""
    values = {s: (syms or {}).get(s, TYPICAL_EXTENT) for s in program.syms}
    blocks = [k.block for k in fused.kernels]
    given = Sizes(program, values)
    sizes = Sizes(simple, values, blocks)
    signed = [signature(b) for b in blocks]
    ops = operators(program)
    # tensors that only the given program has keep their sizes from it
    sizes.shape = given.shape | sizes.shape
    sizes.dtype = given.dtype | sizes.dtype
    moved = [block_access(b, sizes) for b in blocks]
    shown = dataflow.choose(dataflow.kernel_pieces(fused.kernels, signed))
    measured: Sequence[float | None] = seconds or [None] * len(code)
    kernels = tuple(
        KernelReport(
            name=k.block.name,
            members=k.plan.group.members,
            kind="library" if c.library else "fused",
            grid=c.grid,
            bytes=a.total,
            listing="" if c.library else "\n".join(show_nodes(k.block.body)),
            tile=c.tile,
            source=c.source,
            signature=sig,
            renaming=names,
            language=c.language or "C++",
            calls=_called(simple, k) if c.library else (),
            predicted=a.total / bandwidth if bandwidth else None,
            seconds=s,
        )
        for k, c, a, (sig, names), s in zip(fused.kernels, code, moved, signed, measured, strict=True)
    )
    library = [k.kind == "library" for k in kernels]
    return Region(
        name=name or program.name,
        program=show_program(program),
        operators=len(ops),
        kernels=kernels,
        folds=_folds(simple, [k for k, skip in zip(fused.kernels, library, strict=True) if not skip]),
        rejections=_rejections(fused),
        traffic=compare(program, [operator_access(o, program, given) for o in ops], moved, sizes),
        before=dataflow.before(program, given),
        after=dataflow.after(simple, fused.kernels, sizes, shown),
        syms=values,
        rules=rules_of(simple),
    )


def _called(p: Program, k: FusedKernel) -> tuple[str, ...]:
    """The operators that a library call stands for, as the graph names them."""
    by_name = {r: c for c in p.body for r in c.results}
    members = k.plan.group.members
    return tuple(dict.fromkeys(c.origin for m in members if (c := by_name.get(m)) is not None and c.origin))


def _rejections(fused: Fused) -> tuple[RejectionReport, ...]:
    out: dict[RejectionReport, None] = {}
    for k in fused.kernels:
        for r in k.plan.rejections:
            out[RejectionReport("pass", r.name, r.reason, r.loc)] = None
    for f in fused.grouping.refusals:
        out[RejectionReport("kernel", f"{f.producer} → {f.consumer}", f.reason, f.loc)] = None
    return tuple(out)


def _folds(p: Program, kernels: Sequence[FusedKernel]) -> tuple[FoldReport, ...]:
    """One a stage; the two kernels of a split fold share theirs."""
    g = Graph.of(p)
    out, seen = [], set[int]()
    for k in kernels:
        if id(k.plan) in seen:
            continue
        seen.add(id(k.plan))
        for s in k.plan.stages:
            cascade = tuple(_inlined(g, g.by_name[r], s.reductions) for r in s.reductions)
            reading = _cascade(p, s, cascade)
            delayed = _read(reading, s.fold, delay=True)
            out.append(
                FoldReport(
                    kernel=k.block.name.removesuffix("_partial"),
                    cascade=cascade,
                    parallel=k.plan.group.parallel,
                    fold=s.fold,
                    delayed=delayed,
                    paper=_read(reading, delayed, delay=False),
                )
            )
    return tuple(out)


def _read(reading: Cascade, otherwise: Fold, *, delay: bool) -> Fold:
    """A fold without guards, for reading. `otherwise`: where only another form exists; a factor that cannot be kept in
    the loop (it may overflow there) may still be moved to the end."""
    try:
        return build_fold(reading, Options(guards=False, residuals=False, delay=delay))
    except NotFusibleError:
        return otherwise


def _inlined(g: Graph, c: Compute, names: Sequence[str]) -> Compute:
    """A reduction with the maps that use earlier reductions substituted."""
    wanted = set(names)

    def depends(m: str) -> bool:
        if g.by_name[m].reducer is not None:
            return False
        return any(r in wanted or depends(r) for r in g.producers[m])

    body = inline_maps(g, c.body, depends)
    return Compute(c.name, c.dims, c.dtype, body, c.reducer, c.rdims, c.index_name, c.loc, c.origin)


def _cascade(p: Program, s: Stage, cascade: Sequence[Compute]) -> Cascade:
    reductions = []
    for c in cascade:
        if c.reducer in ("argmax", "argmin"):
            held = type_of(c.body, p.dtype_of)
            reductions.append(Reduction(value_name(c), c.reducer, c.dims, c.body, held, c.name, c.loc))
        else:
            exact = is_exact(Graph.of(p), c)
            reductions.append(Reduction(c.name, str(c.reducer), c.dims, c.body, c.dtype, c.index_name, c.loc, exact))
    return Cascade(s.axes, tuple(reductions), tuple((i.name, i.dtype) for i in p.inputs))


def same_fold(a: Fold, b: Fold) -> bool:
    """Whether two forms of a fold read the same."""
    return (a.state, a.finish) == (b.state, b.finish)
