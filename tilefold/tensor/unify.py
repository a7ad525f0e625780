"""Give linked dims one name.

Law: dims are bound names, so renaming one in a statement changes nothing. If statement C reads
axis n of tensor T with the plain index d, then d and T's dim n run over the same elements, and
one name for both makes the sharing visible to fusion.

So do dims of two statements that read an axis in as many steps (the sums and differences of every two elements).

Side conditions: equal extents; no statement gets one name for two of its dims. Where two links
contradict (x[i, d] * x[j, d]), the nearer one wins: links to results used once first, then to
other results, later ones first, then to program inputs, then between readers of every n-th element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.expr import Const, Expr, Index, Load, loads, tensors_read
from tilefold.tensor.index_simplify import poly
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import dims_of, prune_dims, rename


def unify(p: Program) -> Program:
    """The program with linked dims renamed to one another."""
    classes = _Classes(p)
    for a, b in _links(p):
        classes.join(a, b)
    names = {d: found for d in p.sizes if (found := classes.find(d)) != d}
    return prune_dims(rename(p, names))


def _links(p: Program) -> Iterator[tuple[str, str]]:
    """Pairs (dim of the reader, dim of what is read), strongest first. Input axes are `name@axis`."""
    position = {r: n for n, c in enumerate(p.body) for r in c.results}
    dims = {r: c.dims for c in p.body for r in c.results}
    users = Counter(t for c in p.body for t in tensors_read(c.body))
    found: list[tuple[tuple[int, int], str, str]] = []
    strided: dict[tuple[str, int, int, Expr], str] = {}
    for n, c in enumerate(p.body):
        for ld in loads(c.body):
            for axis, i in enumerate(ld.index):
                if (at := _steps(i)) is not None:
                    d, step = at
                    first = strided.setdefault((ld.tensor, axis, step, p.sizes[d]), d)
                    found.append(((3, n), d, first))
                if not isinstance(i, Index):
                    continue
                if ld.tensor in dims:
                    rank = (0 if users[ld.tensor] == 1 else 1, n - position[ld.tensor])
                    found.append((rank, i.dim, dims[ld.tensor][axis]))
                else:
                    found.append(((2, n), i.dim, input_axis(ld, axis)))
    found.sort(key=lambda f: f[0])
    return ((a, b) for _, a, b in found)


def _steps(i: Expr) -> tuple[str, int] | None:
    """The dim of an index of several steps along it, and a number beyond, and how many steps; None of others."""
    terms = {} if isinstance(i, Index | Const) else poly(i, {})
    (*others, (of, step)) = [(of, n) for of, n in terms.items() if of] or [((), 0)]
    one = not others and len(of) == 1 and isinstance(of[0], Index) and step > 1
    return (of[0].dim, step) if one and isinstance(of[0], Index) else None


def input_axis(ld: Load, axis: int) -> str:
    """Stand-in for the dim of a program input's axis."""
    return f"{ld.tensor}@{axis}"


class _Classes:
    """Union-find over dims; a class knows the statements that range over it."""

    def __init__(self, p: Program):
        self.parent: dict[str, str] = {}
        self.members: dict[str, set[int]] = {}
        self.size: dict[str, object] = {}
        for d, e in p.sizes.items():
            self._add(d, e)
        for i in p.inputs:
            for axis, e in enumerate(i.shape):
                self._add(input_axis(Load(i.name, ()), axis), e)
        for n, c in enumerate(p.body):
            for d in dims_of(c):
                self.members[d].add(n)

    def _add(self, d: str, e: Expr) -> None:
        self.parent[d], self.members[d] = d, set()
        self.size[d] = frozenset(poly(e, {}).items())

    def find(self, d: str) -> str:
        while self.parent[d] != d:
            self.parent[d] = self.parent[self.parent[d]]
            d = self.parent[d]
        return d

    def join(self, a: str, b: str) -> None:
        a, b = self.find(a), self.find(b)
        if a == b or self.size[a] != self.size[b] or self.members[a] & self.members[b]:
            return
        # a real dim's name is kept before an input axis'
        keep, gone = (b, a) if "@" in a else (a, b)
        self.parent[gone] = keep
        self.members[keep] |= self.members.pop(gone)


def canonical_names(p: Program) -> Program:
    """Short dim names in order of appearance: i, j, k, ..."""
    taken = {r for c in p.body for r in c.results} | {i.name for i in p.inputs} | set(p.syms)
    pool = (n for n in _short_names() if n not in taken)
    names: dict[str, str] = {}
    for c in p.body:
        for d in dims_of(c):
            if d not in names:
                names[d] = next(pool)
    # a dim may be mentioned by its size alone
    for d in p.sizes:
        if d not in names:
            names[d] = next(pool)
    p = rename(p, names)
    order = {d: n for n, d in enumerate(names.values())}
    return replace(p, sizes=dict(sorted(p.sizes.items(), key=lambda item: order[item[0]])))


def _short_names() -> Iterator[str]:
    letters = "ijklmnpqrsuvxyz"
    yield from letters
    n = 1
    while True:
        yield from (f"{c}{n}" for c in letters)
        n += 1
