"""Maps over dims that lie side by side in what they store, as maps over one axis.

Law (mixed radix): what is stored at (d, e) of a result whose axes d and e are neighbours in memory is stored at
f = d E + e of one axis, for d = f // E and e = f mod E. Unlike in `block.collapse`, other tensors may be read at d or
at e alone, then at these digits of f: a scale of each channel of an image, the pixels of an image made of channels.

Lanes of a thread block are a power of two along each of its dims. Along rows of 81 x 3 neighbours they hold 128 x 4
with every third idle and no vector of 16 bytes; along all rows of an image no lane is idle. Digits are arithmetic for
each element, so that it is a price that decides (`backends.triton.one_axis`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, children, transform
from tilefold.block.collapse import Joiner, Merge, Neighbours, NotTogether, accesses, next_to
from tilefold.block.ir import Block, Let, Loop, Store, exprs_of, walk
from tilefold.block.tidy import mapped
from tilefold.tensor.analysis import is_static
from tilefold.tensor.index_simplify import simplify


def on_one_axis(b: Block, near: Neighbours) -> Iterator[tuple[Block, tuple[Merge, ...]]]:
    """`b`, which reduces nothing, with the two innermost dims of its results as one, then that and the next, ..., and
    what that does to its tensors, in order."""
    if not is_map(b):
        return
    merges: list[Merge] = []
    while (found := _innermost(b, near)) is not None:
        d, e, axes = found
        try:
            b = with_short_positions(Joiner(b, d, e, axes, across=False, split=True).run())
        except NotTogether:
            return
        merges.append(Merge(axes))
        near = {t: next_to(pairs, axes[t]) if t in axes else pairs for t, pairs in near.items()}
        yield b, tuple(merges)


def is_map(b: Block) -> bool:
    """Whether `b` is parallel loops over known extents whose statements reduce nothing."""
    for n in walk(b.body):
        if isinstance(n, Loop) and (n.kind != "forall" or n.single or n.start is not None or n.stop is not None):
            return False
        if not isinstance(n, Loop | Let | Store) or (isinstance(n, Let) and (n.rdims or n.index_name)):
            return False
        if isinstance(n, Store) and n.added:
            return False
    return all(is_static(b.sizes[d]) for r in b.results for d in r.dims)


def _innermost(b: Block, near: Neighbours) -> tuple[str, str, dict[str, tuple[int, int]]] | None:
    """Two dims, the second of which is the innermost of all that is stored and stands in the loop of the first; and
    each tensor that has both, with its two axes."""
    at: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    torn = set[tuple[str, str, str]]()
    for tensor, index in accesses(b):
        pairs = {(x, y): (index[x], index[y]) for x, y in near.get(tensor, frozenset())}
        for (x, y), places in pairs.items():
            match places:
                case Index(d), Index(e) if d != e:
                    at.setdefault((d, e), {})[tensor] = (x, y)
        torn |= {(tensor, d, e) for d, e in at if not any(p == (Index(d), Index(e)) for p in pairs.values())}
    results = {r.name for r in b.results}
    for (d, e), axes in at.items():
        together = {t: p for t, p in axes.items() if (t, d, e) not in torn}
        last = all(together.get(r, (0, -1))[1] == _unit(b, near, r) for r in results)
        if last and _inside(b, d, e):
            return d, e, together
    return None


def _unit(b: Block, near: Neighbours, result: str) -> int:
    """The axis of neighbours of a result: the end of its chain of axes that lie side by side."""
    ends = {y for _, y in near[result]} - {x for x, _ in near[result]}
    return min(ends) if len(ends) == 1 else -1


def _inside(b: Block, d: str, e: str) -> bool:
    """Whether the loop over `e` stands in that over `d`, each once."""
    loops = [n for n in walk(b.body) if isinstance(n, Loop) and n.dim in (d, e)]
    return [n.dim for n in loops] == [d, e] and any(n.dim == e for n in walk(loops[0].body) if isinstance(n, Loop))


def with_short_positions(b: Block) -> Block:
    """`b` with quotients and remainders of positions in their simplest form: (64 j + k) // 2 is 32 j + k // 2."""

    def short(e: Expr) -> Expr | None:
        match e:
            case Call("floordiv" | "mod", (Call(), Const())):
                return simplify(e, b.sizes)
        return None

    if not any(_is_long(e) for n in walk(b.body) for e in exprs_of(n)):
        return b
    return replace(b, body=mapped(b.body, lambda e: transform(e, short)))


def _is_long(e: Expr) -> bool:
    """Whether a quotient or a remainder of something computed is in `e`."""
    here = isinstance(e, Call) and e.op in ("floordiv", "mod") and isinstance(e.args[0], Call)
    return here or any(map(_is_long, children(e)))
