"""Text form of expressions: Python's expression syntax, printed and parsed back to the same tree.

    p[b, i, j] * 0.125          Load, Index, Const        (f32 literals print with a point or exponent)
    where(j <= i, s[i, j], -inf)
    exp(x[i, j] - m[i]) / size(j)
    bf16(e)   e4m3(e)            Cast
    ~(a < b)   p & q   p | q     logical not, and, or
    f64(0.1)                     Const of dtype f64 is written `f64const(0.1)`

A bare name is a dim index, a symbol or a 0-d tensor, whichever `Names` says.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from dataclasses import dataclass, field

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, call, children
from tilefold.algebra.ops import BY_INFIX, OPS
from tilefold.errors import ParseError

_CASTS = {d.value: d for d in DType}
_PRECEDENCE = {
    "lt": 1, "le": 1, "gt": 1, "ge": 1, "eq": 1, "ne": 1, "or": 2, "and": 3,
    "add": 5, "sub": 5, "mul": 6, "div": 6, "floordiv": 6, "mod": 6, "neg": 7, "pow": 8,
}  # fmt: skip
_ATOM = 9


@dataclass(slots=True)
class Names:
    """What a bare name means while parsing. Anything not listed is a 0-d tensor if `open_tensors`."""

    dims: set[str] = field(default_factory=set)
    syms: set[str] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)
    open_tensors: bool = False


#: The text of nodes with operands, and its level, by identity.
_Shown = dict[int, tuple[str, int]]


def show(e: Expr) -> str:
    """The text of an expression."""
    return _show(e, {})[0]


def _number(v: float) -> str:
    if math.isnan(v):
        return "nan"
    if math.isinf(v):
        return "inf" if v > 0 else "-inf"
    return repr(float(v))


def _show(e: Expr, done: _Shown) -> tuple[str, int]:
    if not children(e):
        return _show_leaf(e)
    known = done.get(id(e))
    if known is None:
        known = done[id(e)] = _show_node(e, done)
    return known


def _show_leaf(e: Expr) -> tuple[str, int]:
    match e:
        case Const(value, dtype):
            if dtype is DType.BOOL:
                return str(bool(value)), _ATOM
            if dtype is DType.F64:
                return f"f64const({_number(float(value))})", _ATOM
            text = str(int(value)) if dtype is DType.I64 else _number(float(value))
            return text, _ATOM if not text.startswith("-") else 7
        case Index(dim):
            return dim, _ATOM
        case Size(dim):
            return f"size({dim})", _ATOM
        case Sym(name):
            return name, _ATOM
        case Load(tensor, ()):
            return tensor, _ATOM
    raise AssertionError(e)


def _show_node(e: Expr, done: _Shown) -> tuple[str, int]:
    match e:
        case Load(tensor, index):
            return f"{tensor}[{_list(index, done)}]", _ATOM
        case Cast(arg, dtype):
            return f"{dtype.value}({_show(arg, done)[0]})", _ATOM
        case Call("neg", (a,)):
            text, level = _show(a, done)
            return (f"-{text}" if level >= 7 and not isinstance(a, Const) else f"-({text})"), 7
        case Call("not", (a,)):
            text, level = _show(a, done)
            return (f"~{text}" if level >= 7 else f"~({text})"), 7
        case Call(op, args) if OPS[op].infix:
            mine = _PRECEDENCE[op]
            left, right = _show(args[0], done), _show(args[1], done)
            # comparisons do not chain; `**` is right associative and binds its right side loosely
            need_left = mine + (1 if op == "pow" or mine == 1 else 0)
            lhs = left[0] if left[1] >= need_left else f"({left[0]})"
            rhs = right[0] if right[1] > mine else f"({right[0]})"
            return f"{lhs} {OPS[op].infix} {rhs}", mine
        case Call(op, args):
            return f"{op}({_list(args, done)})", _ATOM
    raise AssertionError(e)


def _list(es: tuple[Expr, ...], done: _Shown) -> str:
    return ", ".join([_show(e, done)[0] for e in es])


#: Signs or parentheses in a row: more are nobody's formula, and Python's own limit depends on who raised it before.
DEEPEST = 200
_DEEP = re.compile(rf"[-+~(\s]{{{DEEPEST},}}")


def parse(text: str, names: Names) -> Expr:
    """The expression that `text` shows; ParseError with the place otherwise."""
    if (run := _DEEP.search(text)) is not None:
        raise ParseError(f"not an expression: {run[0][:20]!r}... nests more than {DEEPEST} deep")
    try:
        tree = syntax(text).body
    except SyntaxError as err:
        raise ParseError(f"not an expression: {text!r}: {err.msg}") from None
    return _Parser(names, text).expr(tree)


def syntax(text: str) -> ast.Expression:
    """Python's own tree; what it warns of (`1if x`) is an error elsewhere. SyntaxError, ValueError, RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text.strip(), mode="eval")


_BIN = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "and", ast.BitOr: "or",
}  # fmt: skip
_CMP = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
assert set(_BIN.values()) | set(_CMP.values()) == set(BY_INFIX.values())


def _whole(value: int) -> Const:
    if not -(2**63) <= value < 2**63:
        raise ParseError("a whole number of more than 64 bits", hint="with a point or an exponent it is a float: 1e30")
    return Const(value, DType.I64)


class _Parser:
    def __init__(self, names: Names, text: str):
        self.names, self.text = names, text

    def fail(self, node: ast.AST, why: str) -> ParseError:
        at = ast.get_source_segment(self.text.strip(), node) or self.text  # type: ignore[arg-type]
        return ParseError(f"{why}: {at!r}", hint=f"in {self.text.strip()!r}")

    def expr(self, n: ast.expr) -> Expr:
        match n:
            case ast.Constant(value=bool(v)):
                return Const(v, DType.BOOL)
            case ast.Constant(value=int(v)):
                return _whole(v)
            case ast.Constant(value=float(v)):
                return Const(v, DType.F32)
            case ast.Name(id=name):
                return self.name(n, name)
            case ast.Subscript(value=ast.Name(id=tensor), slice=s):
                if not self.names.open_tensors and tensor not in self.names.tensors:
                    raise self.fail(n, f"unknown tensor {tensor}")
                items = s.elts if isinstance(s, ast.Tuple) else [s]
                return Load(tensor, tuple(self.expr(i) for i in items))
            case ast.UnaryOp(op=ast.USub(), operand=a):
                return self.negated(a)
            case ast.UnaryOp(op=ast.Invert(), operand=a):
                return call("not", self.expr(a))
            case ast.UnaryOp(op=ast.UAdd(), operand=a):
                return self.expr(a)
            case ast.BinOp(left=a, op=op, right=b) if type(op) in _BIN:
                return call(_BIN[type(op)], self.expr(a), self.expr(b))
            case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _CMP:
                return call(_CMP[type(op)], self.expr(a), self.expr(b))
            case ast.Call(func=ast.Name(id=f), args=args, keywords=[]):
                return self.function(n, f, args)
        raise self.fail(n, "not part of the expression language")

    def negated(self, a: ast.expr) -> Expr:
        if isinstance(a, ast.Constant) and type(a.value) is int and a.value > 2**63 - 1:
            return _whole(-a.value)  # the least of the whole numbers has no positive one
        inner = self.expr(a)
        bare = isinstance(a, ast.Constant) or (isinstance(a, ast.Name) and a.id in ("inf", "nan"))
        parenthesised = self.text.strip()[a.col_offset - 1 : a.col_offset] == "("
        if isinstance(inner, Const) and bare and not parenthesised:
            return Const(-inner.value, inner.dtype)
        return call("neg", inner)

    def name(self, n: ast.expr, name: str) -> Expr:
        if name in ("inf", "nan"):
            return Const(float(name), DType.F32)
        if name in self.names.dims:
            return Index(name)
        if name in self.names.syms:
            return Sym(name)
        if name in self.names.tensors or self.names.open_tensors:
            return Load(name, ())
        raise self.fail(n, f"unknown name {name}")

    def function(self, n: ast.Call, f: str, args: list[ast.expr]) -> Expr:
        if f == "size" and len(args) == 1 and isinstance(args[0], ast.Name):
            return Size(args[0].id)
        if f == "f64const" and len(args) == 1:
            inner = self.expr(args[0])
            if isinstance(inner, Const):
                return Const(float(inner.value), DType.F64)
        if f in _CASTS and len(args) == 1:
            return Cast(self.expr(args[0]), _CASTS[f])
        if f in OPS:
            if len(args) != OPS[f].arity:
                raise self.fail(n, f"{f} takes {OPS[f].arity} argument(s), not {len(args)}")
            return Call(f, tuple(self.expr(a) for a in args))
        raise self.fail(n, f"unknown function {f}")
