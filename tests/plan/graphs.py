"""Random DAGs with random costs, and selection by trying every partition."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tilefold.plan.dag import Dag, bits, connected
from tilefold.plan.problem import Problem, Variant


def random_dag(rng: random.Random, n: int, density: float = 0.35) -> Dag:
    names = [f"n{k}" for k in range(n)]
    return Dag.of(names, {names[k]: [names[j] for j in range(k) if rng.random() < density] for k in range(n)})


def random_problem(rng: random.Random, n: int, *, shapes: bool = False, legal: float = 0.6) -> Problem:
    """Costs are random numbers by set, below the sum of the singletons' often enough; singletons are always legal."""
    dag = random_dag(rng, n)
    partners = [p | s for p, s in zip(dag.preds, dag.succs, strict=True)]
    for a in range(n):
        for b in range(a):
            if rng.random() < 0.15:  # two readers of one operand
                partners[a] |= 1 << b
                partners[b] |= 1 << a
    for k in range(n):
        if rng.random() < 0.15:  # a library call
            partners = [p & ~(1 << k) for p in partners]
            partners[k] = 0
    made: dict[int, list[Variant]] = {}
    allowed: dict[int, bool] = {}

    def variants(s: int) -> list[Variant]:
        if s not in made:
            count = rng.choice([1, 2, 3]) if shapes else 1
            made[s] = [_variant(rng, dag, s, shapes) for _ in range(count)]
        return made[s]

    def bound(s: int) -> float | None:
        if s not in allowed:
            allowed[s] = s.bit_count() == 1 or rng.random() < legal
        return min(v.seconds for v in variants(s)) * rng.uniform(0.5, 1.0) if allowed[s] else None

    fixed: dict[int, float | None] = {}
    return Problem(
        dag,
        tuple(partners),
        lambda s: fixed.setdefault(s, bound(s)),
        variants,
        transfer=lambda node, given, wanted: 0.0 if given == wanted else 0.3 + 0.1 * (node % 3),
    )


def _variant(rng: random.Random, dag: Dag, s: int, shapes: bool) -> Variant:
    seconds = rng.uniform(0.5, 1.0) * s.bit_count() ** 0.6
    if not shapes:
        return Variant(seconds)
    read = {k for m in bits(s) for k in bits(dag.preds[m]) if not s >> k & 1}
    gives = {k: rng.choice("ab") for k in bits(s) if rng.random() < 0.7}
    return Variant(seconds, gives, {k: rng.choice("ab") for k in read if rng.random() < 0.7})


def brute_force(p: Problem) -> float:
    """The least cost over all partitions into legal, linked sets with an order to run them in."""
    best = float("inf")
    for parts in partitions(p.dag):
        if all(_legal(p, s) for s in parts) and _acyclic(p.dag, parts):
            best = min(best, _cost(p, parts))
    return best


def partitions(dag: Dag) -> Iterator[list[int]]:
    """Every way to cut the nodes into sets."""

    def place(k: int, parts: list[int]) -> Iterator[list[int]]:
        if k == len(dag.names):
            yield list(parts)
            return
        for i in range(len(parts)):
            parts[i] |= 1 << k
            yield from place(k + 1, parts)
            parts[i] &= ~(1 << k)
        parts.append(1 << k)
        yield from place(k + 1, parts)
        parts.pop()

    yield from place(0, [])


def _legal(p: Problem, s: int) -> bool:
    linked = s.bit_count() == 1 or connected(s, p.partners)
    return linked and p.bound(s) is not None


def _acyclic(dag: Dag, parts: list[int]) -> bool:
    left, done = list(parts), 0
    while left:
        for s in left:
            if not any(dag.preds[k] & ~(done | s) for k in bits(s)):
                done |= s
                left.remove(s)
                break
        else:
            return False
    return True


def _cost(p: Problem, parts: list[int]) -> float:
    """Best choice of variants: all combinations, a shape mismatch paid by each reader."""
    owner = {k: i for i, s in enumerate(parts) for k in bits(s)}

    def total(i: int, chosen: list[Variant]) -> float:
        if i == len(parts):
            cost = sum(v.seconds for v in chosen)
            for v in chosen:
                for k, want in v.wants.items():
                    given = chosen[owner[k]].gives.get(k)
                    cost += p.transfer(k, given, want) if given is not None else 0.0
            return cost
        return min(total(i + 1, [*chosen, v]) for v in p.variants(parts[i]))

    return total(0, [])
