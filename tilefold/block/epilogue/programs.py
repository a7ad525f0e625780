"""The block programs of the kernels that the laws led to, and listings before and after."""

from __future__ import annotations

from dataclasses import replace

from tilefold.block.epilogue.describe import described
from tilefold.block.epilogue.kernels import Kernels
from tilefold.block.epilogue.search import Rewritten
from tilefold.block.fuse import UNIT, Fused, fuse_group
from tilefold.block.group import Group, Grouping
from tilefold.block.text import show_nodes
from tilefold.tensor.analysis import Graph
from tilefold.tensor.index_simplify import const
from tilefold.tensor.text import show_compute


def block_programs(found: Kernels) -> Fused:
    """One block program a kernel (two where a fold is split over segments), in execution order."""
    p = replace(found.program, sizes={**found.program.sizes, UNIT: const(1)})
    g = Graph.of(p)
    groups = tuple(Group(k.members, k.parallel) for k in found.kernels)
    kernels = tuple(b for x in groups for b in fuse_group(g, x))
    return Fused(p, kernels, Grouping(groups, ()))


def listing(found: Rewritten) -> str:
    """The kernels before, the laws that fired, and the kernels after as block programs."""
    lines = [f"before: {_summary(found.before)}"]
    lines += _statements(found.before)
    lines.append("")
    for n, s in enumerate(found.steps, 1):
        lines.append(f"{n}. {s.law.name}: {s.match.what}")
        lines.append(f"     {s.law.statement}   ({s.law.source}; rounding: {s.law.rounding})")
    lines += ["", f"after: {_summary(found.result)}"]
    titles = {d.kernel.members: d.title() for d in described(found.result)}
    for k in block_programs(found.result).kernels:
        lines += ["", f"  -- {titles[k.plan.group.members]}"]
        lines += [f"  {line}" for line in show_nodes(k.block.body)]
    return "\n".join(lines) + "\n"


def _summary(k: Kernels) -> str:
    kinds = [d.kind for d in described(k)]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(kinds)} kernels ({counted}); {k.cost.passes:.0f} bytes in passes, {k.cost.beside:.0f} beside products"


def _statements(k: Kernels) -> list[str]:
    by_name = {c.name: c for c in k.program.body}
    lines: list[str] = []
    for d in described(k):
        lines.append(f"  -- {d.title()}")
        lines += [f"     {show_compute(by_name[m])}" for m in d.kernel.members]
    return lines
