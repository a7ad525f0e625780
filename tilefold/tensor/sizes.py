"""Values of size expressions: extents of dims over a program's symbols.

A size is a constant, a symbol, the run-time extent of a dim (`Size`), or integer arithmetic on sizes. Symbols may stand
for `torch.SymInt`: then so does the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilefold.algebra.expr import Call, Const, Expr, Size, Sym

#: Extent assumed for a size that is only known at run time.
TYPICAL_EXTENT = 512

Shape = Callable[[Mapping[str, int]], tuple[int, ...]]

_INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"maximum": torch.sym_max, "minimum": torch.sym_min}
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
} | _FUNCTIONS
#: The same for estimates, also of fractions: nothing is divided by what is estimated as 0.
ESTIMATED = _OPERATIONS | {"floordiv": lambda a, b: a // max(1, b), "mod": lambda a, b: a % max(1, b)}


def extent(e: Expr, syms: Mapping[str, int], dims: Mapping[str, int] | None = None) -> int:
    """The value of a size for those of its symbols and dims. KeyError: one that is missing."""
    return _value(e, syms.__getitem__, dims or {}, _OPERATIONS)


def estimate(e: Expr, syms: Mapping[str, int] | None = None, dims: Mapping[str, int] | None = None) -> int:
    """The same with `TYPICAL_EXTENT` for symbols without a value; at least 0."""
    if type(e) is Const:  # most are
        return max(0, int(e.value))
    known = syms or {}
    return max(0, _value(e, lambda name: known.get(name, TYPICAL_EXTENT), dims or {}, ESTIMATED))


def extents(sizes: Mapping[str, Expr], syms: Mapping[str, int] | None = None) -> dict[str, int]:
    """The extent of every dim, for given (or typical) values of the symbols."""
    return {d: estimate(e, syms) for d, e in sizes.items()}


def shape_function(shape: Sequence[Expr]) -> Shape:
    """Sizes as a fast host function of the symbols; constant ones do not look at them."""
    if all(isinstance(e, Const) for e in shape):
        fixed = tuple(int(e.value) for e in shape if isinstance(e, Const))
        return lambda syms: fixed
    source = "lambda syms: (" + "".join(f"{_python(e)}, " for e in shape) + ")"
    function: Shape = eval(source, {"__builtins__": {}} | _FUNCTIONS)
    return function


def _value(
    e: Expr, symbol: Callable[[str], int], dims: Mapping[str, int], table: Mapping[str, Callable[[Any, Any], Any]]
) -> int:
    match e:
        case Const(known, _):
            return int(known)
        case Sym(name):
            return symbol(name)
        case Size(d):
            return dims[d]
        case Call("neg", (a,)):
            return -_value(a, symbol, dims, table)
        case Call(op, (a, b)) if op in table:
            found: int = table[op](_value(a, symbol, dims, table), _value(b, symbol, dims, table))
            return found
    raise AssertionError(f"not a size expression: {e}")


def _python(e: Expr) -> str:
    """Python source of a size over symbols (names are identifiers by construction)."""
    match e:
        case Const(known, _):
            return repr(int(known))
        case Sym(name):
            return f"syms[{name!r}]"
        case Call(op, (a, b)) if op in _INFIX:
            return f"({_python(a)} {_INFIX[op]} {_python(b)})"
        case Call(op, (a, b)) if op in _FUNCTIONS:
            return f"{op}({_python(a)}, {_python(b)})"
        case Call("neg", (a,)):
            return f"(-{_python(a)})"
    raise AssertionError(f"not a size expression: {e}")
