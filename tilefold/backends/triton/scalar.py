"""Expressions to Triton code."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType, promote
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, dims_used, loads
from tilefold.algebra.facts import Range
from tilefold.algebra.ops import OPS, RANDOM
from tilefold.algebra.simplify import is_square
from tilefold.backends.triton.exponents import LOG2E, Term, exponential
from tilefold.backends.triton.functions import IN_INTERPRETER, INFIX, PRODUCTS, ROOTS, UNARY
from tilefold.backends.triton.simplify import pull_scale, terms
from tilefold.backends.triton.values import (
    TRITON_TYPE,
    Value,
    converted,
    fitted,
    float32,
    in_parts,
    inverse,
    is_number,
    number,
    union,
)
from tilefold.errors import BackendError

#: The inverse of what is no less has no more than 128 as its exponent.
LEAST_NORMAL = 2.0**-126
#: Roots of what is no less are found by `tf_sqrt_of_normal`: what a root's square lacks is a normal number.
ROOTED = 2.0**-100
#: Divisors between its inverse and this have inverses that are good for all quotients.
BY_INVERSE = 2.0**100
#: Angles up to which turns are whole numbers of float32, with room.
MOST_TURNED = 2.0**22
#: Whole parts of floats below it are positions, sums and products of which 32 bits hold.
MOST_POSITION = 2.0**20
#: What is more is rounded beyond the largest e4m3 (448).
MOST_E4M3 = 464.0


@dataclass(frozen=True, slots=True)
class Leaves:
    """What expressions are made of in a kernel: loads, indices, tile bounds; and the accuracy wanted.

    only: for what is rendered in it, loads are needed only where a value of the thread block is true (or is not).
    far: whether an expression has finite values so large that their products with log2(e) are too coarse (`far`).
    narrow: results are of 16 bits or less (`coarse`), so errors of 2^-20 are far below theirs. all_narrow: so are all
    floats of the kernel, and those of 2^-11 are.
    exact: quotients are correctly rounded, for something in the kernel rounds to a coarse grid.
    positions: whether integers that no data decide have 32 bits here.
    inverses: quotients are many: they are products with inverses. In kernels of matrix products they are few, and what
    inverses take of the registers costs more (attention of 256 keys: 107 to 139, a block fewer, 12 % of the time).
    multiplies: the kernel has such products, whose errors are more than those of an inverse.
    """

    load: Callable[[Load, Sequence[str]], Value]
    exists: Callable[[Expr, Expr, Sequence[str]], Value]
    guarded: Callable[[Expr, Sequence[str]], Value | None]
    index: Callable[[str], Value]
    size: Callable[[str], Value]
    sym: Callable[[str], Value]
    tile_start: Callable[[str], Value]
    tile_stop: Callable[[str], Value]
    extreme: Callable[[str, Expr], Value]
    fixed_quotient: Callable[[str, int], bool]
    range_of: Callable[[Expr], Range]
    most: Callable[[Expr, Expr], float | None]
    named: Callable[[str, str, int], str]
    far: Callable[[Expr], bool]
    only: Callable[[Value, bool], AbstractContextManager[None]]
    narrow: bool = False
    all_narrow: bool = False
    exact: bool = False
    inverses: bool = True
    multiplies: bool = False
    interpreted: bool = False
    nvidia: bool = True
    positions: Callable[[], bool] = lambda: False

    @property
    def by_row(self) -> bool:
        """Whether an error that all of a row has alike is to be none: nothing else is as large."""
        return not (self.narrow or self.multiplies)

    @property
    def on_device(self) -> bool:
        """Whether the machine's own instructions are there."""
        return self.nvidia and not self.interpreted


#: An integer of fewer bits that is kept in 64.
_WIDENED = re.compile(r"\(?(\w+)\.to\(tl\.int64\)\)?")


class Expressions:
    """Renders expressions; `frame` is the order of dims that results follow."""

    def __init__(self, leaves: Leaves):
        self.leaves = leaves

    def value(self, e: Expr, frame: Sequence[str]) -> Value:
        """Code of `e` in its compute type, with the dims it varies over in frame order."""
        match e:
            case Const(v, dtype):
                return Value(number(v, dtype), (), dtype)
            case Index(d):
                return self.leaves.index(d)
            case Size(d):
                return self.leaves.size(d)
            case Sym(s):
                return self.leaves.sym(s)
            case Load():
                return self.leaves.load(e, frame)
            case Cast(Call(("add" | "sub" | "abs"), _) as arg, DType.F32) if self._far_apart(arg, frame):
                return self._to(arg, self.value(arg, frame), DType.F32, frame)
            case Call("log1p", (Cast(arg, DType.F32) as x,)) if self._whole(arg, frame):
                n = self.value(x, frame)  # 1 + n is exact
                return Value(f"(tf_log2_approx(1.0 + {n.code}) * {1 / LOG2E})", n.axes, n.kind, n.level)
            case Cast(arg, DType.I64) if (found := self._short(arg, frame)) is not None:
                return found
            case Cast(arg, dtype):
                return self._cast(self.to_be_cast(arg, dtype, frame), dtype, self.checked(arg, dtype))
            case Call("tile_start", (Index(d),)):
                return self.leaves.tile_start(d)
            case Call("tile_stop", (Index(d),)):
                return self.leaves.tile_stop(d)
            case Call("within", (arg, n)):  # of no load's index: these are checked with the load
                self.leaves.exists(arg, n, frame)
                return self.value(arg, frame)
            case Call(("tile_min" | "tile_max") as op, (arg,)):
                return self.leaves.extreme(op, arg)
            case Call("where", (_, _, Const())) if (found := self.leaves.guarded(e, frame)) is not None:
                return found
            case Call("exp", (arg,)):
                return self._exp(arg, frame)
            case Call("pow", (base, Const(n, _))):
                return self._power(self.value(base, frame), float(n), self.leaves.range_of(base).lo)
            case Call("floordiv", (Index(d), Const(n, DType.I64))) if self.leaves.fixed_quotient(d, int(n)):
                start = self.leaves.tile_start(d)
                return Value(f"({start.code} // {int(n)})", (), DType.I64, start.level)
            case Call(op, args):
                return self._call(op, args, frame)
        raise AssertionError(e)

    def _far_apart(self, e: Expr, frame: Sequence[str]) -> bool:
        """Whether `e` is made of whole numbers and varies along several dims, as a distance does."""
        v = self.value(e, frame)
        return v.kind is DType.I64 and len(v.axes) > 1

    def _bounded(self, e: Expr) -> bool:
        """Whether the sine of `e` may be one to a few places: less than `MOST_TURNED` from 0, for certain."""
        found = self.leaves.range_of(e)
        return self._approximates() and found.lo > -MOST_TURNED and found.hi < MOST_TURNED

    def _whole(self, e: Expr, frame: Sequence[str]) -> bool:
        """Whether log1p of `e`, a whole number, may be a logarithm to a few places."""
        return self._approximates() and self.value(e, frame).kind is DType.I64

    def _approximates(self) -> bool:
        """Whether functions may be those to a few places of the machine."""
        return self.leaves.narrow and self.leaves.on_device

    def _short(self, e: Expr, frame: Sequence[str]) -> Value | None:
        """The whole part of a float that is no larger than a position is, in 32 bits; None of others."""
        found = self.leaves.range_of(e)
        if not self.leaves.positions() or not -MOST_POSITION < found.lo <= found.hi < MOST_POSITION:
            return None
        v = self.value(e, frame)
        return replace(v, code=f"({v.code}).to(tl.int32)", kind=DType.I64) if v.kind.is_float and v.axes else None

    def to_be_cast(self, e: Expr, dtype: DType, frame: Sequence[str]) -> Value:
        """Code of `e` for a reader that rounds it to `dtype`."""
        match e:
            case Call("div", args) if dtype is DType.E4M3:
                return self._call("div", args, frame, to_e4m3=True)
        return self.value(e, frame)

    def _call(self, op: str, args: tuple[Expr, ...], frame: Sequence[str], *, to_e4m3: bool = False) -> Value:
        vs = self._chosen(args, frame) if op == "where" else [self.value(a, frame) for a in args]
        if OPS[op].result in ("same", "float") or op in ("lt", "le", "gt", "ge", "eq", "ne"):
            kind = self._kind(op, vs)
            vs = [
                v if op == "where" and n == 0 else self._to(a, v, kind, frame)
                for n, (a, v) in enumerate(zip(args, vs, strict=True))
            ]
        else:
            kind = DType.BOOL
        axes = union(vs, frame)
        codes = [fitted(v, axes) for v in vs]
        if op == "sub" and kind is DType.F32 and is_square(x := args[1]) and isinstance(x, Call):
            factor = fitted(self._to(x.args[0], self.value(x.args[0], frame), kind, frame), axes)
            codes[1] = self._rounded(factor, factor)
        level = max(v.level for v in vs)
        result = kind if OPS[op].result in ("same", "float") else DType.BOOL
        if op == "div" and kind is DType.F32:
            quotient = self._quotient(vs[0], vs[1], args[1], axes, to_e4m3=to_e4m3)
            if quotient is not None:
                return Value(quotient, axes, kind, level)
        return Value(self._code(op, codes, kind, vs, args), axes, result, level)

    def _chosen(self, args: tuple[Expr, ...], frame: Sequence[str]) -> list[Value]:
        """A condition and what it chooses from: of one on the place of a whole thread block (its part of several that
        are put together), what is not chosen is not read. Conditions on data would be waited for first."""
        condition = self.value(args[0], frame)
        if condition.axes or condition.kind is not DType.BOOL or loads(args[0]):
            return [condition, *(self.value(a, frame) for a in args[1:])]
        found = [condition]
        for a, chosen in zip(args[1:], (True, False), strict=True):
            with self.leaves.only(condition, chosen):
                found.append(self.value(a, frame))
        return found

    def _quotient(self, x: Value, s: Value, divisor: Expr, axes: tuple[str, ...], *, to_e4m3: bool) -> str | None:
        """x / s in float32 by an inverse: where s varies along fewer axes, one that is computed along these alone; of
        others the machine's, where nothing is rounded coarsely and s is no less than the least normal number.

        `tf_even(s)` keeps the inverse finite. It has two parts: of one, all quotients of a row are off by what was
        rounded off the inverse, and so is whatever adds them up (weights that are to sum up to 1), where those of a
        division are each off by their own. Results of 16 bits have no place for that; they have one part. Where
        something is rounded coarsely the product is corrected by its remainder (Markstein), but on its way to e4m3.
        None: a plain division.
        """
        if is_number(s.code) or self.leaves.interpreted:
            return None
        if len(s.axes) == len(axes):
            if self.leaves.exact or not self.leaves.nvidia or self.leaves.range_of(divisor).lo < LEAST_NORMAL:
                return None
            inverse = f"tf_reciprocal({fitted(s, axes)})"
            return inverse if is_number(x.code) and float(x.code) == 1.0 else self._rounded(fitted(x, axes), inverse)
        if not (self.leaves.inverses or self.leaves.exact):
            return None

        def along(text: str, stem: str = "") -> str:
            """Code over all axes of what is computed along those of s; named, it is computed before anything else."""
            text = self.leaves.named(text, stem, s.level) if stem else text
            return fitted(Value(text, s.axes, DType.F32), axes)

        code, above = s.code, fitted(x, axes)
        if self.leaves.range_of(divisor).lo < LEAST_NORMAL:
            even = self.leaves.named(f"tf_even({code})", "even", s.level)
            above = f"({above} * {along(even)})"
            code = self.leaves.named(f"{code} * {even}", "scaled", s.level)
        if to_e4m3 or (self.leaves.by_row and not self.leaves.exact):
            below = self.leaves.named(f"tf_inverse_below({code})", "inverse", s.level)
            return f"tf_by_parts({above}, {along(below)}, {along(f'tf_inverse_rest({code}, {below})', 'rest')})"
        name = self.leaves.named(f"tf_inverse({code})", "inverse", s.level)
        if self.leaves.exact:
            return f"tf_quotient({above}, {along(code)}, {along(name)})"
        return self._rounded(above, along(name))

    def _rounded(self, x: str, y: str) -> str:
        """x y, never as a part of a fused multiply-add, in which one of two quotients that are subtracted would not be
        rounded: equal ones would differ, and steps of a row that is divided by its sum not add up to its ends."""
        return f"tf_times({x}, {y})" if self.leaves.on_device else f"({x} * {y})"

    def _kind(self, op: str, vs: list[Value]) -> DType:
        kinds = [v.kind for v in (vs[1:] if op == "where" else vs)]
        t = kinds[0]
        for k in kinds[1:]:
            t = promote(t, k)
        if op in ("add", "sub", "mul", "neg") and t is DType.BOOL:
            t = DType.I64
        return promote(t, DType.F32) if OPS[op].result == "float" else t

    def _to(self, e: Expr, v: Value, kind: DType, frame: Sequence[str]) -> Value:
        """Convert; a difference of indices is converted before it is spread over a tile."""
        if kind is DType.F32 and v.kind is DType.I64 and len(v.axes) > 1:
            match e:
                case Call("abs", (a,)):
                    x = self._to(a, self.value(a, frame), kind, frame)
                    return Value(f"tl.abs({x.code})", x.axes, kind, x.level)
                case Call(("add" | "sub") as op, (a, b)) if not any(isinstance(x, Load) for x in (a, b)):
                    x, y = (self._to(k, self.value(k, frame), kind, frame) for k in (a, b))
                    axes = union([x, y], frame)
                    code = f"({fitted(x, axes)} {INFIX[op]} {fitted(y, axes)})"
                    return Value(code, axes, kind, max(x.level, y.level))
        return converted(v, kind)

    def _code(self, op: str, c: list[str], kind: DType, vs: list[Value], args: Sequence[Expr]) -> str:
        if op in INFIX:
            return f"({c[0]} {INFIX[op]} {c[1]})"
        if op == "where":
            return f"tl.where({c[0]}, {c[1]}, {c[2]})"
        if op in ("maximum", "minimum"):
            if all(is_number(x) for x in c):
                return f"({'max' if op == 'maximum' else 'min'}({c[0]}, {c[1]}))"
            nan = ", propagate_nan=tl.PropagateNan.ALL" if kind.is_float and not self.leaves.interpreted else ""
            return f"tl.{op}({c[0]}, {c[1]}{nan})"
        if op == "div":
            return self._by_number(c[0], c[1], kind)
        if op in ("floordiv", "mod") and not kind.is_float and self._truncates(args):
            if vs[0].axes and (by := self._inverse(args)) is not None:
                m, s = by
                return f"tf_rest({c[0]}, {m}, {s}, {c[1]})" if op == "mod" else f"tf_whole({c[0]}, {m}, {s})"
            return f"({c[0]} {'//' if op == 'floordiv' else '%'} {c[1]})"
        if op in ("floordiv", "mod") and not kind.is_float and (bits := _power(args[1])) is not None:
            return f"({c[0]} >> {bits})" if op == "floordiv" else f"({c[0]} & {(1 << bits) - 1})"
        if op == "floordiv":
            return f"tl.floor({c[0]} / {c[1]})" if kind.is_float else f"tf_floordiv({c[0]}, {c[1]})"
        if op == "mod":
            return f"tf_float_mod({c[0]}, {c[1]})" if kind.is_float else f"tf_mod({c[0]}, {c[1]})"
        if op == "pow":
            if self.leaves.interpreted:
                return f"tl.exp2({c[1]} * tl.log2({c[0]}))"
            base, exponent = (_of_type(x, kind) for x in c)
            return f"{self._pow(kind, self.leaves.range_of(args[0]).lo)}({base}, {exponent})"
        if op == "and":
            return f"({_bool(vs[0], c[0])} & {_bool(vs[1], c[1])})"
        if op == "or":
            return f"({_bool(vs[0], c[0])} | {_bool(vs[1], c[1])})"
        if op == "not":
            return f"({c[0]} == 0)"
        if op == "isnan":
            return f"({c[0]} != {c[0]})"
        if op == "isinf":
            return f'(tl.abs({c[0]}) == float("inf"))'
        if op == "sign":
            return f"tf_sign({c[0]})" if kind.is_float else f"tf_int_sign({c[0]})"
        if op in RANDOM:
            return f"tf_{op}({', '.join(c)})"
        if op in ("floor", "ceil", "trunc", "round") and not kind.is_float:
            return c[0]
        if op == "tanh" and self.leaves.narrow and not self.leaves.interpreted:
            if not self.leaves.nvidia:
                return f"tf_tanh({c[0]})"
            return f"tf_tanh_approx({c[0]})" if self.leaves.all_narrow else f"tf_tanh_by_exp({c[0]})"
        if kind is DType.F32 and (found := self._in_float32(op, args[0])):
            return f"{found}({c[0]})"
        table = IN_INTERPRETER if self.leaves.interpreted and op in IN_INTERPRETER else UNARY
        if op not in table:
            raise BackendError(f"the Triton back end has no operation {op}", hint="use backend cpp, or report it")
        return table[op].format(c[0])

    def _in_float32(self, op: str, arg: Expr) -> str:
        """A function of ours that takes fewer instructions than the library's; "" where there is none."""
        if op == "log1p":
            found = self.leaves.range_of(arg)
            return "tf_log1p_unit" if found.lo >= 0.0 and found.hi <= 1.0 else "tf_log1p_single"
        if op == "tanh" and self.leaves.on_device:
            return "tf_tanh_single"
        if op == "sigmoid" and self.leaves.on_device:
            return "tf_sigmoid"
        if op == "sqrt" and self.leaves.on_device:
            return "tf_sqrt_of_normal" if self.leaves.range_of(arg).lo >= ROOTED else "tf_sqrt"
        if op == "erf" and self._approximates():
            return "tf_erf_by_exp"
        return f"tf_{op}_approx" if op in ("sin", "cos") and self._bounded(arg) else ""

    def _by_number(self, above: str, below: str, kind: DType) -> str:
        """A number's inverse is multiplied by, as torch's kernels for GPUs do: it is off by half a last place, and
        with it all elements of a tensor, unless what was rounded off is multiplied by too (variances as differences
        of means: a similarity of images was off by 1.2e-5, eager by 3e-7). Triton's own division is approximate.

        Also where something is rounded coarsely: scales that rows are divided by, a maximum by 127, decide there which
        of two whole numbers a tie becomes, and those of the true quotient are other ones than eager's."""
        if self.leaves.interpreted or kind is not DType.F32 or is_number(above):
            return f"({above} / {below})"
        if not is_number(below) or not 1 / BY_INVERSE < abs(float(below)) < BY_INVERSE:
            return f"tl.div_rn({above}, {below})" if self.leaves.exact else f"({above} / {below})"
        inverse = 1 / float32(float(below))
        if self.leaves.exact:
            return self._rounded(above, str(float32(inverse)))
        low, rest = in_parts(inverse)
        whole = rest == 0.0 or not self.leaves.by_row
        return f"({above} * {float32(inverse)})" if whole else f"tf_by_parts({above}, {low}, {rest})"

    def _truncates(self, args: Sequence[Expr]) -> bool:
        """Whether a quotient of whole numbers is rounded as the machine's, which cuts it off: none is below 0."""
        return self.leaves.range_of(args[0]).nonneg and self.leaves.range_of(args[1]).lo > 0

    def _inverse(self, args: Sequence[Expr]) -> tuple[int, int] | None:
        """The inverse of a number that positions, of 32 bits, are divided by; None where a shift divides, or where it
        may be something else that is divided."""
        at, by = args
        if not self.leaves.positions() or not isinstance(by, Const) or _power(by) is not None or not _is_position(at):
            return None
        return inverse(int(by.value))

    def checked(self, e: Expr, dtype: DType) -> bool:
        """Whether e may be beyond the range of e4m3, whose conversion saturates where torch has NaN."""
        match e:
            case Call("div", (a, b)) if dtype is DType.E4M3 and not self.leaves.interpreted:
                most = self.leaves.most(a, b)
                return most is None or most > MOST_E4M3
        return True

    def _cast(self, v: Value, dtype: DType, checked: bool = True) -> Value:
        if is_number(v.code) and dtype.is_float and not dtype.rounds:
            return converted(v, dtype.compute)
        if dtype is DType.BOOL:
            return converted(v, DType.BOOL)
        code = v.code
        if is_number(code):
            code = f"tl.full([], {code}, {TRITON_TYPE[v.kind]})"
        narrow = _WIDENED.fullmatch(code)
        if narrow is not None and dtype.is_float:
            code = narrow[1]  # the conversion of an integer rounds once, whatever type it is kept in
        if dtype.is_float and dtype.compute is not dtype:
            return Value(f"{narrowed(code, v.kind, dtype, checked=checked)}.to(tl.float32)", v.axes, DType.F32, v.level)
        if not dtype.is_float and dtype is not DType.I64:
            return Value(f"({code}).to({TRITON_TYPE[dtype]}).to(tl.int64)", v.axes, DType.I64, v.level)
        return converted(Value(code, v.axes, v.kind, v.level), dtype)

    def _exp(self, arg: Expr, frame: Sequence[str]) -> Value:
        """exp as exp2, its scale folded into the factors of the argument where that rounds no more than it did.

        An argument of one term, of which nothing is subtracted, may be large: x log2(e) is off by |x| 2^-25 or so, and
        by as much the result, relatively. In float32 such a one is computed with the rest of that product.
        """
        parts = terms(arg)
        if len(parts) == 1 and not self.leaves.narrow and not self.leaves.interpreted:
            v = self.value(arg, frame)
            if v.kind is DType.F32 and not is_number(v.code):
                return Value(f"libdevice.exp({v.code})", v.axes, v.kind, v.level)
        wide = [(k, x) for k, x in parts if len(dims_used(x)) > 1 or isinstance(x, Call)]
        folds = self.leaves.narrow or any(abs(k) * pull_scale(x, loose=False)[0] != 1.0 for k, x in parts)
        if not folds or not wide or len(parts) > 3:
            v = self.value(arg, frame)
            v = v if v.kind.is_float else converted(v, DType.F32)
            return Value(f"tl.exp({v.code})", v.axes, v.kind, v.level)
        kind = DType.F32
        done: list[Term] = []
        for k, x in parts:
            more, inner = pull_scale(x, loose=self.leaves.narrow)
            v = self.value(inner, frame)
            if not v.kind.is_float:
                v = self._to(inner, v, DType.F32, frame)
            kind = promote(kind, v.kind)
            done.append(Term(k * more, v, self.leaves.far(x)))
        return exponential(done, kind, frame, exact=self.leaves.by_row)

    def _power(self, v: Value, n: float, least: float) -> Value:
        """v ** n, where v is known to be `least` or more: powers of a normal number in quarters are roots."""
        v = converted(v, DType.F32) if not v.kind.is_float and n != int(n) else v
        simple = {**PRODUCTS, 0.5: "tl.sqrt({0})", -0.5: "tl.rsqrt({0})"}
        simple |= {-n: f"(1.0 / {PRODUCTS[n]})" for n in (1.0, 2.0)}
        if n in simple:
            x = v.code
            if n in (5.0, 7.0) and not x.isidentifier():  # read twice
                x = self.leaves.named(x, "base", v.level)
            return Value(simple[n].format(x), v.axes, v.kind, v.level)
        if v.kind is DType.F32 and abs(n) in ROOTS and least >= LEAST_NORMAL:
            x = v.code if v.code.isidentifier() else self.leaves.named(v.code, "base", v.level)
            code = ROOTS[abs(n)].format(x)
            return Value(code if n > 0 else f"(1.0 / {code})", v.axes, v.kind, v.level)
        v = converted(v, DType.F32) if not v.kind.is_float else v
        if self.leaves.interpreted:
            return Value(f"tl.exp2({n} * tl.log2({v.code}))", v.axes, v.kind, v.level)
        code = f"{self._pow(v.kind, least)}({_of_type(v.code, v.kind)}, {_of_type(str(n), v.kind)})"
        return Value(code, v.axes, v.kind, v.level)

    def _pow(self, kind: DType, least: float) -> str:
        """The power of what is no less than `least`: the library's has two to four times as many instructions, and
        branches."""
        ours = kind is DType.F32 and self.leaves.nvidia
        return ("tf_pow_of_positive" if least >= 0.0 else "tf_pow") if ours else "libdevice.pow"


def narrowed(code: str, kind: DType, dtype: DType, *, checked: bool = True) -> str:
    """`code` rounded to a narrow float as torch does (integers by way of float32; e4m3: beyond the range is NaN;
    unchecked, it is not beyond)."""
    if not kind.is_float:
        code = f"({code}).to(tl.float32)"
    if dtype is DType.E4M3 and checked:
        return f"tf_in_e4m3({code}).to(tl.float8e4nv)"
    return f"({code}).to({TRITON_TYPE[dtype]})"


def _of_type(code: str, kind: DType) -> str:
    """`code`, a number as a value of this type: Triton takes a number for a float32, and CUDA's library has no function
    of two types."""
    return f"tl.full([], {code}, {TRITON_TYPE[kind]})" if is_number(code) else code


def _is_position(e: Expr) -> bool:
    """Whether an integer is made of indices, of where tiles begin, extents and numbers alone."""
    match e:
        case Call("tile_start", (Index(),)) | Size():
            return True
        case Call("add" | "sub" | "mul" | "floordiv" | "mod" | "maximum" | "minimum", args):
            return all(map(_is_position, args))
        case Const(_, dtype):
            return dtype is DType.I64
    return isinstance(e, Index)


def _power(e: Expr) -> int | None:
    """k where `e` is the number 2^k: quotients by it are shifts, remainders bits, of numbers below 0 too."""
    n = int(e.value) if isinstance(e, Const) and e.dtype is DType.I64 else 0
    return n.bit_length() - 1 if n > 0 and not n & (n - 1) else None


def _bool(v: Value, code: str) -> str:
    return code if v.kind is DType.BOOL else f"({code} != 0)"
