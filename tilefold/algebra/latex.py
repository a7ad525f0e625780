"""LaTeX of expressions, in the style of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym

Namer = Callable[[Load, str], str]

_GREEK = {"alpha", "beta", "gamma", "delta", "eps", "mu", "sigma", "lambda", "rho", "tau"}
_FUNCTIONS = {"exp", "log", "sin", "cos", "tanh", "max", "min"}
_RELATIONS = {
    "lt": "<", "le": r"\le", "gt": ">", "ge": r"\ge", "eq": "=", "ne": r"\ne", "and": r"\wedge", "or": r"\vee",
}  # fmt: skip
_SUM, _PRODUCT, _POWER, _ATOM = 1, 2, 3, 4


def name(text: str) -> str:
    """A variable: one letter as it is, Greek letters as such, longer names upright."""
    if text in _GREEK:
        return "\\" + {"eps": "epsilon"}.get(text, text)
    base = text.replace("_", r"\_")
    return base if len(text) == 1 else rf"\mathrm{{{base}}}"


def plain_load(load: Load, index: str) -> str:
    """An input: name[index]."""
    return name(load.tensor) + (f"[{index}]" if index else "")


def latex(e: Expr, namer: Namer = plain_load) -> str:
    """LaTeX of `e`; `namer` writes loads, given their index as LaTeX."""
    return _tex(e, namer)[0]


def _number(v: float) -> str:
    if math.isnan(v):
        return r"\mathrm{NaN}"
    if math.isinf(v):
        return r"\infty" if v > 0 else r"-\infty"
    return str(int(v)) if float(v).is_integer() and abs(v) < 1e6 else f"{v:g}"


def _at_least(part: tuple[str, int], level: int) -> str:
    return part[0] if part[1] >= level else rf"\left({part[0]}\right)"


def _tex(e: Expr, namer: Namer) -> tuple[str, int]:
    match e:
        case Const(value, _):
            text = _number(float(value))
            return text, _SUM if text.startswith("-") else _ATOM
        case Index(dim):
            return dim, _ATOM
        case Sym(sym):
            return sym, _ATOM
        case Size(dim):
            return f"N_{{{dim}}}", _ATOM
        case Load(_, index):
            return namer(e, ", ".join(latex(i, namer) for i in index)), _ATOM
        case Cast(arg, dtype):
            return rf"\mathrm{{{dtype.value}}}\left({latex(arg, namer)}\right)", _ATOM
        case Call(op, args):
            return _call(op, args, namer)
    raise AssertionError(e)


def _call(op: str, args: tuple[Expr, ...], namer: Namer) -> tuple[str, int]:
    a = [_tex(x, namer) for x in args]
    match op:
        case "add":
            return f"{a[0][0]} + {_at_least(a[1], _SUM + (a[1][0].startswith('-')))}", _SUM
        case "sub":
            return f"{a[0][0]} - {_at_least(a[1], _PRODUCT)}", _SUM
        case "neg":
            return f"-{_at_least(a[0], _PRODUCT)}", _SUM
        case "mul":
            return rf"{_at_least(a[0], _PRODUCT)} \, {_at_least(a[1], _PRODUCT)}", _PRODUCT
        case "div":
            return rf"\frac{{{a[0][0]}}}{{{a[1][0]}}}", _PRODUCT
        case "pow":
            return f"{_at_least(a[0], _ATOM)}^{{{a[1][0]}}}", _POWER
        case "sqrt":
            return rf"\sqrt{{{a[0][0]}}}", _ATOM
        case "rsqrt":
            return rf"\frac{{1}}{{\sqrt{{{a[0][0]}}}}}", _PRODUCT
        case "abs":
            return rf"\left|{a[0][0]}\right|", _ATOM
        case "where":
            rows = rf"{a[1][0]} & {a[0][0]} \\ {a[2][0]} & \text{{otherwise}}"
            return rf"\begin{{cases}} {rows} \end{{cases}}", _ATOM
    if op in _RELATIONS:
        return rf"{a[0][0]} {_RELATIONS[op]} {a[1][0]}", _SUM
    label = {"maximum": "max", "minimum": "min"}.get(op, op)
    head = f"\\{label}" if label in _FUNCTIONS else rf"\operatorname{{{label}}}"
    return rf"{head}\left({', '.join(x[0] for x in a)}\right)", _ATOM
