"""Size expressions as fast host functions: extents of dims and shapes at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilefold.algebra.expr import Call, Const, Expr, Sym

Extent = Callable[[Mapping[str, int]], int]

_INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_FUNCTION = {"maximum": "max", "minimum": "min"}


def shape_function(shape: Sequence[Expr]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """Shape over symbol values; constant shapes do not look at them."""
    if all(isinstance(e, Const) for e in shape):
        fixed = tuple(int(e.value) for e in shape if isinstance(e, Const))
        return lambda syms: fixed
    source = "lambda syms: (" + "".join(f"{_python(e)}, " for e in shape) + ")"
    function: Callable[[Mapping[str, int]], tuple[int, ...]] = eval(source, {"__builtins__": {"max": max, "min": min}})
    return function


def _python(e: Expr) -> str:
    """Python source of an integer expression over symbols (names are identifiers by construction)."""
    match e:
        case Const(value, _):
            return repr(int(value))
        case Sym(name):
            return f"syms[{name!r}]"
        case Call(op, (a, b)) if op in _INFIX:
            return f"({_python(a)} {_INFIX[op]} {_python(b)})"
        case Call(op, (a, b)) if op in _FUNCTION:
            return f"{_FUNCTION[op]}({_python(a)}, {_python(b)})"
        case Call("neg", (a,)):
            return f"(-{_python(a)})"
    raise AssertionError(f"not a size expression: {e}")
