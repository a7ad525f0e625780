"""`tilefold.derive`: the mathematics alone, from index notation or from Python functions.

    derive('''
        m = max[l] p[l]
        t = sum[l] exp(p[l] - m)
        o[e] = sum[l] exp(p[l] - m) / t * v[l, e]
    ''')

    derive(
        m=lambda p, l: max_[l](p[l]),
        t=lambda p, m, l: sum_[l](exp(p[l] - m)),
        o=lambda p, v, m, t, l, e: sum_[l](exp(p[l] - m) / t * v[l, e]),
    )

Text: one statement a line (or between semicolons), `name[dims] = reducer[axes] expression`, or without a reducer a
map, which is substituted into what follows. `size(l)` is the extent of a dim; top-k is
`s[r], i[r] = topk[l; r] x[l]`, argmax `v, i = argmax[l] x[l]`. Names in index brackets are
dims, names on earlier left sides results, everything else inputs.

Functions: parameters are dims, inputs or earlier results, whichever their use says. The
dims of a result are the indices of its body that are not reduced, in parameter order.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.context import reindex
from tilefold.algebra.deep import deeply
from tilefold.algebra.derivation import Derivation, derivation_of
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Expr, Index, Load, Size, call, lit, loads, places, transform, type_of, walk
from tilefold.algebra.ops import INDEX_REDUCERS, OPS, REDUCERS
from tilefold.algebra.text import Names, parse, syntax
from tilefold.errors import ParseError

#: Operations that a statement may grow to when maps are substituted.
MOST_NODES = 20_000
#: Reducers of what has an order, which conditions have not.
_OF_NUMBERS = ("max", "min", *INDEX_REDUCERS)
_LEFT = re.compile(r"(\w+)(?:\[([^\]]*)\])?$")
_RIGHT = re.compile(rf"({'|'.join(REDUCERS)})\s*\[([^\]]*)\]\s*(.*)$")


def derive(
    formula: str | None = None,
    /,
    *,
    dtypes: Mapping[str, str] | None = None,
    ignore_rounding: bool = False,
    **functions: Callable[..., Reduced],
) -> Derivation:
    """The Fold of a cascade, with its forms and proof.

    `formula`: text (see the module), or keyword functions in dependency order. `dtypes` names
    the element types of inputs and results (f32 where it does not). `ignore_rounding`: casts
    that quantise are taken as the identity. Raises ParseError, or NotFusibleError with the reason.
    """
    if (formula is None) == (not functions):
        raise ParseError("derive takes either a formula or functions", hint="derive('m = max[l] x[l]')")
    if formula is not None and not isinstance(formula, str):
        raise ParseError(f"a formula is a text, not {type(formula).__name__}", hint="derive('m = max[l] x[l]')")
    if wrong := [name for name, f in functions.items() if not callable(f)]:
        raise ParseError(f"{wrong[0]} is no function", hint="derive(t=lambda x, l: sum_[l](x[l]))")
    rows = rows_of(formula) if formula is not None else ()
    dims = dims_of(rows)

    def work() -> Derivation:
        lines = [_line(row, dims) for row in rows] if formula is not None else _from_functions(functions)
        return derivation_of(cascade_of(lines, dtypes or {}), ignore_rounding=ignore_rounding)

    return deeply(work)


@dataclass(frozen=True, slots=True)
class Line:
    """One statement: `names[0][dims] = reducer[axes] body`; reducer None: a map. `row`: its text, for messages."""

    names: tuple[str, ...]
    dims: tuple[str, ...]
    reducer: str | None
    axes: tuple[str, ...]
    body: Expr
    row: str = ""

    @property
    def where(self) -> str:
        """For the end of a message."""
        return f": {self.row!r}" if self.row else ""


def cascade_of(lines: list[Line], dtypes: Mapping[str, str]) -> Cascade:
    """Maps substituted, reductions collected; ParseError where they do not make one cascade."""
    maps: dict[str, tuple[tuple[str, ...], Expr]] = {}
    reductions: list[Reduction] = []
    axes: tuple[str, ...] | None = None
    _check_names(lines)
    _check_reads(lines)
    sizes: dict[str, int] = {}
    for line in lines:
        nodes = sum(sizes.get(n.tensor, 1) if isinstance(n, Load) else 1 for n in places(line.body))
        if nodes > MOST_NODES:
            raise ParseError(
                f"{line.names[0]} grows beyond {MOST_NODES} operations once maps are substituted{line.where}"
            )
        body = _inline(line.body, maps)
        if line.reducer is None:
            maps[line.names[0]], sizes[line.names[0]] = (line.dims, body), nodes
            continue
        if axes is not None and line.axes != axes:
            raise ParseError(
                f"{line.names[0]} reduces over {', '.join(line.axes)}, the reductions before it over {', '.join(axes)}",
                hint="a cascade has one set of axes; derive the parts separately",
            )
        axes = line.axes
        if clash := set(line.dims) & set(axes):
            raise ParseError(f"{line.names[0]} keeps {', '.join(sorted(clash))}, which it reduces")
        if line.reducer in _OF_NUMBERS and type_of(body, lambda n: _dtype(n, dtypes)) is DType.BOOL:
            raise ParseError(
                f"{line.names[0]} is the {line.reducer} of a condition{line.where}",
                hint="any[l] and all[l] are for conditions; where(condition, 1.0, 0.0) is a number",
            )
        index = line.names[1] if len(line.names) > 1 else None
        if line.reducer in INDEX_REDUCERS and index is None:
            index = f"{line.names[0]}_index"
        dtype = _dtype(line.names[0], dtypes)
        reductions.append(Reduction(line.names[0], line.reducer, line.dims, body, dtype, index))
    if axes is None:
        raise ParseError("no reduction in the formula", hint="write one as `t = sum[l] x[l]`")
    results = {r.name for r in reductions}
    names = sorted({n.tensor for r in reductions for n in loads(r.body)} - results)
    return Cascade(axes, tuple(reductions), tuple((n, _dtype(n, dtypes)) for n in names))


def _check_names(lines: list[Line]) -> None:
    """Every name is defined once, and before it is used; ParseError with the statement."""
    dims = {d for line in lines for d in (*line.dims, *line.axes)}
    later = {n for line in lines for n in line.names}
    seen: set[str] = set()
    for line in lines:
        for names in (line.dims, line.axes):
            if twice := [d for n, d in enumerate(names) if d in names[:n]]:
                raise ParseError(f"{twice[0]} is named twice{line.where}")
        for n, name in enumerate(line.names):
            if name in seen or name in line.names[:n]:
                raise ParseError(f"{name} is defined twice{line.where}", hint="give the second another name")
            if name in dims:
                raise ParseError(f"{name} is a dim and a result{line.where}", hint="give the result another name")
        for x in loads(line.body):
            if x.tensor in line.names:
                raise ParseError(f"{x.tensor} is defined by itself{line.where}", hint="a reducer says what adds up")
            if x.tensor in later - seen:
                raise ParseError(f"{x.tensor} is used before it is defined{line.where}")
        seen |= set(line.names)


def _check_reads(lines: list[Line]) -> None:
    """Indices are of dims that the statement has, a tensor has one number of them, and results are read at dims that
    it keeps; ParseError with the statement."""
    ranks: dict[str, int] = {}
    results: set[str] = set()
    for line in lines:
        kept = line.dims[:-1] if line.reducer == "topk" else line.dims  # the last are its slots
        for n in walk(line.body):
            if isinstance(n, Index) and n.dim not in (*kept, *line.axes):
                left = f"{line.names[0]}[{', '.join((*kept, n.dim, *line.dims[len(kept) :]))}]"
                raise ParseError(f"{n.dim} is neither kept nor reduced{line.where}", hint=f"`{left} = ...` keeps it")
        for x in loads(line.body):
            if ranks.setdefault(x.tensor, len(x.index)) != len(x.index):
                raise ParseError(f"{x.tensor} has {ranks[x.tensor]} dims, not {len(x.index)}{line.where}")
            if x.tensor in results and not {*x.index} <= {Index(d) for d in line.dims}:
                raise ParseError(f"{x.tensor} is a result, and read at no dim that {line.names[0]} keeps{line.where}")
        ranks |= dict.fromkeys(line.names, len(line.dims))
        results |= set(line.names) if line.reducer is not None else set()


def _dtype(name: str, dtypes: Mapping[str, str]) -> DType:
    text = dtypes.get(name, "f32")
    try:
        return DType(text)
    except ValueError:
        raise ParseError(f"unknown dtype {text!r} of {name}") from None


def _inline(e: Expr, maps: Mapping[str, tuple[tuple[str, ...], Expr]]) -> Expr:
    def one(n: Expr) -> Expr | None:
        if isinstance(n, Load) and n.tensor in maps:
            dims, body = maps[n.tensor]
            return reindex(body, dict(zip(dims, n.index, strict=True)))
        return None

    return transform(e, one)


# -- text ------------------------------------------------------------------------------------


def lines_of(formula: str) -> list[Line]:
    """The statements of a text."""
    rows = rows_of(formula)
    dims = dims_of(rows)
    return [_line(row, dims) for row in rows]


def dims_of(rows: tuple[str, ...]) -> set[str]:
    """Names that some statement uses as dims."""
    return {d for row in rows for d in _dims_in(row)}


def rows_of(formula: str) -> tuple[str, ...]:
    """The statements of a text: its lines without comments, also cut at semicolons outside of brackets."""
    lines = (line.partition("#")[0] for line in formula.splitlines())
    rows = (row.strip() for line in lines for row in re.split(r";(?![^\[]*\])", line))
    return tuple(row for row in rows if row)


def _split(text: str) -> tuple[str, ...]:
    return tuple(s.strip() for s in text.split(",") if s.strip())


def _dims_in(row: str) -> set[str]:
    """Names in index brackets and reducer brackets."""
    left, eq, right = row.partition("=")
    if not eq:
        raise ParseError(f"not a statement: {row!r}", hint="`name[dims] = reducer[axes] expression`")
    out = {d for part in re.findall(r"\[([^\]]*)\]", left) for d in _split(part)}
    if m := _RIGHT.match(right.strip()):
        out |= set(_split(m[2].replace(";", ",")))
        right = m[3]
    try:
        tree = syntax(right)
    except SyntaxError as err:
        hint = _meant(row)
        if m is not None and "[" not in m[2]:  # the reduction is right
            hint = None if right.strip() else "a statement is a line: `m = sum[l] x[l]`"
        raise ParseError(f"not an expression: {right.strip()[:200]!r}: {err.msg}", hint=hint) from None
    except (ValueError, RecursionError, MemoryError) as err:  # null characters; Python's parser has no more room
        raise ParseError(f"not an expression: {right.strip()[:200]!r}: {err}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            out |= {n.id for n in ast.walk(node.slice) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "size":
            out |= {n.id for n in node.args if isinstance(n, ast.Name)}
    return out


def _meant(row: str) -> str | None:
    """What a statement that is none may have been meant for."""
    right = row.partition("=")[2].strip()
    found = re.match(r"(\w+)\s*\[([^\]]*\]\s*[\w(-])?", right)
    if found is None or (found[1] not in REDUCERS and found[2] is None):
        return None
    if found[1] in REDUCERS:
        return f"a reduction names its dims first: `{found[1]}[l] x[l]`"
    return f"a reduction is one of {', '.join(REDUCERS)}"


def _line(row: str, dims: set[str]) -> Line:
    left, _, right = row.partition("=")
    heads = [_LEFT.match(s.strip()) for s in re.split(r",(?![^\[]*\])", left)]
    if not all(heads):
        raise ParseError(f"left of `=` must be `name` or `name[dims]`: {row!r}")
    names = tuple(h[1] for h in heads if h)
    if wrong := [n for n in names if not n.isidentifier() or keyword.iskeyword(n)]:
        what = "a word of Python" if keyword.iskeyword(wrong[0]) else "no name"
        raise ParseError(f"{wrong[0]} is {what}: {row!r}")
    own, *others = (_split(h[2] or "") for h in heads if h)
    if any(dims != own for dims in others):
        raise ParseError(f"{names[0]} and {names[1]} have other dims: {row!r}")
    m = _RIGHT.match(right.strip())
    body = parse(m[3] if m else right, Names(dims=dims, open_tensors=True))
    if m is None:
        if len(names) > 1:
            raise ParseError(f"a map has one result: {row!r}")
        return Line(names, own, None, (), body, row)
    axes, _, slot = m[2].partition(";")
    if not _split(axes) or not all(a.isidentifier() for a in _split(axes)):
        raise ParseError(f"{m[1]} names the dims that it reduces, as {m[1]}[l]: {row!r}")
    slots = _split(slot)
    if (m[1] == "topk") != (len(slots) == 1) or (slots and own[-1:] != slots):
        raise ParseError(f"top-k is written `s[r], i[r] = topk[l; r] x[l]`: {row!r}")
    if len(names) > 1 + (m[1] in INDEX_REDUCERS):
        raise ParseError(f"{m[1]} has {'two results' if m[1] in INDEX_REDUCERS else 'one result'}: {row!r}")
    return Line(names, own, m[1], _split(axes), body, row)


# -- functions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A symbolic value inside a `derive` function; arithmetic, comparisons, indexing."""

    expr: Expr

    def __getitem__(self, index: Term | int | tuple[Term | int, ...]) -> Term:
        if not isinstance(self.expr, Load) or self.expr.index:
            raise ParseError("only inputs and results can be indexed")
        items = index if isinstance(index, tuple) else (index,)
        return Term(Load(self.expr.tensor, tuple(_index(_raw(i)) for i in items)))

    def __neg__(self) -> Term:
        return Term(call("neg", self.expr))

    def __abs__(self) -> Term:
        return Term(call("abs", self.expr))


def _raw(x: Term | float) -> Expr:
    return x.expr if isinstance(x, Term) else lit(x)


def _index(e: Expr) -> Expr:
    """Names inside an index are dims."""
    return transform(e, lambda n: Index(n.tensor) if isinstance(n, Load) and not n.index else None)


def _install() -> None:
    """Binary operators of Term, from one table."""
    table = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
             "pow": "pow", "and": "and", "or": "or"}  # fmt: skip
    for method, op in table.items():
        setattr(Term, f"__{method}__", lambda a, b, op=op: Term(call(op, _raw(a), _raw(b))))
        setattr(Term, f"__r{method}__", lambda a, b, op=op: Term(call(op, _raw(b), _raw(a))))
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Term, f"__{op}__", lambda a, b, op=op: Term(call(op, _raw(a), _raw(b))))


_install()


def function(op: str) -> Callable[..., Term]:
    """An operation of the expression language on symbolic values."""

    def apply(*args: Term | float) -> Term:
        return Term(Call(op, tuple(_raw(a) for a in args)))

    apply.__name__, apply.__doc__ = op, OPS[op].name
    return apply


exp, log, sqrt, rsqrt, tanh, where, maximum, minimum = map(
    function, ("exp", "log", "sqrt", "rsqrt", "tanh", "where", "maximum", "minimum")
)


def size(dim: Term) -> Term:
    """The extent of a dim."""
    e = _index(dim.expr)
    if not isinstance(e, Index):
        raise ParseError("size takes a dim")
    return Term(Size(e.dim))


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a `derive` function returns: a reducer over axes of a body."""

    reducer: str
    axes: tuple[str, ...]
    slot: str | None
    body: Expr


@dataclass(frozen=True, slots=True)
class Reducer:
    """`sum_[l](body)`; top-k: `topk_[l, r](body)`, the last name being the slot dim."""

    name: str

    def __getitem__(self, axes: Term | tuple[Term, ...]) -> Callable[[Term], Reduced]:
        items = axes if isinstance(axes, tuple) else (axes,)
        names = tuple(e.dim for e in (_index(t.expr) for t in items) if isinstance(e, Index))
        slot = names[-1] if self.name == "topk" else None
        reduced = names[:-1] if slot is not None else names
        return lambda body: Reduced(self.name, reduced, slot, _raw(body))


sum_, prod_, max_, min_, argmax_, argmin_, topk_ = map(
    Reducer, ("sum", "prod", "max", "min", "argmax", "argmin", "topk")
)


def _from_functions(functions: Mapping[str, Callable[..., Reduced]]) -> list[Line]:
    made: list[tuple[str, tuple[str, ...], Reduced]] = []
    for name, f in functions.items():
        params = tuple(inspect.signature(f).parameters)
        out = f(*(Term(Load(p, ())) for p in params))
        if not isinstance(out, Reduced):
            raise ParseError(f"{name}: a function returns a reduction", hint="such as sum_[l](x[l])")
        made.append((name, params, out))
    dims = {d for _, _, r in made for d in (*r.axes, *((r.slot,) if r.slot else ()))}
    dims |= {n.dim for _, _, r in made for n in walk(r.body) if isinstance(n, Index | Size)}
    lines = []
    for name, params, r in made:
        body = transform(r.body, lambda n: Index(n.tensor) if isinstance(n, Load) and n.tensor in dims else None)
        used = {n.dim for n in walk(body) if isinstance(n, Index)}
        own = tuple(p for p in params if p in used and p not in r.axes)
        line = Line((name,), own, r.reducer, r.axes, body)
        lines.append(line if r.slot is None else replace(line, dims=(*own, r.slot)))
    return lines
