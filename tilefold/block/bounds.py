"""Loop bounds from masks: blocks that a mask empties are not visited.

Law: if, with the mask false on a whole block, every accumulation of the loop body adds its
identity, then the iteration changes nothing, because repair(t, D, D) = t. A mask that
compares indices linearly (causal, sliding window, prefix) is false on all of a block beyond a
bound that the block of the other dims determines, and that bound becomes the loop's. Terms of the comparison may be
data that the loop's dim does not index (`k < length[b]`): the bound then has their extreme over the block.

(As with every implementation that skips masked keys, 0 * NaN of a masked value is not formed.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Size,
    Sym,
    call,
    children,
    dims_used,
    lit,
    loads,
    rebuild,
    substitute,
    transform,
    type_of,
    walk,
)
from tilefold.block.ir import Accumulate, Block, Let, Loop, Node, Update, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.block.tidy import mapped, without_dead

NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_ZERO = Const(0.0, DType.F32)
_NEG_INF = Const(-math.inf, DType.F32)


def bound_loops(b: Block) -> Block:
    """`b` with serial loops narrowed to the blocks that their masks leave."""
    data = integers((i.name, i.dtype) for i in b.inputs)
    b = _spelled_out(b, data)
    return replace(b, body=tuple(_node(n, (), data) for n in b.body))


def _spelled_out(b: Block, data: frozenset[str]) -> Block:
    """`b` with masks that compare positions where they are used (a window, which the scores and their gradient read):
    there they bound loops, and a back end settles them for a whole tile. What was computed for them alone goes."""
    made = {n.name: n for n in walk_nodes(b.body) if isinstance(n, Let) and n.reducer is None and not n.dtype.is_float}
    inputs, known = {i.name for i in b.inputs}, dict[Load, Expr]()

    def whole(e: Expr) -> Expr:
        return transform(e, lambda x: at(x) if isinstance(x, Load) and x.tensor in made else None)

    def at(ld: Load) -> Expr:
        if ld not in known:  # what is computed of it several times, step by step, has it once
            let = made[ld.tensor]
            known[ld] = whole(substitute(let.expr, {Index(d): ix for d, ix in zip(let.dims, ld.index, strict=True)}))
        return known[ld]

    def one(e: Expr) -> Expr | None:
        if not (isinstance(e, Call) and e.op == "where") or not any(ld.tensor in made for ld in loads(e.args[0])):
            return None
        mask = whole(e.args[0])
        own = of_positions(mask, data) and all(ld.tensor in inputs for ld in loads(mask))
        return Call("where", (mask, *e.args[1:])) if own else None

    return without_dead(replace(b, body=mapped(b.body, lambda e: transform(e, one)))) if made else b


def integers(tensors: Iterable[tuple[str, DType]]) -> frozenset[str]:
    """Of these arguments, those whose elements may bound a loop."""
    return frozenset(name for name, dtype in tensors if dtype in (DType.I64, DType.I32))


def _node(n: Node, outer: tuple[str, ...], data: frozenset[str]) -> Node:
    if not isinstance(n, Loop):
        return n
    n = replace(n, body=tuple(_node(x, (*outer, n.dim), data) for x in n.body))
    if n.kind == "forall" or n.start is not None or n.stop is not None:
        return n
    starts: list[Expr] = []
    stops: list[Expr] = []
    for mask, alive in _masks(n.body):
        if not _dead(n.body, mask, not alive):
            continue
        begins, ends = _ends(mask, alive, lambda need: bound(need, n.dim, outer, everywhere=False, data=data))
        starts += begins
        stops += ends
    start = _fold("maximum", [Const(0, DType.I64), *starts]) if starts else None
    stop = _fold("minimum", [Size(n.dim), *stops]) if stops else None
    return replace(n, start=start, stop=stop)


def _fold(op: str, items: list[Expr]) -> Expr:
    out = items[0]
    for e in dict.fromkeys(items[1:]):
        out = call(op, out, e)
    return out


def _masks(body: tuple[Node, ...]) -> Iterator[tuple[Expr, bool]]:
    """Conditions of `where`s in the body, each with the value under which its block could be alive."""
    seen: set[Expr] = set()
    for n in walk_nodes(body):
        for e in exprs_of(n):
            for x in walk(e):
                if isinstance(x, Call) and x.op == "where" and x.args[0] not in seen:
                    seen.add(x.args[0])
                    yield x.args[0], True
                    yield x.args[0], False


# -- is an iteration dead? ------------------------------------------------------------------


def _dead(body: tuple[Node, ...], mask: Expr, value: bool) -> bool:
    """Whether the body changes nothing when `mask` has that value on the whole block."""
    known: dict[str, Const] = {}
    for n in body:
        match n:
            case Let(name, _, _, e, None):
                c = _settled(e, mask, value, known)
                if isinstance(c, Const):
                    known[name] = c
            case Let(reducer=r) if r is not None:
                continue
            case Update():
                continue
            case Accumulate(_, reducer, _, e, _):
                c = _settled(e, mask, value, known)
                if not isinstance(c, Const) or float(c.value) != float(identity_of(reducer, DType.F32.torch_dtype)):
                    return False
            case _:
                return False
    return any(isinstance(n, Accumulate) for n in body)


def _settled(e: Expr, mask: Expr, value: bool, known: Mapping[str, Const]) -> Expr:
    """`e` simplified knowing the mask; finite wherever it is not known to be -inf or 0."""
    if e == mask:
        return Const(value, DType.BOOL)
    if isinstance(e, Load):
        return known.get(e.tensor, e)
    e = rebuild(e, tuple(_settled(k, mask, value, known) for k in children(e)))
    match e:
        case Call("where", (Const(v, _), a, b)):
            return a if v else b
        case Call("mul", (a, b)) if _ZERO in (a, b) and _NEG_INF not in (a, b):
            return _ZERO
        case Call("mul", (a, Const(v, _))) if a == _NEG_INF and v > 0:
            return _NEG_INF
        case Call("div", (a, _)) if a == _ZERO:
            return _ZERO
        case Call("div", (a, Const(v, _))) if a == _NEG_INF and v > 0:
            return _NEG_INF
        case Call("add", (a, b)) if _NEG_INF in (a, b):
            return _NEG_INF
        case Call("sub", (a, _)) if a == _NEG_INF:
            return _NEG_INF
        case Call(("exp" | "exp2"), (a,)) if a == _NEG_INF:
            return _ZERO
        case Cast(a, dtype) if isinstance(a, Const) and dtype.is_float and not dtype.rounds:
            return a
    return e


# -- what a living block needs --------------------------------------------------------------


def _ends(e: Expr, truth: bool, find: Callable[[Call], tuple[str, Expr] | None]) -> tuple[list[Expr], list[Expr]]:
    """Starts and stops of what has to hold somewhere in a block for `e` to have that value there: of both parts of a
    conjunction, and around both parts of a disjunction (a causal mask or a prefix)."""
    match e:
        case Call("not", (a,)):
            return _ends(a, not truth, find)
        case Call(("and" | "or") as op, (a, b)):
            (starts, stops), (others, ends) = _ends(a, truth, find), _ends(b, truth, find)
            if (op == "and") == truth:
                return starts + others, stops + ends
            first = [call("minimum", _fold("maximum", starts), _fold("maximum", others))] if starts and others else []
            last = [call("maximum", _fold("minimum", stops), _fold("minimum", ends))] if stops and ends else []
            return first, last
        case Call(("lt" | "le" | "gt" | "ge") as op, (a, b)):
            found = find(Call(op if truth else NEGATED[op], (a, b)))
            if found is not None:
                return ([found[1]], []) if found[0] == "start" else ([], [found[1]])
        case Call(("ne" | "eq") as op, (Call("where", (c, Const(x, _), Const(y, _))), Const(z, _))):
            on, off = (x == z) == (op == "eq"), (y == z) == (op == "eq")
            if on != off:
                return _ends(c, truth == on, find)
        case Cast(a, DType.BOOL):
            return _ends(a, truth, find)
    return [], []


def bound(
    need: Call, dim: str, outer: Container[str], *, everywhere: bool, data: Container[str] = ()
) -> tuple[str, Expr] | None:
    """("stop", e) or ("start", e): blocks of `dim` outside never satisfy the comparison; with `everywhere`, blocks
    inside satisfy it in every element. None where it is not linear in the indices of `dim` and `outer`, and in
    elements of `data` that `outer` indexes. A comparison of data that `dim` has no part in stops at 0 where it fails.
    """
    terms = linear(Call("sub", need.args), data)
    if terms is None:
        return None
    at = terms.pop(Index(dim), 0)
    if any(d not in outer for t in terms for d in dims_used(t)):
        return None
    if at == 0 and any(True for t in terms for _ in loads(t)):
        least = need.op in ("lt", "le")
        holds = Call(need.op, (extreme(terms, largest=least == everywhere, plus=0), lit(0)))
        return "stop", call("where", holds, Size(dim), lit(0))
    if at not in (1, -1):
        return None
    op = need.op if at == 1 else SWAPPED[need.op]
    # at * j + rest (op) 0, that is j (op) f with f = -rest / at
    f = {t: -c * at for t, c in terms.items()}
    if op in ("lt", "le"):
        return "stop", extreme(f, largest=not everywhere, plus=1 if op == "le" else 0)
    return "start", extreme(f, largest=everywhere, plus=1 if op == "gt" else 0)


def of_positions(e: Expr, data: Container[str]) -> bool:
    """Whether `e` compares positions, with each other or with integers of data, beside what else it asks: it may
    bound a loop."""
    match e:
        case Call("and" | "or" | "not", args):
            return any(of_positions(a, data) for a in args)
        case Call(("lt" | "le" | "gt" | "ge"), args):
            read = [ld.tensor for ld in loads(e)]
            own = any(t in data for t in read) if read else bool(dims_used(e))
            return own and linear(Call("sub", args), data) is not None
    return False


def linear(e: Expr, data: Container[str] = ()) -> dict[Expr, int] | None:
    """Coefficients of an integer expression over indices, sizes, symbols, integers computed of elements of `data`, and
    (under Const 1) a constant."""
    found = _linear(e, data)
    if found is None and (read := list(loads(e))) and all(ld.tensor in data for ld in read):
        return {e: 1} if type_of(e, lambda _: DType.I64) is DType.I64 else None
    return found


def _linear(e: Expr, data: Container[str]) -> dict[Expr, int] | None:
    one = Const(1, DType.I64)
    match e:
        case Const(v, dtype) if float(v).is_integer() and dtype is not DType.BOOL:
            return {one: int(v)}
        case Index() | Size() | Sym():
            return {e: 1}
        case Call("neg", (a,)):
            return _scaled(linear(a, data), -1)
        case Call(("add" | "sub") as op, (a, b)):
            x, y = linear(a, data), _scaled(linear(b, data), 1 if op == "add" else -1)
            if x is None or y is None:
                return None
            return {t: x.get(t, 0) + y.get(t, 0) for t in {**x, **y}}
        case Call("mul", (Const(v, DType.I64), a)) | Call("mul", (a, Const(v, DType.I64))):
            return _scaled(linear(a, data), int(v))
        case Cast(a, dtype) if dtype in (DType.I64, DType.I32, DType.F32, DType.F64):
            return linear(a, data)
    return None


def _scaled(terms: dict[Expr, int] | None, by: int) -> dict[Expr, int] | None:
    return None if terms is None else {t: c * by for t, c in terms.items()}


def extreme(terms: Mapping[Expr, int], *, largest: bool, plus: int) -> Expr:
    """The extreme value of a linear form over the current blocks of its indices."""
    out: Expr | None = None
    constant = plus
    for t, c in terms.items():
        if isinstance(t, Const):
            constant += c
            continue
        if c == 0:
            continue
        if isinstance(t, Index):
            top = (c > 0) == largest
            constant -= c if top else 0  # the last index is tile_stop - 1
            t = call("tile_stop" if top else "tile_start", t)
        elif any(True for _ in loads(t)):
            t = call("tile_max" if (c > 0) == largest else "tile_min", t)
        part = t if c == 1 else call("mul", c, t)
        out = part if out is None else call("add", out, part)
    if out is None:
        return Const(constant, DType.I64)
    return out if constant == 0 else call("add", out, constant)
