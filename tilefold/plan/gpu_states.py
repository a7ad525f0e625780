"""Sums over one stream whose states no thread block holds together, each in a kernel of its own.

    together    every state in registers, and what they are sums of computed once
    apart       each kernel streams its operands again and computes what its own state needs

A group of four warps has 64 rows of a state in registers, and of scores what is left. Two states that do not fit are
kept in memory by the compiler, turn by turn of the loop. Law: sums over the same stream do not know of each other, so
that any of them may leave, with copies of the statements that it needs. The gradients of keys and of values are such
sums, of the same probabilities: apart, these are computed twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Load
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.block.parallel import ends_a_chain
from tilefold.names import fresh
from tilefold.plan.gpu_forms import kept_local
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, renamed
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tile.pieces import power_of_two

Members = tuple[str, ...]


def states_apart(
    p: Program, groups: Sequence[Group], machine: Gpu, limits: Limits, calls: Collection[Members] = ()
) -> tuple[Program, list[Group]]:
    """The program, with copies of what several kernels compute, and its groups, so that the states of each fit. limits:
    of a kernel; calls: of a library."""
    made: list[Group] = []
    g = Graph.of(p)
    for x in groups:
        found = None if x.members in calls else _apart(g, x, machine, limits)
        if found is None:
            made.append(x)
        else:
            p, parts = found
            g = Graph.of(p)
            made += parts
    return p, made


def _apart(g: Graph, x: Group, machine: Gpu, limits: Limits) -> tuple[Program, list[Group]] | None:
    """A group's kernels; None where it stays one."""
    sums = [m for m in x.members if ends_a_chain(g, m, x.members) and _narrow(g, m)]
    if len(sums) < 2 or len({frozenset(g.by_name[m].rdims) for m in sums}) != 1:
        return None
    shares = _shares({m: _columns(g, x, m) for m in sums}, machine.owned)
    needs = [_needed(g, x, share) for share in shares]
    if len(shares) < 2 or any(set(need) & set(sums) - set(share) for need, share in zip(needs, shares, strict=True)):
        return None
    twice = {m for m in x.members if sum(m in need for need in needs) > 1}
    left = set(x.members) - {m for need in needs for m in need}
    if left or any(g.by_name[m].index_name for m in twice) or not _pays(g, x, needs, machine):
        return None
    p, members = _copied(g, needs)
    g = Graph.of(p)
    found = [one_kernel(g, part, limits) for part in members]
    parts = [part for part in found if isinstance(part, Group)]
    return (p, parts) if len(parts) == len(found) else None


def _narrow(g: Graph, m: str) -> bool:
    """Whether a product is of a 16-bit operand: others have no form that keeps states so."""
    p = product_of(g.by_name[m])
    factors = (p.a, p.b) if p is not None else ()
    return any(isinstance(e, Load) and g.program.dtype_of(e.tensor) in (DType.F16, DType.BF16) for e in factors)


def _columns(g: Graph, x: Group, m: str) -> int:
    """Of a state, as registers hold them."""
    return power_of_two(int(g.points(kept_local(g, x, frozenset(), m))))


def _shares(columns: Mapping[str, int], most: int) -> list[Members]:
    """States side by side as long as they fit; one that does not fit by itself is not helped."""
    if sum(columns.values()) <= most or max(columns.values()) > most:
        return []
    found: list[Members] = []
    for m, n in columns.items():
        last = found[-1] if found else ()
        if found and sum(columns[k] for k in last) + n <= most:
            found[-1] = (*last, m)
        else:
            found.append((m,))
    return found


def _needed(g: Graph, x: Group, share: Members) -> Members:
    """Members that compute these states and what is made of them."""
    inside = x.members.__contains__
    after = {c.name for m in share for c in g.reached(m, g.consumers, lambda c: inside(c.name)) if inside(c.name)}
    wanted = {*share, *after}
    before = {c.name for m in wanted for c in g.reached(m, g.producers, lambda c: inside(c.name)) if inside(c.name)}
    return tuple(m for m in x.members if m in wanted | before)


def _pays(g: Graph, x: Group, needs: Sequence[Members], machine: Gpu) -> bool:
    """Whether products at their own rate, some of them twice, take less time than all of them once at the rate of
    products whose results do not stay in registers."""
    apart = sum(g.flops(m) for need in needs for m in need if product_of(g.by_name[m]) is not None)
    together = sum(g.flops(m) for m in x.members if product_of(g.by_name[m]) is not None)
    own, spilled = (
        machine.gemm_rate(DType.BF16, library=False),
        machine.folded * machine.gemm_rate(DType.BF16, library=True),
    )
    return apart / own + machine.second_kernel < together / spilled


def _copied(g: Graph, needs: Sequence[Members]) -> tuple[Program, list[Members]]:
    """The program with a copy of each member for every kernel beyond the first that needs it; members of each."""
    body: list[Compute] = []
    taken = {*g.by_name, *(i.name for i in g.program.inputs), *(r for c in g.program.body for r in c.results)}
    names: list[dict[str, str]] = [{} for _ in needs]
    members: list[list[str]] = [[] for _ in needs]
    for c in g.program.body:
        own = [n for n, need in enumerate(needs) if c.name in need]
        body += [c] if not own else []
        for n in own:
            new = c if n == own[0] else replace(c, name=fresh(f"{c.name}_again", taken))
            body.append(replace(new, body=renamed(new.body, names[n])))
            members[n].append(new.name)
            if n != own[0]:
                names[n][c.name] = new.name
    return replace(g.program, body=tuple(body)), [tuple(m) for m in members]
