"""Blockbuster's three examples end to end: rules, steps, listings, snapshots, safety, and the results on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.blockbuster.edit import canonical
from tilefold.blockbuster.interp import run
from tilefold.blockbuster.ir import Program
from tilefold.blockbuster.listing import lines_of, show
from tilefold.blockbuster.parse import parse
from tilefold.blockbuster.rules.algorithm import Fusion, fuse, fuse_reductions
from tilefold.blockbuster.safety import make_safe, unsafe
from tilefold.runtime.graphs import compile_graph
from tilefold.suites.blocks.case import BlockCase, Outcome
from tilefold.suites.blocks.examples import Example, examples
from tilefold.suites.blocks.users import cases as user_cases

#: Elements of each dim in the runs on CPU, and dims that are one block there (the paper's D = L = 1).
CPU_SIZES = {"m": 96, "n": 160, "d": 64, "l": 48, "k": 64}
WHOLE = ("d", "l")
#: Numbers of blocks that interpretation tries.
CUTS: tuple[Mapping[str, int], ...] = ({}, dict.fromkeys("mnkdl", 2), dict.fromkeys("mnkdl", 3))
GROUP = "Blockbuster"


def cases() -> tuple[BlockCase, ...]:
    """All of them; under a minute together."""
    found: list[BlockCase] = []
    for ex in examples():
        found += [
            BlockCase(GROUP, f"{ex.name}: sequence of rules, steps, snapshots", partial(_rules, ex)),
            BlockCase(GROUP, f"{ex.name}: final listing is the paper's", partial(_listing, ex)),
            BlockCase(GROUP, f"{ex.name}: every step interpreted", partial(_interpreted, ex)),
            BlockCase(GROUP, f"{ex.name}: fused and safe, on CPU", partial(_on_cpu, ex, 1.0)),
        ]
    attention = examples()[0]
    found.append(BlockCase(GROUP, "attention: scores of +-1e4, on CPU", partial(_on_cpu, attention, 1e4)))
    return (*found, *user_cases())


@lru_cache
def fused(name: str) -> Fusion:
    """The algorithm's run on an example."""
    return fuse(next(ex for ex in examples() if ex.name == name).program)


def same_rules(done: tuple[int, ...], paper: tuple[int, ...]) -> bool:
    """Whether two sequences of rules agree; 12 stands for "rule 1 or 2"."""
    return len(done) == len(paper) and all(
        a == b or (b == 12 and a in (1, 2)) for a, b in zip(done, paper, strict=True)
    )


def paper_program(ex: Example, p: Program) -> Program:
    """The paper's final listing, with the declarations of our program."""
    text = show(p).splitlines()
    declarations = text[: len(text) - len(lines_of(p))]
    return parse("\n".join(declarations) + "\n" + ex.listing)


def sample(ex: Example, p: Program, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs of an example at the program's sizes."""
    g = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    for i in p.graph.inputs:
        sizes = [p.sizes[d] for d in p.arrays[i.name].axes]
        shape = [int(e.value) for e in sizes if isinstance(e, Const)]
        out[i.name] = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return out


def error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error relative to the largest element; infinite where a number is missing."""
    worst = float((x.double() - reference).abs().max() / reference.abs().max())
    return worst if worst == worst else float("inf")


def _rules(ex: Example) -> Outcome:
    f = fused(ex.name)
    done = tuple(s.law.number for s in f.steps)
    ok = same_rules(done, ex.rules) and f.snapshots == ex.snapshots
    return Outcome(ok, f"{len(done)} steps (paper {len(ex.rules)}), snapshots after {', '.join(map(str, f.snapshots))}")


def _listing(ex: Example) -> Outcome:
    p = fused(ex.name).result
    ok = canonical(paper_program(ex, p).graph) == canonical(p.graph)
    return Outcome(ok, f"{len(lines_of(p))} lines, equal up to names" if ok else "differs")


def _interpreted(ex: Example) -> Outcome:
    f = fused(ex.name)
    x = sample(ex, f.start, torch.float64)
    reference, worst = ex.reference(x), 0.0
    for k in range(len(f.steps) + 1):
        p = f.after(k)
        for cut in CUTS if k in (0, *f.snapshots) else CUTS[1:2]:
            worst = max(worst, error(run(p, x, blocks=cut)[p.graph.outputs[0]], reference))
    return Outcome(worst < 1e-12, f"{len(f.steps) + 1} programs, largest error {worst:.1e}")


def _on_cpu(ex: Example, scores: float) -> Outcome:
    """The last snapshot made safe, through loops, tiles and C++; next to eager, both against float64."""
    f = fused(ex.name)
    p = replace(f.result, sizes={d: Const(CPU_SIZES[d], DType.I64) for d in f.result.sizes})
    x = sample(ex, p, torch.float32)
    if scores != 1.0:
        top = (x["Q"] @ x["KT"].T).abs().max() * CPU_SIZES["d"] ** -0.5
        x["Q"] *= scores / top
    safe = make_safe(fuse_reductions(p))
    compiled = compile_graph(safe, [d for d in WHOLE if d in p.sizes])
    reference = ex.reference({k: v.double() for k, v in x.items()})
    ours, eager = error(compiled(x)[p.graph.outputs[0]], reference), error(ex.reference(x), reference)
    ok = len(compiled.blocks) == 1 and not unsafe(safe) and ours <= 2 * eager
    return Outcome(ok, f"{len(compiled.blocks)} kernel, error {ours:.1e}, eager {eager:.1e}")
