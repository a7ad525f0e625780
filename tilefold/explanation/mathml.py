"""Expressions and Folds as MathML, which browsers render themselves.

A `Notation` decides how loads look: short symbols for long names, indices that stand for "for
each" left out, `m@new` as m with a prime. The structure is the expression's own: nothing is simplified.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, walk
from tilefold.algebra.fold import NEW, OLD, Fold, StateVar

_ADD, _MUL, _PREFIX, _POW, _ATOM = 2, 3, 4, 5, 6
_BINARY = {
    "lt": ("&lt;", 1), "le": ("≤", 1), "gt": ("&gt;", 1), "ge": ("≥", 1), "eq": ("=", 1), "ne": ("≠", 1),
    "or": ("∨", 0), "and": ("∧", 0), "add": ("+", _ADD), "sub": ("−", _ADD), "mul": ("⁢", _MUL), "mod": ("mod", _MUL),
}  # fmt: skip
_FUNCTIONS = {
    "maximum": "max", "minimum": "min", "log": "ln", "tanh": "tanh", "sin": "sin", "cos": "cos", "sigmoid": "σ",
    "erf": "erf", "erfinv": "erf⁻¹", "lgamma": "ln Γ",
    "log2": "log₂", "log1p": "log1p", "expm1": "expm1", "sign": "sgn", "trunc": "trunc",
    "round": "round", "isnan": "isnan", "isinf": "isinf", "tile_start": "start", "tile_stop": "stop",
    "tile_min": "min", "tile_max": "max",
}  # fmt: skip
_FENCES = {"abs": ("|", "|"), "floor": ("⌊", "⌋"), "ceil": ("⌈", "⌉")}
_BIG = {"sum": "∑", "prod": "∏"}
_JOIN = {"sum": "+", "prod": "·", "any": "∨", "all": "∧"}


@dataclass(frozen=True, slots=True)
class Notation:
    """`symbols`: tensor or state name -> what is printed; `hidden`: dims left out of subscripts.

    `marks`: suffix of a load's name (`@new`, `@old`, `@a`) -> printed mark, a prime or a subscript.
    """

    symbols: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    marks: Mapping[str, str] = field(default_factory=lambda: {NEW: "′", OLD: ""})


def identifier(name: str) -> str:
    """One name: italic if a single letter (a trailing number becomes a subscript, a combining hat an accent)."""
    if name.endswith("\u0302"):
        return f'<mover accent="true">{identifier(name[:-1])}<mo>^</mo></mover>'
    m = re.fullmatch(r"([A-Za-zα-ω])_?(\d+)", name)
    if m:
        return f"<msub><mi>{m[1]}</mi><mn>{m[2]}</mn></msub>"
    if len(name) > 1:
        return f'<mi class="name" mathvariant="normal">{escape(name)}</mi>'
    return f"<mi>{escape(name)}</mi>"


def expr(e: Expr, notation: Notation) -> str:
    """The MathML of an expression, as one <mrow>-like element."""
    return _expr(e, notation)[0]


def _group(inner: str) -> str:
    return f'<mrow><mo fence="true" stretchy="true">(</mo>{inner}<mo fence="true" stretchy="true">)</mo></mrow>'


def _at(part: tuple[str, int], level: int) -> str:
    return part[0] if part[1] >= level else _group(part[0])


def number(v: float) -> str:
    """A constant: -inf as −∞, whole numbers without a point, others in six digits."""
    if math.isnan(v):
        return "<mi>NaN</mi>"
    sign = "<mo>−</mo>" if v < 0 else ""
    text = "∞" if math.isinf(v) else f"{abs(v):g}"
    m = re.fullmatch(r"(.*)e([+-])0*(\d+)", text)
    if m:
        power = f"<msup><mn>10</mn><mn>{'−' if m[2] == '-' else ''}{m[3]}</mn></msup>"
        body = power if m[1] == "1" else f"<mn>{m[1]}</mn><mo>·</mo>{power}"
    else:
        body = f"<mn>{text}</mn>"
    return f"<mrow>{sign}{body}</mrow>" if sign or m else body


def _expr(e: Expr, n: Notation) -> tuple[str, int]:
    match e:
        case Const(value, DType.BOOL):
            return f"<mi>{'true' if value else 'false'}</mi>", _ATOM
        case Const(value, _):
            return number(float(value)), _ATOM if value >= 0 else _PREFIX
        case Index(dim):
            return identifier(n.symbols.get(dim, dim)), _ATOM
        case Size(dim):
            return f'<mrow><mo fence="true">|</mo>{identifier(dim)}<mo fence="true">|</mo></mrow>', _ATOM
        case Sym(name):
            return identifier(name), _ATOM
        case Load():
            return load(e, n), _ATOM
        case Cast(arg, dtype):
            if dtype.rounds:
                return f"<mrow><mi>{dtype.value}</mi>{_group(expr(arg, n))}</mrow>", _ATOM
            return _expr(arg, n)
        case Call(op, args):
            return _call(op, args, n)
    raise AssertionError(e)


def load(e: Load, n: Notation) -> str:
    """A tensor element or state variable, indices as a subscript."""
    base, at, suffix = e.tensor.partition("@")
    mark = n.marks.get(at + suffix, "")
    name = identifier(n.symbols.get(base, base))
    shown = [ix for ix in e.index if not (isinstance(ix, Index) and ix.dim in n.hidden)]
    low = '<mo separator="true">,</mo>'.join(expr(ix, n) for ix in shown)
    if mark == "′":
        return f"<msubsup>{name}<mrow>{low}</mrow><mo>′</mo></msubsup>" if low else f"<msup>{name}<mo>′</mo></msup>"
    if mark:
        low = f'<mi class="side">{escape(mark)}</mi>' + (f'<mo separator="true">,</mo>{low}' if low else "")
    return f"<msub>{name}<mrow>{low}</mrow></msub>" if low else name


def _call(op: str, args: tuple[Expr, ...], n: Notation) -> tuple[str, int]:
    match op, args:
        case "exp", (a,):
            return f"<msup><mi>e</mi><mrow>{expr(a, n)}</mrow></msup>", _POW
        case "exp2", (a,):
            return f"<msup><mn>2</mn><mrow>{expr(a, n)}</mrow></msup>", _POW
        case "sqrt", (a,):
            return f"<msqrt>{expr(a, n)}</msqrt>", _ATOM
        case "rsqrt", (a,):
            return f"<mfrac><mn>1</mn><msqrt>{expr(a, n)}</msqrt></mfrac>", _MUL
        case "div", (a, b):
            return f"<mfrac><mrow>{expr(a, n)}</mrow><mrow>{expr(b, n)}</mrow></mfrac>", _MUL
        case "floordiv", (a, b):
            inner = f"<mfrac><mrow>{expr(a, n)}</mrow><mrow>{expr(b, n)}</mrow></mfrac>"
            return f"<mrow><mo>⌊</mo>{inner}<mo>⌋</mo></mrow>", _ATOM
        case "pow", (a, b):
            return f"<msup>{_at(_expr(a, n), _ATOM)}<mrow>{expr(b, n)}</mrow></msup>", _POW
        case "neg", (a,):
            return f"<mrow><mo>−</mo>{_at(_expr(a, n), _MUL)}</mrow>", _PREFIX - 1
        case "not", (a,):
            return f"<mrow><mo>¬</mo>{_at(_expr(a, n), _ATOM)}</mrow>", _PREFIX
        case "where", (Call("eq", (x, Const())), Const(), y) if isinstance(x, Load) and x == y:
            return f'<mover accent="true">{load(x, n)}<mo>¯</mo></mover>', _ATOM
        case "where", (c, a, b):
            rows = ((expr(a, n), "if", expr(c, n)), (expr(b, n), "otherwise", ""))
            cells = "".join(
                f"<mtr><mtd>{v}</mtd><mtd><mtext>{w}&nbsp;</mtext>{x}</mtd></mtr>".replace("&nbsp;", "\u00a0")
                for v, w, x in rows
            )
            return f'<mrow><mo fence="true">{{</mo><mtable columnalign="left">{cells}</mtable></mrow>', _ADD
        case _, (a,) if op in _FENCES:
            left, right = _FENCES[op]
            return f'<mrow><mo fence="true">{left}</mo>{expr(a, n)}<mo fence="true">{right}</mo></mrow>', _ATOM
        case _, (a, b) if op in _BINARY:
            return _binary(op, a, b, n)
    inner = '<mo separator="true">,</mo>'.join(expr(a, n) for a in args)
    return f"<mrow><mi>{_FUNCTIONS.get(op, op)}</mi>{_group(inner)}</mrow>", _ATOM


def guards(e: Expr, n: Notation) -> tuple[str, ...]:
    """What the barred names in an expression mean: a value of its own where the variable is not usable."""
    found: dict[str, None] = {}
    for x in walk(e):
        match x:
            case Call("where", (Call("eq", (Load() as v, Const() as bad)), Const() as good, y)) if v == y:
                bare = Notation(n.symbols, n.hidden, {})
                barred, plain = expr(x, bare), load(v, bare)
                rule = f"<mrow>{plain}<mo>=</mo>{number(float(bad.value))}</mrow>"
                found[
                    f"{math_element(barred, False)} is {math_element(plain, False)}, but "
                    f"{math_element(number(float(good.value)), False)} where {math_element(rule, False)}"
                ] = None
    return tuple(found)


def _binary(op: str, a: Expr, b: Expr, n: Notation) -> tuple[str, int]:
    sign, level = _BINARY[op]
    if op == "mul" and a == b:
        return f"<msup>{_at(_expr(a, n), _ATOM)}<mn>2</mn></msup>", _POW
    left, right = _expr(a, n), _expr(b, n)
    if op == "mul":
        visible = isinstance(b, Const) or isinstance(a, Const | Size) or isinstance(b, Size)
        sign = "·" if visible else "⁢"
    tight = level + 1 if op in ("sub", "mod") or level <= 1 else level
    return f"<mrow>{_at(left, level)}<mo>{sign}</mo>{_at(right, tight)}</mrow>", level


def big(op: str, dims: tuple[str, ...], body: str) -> str:
    """A reducer with its axes below it and the body behind it."""
    under = '<mo separator="true">,</mo>'.join(map(identifier, dims))
    sign = f'<mo largeop="true">{_BIG[op]}</mo>' if op in _BIG else f"<mi>{op}</mi>"
    return f'<mrow><munder>{sign}<mrow>{under}</mrow></munder><mspace width="0.2em"/>{body}</mrow>'


def combined(reducer: str, parts: tuple[str, ...]) -> str:
    """`parts` put together by a reducer: a sum of terms, or max(a, b)."""
    sign = _JOIN.get(reducer)
    if sign:
        return "<mrow>" + f"<mo>{sign}</mo>".join(parts) + "</mrow>"
    inner = '<mo separator="true">,</mo>'.join(parts)
    return f"<mrow><mi>{reducer}</mi>{_group(inner)}</mrow>"


def reduction(reducer: str, rdims: tuple[str, ...], body: Expr, n: Notation) -> str:
    """`reducer over rdims of body`; a sum of terms is put in parentheses."""
    text, level = _expr(body, n)
    loose = level <= _ADD and reducer in _BIG
    return big(reducer, rdims, _group(text) if loose else text)


def _own(v: StateVar) -> Load:
    return Load(v.name, tuple(Index(d) for d in v.dims))


def equation(left: str, right: str, display: bool = True) -> str:
    """left = right as a <math> element."""
    return math_element(f"<mrow>{left}<mo>=</mo>{right}</mrow>", display)


def math_element(inner: str, display: bool = True) -> str:
    """A whole <math> element."""
    return f'<math display="{"block" if display else "inline"}">{inner}</math>'


def update(v: StateVar, axes: tuple[str, ...], n: Notation) -> str:
    """`var' = repair(var) (+) reducer over the tile of element` (module `algebra.fold`)."""
    own = _own(v)
    kept = expr(v.repair, n) if v.repair is not None else load(own, n)
    new = load(Load(v.name + NEW, own.index), n)
    return equation(new, combined(v.reducer, (kept, reduction(v.reducer, axes, v.element, n))))


def merge(v: StateVar, fold: Fold, n: Notation) -> str:
    """`var = repair(a.var, a.D, D) (+) repair(b.var, b.D, D)` (RedFuser eq. 11)."""
    own, names = _own(v), {w.name for w in fold.state}
    sides = []
    for side in ("a", "b"):
        marks = {NEW: "", OLD: side, f"@{side}": side}
        part = Load(f"{v.name}@{side}", own.index)
        e = part if v.repair is None else _sided(v.repair, v.name, part, names)
        sides.append(expr(e, Notation(n.symbols, n.hidden, marks)))
    return equation(load(own, n), combined(v.reducer, (sides[0], sides[1])))


def _sided(e: Expr, var: str, part: Load, names: set[str]) -> Expr:
    """The repair with the variable itself read from one side."""
    match e:
        case Load(t, _) if t == var:
            return part
        case Call(op, args):
            return Call(op, tuple(_sided(a, var, part, names) for a in args))
        case Cast(a, dtype):
            return Cast(_sided(a, var, part, names), dtype)
    return e
