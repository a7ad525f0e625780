"""A gathered element is a sum against a one-hot row.

    select    h[i, y(i)] = sum over k of where(k == y(i), h[i, k], 0)          CODA kernels 3 and 8
    collapse  sum over k of where(k == y and c, v, 0) = where(c and 0 <= y < K, v, 0)   for v constant along k
              sum over k of u + where(k == y and c, v, 0) = K u + where(c and 0 <= y < K, v, 0)   as a pass
              sum over k of f(k) where(k == y and c, v(k), 0) = where(c and 0 <= y < K, f(y) v(y), 0)   as a pass

`select` makes the gather of a product's element a reduction along the product's output, which an
epilogue has in its tile; where the index is out of range the sum is 0 (a gather is undefined there).
`collapse` is the other direction for values that no product makes.

Side conditions: the index does not depend on k; for `select` the tensor is a product's result.
Rounding: none, all other terms are exact zeros (a nan or inf elsewhere in the row is not touched, where a product with
zeros makes nan of it).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads, substitute, walk
from tilefold.tensor.index_simplify import const, poly, within
from tilefold.tensor.inline import converted, too_long
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import fresh, gemms, plain
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import in_order, rename_loads, substitute_map


def _gathers(p: Program, c: Compute) -> list[Load]:
    """Loads of products in which one axis is gathered and the others are the reader's own dims."""
    known = gemms(p)
    out = []
    for ld in loads(c.body):
        if ld.tensor not in known:
            continue
        data = [n for n, i in enumerate(ld.index) if any(isinstance(x, Load) for x in walk(i))]
        others = [i for n, i in enumerate(ld.index) if n not in data]
        if len(data) == 1 and all(isinstance(i, Index) for i in others) and len(set(others)) == len(others):
            out.append(ld)
    return out


def select_matches(p: Program) -> tuple[Match, ...]:
    """Gathers from products' results."""
    return tuple(
        Match("select", (c.name, ld.tensor), f"element of {ld.tensor} in {c.name}", (ld,))
        for c in p.body
        for ld in _gathers(p, c)
    )


def select_apply(p: Program, match: Match) -> Program:
    """The gathered elements as a statement of their own."""
    ld = match.choice[0]
    assert isinstance(ld, Load)
    source = gemms(p)[ld.tensor].compute
    axis = next(n for n, i in enumerate(ld.index) if not isinstance(i, Index))
    k = source.dims[axis]
    rows = [i for n, i in enumerate(ld.index) if n != axis]
    dims = tuple(i.dim for i in rows if isinstance(i, Index))
    if k in dims or k in dims_used(ld.index[axis]):
        k = fresh(p, f"{k}_")
        p = replace(p, sizes={**p.sizes, k: p.sizes[source.dims[axis]]})
    whole = Load(ld.tensor, tuple(Index(k) if n == axis else i for n, i in enumerate(ld.index)))
    hit = Call("eq", (Index(k), ld.index[axis]))
    body = Call("where", (hit, whole, Const(0.0, DType.F32)))
    picked = Compute(fresh(p, f"{ld.tensor}_at"), dims, source.dtype.compute, body, "sum", (k,), loc=source.loc)

    def one(x: Load) -> Expr | None:
        return Load(picked.name, plain(dims)) if x == ld else None

    out = tuple(replace(c, body=rename_loads(c.body, one)) if c.name == match.at[0] else c for c in p.body)
    return in_order(replace(p, body=(*out, picked)))


#: Something of a one-hot row: where it is not zero, what else must hold there, and the value.
Pick = tuple[Expr, Expr, Expr]


def _one_hot(c: Compute) -> Pick | None:
    """(index, other condition, value) of a sum of a one-hot row."""
    return _pick(c.body, c.rdims[0]) if c.reducer == "sum" and len(c.rdims) == 1 else None


def _pick(e: Expr, k: str) -> Pick | None:
    """The one element of a row that may not be zero."""
    match e:
        case Cast(arg, dtype) if dtype.is_float:  # zeros stay zeros
            found = _pick(arg, k)
            return None if found is None else (found[0], found[1], Cast(found[2], dtype))
        case Call("where", (condition, value, Const(zero, _))) if zero == 0 and k not in dims_used(value):
            pass
        case _:
            return None
    index: Expr | None = None
    others: list[Expr] = []
    for part in _conjuncts(condition):
        match part:
            case Call("eq", (a, b)) if Index(k) in (a, b) and index is None and k not in dims_used(a) & dims_used(b):
                index = b if a == Index(k) else a
            case _ if k not in dims_used(part):
                others.append(part)
            case _:
                return None
    if index is None:
        return None
    rest: Expr = Const(True, DType.BOOL)
    for o in others:
        rest = o if rest == Const(True, DType.BOOL) else Call("and", (rest, o))
    return index, rest, value


def _affine(e: Expr, k: str) -> tuple[Expr | None, list[Pick]] | None:
    """e as something constant along k (None: 0) and elements of one-hot rows, all of them added up."""
    if k not in dims_used(e):
        return e, []
    match e:
        case Call("add" | "sub" as op, (a, b)):
            x, y = _affine(a, k), _affine(b, k)
            if x is None or y is None:
                return None
            y = _scaled(y, lambda v: Call("neg", (v,))) if op == "sub" else y
            both = [v for v in (x[0], y[0]) if v is not None]
            return Call("add", (both[0], both[1])) if len(both) == 2 else next(iter(both), None), x[1] + y[1]
        case Call("neg", (a,)):
            x = _affine(a, k)
            return None if x is None else _scaled(x, lambda v: Call("neg", (v,)))
        case Call("mul" | "div" as op, (a, b)) if k not in dims_used(b):
            x = _affine(a, k)
            return None if x is None else _scaled(x, lambda v: Call(op, (v, b)))
        case Call("mul", (a, b)) if k not in dims_used(a):
            x = _affine(b, k)
            return None if x is None else _scaled(x, lambda v: Call("mul", (a, v)))
    found = _pick(e, k)
    return None if found is None else (None, [found])


def _scaled(x: tuple[Expr | None, list[Pick]], by: Callable[[Expr], Expr]) -> tuple[Expr | None, list[Pick]]:
    return None if x[0] is None else by(x[0]), [(index, rest, by(value)) for index, rest, value in x[1]]


def collapse_sums(p: Program) -> Program:
    """The program in which sums over rows that are constant but for single elements are maps: the constant times the
    length, and the elements. Added up one after the other, many small terms beside a large one would be rounded as it
    is (the gradient of a smoothed cross-entropy). Rows of floats with a known length that is not 0."""
    maps = {c.name: c for c in p.body if c.reducer is None and len(c.results) == 1 and c.dtype.compute is DType.F32}
    dtypes = {i.name: i.dtype for i in p.inputs} | {r: c.dtype for c in p.body for r in c.results}
    named: set[str] = set()

    def names(e: Expr) -> bool:
        """Whether elements are told by their index there, or in the maps that are read: else no row has single ones."""
        if any(ld.tensor in named for ld in loads(e)):
            return True
        return any(isinstance(n, Call) and n.op == "eq" and any(isinstance(a, Index) for a in n.args) for n in walk(e))

    for name, c in maps.items():
        if isinstance(c.body, Index) or names(c.body):
            named.add(name)

    def written_out(e: Expr, k: str) -> Expr:
        """With the maps that are read along k in their readers' place, as long as that is no longer than bodies are."""

        def one(n: Load) -> Expr | None:
            if n.tensor not in maps or k not in dims_used(n):
                return None
            m = maps[n.tensor]
            return converted(substitute_map(m, n), m.dtype, dtypes)

        longer = rename_loads(e, one)
        return e if longer is e or too_long(longer) else written_out(longer, k)

    body = []
    for c in p.body:
        size = p.sizes[c.rdims[0]] if len(c.rdims) == 1 else None
        if c.reducer != "sum" or c.dtype is not DType.F32 or not isinstance(size, Const) or size.value == 0:
            body.append(c)
            continue
        found = _affine(written_out(c.body, c.rdims[0]), c.rdims[0]) if names(c.body) else None
        if found is None or not found[1]:
            body.append(c)
            continue
        constant, picks = found
        terms = [] if constant is None else [Call("mul", (constant, Const(float(size.value), DType.F32)))]
        terms += [_element(pick, size) for pick in picks]
        total = terms[0]
        for t in terms[1:]:
            total = Call("add", (total, t))
        body.append(replace(c, reducer=None, rdims=(), body=total))
    return replace(p, body=tuple(body))


def _element(pick: Pick, size: Expr) -> Call:
    """What a sum over a one-hot row is."""
    index, rest, value = pick
    inside = Call("and", (Call("ge", (index, const(0))), Call("lt", (index, size))))
    condition = inside if rest == Const(True, DType.BOOL) else Call("and", (inside, rest))
    return Call("where", (condition, value, Const(0.0, DType.F32)))


def _conjuncts(e: Expr) -> list[Expr]:
    match e:
        case Call("and", (a, b)):
            return _conjuncts(a) + _conjuncts(b)
        case Cast(arg, DType.BOOL):
            return _conjuncts(arg)
    return [e]


def collapse_products(p: Program) -> Program:
    """The program in which products with a matrix that has one element a row or column are maps: `diag(d) @ x` scales
    rows, `x @ eye` is x, `one_hot(t) @ w` takes rows of w. Sums of floats; where data say which element, matrices alone
    (a row's label's logit may stand for what a product makes)."""
    maps = {c.name: c for c in p.body if c.reducer is None and len(c.results) == 1}
    dtypes = {i.name: i.dtype for i in p.inputs} | {r: c.dtype for c in p.body for r in c.results}
    return replace(p, body=tuple(_without_one_hot(c, p, maps, dtypes) for c in p.body))


def _without_one_hot(c: Compute, p: Program, maps: Mapping[str, Compute], dtypes: dict[str, DType]) -> Compute:
    if c.reducer != "sum" or c.index_name is not None or not c.dtype.is_float:
        return c
    product = product_of(c)
    matrix = product is not None and product.is_matrix()
    factors = _factors(c.body)
    for n, k in itertools.product(range(len(factors)), c.rdims):
        others = factors[:n] + factors[n + 1 :]
        found = (
            _element_of(_written_out(factors[n], maps, dtypes), k) if any(k in dims_used(x) for x in others) else None
        )
        if found is None or (loads(found[0]) and not matrix):
            continue
        y, rest, value = found
        body = value
        for x in others:
            body = Call("mul", (body, substitute(x, {Index(k): y})))
        if not within(poly(y, p.sizes), poly(p.sizes[k], p.sizes), p.sizes):
            body = _element((y, rest, body), p.sizes[k])
        elif rest != Const(True, DType.BOOL):
            body = Call("where", (rest, body, Const(0.0, DType.F32)))
        rdims = tuple(d for d in c.rdims if d != k)
        made = replace(c, reducer="sum" if rdims else None, rdims=rdims, body=body)
        return _without_one_hot(made, p, maps, dtypes)
    return c


def _factors(e: Expr) -> list[Expr]:
    match e:
        case Call("mul", (a, b)):
            return _factors(a) + _factors(b)
    return [e]


def _written_out(e: Expr, maps: Mapping[str, Compute], dtypes: dict[str, DType]) -> Expr:
    """What a factor is that a map makes."""
    match e:
        case Cast(arg, dtype):
            return Cast(_written_out(arg, maps, dtypes), dtype)
        case Load(tensor) if tensor in maps:
            return converted(substitute_map(maps[tensor], e), maps[tensor].dtype, dtypes)
    return e


def _element_of(e: Expr, k: str) -> Pick | None:
    """Of a factor that is not zero at one k alone: that k, what else must hold, and the value there."""
    match e:
        case Cast(arg, dtype) if dtype.is_float:
            found = _element_of(arg, k)
            return None if found is None else (found[0], found[1], Cast(found[2], dtype))
        case Call("where", (condition, value, Const(zero, _))) if zero == 0:
            pass
        case Call("eq" | "and"):
            condition, value = e, Const(1.0, DType.F32)
        case _:
            return None
    found = _pick(Call("where", (condition, Const(1.0, DType.F32), Const(0.0, DType.F32))), k)
    return None if found is None else (found[0], found[1], substitute(value, {Index(k): found[0]}))


def collapse_matches(p: Program) -> tuple[Match, ...]:
    """Sums of a value against a one-hot row."""
    return tuple(Match("collapse", (c.name,), f"{c.name} is one element") for c in p.body if _one_hot(c) is not None)


def collapse_apply(p: Program, match: Match) -> Program:
    """The sum as a map."""
    body = []
    for c in p.body:
        found = _one_hot(c) if c.name == match.at[0] else None
        if found is None:
            body.append(c)
            continue
        body.append(replace(c, reducer=None, rdims=(), body=_element(found, p.sizes[c.rdims[0]])))
    return replace(p, body=tuple(body))


SELECT = Law(
    "select", "h[i, y] = sum over k of where(k == y, h[i, k], 0)", "none", "CODA kernels 3, 8",
    select_matches, select_apply,
)  # fmt: skip
COLLAPSE = Law(
    "collapse", "sum over k of where(k == y, v, 0) = v", "none", "one-hot row", collapse_matches, collapse_apply
)
