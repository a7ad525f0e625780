"""Selection by trying every partition: the check of `plan.select`, for small programs.

Independent of it: no ideals and no shortest path. The lowest operator that has no kernel yet gets every linked, legal
set of free operators that contains it, in turn; a finished partition counts if its kernels can be run in some order.
What cannot become cheaper than the best so far is left out, by lower bounds first and by prices then. Shapes of cut
tensors are not looked at.
"""

from __future__ import annotations

from tilefold.plan.dag import bits, connected
from tilefold.plan.problem import Problem

#: Most operators: the sets alone are two to the power of them.
MOST = 16


def cheapest(p: Problem) -> float:
    """The least cost over all partitions into legal candidates (inf: there is none). ValueError for large programs."""
    n = len(p.dag.names)
    if n > MOST:
        raise ValueError(f"{n} operators are too many to try everything")
    legal = [s for s in range(1, 1 << n) if _one_piece(p, s) and p.bound(s) is not None]
    starting = [[s for s in legal if s & -s == 1 << k] for k in range(n)]
    return _Search(p, starting).cover(0, [], 0.0, float("inf"))


def _one_piece(p: Problem, s: int) -> bool:
    return s & (s - 1) == 0 or (s.bit_count() <= p.largest and connected(s, p.partners) and p.dag.convex(s))


class _Search:
    def __init__(self, p: Problem, starting: list[list[int]]):
        self.p, self.starting = p, starting
        self.price: dict[int, float] = {}

    def cover(self, done: int, parts: list[int], spent: float, best: float) -> float:
        """The best cost of a partition that begins with `parts`, or `best` if none is better."""
        if done == self.p.dag.everything:
            return spent if runnable(self.p, parts) else best
        first = next(bits(self.p.dag.everything & ~done))
        for s in self.starting[first]:
            if s & done or spent + (self.p.bound(s) or 0.0) >= best:
                continue
            cost = self.cost(s)
            if spent + cost < best:
                best = min(best, self.cover(done | s, [*parts, s], spent + cost, best))
        return best

    def cost(self, s: int) -> float:
        """Price of the cheapest variant."""
        if s not in self.price:
            self.price[s] = min((v.seconds for v in self.p.variants(s)), default=float("inf"))
        return self.price[s]


def runnable(p: Problem, parts: list[int]) -> bool:
    """Whether the kernels can be run one after the other."""
    left, done = list(parts), 0
    while left:
        ready = [s for s in left if not any(p.dag.preds[k] & ~(done | s) for k in bits(s))]
        if not ready:
            return False
        for s in ready:
            done |= s
            left.remove(s)
    return True
