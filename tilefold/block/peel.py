"""Peeling: the blocks of a loop that a mask leaves whole, without the mask.

Law: for j in a .. c: S  =  for j in a .. b: S; for j in b .. c: S, for any b between, because a `for`
loop runs its blocks in order. Between bounds on which a mask is known to be true, where(mask, x, y) = x.

A mask that compares indices linearly (causal, sliding window) is true on all of a block inside
bounds that the blocks of the outer loops determine: the dual of `block.bounds`. At most three loops come
of one: before (masked), inside (no mask), after (masked).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Size, call, transform, walk
from tilefold.block.bounds import NEGATED, bound
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.block.verify import verify
from tilefold.errors import ScheduleError


def peel_loop(b: Block, dim: str) -> Block:
    """`b` with every serial loop over `dim` that has masks peeled. ScheduleError where none has one."""
    done = replace(b, body=_nodes(b.body, dim, ()))
    if done.body == b.body:
        raise ScheduleError(
            f"no loop over {dim} has a mask that is known on whole blocks",
            hint="a mask is a `where` on linear comparisons of indices of loops, such as j <= i",
        )
    return verify(done)


def _nodes(nodes: tuple[Node, ...], dim: str, outer: tuple[str, ...]) -> tuple[Node, ...]:
    out: list[Node] = []
    for n in nodes:
        if not isinstance(n, Loop):
            out.append(n)
        elif n.dim != dim:
            out.append(replace(n, body=_nodes(n.body, dim, (*outer, n.dim))))
        else:
            out += _peeled(n, outer)
    return tuple(out)


def _peeled(n: Loop, outer: tuple[str, ...]) -> list[Loop]:
    """The loops that replace `n`; `n` itself where no mask is known on whole blocks."""
    masks: list[Expr] = []
    starts: list[Expr] = []
    stops: list[Expr] = []
    for mask in _masks(n.body):
        found = _inside(mask, n.dim, outer)
        if found:
            masks.append(mask)
            starts += [e for end, e in found if end == "start"]
            stops += [e for end, e in found if end == "stop"]
    if n.kind == "forall" or n.single or not masks:
        return [n]
    start = n.start if n.start is not None else Const(0, DType.I64)
    stop = n.stop if n.stop is not None else Size(n.dim)
    loops: list[Loop] = []
    if starts:
        first = _fold("maximum", starts)
        loops.append(replace(n, start=n.start, stop=call("minimum", stop, first)))
        start = call("maximum", start, first)
    last = _fold("minimum", stops) if stops else None
    inside = n.stop if last is None else call("minimum", stop, last)
    begin = start if starts else n.start
    loops.append(replace(n, start=begin, stop=inside, body=_unmasked(n.body, frozenset(masks))))
    if last is not None:
        loops.append(replace(n, start=call("maximum", start, last), stop=n.stop))
    return loops


def _fold(op: str, items: list[Expr]) -> Expr:
    out, *rest = dict.fromkeys(items)
    for e in rest:
        out = call(op, out, e)
    return out


def _masks(body: tuple[Node, ...]) -> Iterator[Expr]:
    """Conditions of the `where`s in a body, each once."""
    seen: dict[Expr, None] = {}
    for n in walk_nodes(body):
        for e in exprs_of(n):
            seen |= dict.fromkeys(x.args[0] for x in walk(e) if isinstance(x, Call) and x.op == "where")
    return iter(seen)


def _inside(mask: Expr, dim: str, outer: tuple[str, ...]) -> list[tuple[str, Expr]] | None:
    """Bounds on `dim` inside of which the mask is true everywhere; None where that is not known."""
    needs = _comparisons(mask, True)
    if needs is None:
        return None
    found = [bound(need, dim, outer, everywhere=True) for need in needs]
    return None if None in found else [f for f in found if f is not None]


def _comparisons(e: Expr, truth: bool) -> list[Call] | None:
    """Comparisons whose conjunction says exactly that `e` has that value; None where there are none such."""
    match e:
        case Call("not", (a,)):
            return _comparisons(a, not truth)
        case Call(("and" | "or") as op, (a, b)) if truth == (op == "and"):
            x, y = _comparisons(a, truth), _comparisons(b, truth)
            return None if x is None or y is None else x + y
        case Call(("lt" | "le" | "gt" | "ge") as op, args):
            return [Call(op if truth else NEGATED[op], args)]
    return None


def _unmasked(body: tuple[Node, ...], masks: frozenset[Expr]) -> tuple[Node, ...]:
    """The body with `where` on one of the masks decided."""

    def one(e: Expr) -> Expr | None:
        return e.args[1] if isinstance(e, Call) and e.op == "where" and e.args[0] in masks else None

    return tuple(_mapped(n, lambda e: transform(e, one)) for n in body)


def _mapped(n: Node, f: Callable[[Expr], Expr]) -> Node:
    match n:
        case Loop():
            return replace(n, body=tuple(_mapped(x, f) for x in n.body))
        case Init():
            return n
        case Let() | Accumulate():
            return replace(n, expr=f(n.expr), payload=None if n.payload is None else f(n.payload))
        case Update() | Store():
            return replace(n, expr=f(n.expr))
    raise AssertionError(n)
