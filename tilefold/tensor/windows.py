"""Sums over windows written out: a reduction over few elements as a map.

Law: a sum over r = 0 .. n - 1 of f(r) is f(0) + f(1) + .. + f(n - 1), added in arithmetic type in that order. A
convolution of one channel a group is then a map like a pooling's: neighbours read the same memory at nearly the same
time, and what follows it, which a library's call would have to read again, is in the same kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tilefold.algebra.evaluate import COMBINE
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    call,
    dims_used,
    loads,
    rename_dims,
    substitute,
)
from tilefold.names import fresh
from tilefold.tensor.index_simplify import const, is_integer, simplify
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import prune_dims

#: Products that one map adds, each of elements of its own: what it reads is under way at once, in registers.
AT_ONCE = 9
#: Terms beyond which as many beside each other are added first: expressions are no deeper.
LONG, BESIDE = 32, 16


def windows_written_out(p: Program, names: Collection[str]) -> Program:
    """The program with those sums, over dims of constant extent, written out."""
    if not names:
        return p
    taken = set(p.names)
    made = {c.name: written_out(p, c, taken) for c in p.body if c.name in names}
    p = replace(p, body=tuple(x for c in p.body for x in made.get(c.name, [c])))
    for c in (x for parts in made.values() for x in reversed(parts)):
        p = _only_what_is_read(p, c.name)
    return narrow(prune_dims(p))


def _only_what_is_read(p: Program, name: str) -> Program:
    """The program with a map made for the leading part alone that all of its readers read (a causal convolution pads at
    both ends and drops one): a dim of its own extent becomes the readers' dim."""
    if name in p.outputs:
        return p
    read = [ld for c in p.body for ld in loads(c.body) if ld.tensor == name]
    made = next(c for c in p.body if c.name == name)
    names: dict[str, str] = {}
    for n, d in enumerate(made.dims):
        places = {ld.index[n] for ld in read}
        at = places.pop() if len(places) == 1 else None
        if isinstance(at, Index) and at.dim != d and at.dim not in (*made.dims, *names.values()):
            names[d] = at.dim
    body = rename_dims(made.body, names)
    turned = replace(made, dims=tuple(names.get(d, d) for d in made.dims), body=body)
    return replace(p, body=tuple(turned if c is made else c for c in p.body))


def joined(reducer: str, terms: Iterable[Expr]) -> Expr:
    """What a reduction of these elements is, one after the other."""
    return functools.reduce(lambda a, b: call(COMBINE[reducer], a, b), terms)


def written_out(p: Program, c: Compute, taken: set[str]) -> list[Compute]:
    """Maps that add a few elements each to what the one before has; the last one is the sum (or another reduction).
    taken: names of the program, and of maps for other sums of it, to which these are added."""
    counts = [int(e.value) for e in map(p.sizes.__getitem__, c.rdims) if isinstance(e, Const)]
    taps = list(itertools.product(*map(range, counts)))
    here = [settled(substitute(c.body, _at(c, at)), p) for at in taps]
    read = [ld for ld in loads(c.body) if not dims_used(ld).isdisjoint(c.rdims)]
    others = {ld for ld in loads(c.body) if ld not in read}
    different = len({ld for e in here for ld in loads(e)} - others)
    parts, found = max(1, -(-different // (max(1, len(read)) * AT_ONCE))), list[Compute]()
    for n in range(parts):
        terms: list[Expr] = [Load(found[-1].name, tuple(map(Index, c.dims)))] if found else []
        terms += here[n * len(taps) // parts : (n + 1) * len(taps) // parts]
        last = n == parts - 1
        name = c.name if last else fresh(f"{c.name}_{n}", taken)
        dtype = c.dtype if last else c.dtype.compute
        if len(terms) > LONG:
            terms = [joined(c.reducer or "", terms[k : k + BESIDE]) for k in range(0, len(terms), BESIDE)]
        total = joined(c.reducer or "", terms)
        found.append(replace(c, name=name, dtype=dtype, body=total, reducer=None, rdims=()))
    return found


def _at(c: Compute, at: Sequence[int]) -> dict[Expr, Expr]:
    """What stands for the dims of a reduction at one of its elements."""
    return {Index(d): const(k) for d, k in zip(c.rdims, at, strict=True)}


def settled(e: Expr, p: Program) -> Expr:
    """Canonical index arithmetic, inside of loads and in conditions."""
    match e:
        case Load(tensor, index):
            return Load(tensor, tuple(simplify(i, p.sizes) for i in index))
        case Call(op, args) if op in ("ge", "lt") and all(map(is_integer, args)):
            return Call(op, tuple(simplify(a, p.sizes) for a in args))
        case Call(op, args):
            return Call(op, tuple(settled(a, p) for a in args))
        case Cast(arg, dtype):
            return Cast(settled(arg, p), dtype)
    return e
