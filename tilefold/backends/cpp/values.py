"""Expressions as C++: every sub-expression is computed once, in the outermost loop that determines it.

`Values` writes into a stack of scopes. A value that depends on the strip dim is a vector with one
lane an index; loads of elements next to each other are vector loads, others gathers. Loads whose
index is not provably inside the tensor are clamped into it: a `where` discards what they read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import frexp, isfinite

from tilefold.algebra.dtypes import DType, promote
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, children, dims_used, type_of
from tilefold.algebra.facts import from_dtype, range_of
from tilefold.algebra.ops import BY_INFIX, OPS, RANDOM, TILE_EXTREMES
from tilefold.algebra.simplify import is_square
from tilefold.backends.cpp.affine import in_range, split
from tilefold.backends.cpp.scope import MEMORY, CType, Facts, Scope, Value, const_int, literal, product

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/",
    "bits_and": "&", "bits_or": "|", "bits_xor": "^", "bits_up": "<<", "bits_down": ">>",
}  # fmt: skip
_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: Of powers of two whose inverses are no denormal numbers of any type that is computed with.
_EXPONENT = 120
_CTYPE: dict[DType, CType] = {DType.F32: "float", DType.F64: "double", DType.BOOL: "bool"}


class Values:
    """Writes expressions into `scopes` (outermost first). `strip`: the dim whose indices are lanes."""

    def __init__(self, facts: Facts, scopes: list[Scope], strip: str | None = None, lanes: str = ""):
        self.facts, self.scopes, self.strip, self.lanes = facts, scopes, strip, lanes
        self.uses: Counter[Expr] = Counter()
        self.written: frozenset[str] = frozenset()  # stored by the innermost loops: not to be hoisted out of them

    def count(self, exprs: Iterable[Expr]) -> None:
        """Announce what will be computed, so that common parts get a name."""

        def visit(e: Expr) -> None:
            self.uses[e] += 1
            if self.uses[e] == 1:
                for k in children(e):
                    visit(k)

        for e in exprs:
            visit(e)

    # ------------------------------------------------------------ placing
    def level(self, e: Expr) -> int:
        """Index of the outermost scope in which `e` can be computed."""
        innermost = len(self.scopes) - 1
        if any(isinstance(n, Load) and n.tensor in self.written for n in _nodes(e)):
            return innermost
        need = dims_used(e) & self.scopes[-1].dims
        return next(n for n, s in enumerate(self.scopes) if need <= s.dims)

    def known(self, key: Expr | str) -> Value | None:
        for scope in reversed(self.scopes):
            if key in scope.known:
                return scope.known[key]
        return None

    def keep(self, key: Expr | str, level: int, v: Value, name: str) -> Value:
        """Give `v` a name in scope `level`."""
        var = self.facts.name(name)
        scope = self.scopes[level]
        scope.lines.append(f"const auto {var} = {v.text};")
        out = Value(var, v.ctype, v.vec)
        scope.known[key] = out
        return out

    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    # ------------------------------------------------------------ expressions
    def value(self, e: Expr) -> Value:
        """The value of `e` in its compute type (integers: the narrowest type that holds them)."""
        hit = self.known(e)
        if hit is not None:
            return hit
        level = self.level(e)
        match e:
            case Const(v, dtype):
                ctype = _CTYPE.get(dtype) or self.facts.int_type(e)
                return Value(literal(v, ctype), ctype, False)
            case Index(dim):
                return self.index(e, dim)
            case Size(dim):
                return Value(self.facts.names[f"size {dim}"], "int64_t", False)
            case Sym(name):
                return Value(self.facts.names[name], "int64_t", False)
            case Load(tensor, index):
                out = self.load(tensor, index, level)
                return self.keep(e, level, out, f"{tensor}_{''.join(n.dim for n in index if isinstance(n, Index))}")
            case Cast(arg, dtype):
                out = self.cast(arg, dtype)
            case Call(op, args):
                out = self.call(e, op, args)
            case _:
                raise AssertionError(e)
        hoist = level < len(self.scopes) - 1 and (op_cost(e) > 0 or out.vec)
        return self.keep(e, level, out, _temp_name(e)) if hoist or self.uses[e] > 1 else out

    def index(self, e: Expr, dim: str) -> Value:
        if dim not in self.scopes[-1].dims:  # a dim of the grid, at its only index
            return Value(self.facts.ranges[dim][0], "int64_t", False)
        if dim != self.strip:
            return Value(dim, "int64_t", False)
        t = self.facts.int_type(e)
        v = Value(f"tf::iota<{t}, {self.lanes}>({t}({dim}))", t, True)
        return self.keep(e, self.level(e), v, f"{dim}_lanes")

    def typed(self, e: Expr, ctype: CType, vec: bool = False, found: Value | None = None) -> str:
        """Text of `e` converted to `ctype`, as one value a lane if `vec`. `found`: its value, if that is known."""
        if isinstance(e, Const) and ctype in ("float", "double"):
            v = Value(literal(float(e.value), ctype), ctype, False)
        else:
            v = self.value(e) if found is None else found
        return self.convert(v, ctype, vec)

    def convert(self, v: Value, ctype: CType, vec: bool) -> str:
        text = v.text
        if v.vec:
            return text if v.ctype == ctype else f"tf::to<{ctype}>({text})"
        if v.ctype != ctype:
            text = f"bool({text} != 0)" if ctype == "bool" else f"{ctype}({text})"
        if not vec:
            return text
        return f"tf::splat_mask<{self.lanes}>({text})" if ctype == "bool" else f"tf::splat<{self.lanes}>({text})"

    def address(self, e: Expr) -> str:
        """`e`, which does not depend on the strip, as an int64 text."""
        n = const_int(e)
        return str(n) if n is not None else self.convert(self.value(e), "int64_t", False)

    def cast(self, arg: Expr, dtype: DType) -> Value:
        v = self.value(arg)
        if dtype is DType.BOOL:
            return Value(self.convert(v, "bool", v.vec), "bool", v.vec)
        if dtype.is_int:
            wide = v.ctype == "int64_t" or (v.ctype in ("float", "double") and not self.small(arg, dtype))
            source: CType = "int64_t" if wide else "int32_t"
            text = self.convert(v, source, v.vec)
            if dtype is DType.I64:
                return Value(text, source, v.vec)
            return Value(f"tf::round_to<{MEMORY[dtype]}>({text})", "int32_t", v.vec)
        ctype: CType = "double" if dtype is DType.F64 else "float"
        text = self.typed(arg, ctype, v.vec, v)
        if dtype in (DType.F32, DType.F64):
            return Value(text, ctype, v.vec)
        return Value(f"tf::round_to<{MEMORY[dtype]}>({text})", "float", v.vec)

    def small(self, e: Expr, dtype: DType) -> bool:
        """Whether a number that becomes a narrow integer is one of 32 bits (or NaN, whose low bits are zero)."""
        if dtype.nbytes > 2:
            return False
        known = range_of(e, lambda ld: from_dtype(self.facts.dtype(ld.tensor)))
        return known.lo >= -(2**30) and known.hi <= 2**30

    def call(self, e: Expr, op: str, args: tuple[Expr, ...]) -> Value:
        if op in ("tile_start", "tile_stop"):
            assert isinstance(args[0], Index)
            return Value(self.facts.ranges[args[0].dim][op == "tile_stop"], "int64_t", False)
        if op in TILE_EXTREMES:
            return Value(self.extreme(op, args[0]), "int64_t", False)
        values = [self.value(a) for a in args]  # once: a second time for every level of nesting would be exponential
        if op in RANDOM:
            return self.random(op, args, values)
        vec = self.strip is not None and any(v.vec for v in values)
        kind = self.operand_type(op, args)
        ctype: CType = _CTYPE.get(kind) or self.facts.int_type(*args, *(() if op in _COMPARE else (e,)))
        result: CType = "bool" if OPS[op].result == "bool" else ctype
        if op == "where":
            cond = values[0]
            test = self.convert(cond, "bool", cond.vec)
            a, b = (self.typed(x, ctype, vec, v) for x, v in zip(args[1:], values[1:], strict=True))
            return Value(f"tf::select({test}, {a}, {b})" if cond.vec else f"({test} ? {a} : {b})", ctype, vec)
        if op in ("and", "or", "not"):
            parts = [self.typed(a, "bool", vec, v) for a, v in zip(args, values, strict=True)]
            sign = {"and": "&", "or": "|"}.get(op)
            return Value(f"({parts[0]} {sign} {parts[1]})" if sign else f"(!{parts[0]})", "bool", vec)
        integral = ctype in ("int32_t", "int64_t", "bool")
        if (integral and op in ("floor", "ceil", "trunc", "round")) or (ctype == "bool" and op == "abs"):
            return Value(self.typed(args[0], ctype, vec, values[0]), ctype, vec)
        if integral and op in ("isnan", "isinf"):
            return Value(self.convert(Value("false", "bool", False), "bool", vec), "bool", vec)
        if op == "pow" and not integral:
            special = self.power(args[0], args[1], ctype, vec)
            if special is not None:
                return special
        inverse = _exact_inverse(args[1], self.facts) if op == "div" and not integral else None
        if inverse is not None:
            factor = self.convert(Value(literal(inverse, ctype), ctype, False), ctype, vec)
            return Value(f"({self.typed(args[0], ctype, vec, values[0])} * {factor})", ctype, vec)
        if op == "div" and values[0].vec and not values[1].vec and not integral:
            divisor = self.divisor(args[1], self.typed(args[1], ctype, False, values[1]))
            return Value(f"tf::quotient({self.typed(args[0], ctype, True, values[0])}, {divisor})", ctype, True)
        parts = [self.typed(a, ctype, vec, v) for a, v in zip(args, values, strict=True)]
        if op == "sub" and not integral and is_square(args[1]):
            parts[1] = f"tf::rounded({parts[1]})"
        if op == "within" and vec:
            parts.append("w")  # lanes that hold an element
        return Value(self.plain(op, parts, vec), result, vec)

    def random(self, op: str, args: tuple[Expr, ...], values: list[Value]) -> Value:
        """A number of a place: lanes where a part of the place is a lane's; a seed is one number."""
        vec = any(v.vec for v in values[1:])
        assert not values[0].vec, "a seed that lanes differ in"
        words = [self.typed(a, "int32_t", vec, v) for a, v in zip(args[1:], values[1:], strict=True)]
        seed = self.typed(args[0], "int64_t", False, values[0])
        return Value(f"tf::{op}({seed}, {', '.join(words)})", "int32_t", vec)

    def extreme(self, op: str, e: Expr) -> str:
        """The least or greatest value of an integer over the current ranges of its dims: by trying them all."""
        dims = sorted(dims_used(e))
        scope = Scope(frozenset(dims))
        value = Values(self.facts, [scope]).address(e)
        loops = [f"for (int64_t {d} = {lo}; {d} < {hi}; ++{d})" for d in dims for lo, hi in (self.facts.ranges[d],)]
        best = self.facts.name("best")
        start, better = ("INT64_MIN", ">") if op == "tile_max" else ("INT64_MAX", "<")
        step = f"const int64_t {best}_x = {value}; if ({best}_x {better} {best}) {best} = {best}_x;"
        body = f"{' '.join(loops)} {{ {' '.join(scope.lines)} {step} }}"
        return f"[&] {{ int64_t {best} = {start}; {body} return {best}; }}()"

    def plain(self, op: str, parts: list[str], vec: bool) -> str:
        if op in _INFIX:
            return f"({parts[0]} {_INFIX[op]} {parts[1]})"
        if op == "neg":
            return f"(-{parts[0]})"
        if op in _COMPARE and not vec:
            sign = next(s for s, name in BY_INFIX.items() if name == op)
            return f"({parts[0]} {sign} {parts[1]})"
        return f"tf::{op}({', '.join(parts)})"

    def operand_type(self, op: str, args: tuple[Expr, ...]) -> DType:
        """The type that operands are brought to: as `evaluate.apply`."""
        kind = DType.BOOL
        for a in args[1:] if op == "where" else args:
            kind = promote(kind, type_of(a, self.facts.dtype))
        if kind is DType.BOOL and op in ("add", "mul", "sub", "neg", "floordiv", "mod", "pow", "sign"):
            return DType.I64
        return promote(kind, DType.F32) if OPS[op].result == "float" else kind

    def divisor(self, e: Expr, text: str) -> str:
        """The name of what lanes are divided by, `e` with this text, and its reciprocal: beside where `e` is known."""
        key = f"divisor {text}"
        hit = self.known(key)
        if hit is not None:
            return hit.text
        named = max((n for n, s in enumerate(self.scopes) if e in s.known), default=0)
        level = max(self.level(e), named)
        return self.keep(key, level, Value(f"tf::divisor({text})", "float", False), "divisor").text

    def power(self, base: Expr, exponent: Expr, ctype: CType, vec: bool) -> Value | None:
        """Small constant exponents without `pow`."""
        if not isinstance(exponent, Const) or float(exponent.value) not in (0.5, 1.0, 2.0, 3.0, -1.0):
            return None
        named = Value(self.typed(base, ctype, vec), ctype, vec)
        x = self.keep(f"pow {named.text}", self.level(base), named, "base").text
        one = self.convert(Value(literal(1.0, ctype), ctype, False), ctype, vec)
        forms = {0.5: f"tf::sqrt({x})", 1.0: x, 2.0: f"({x} * {x})", 3.0: f"({x} * {x} * {x})", -1.0: f"({one} / {x})"}
        return Value(forms[float(exponent.value)], ctype, vec)

    # ------------------------------------------------------------ memory
    def offset(self, tensor: str, index: tuple[Expr, ...], skip: frozenset[int] = frozenset()) -> str:
        """Element offset of the axes not in `skip`, which do not depend on the strip."""
        terms = []
        for axis, e in enumerate(index):
            if axis not in skip:
                terms.append(product(self.place(tensor, axis, e), self.facts.stride(tensor, axis)))
        return " + ".join(t for t in terms if t != "0") or "0"

    def place(self, tensor: str, axis: int, e: Expr) -> str:
        """Position along an axis as an int64 text: relative to the tile, clamped unless provably inside."""
        text = self.address(e)
        tile = self.facts.tiles.get(tensor)
        if tile is not None:
            return text if tile.origin[axis] == "0" else f"({text} - {tile.origin[axis]})"
        if self.certain(tensor, axis, e):
            return text if text.isidentifier() or text.isdigit() else f"({text})"
        return f"tf::clamp_index({text}, {self.extent(tensor, axis)})"

    def certain(self, tensor: str, axis: int, e: Expr) -> bool:
        param = self.facts.tensor(tensor)
        return param is None or in_range(e, param.shape[axis], self.facts.kernel.sizes, self.facts.parts)

    def extent(self, tensor: str, axis: int) -> str:
        param = self.facts.tensor(tensor)
        assert param is not None
        return self.address(param.shape[axis])

    def pointer(self, tensor: str, index: tuple[Expr, ...], skip: frozenset[int]) -> str:
        """Address of the element at `index`, axes in `skip` at 0; named in the scope that determines it."""
        key = f"&{tensor}{[e for n, e in enumerate(index) if n not in skip]}{sorted(skip)}"
        hit = self.known(key)
        if hit is not None:
            return hit.text
        rest = [e for n, e in enumerate(index) if n not in skip]
        level = max((self.level(e) for e in rest), default=0)
        offset = self.offset(tensor, index, skip)
        base = self.facts.names[tensor]
        if offset == "0":
            return base
        return self.keep(key, level, Value(f"{base} + {offset}", "int64_t", False), f"{tensor}_at").text

    def load(self, tensor: str, index: tuple[Expr, ...], level: int) -> Value:
        memory = self.facts.dtype(tensor)
        ctype: CType = _CTYPE.get(memory.compute) or ("int64_t" if memory is DType.I64 else "int32_t")
        moving = frozenset(n for n, e in enumerate(index) if self.moves(e))
        if not moving:
            return Value(f"tf::load1({self.pointer(tensor, index, moving)})", ctype, False)
        return Value(self.moving_access("load", tensor, index, moving, ""), ctype, True)

    def moves(self, e: Expr) -> bool:
        return self.strip is not None and self.strip in dims_used(e)

    def moving_access(self, verb: str, tensor: str, index: tuple[Expr, ...], moving: frozenset[int], data: str) -> str:
        """A vector load, or store of `data`, of elements whose place depends on the strip."""
        assert self.strip is not None
        sizes = self.facts.kernel.sizes
        parts = {n: split(index[n], self.strip, sizes) for n in moving}
        inside = verb == "store" or all(self.certain(tensor, n, index[n]) for n in moving)
        base = self.pointer(tensor, index, moving)
        forms = [p for p in parts.values() if p is not None]
        if len(forms) == len(parts) and inside:
            step = " + ".join(product(str(parts[n][0]), self.facts.stride(tensor, n)) for n in sorted(moving))  # type: ignore[index]
            start = " + ".join(self.start(tensor, n, index[n], *parts[n]) for n in sorted(moving))  # type: ignore[misc]
            if step == "1":
                return f"tf::{verb}({base} + {start}, {data}w)"
            return f"tf::{verb}_strided({base} + {start}, {step}, {data}w)"
        if len(forms) == len(parts) == 1 and forms[0][0] == 1:
            (n,) = moving
            first = f"{self.strip} + {self.address(forms[0][1])}"
            return f"tf::load_clamped({base}, {first}, {self.facts.stride(tensor, n)}, {self.extent(tensor, n)}, w)"
        terms = []
        for n in sorted(moving):
            at = self.typed(index[n], "int64_t", True)
            if not inside or (verb == "load" and not self.certain(tensor, n, index[n])):
                at = f"tf::clamp_index({at}, {self.extent(tensor, n)})"
            tile = self.facts.tiles.get(tensor)
            if tile is not None and tile.origin[n] != "0":
                at = f"({at} - tf::splat<{self.lanes}>(int64_t({tile.origin[n]})))"
            stride = self.facts.stride(tensor, n)
            terms.append(at if stride == "1" else f"{at} * tf::splat<{self.lanes}>(int64_t({stride}))")
        return f"tf::{'gather' if verb == 'load' else 'scatter'}({base}, {' + '.join(terms)}, {data}w)"

    def start(self, tensor: str, axis: int, e: Expr, c: int, rest: Expr) -> str:
        """Offset along a moving axis of the strip's first index."""
        text = product(str(c), self.strip or "")
        if rest != Const(0, DType.I64):
            text = f"{text} + {self.address(rest)}"
        tile = self.facts.tiles.get(tensor)
        if tile is not None and tile.origin[axis] != "0":
            text = f"{text} - {tile.origin[axis]}"
        stride = self.facts.stride(tensor, axis)
        return text if stride == "1" and " " not in text else product(f"({text})", stride)


def _exact_inverse(e: Expr, facts: Facts) -> float | None:
    """What multiplies as `e` divides, bit by bit: of a power of two its inverse, None of all else."""
    while isinstance(e, Cast) and e.dtype in (DType.F32, DType.F64):
        e = e.arg
    if isinstance(e, Size):
        e = facts.kernel.sizes[e.dim]
    if not isinstance(e, Const) or not isfinite(e.value) or abs(frexp(e.value)[0]) != 0.5:
        return None
    return 1.0 / e.value if abs(frexp(e.value)[1]) < _EXPONENT else None


def _nodes(e: Expr) -> Iterable[Expr]:
    yield e
    for k in children(e):
        yield from _nodes(k)


#: Rough cycles a vector: what is worth hoisting or a narrower strip.
HEAVY = frozenset(
    (
        *("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "erf", "erfinv", "lgamma", "sin", "cos"),
        *("pow", "rsqrt", "sqrt", "div", "floordiv", "mod", "random", "random16"),
    )
)


def op_cost(e: Expr) -> int:
    """0 for what costs nothing to repeat (literals, names)."""
    return 0 if isinstance(e, Const | Index | Size | Sym) else 1


def _temp_name(e: Expr) -> str:
    match e:
        case Call(op, _):
            return f"{op}_"
        case Cast(_, dtype):
            return f"as_{dtype.value}"
    return "t"
