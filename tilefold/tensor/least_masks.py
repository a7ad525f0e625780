"""Masks by the least number of a type as masks by -inf, where a softmax cannot tell the difference.

Law, of rows with an unmasked element: exp(s - max s) is 0 where s is -3.4e38, as it is where s is -inf

Hugging Face's eager masks are added numbers: `scores + where(j <= i, 0, finfo.min)`. As they stand a loop goes over all
keys; -inf bounds it. The law needs that each row has an element that no mask covers, which is proved of the positions
(the first key, a row's own, an end of what a window sees), so that masks that data decide stay numbers: a row of
padding is the mean of all. Unmasked scores are sums of products, taken to be above half of the least number, as they
are in `backends.triton.far`. float16's least number is one that scores may have: it stays too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from tilefold.algebra.dtypes import DType
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
    substitute,
    transform,
    walk,
)
from tilefold.tensor.index_simplify import const, poly, within
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import resimplified

#: What is as low as this no sum of products is.
LEAST = -1e38
_NEG_INF = Const(-math.inf, DType.F32)
_TRUE = Const(True, DType.BOOL)
_COMPARED = ("lt", "le", "gt", "ge")


def infinite_masks(p: Program) -> Program:
    """The program with such masks."""
    readers: dict[str, list[Compute]] = {}
    for c in p.body:
        for t in dict.fromkeys(ld.tensor for ld in loads(c.body)):
            readers.setdefault(t, []).append(c)
    changed = {}
    near: set[str] = set()
    for c in p.body:
        if c.reducer == "sum" or (c.reducer is None and _near(c.body, near)):
            near.add(c.name)
        stream = _softened(p, c, readers.get(c.name, ()))
        if stream is None:
            continue
        masks: list[Expr] = []
        made = _masked(c.body, near, masks)
        if made is not None and masks and _some(masks, stream, p.sizes):
            changed[c.name] = replace(c, body=made)
    return replace(p, body=tuple(changed.get(c.name, c) for c in p.body)) if changed else p


def _softened(p: Program, c: Compute, readers: Sequence[Compute]) -> str | None:
    """The dim of a softmax over a map, which nothing else reads: its maximum, and exponentials less that."""
    if c.reducer is not None or c.name in p.outputs:
        return None
    tops = [r for r in readers if r.reducer == "max" and isinstance(r.body, Load) and len(r.rdims) == 1]
    if len(tops) != 1 or not all(r is tops[0] or _less(r.body, c.name, tops[0].name) for r in readers):
        return None
    (at,) = tops[0].rdims
    own = tops[0].body
    assert isinstance(own, Load)
    places = [d for d, i in zip(c.dims, own.index, strict=True) if i == Index(at)]
    return places[0] if len(places) == 1 and own.index.count(Index(at)) == 1 else None


def _less(e: Expr, scores: str, top: str) -> bool:
    """Whether an expression reads scores in exponentials of their differences from the maximum alone."""

    def gone(x: Expr) -> Expr | None:
        match x:
            case Call("exp", (Call("sub", (Load(s, _), t)),)) if s == scores and _largest(t, top):
                return Const(0.0, DType.F32)
        return None

    return not any(ld.tensor == scores for ld in loads(transform(e, gone)))


def _largest(e: Expr, top: str) -> bool:
    """Whether an expression is the maximum, or a safe softmax's: 0 where that is -inf."""
    match e:
        case Load(t, _):
            return t == top
        case Call("where", (Call("eq", (Load(t, _), Const(v, _))), Const(0.0, _), x)) if v == -math.inf:
            return t == top and _largest(x, top)
    return False


def _masked(e: Expr, near: AbstractSet[str], masks: list[Expr]) -> Expr | None:
    """A score with -inf where masks had numbers, and the conditions under which it has none; None: it is no such."""
    match e:
        case Call("where", (c, a, b)) if _least(b) and not list(loads(c)):
            masks.append(c)
            kept = _masked(a, near, masks)
            return None if kept is None else Call("where", (c, kept, _NEG_INF))
        case Call("where", (c, a, b)) if _least(a) and not list(loads(c)):
            masks.append(call("not", c))
            kept = _masked(b, near, masks)
            return None if kept is None else Call("where", (c, _NEG_INF, kept))
        case Cast(x, dtype) if dtype in (DType.F32, DType.BF16):
            kept = _masked(x, near, masks)
            return None if kept is None else Cast(kept, dtype)
        case Call("add", (a, b)):
            for mask, s in ((_added(b), a), (_added(a), b)):
                if mask is not None:
                    masks.append(mask)
                    kept = _masked(s, near, masks)
                    return None if kept is None else Call("where", (mask, kept, _NEG_INF))
    return e if _near(e, near) else None


def _added(e: Expr) -> Expr | None:
    """Where a mask that is added is 0."""
    match e:
        case Cast(x, dtype) if dtype in (DType.F32, DType.BF16):
            return _added(x)
        case Call("where", (c, Const(v, _), b)) if v == 0 and _least(b) and not list(loads(c)):
            return c
        case Call("where", (c, a, Const(v, _))) if v == 0 and _least(a) and not list(loads(c)):
            return call("not", c)
    return None


def _least(e: Expr) -> bool:
    """Whether a number is the least of its type, or as low."""
    match e:
        case Const(v, dtype):
            return dtype.is_float and math.isfinite(float(v)) and float(v) <= LEAST
        case Cast(x, dtype) if dtype in (DType.F32, DType.BF16):
            return _least(x)
    return False


def _near(e: Expr, near: AbstractSet[str]) -> bool:
    """Whether an expression is a sum of products, scaled, or a small number. near: the results that are."""
    match e:
        case Const(v, dtype):
            return dtype.is_float and abs(float(v)) < 1e30
        case Load(name, _):
            return name in near
        case Cast(x, dtype):
            return dtype.is_float and _near(x, near)
        case Call("tanh" | "sigmoid", (x,)):
            return _near(x, near)
        case Call("neg", (x,)):
            return _near(x, near)
        case Call("add" | "sub", (a, b)):
            return _near(a, near) and _near(b, near)
        case Call("mul" | "div", (a, Const(v, _))) | Call("mul", (Const(v, _), a)):
            return _near(a, near) and 1e-9 < abs(float(v)) < 1e9
    return False


def _some(masks: list[Expr], stream: str, sizes: Mapping[str, Expr]) -> bool:
    """Whether in every row some element is under no mask."""
    whole = masks[0]
    for m in masks[1:]:
        whole = call("and", whole, m)
    for at in dict.fromkeys(_places(whole, stream)):
        inside = within(poly(at, sizes), poly(sizes[stream], sizes), sizes) or at == const(0)  # no row is empty, or all
        if inside and resimplified(substitute(whole, {Index(stream): at}), sizes) == _TRUE:
            return True
    return False


def _places(mask: Expr, stream: str) -> Iterator[Expr]:
    """Elements that a mask might leave: the first, and what the stream is compared with."""
    yield const(0)
    for x in walk(mask):
        match x:
            case Call(op, (Index(d), e)) | Call(op, (e, Index(d))) if op in _COMPARED and d == stream:
                if stream not in dims_used(e):
                    yield from (e, e - 1, e + 1)
