"""Elementwise operators: one row an ATen overload, its meaning as an expression over its operands."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call, lit
from tilefold.algebra.gamma import digamma
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators import inverse
from tilefold.frontend.operators.context import Context, Value, attrs, broadcast, meta_of

aten = torch.ops.aten
prims = torch.ops.prims
Formula = Callable[..., Expr]
Lowerer = Callable[[Context, torch.fx.Node], Value | tuple[Value, ...]]


def rowwise(formula: Formula, tensors: int, *extras: str) -> Lowerer:
    """An operator whose first `tensors` arguments are operands; `extras` are passed as Python values."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        operands = list(a.values())[:tensors]
        shape, dtype = meta_of(node)
        ct = ctx.compute_dtype(operands)
        if formula in _ALWAYS_FLOAT and not ct.is_float:
            ct = DType.F32
        values = [ctx.value(o) for o in operands]
        options = {k: a[k] for k in extras}
        return ctx.map(shape, dtype, lambda at: formula(*(ctx.operand(v, at, ct) for v in values), **options))

    return lower


def relu(x: Expr) -> Expr:
    return call("maximum", x, 0)


def silu(x: Expr) -> Expr:
    return x * call("sigmoid", x)


def gelu(x: Expr, approximate: str = "none") -> Expr:
    """Both of torch's forms; tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (call("tanh", inner) + 1.0)
    return x * 0.5 * (call("erf", x * math.sqrt(0.5)) + 1.0)


def softplus(x: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    """log(1 + exp(beta x)) / beta, and x itself beyond the threshold."""
    z = x * float(beta)
    return call("where", call("gt", z, float(threshold)), x, call("log1p", call("exp", z)) / float(beta))


def power(x: Expr, y: Expr) -> Expr:
    """Small constant exponents become products and roots, which the algebra can see through."""
    if isinstance(y, Const):
        p = float(y.value)
        if p == 1:
            return x
        if p in (2, 3):
            return x * x if p == 2 else x * x * x
        if p == 0.5:
            return call("sqrt", x)
        if p == -0.5:
            return call("rsqrt", x)
        if p == -1:
            return lit(1.0) / x
    return call("pow", x, y)


def clamp(ctx: Context, node: torch.fx.Node) -> Value:
    """min(max(x, low), high); NaN stays."""
    a = attrs(node)
    low, high = a.get("min"), a.get("max")
    bounds = [b for b in (low, high) if b is not None]
    ct = ctx.compute_dtype([a["self"], *bounds])
    shape, dtype = meta_of(node)
    x = ctx.value(a["self"])

    def at(i: tuple[Expr, ...]) -> Expr:
        e = ctx.operand(x, i, ct)
        if low is not None:
            e = call("maximum", e, ctx.operand(ctx.value(low), i, ct))
        if high is not None:
            e = call("minimum", e, ctx.operand(ctx.value(high), i, ct))
        return e

    return ctx.map(shape, dtype, at)


def add_like(op: str) -> Lowerer:
    """add, sub and rsub with their `alpha`."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        shape, dtype = meta_of(node)
        ct = ctx.compute_dtype([a["self"], a["other"]])
        x, y, alpha = ctx.value(a["self"]), ctx.value(a["other"]), a.get("alpha", 1)

        def at(i: tuple[Expr, ...]) -> Expr:
            left, right = ctx.operand(x, i, ct), ctx.operand(y, i, ct)
            if op == "rsub":
                left, right = right, left
            if alpha != 1:
                right = right * ctx.operand(ctx.value(alpha), (), ct)
            if ct is DType.BOOL and op == "add":
                return call("or", left, right)
            if right == Const(0, DType.I64) and op != "rsub" and ct is DType.I64:
                return left  # positions of a cache that holds nothing yet
            return call("add" if op == "add" else "sub", left, right)

        return ctx.map(shape, dtype, at)

    return lower


def multiply(x: Expr, y: Expr) -> Expr:
    return call("mul", x, y)


def divide(ctx: Context, node: torch.fx.Node) -> Value:
    """True, floor and trunc division. Integers are not divided through floats."""
    a = attrs(node)
    mode = a.get("rounding_mode")
    shape, dtype = meta_of(node)
    ct = ctx.compute_dtype([a["self"], a["other"]])
    x, y = ctx.value(a["self"]), ctx.value(a["other"])

    def at(i: tuple[Expr, ...]) -> Expr:
        left, right = ctx.operand(x, i, ct), ctx.operand(y, i, ct)
        if mode is None:
            return call("div", left, right)
        if mode == "floor":
            return call("floordiv", left, right)
        if ct.is_float:
            return call("trunc", call("div", left, right))
        flip = call("mul", call("sign", left), call("sign", right))
        return call("mul", flip, call("floordiv", call("abs", left), call("abs", right)))

    return ctx.map(shape, dtype, at)


def where(ctx: Context, node: torch.fx.Node) -> Value:
    """Selection; only the branches take part in type promotion."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    names = ("self", "other")
    c, x, y = ctx.value(a["condition"]), *(ctx.value(a[n]) for n in names)
    ct = ctx.compute_dtype([a[n] for n in names])
    return ctx.map(shape, dtype, lambda i: call("where", broadcast(c, i), ctx.operand(x, i, ct), ctx.operand(y, i, ct)))


def masked_fill(ctx: Context, node: torch.fx.Node) -> Value:
    """where(mask, value, self), in self's dtype."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    x, mask, v = ctx.value(a["self"]), ctx.value(a["mask"]), ctx.value(a["value"])
    return ctx.map(
        shape, dtype, lambda i: call("where", broadcast(mask, i), ctx.operand(v, i, dtype), ctx.operand(x, i, dtype))
    )


def convert(ctx: Context, node: torch.fx.Node) -> Value:
    """A dtype cast. Narrowing float casts stay visible as `Cast`, widening ones vanish."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    x = ctx.value(next(iter(a.values())))

    def at(i: tuple[Expr, ...]) -> Expr:
        e = x.at(i)
        if dtype in (DType.F16, DType.BF16) and not isinstance(e, Const) and x.dtype is not dtype:
            return Cast(e, dtype)
        return e

    return ctx.map(shape, dtype, at)


def to_copy(ctx: Context, node: torch.fx.Node) -> Value:
    """`Tensor.to` within one device; also of a number, which `torch.vmap` makes of scalars beside a tensor."""
    given = node.args[0]
    if not isinstance(given, torch.fx.Node):
        shape, dtype = meta_of(node)
        number = ctx.typed(ctx.value(given).at(()), dtype)
        return Value(shape, dtype, lambda _: number)
    source = given.meta["val"]
    if isinstance(source, torch.Tensor) and source.device != node.meta["val"].device:
        raise UnsupportedError("a copy between devices")
    return convert(ctx, node)


def truth(formula: Formula) -> Lowerer:
    """Logical operators: operands are compared with zero first."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        shape, dtype = meta_of(node)
        operands = [ctx.value(v) for v in attrs(node).values()]

        def as_bool(v: Value, i: tuple[Expr, ...]) -> Expr:
            e = broadcast(v, i)
            return e if v.dtype is DType.BOOL else call("ne", e, 0)

        return ctx.map(shape, dtype, lambda i: formula(*(as_bool(o, i) for o in operands)))

    return lower


def lerp(x: Expr, y: Expr, w: Expr) -> Expr:
    """torch's two-sided form: start + w (end - start), or end - (end - start)(1 - w) for |w| >= 0.5."""
    d = y - x
    below, above = x + w * d, y - d * (lit(1.0) - w)
    if isinstance(w, Const):  # one form alone: both read their operands once more, in a kernel under masks
        return below if abs(w.value) < 0.5 else above
    return call("where", call("lt", call("abs", w), 0.5), below, above)


def addc(op: str) -> Lowerer:
    """addcmul and addcdiv: self + value * t1 (op) t2."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        shape, dtype = meta_of(node)
        parts = [a["self"], a["tensor1"], a["tensor2"]]
        ct = ctx.compute_dtype(parts)
        x, y, z = (ctx.value(p) for p in parts)
        scale = ctx.operand(ctx.value(a["value"]), (), ct)

        def at(i: tuple[Expr, ...]) -> Expr:
            term = call(op, ctx.operand(y, i, ct), ctx.operand(z, i, ct))
            return ctx.operand(x, i, ct) + (term if a["value"] == 1 else scale * term)

        return ctx.map(shape, dtype, at)

    return lower


def nan_to_num(ctx: Context, node: torch.fx.Node) -> Value:
    """Replace NaN and infinities; the defaults are 0 and the dtype's extremes."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    x = ctx.value(a["self"])
    if not dtype.is_float:
        return x
    info = torch.finfo(dtype.torch_dtype)
    nan = float(a["nan"] or 0.0)  # type: ignore[arg-type]
    high = info.max if a["posinf"] is None else float(a["posinf"])  # type: ignore[arg-type]
    low = info.min if a["neginf"] is None else float(a["neginf"])  # type: ignore[arg-type]

    def at(i: tuple[Expr, ...]) -> Expr:
        e = x.at(i)
        finite = call("where", call("eq", e, math.inf), high, call("where", call("eq", e, -math.inf), low, e))
        return call("where", call("isnan", e), nan, finite)

    return ctx.map(shape, dtype, at)


def named(op: str) -> Formula:
    """The scalar operation of that name."""
    return lambda *xs: call(op, *xs)


def _tangent(x: Expr) -> Expr:
    return call("sin", x) / call("cos", x)


def _gelu_backward(g: Expr, x: Expr, approximate: str = "none") -> Expr:
    """d gelu: Phi(x) + x phi(x), or the derivative of the tanh form."""
    if approximate == "none":
        cdf = (call("erf", x * math.sqrt(0.5)) + 1.0) * 0.5
        return g * (cdf + x * (call("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))))
    k = math.sqrt(2 / math.pi)
    t = call("tanh", (x + x * x * x * 0.044715) * k)
    slope = (lit(1.0) - t * t) * (x * x * (3 * 0.044715) + 1.0) * k
    return g * ((t + 1.0) * 0.5 + x * 0.5 * slope)


def _silu_backward(g: Expr, x: Expr) -> Expr:
    s = call("sigmoid", x)
    return g * (s * (x * (lit(1.0) - s) + 1.0))


def _threshold_backward(g: Expr, x: Expr, threshold: float) -> Expr:
    return call("where", call("le", x, float(threshold)), 0.0, g)


def _leaky_relu(x: Expr, negative_slope: float) -> Expr:
    return call("where", call("gt", x, 0), x, x * float(negative_slope))


def _elu(x: Expr, alpha: float, scale: float, input_scale: float) -> Expr:
    neg = call("expm1", x * float(input_scale)) * float(alpha * scale)
    return call("where", call("gt", x, 0), x * float(scale), neg)


def _hardtanh(x: Expr, min_val: float, max_val: float) -> Expr:
    return call("minimum", call("maximum", x, float(min_val)), float(max_val))


def _rest(x: Expr, y: Expr) -> Expr:
    """The remainder of the quotient towards zero: of the sign of x."""
    r = call("mod", call("abs", x), call("abs", y))
    return call("where", call("lt", x, 0), -r, r)


_UNARY = {
    "exp": named("exp"), "exp2": named("exp2"), "expm1": named("expm1"), "log": named("log"), "log2": named("log2"),
    "log1p": named("log1p"), "sqrt": named("sqrt"), "rsqrt": named("rsqrt"), "sin": named("sin"), "cos": named("cos"),
    "tan": _tangent, "tanh": named("tanh"), "sigmoid": named("sigmoid"), "erf": named("erf"),
    "erfinv": named("erfinv"), "lgamma": named("lgamma"), "digamma": digamma,
    "reciprocal": lambda x: lit(1.0) / x,
    "log10": lambda x: call("log", x) * (1 / math.log(10)),
    "sinh": lambda x: (call("expm1", x) - call("expm1", -x)) * 0.5,
    "cosh": lambda x: (call("exp", x) + call("exp", -x)) * 0.5,
    **inverse.UNARY,
}  # fmt: skip
_ALWAYS_FLOAT = frozenset((*_UNARY.values(), inverse.atan2))

_BINARY: dict[str, Formula] = {
    "mul": multiply, "maximum": named("maximum"), "minimum": named("minimum"),
    "remainder": named("mod"), "fmod": _rest, "pow": power,
    "eq": named("eq"), "ne": named("ne"), "lt": named("lt"), "le": named("le"), "gt": named("gt"), "ge": named("ge"),
    **inverse.BINARY,
}  # fmt: skip

_SAME: dict[torch._ops.OpOverload, Lowerer] = {
    aten.neg.default: rowwise(named("neg"), 1),
    aten.abs.default: rowwise(named("abs"), 1),
    aten.sign.default: rowwise(named("sign"), 1),
    aten.floor.default: rowwise(named("floor"), 1),
    aten.ceil.default: rowwise(named("ceil"), 1),
    aten.trunc.default: rowwise(named("trunc"), 1),
    aten.round.default: rowwise(named("round"), 1),
    aten.square.default: rowwise(lambda x: x * x, 1),
    aten.isnan.default: rowwise(named("isnan"), 1),
    aten.isinf.default: rowwise(named("isinf"), 1),
    aten.isfinite.default: rowwise(lambda x: call("not", call("or", call("isnan", x), call("isinf", x))), 1),
    aten.relu.default: rowwise(relu, 1),
    aten.silu.default: rowwise(silu, 1),
    aten.gelu.default: rowwise(gelu, 1, "approximate"),
    aten.softplus.default: rowwise(softplus, 1, "beta", "threshold"),
    aten.leaky_relu.default: rowwise(_leaky_relu, 1, "negative_slope"),
    aten.elu.default: rowwise(_elu, 1, "alpha", "scale", "input_scale"),
    aten.hardtanh.default: rowwise(_hardtanh, 1, "min_val", "max_val"),
    aten.lerp.Scalar: rowwise(lerp, 3),
    aten.lerp.Tensor: rowwise(lerp, 3),
    aten.tanh_backward.default: rowwise(lambda g, y: g * (lit(1.0) - y * y), 2),
    aten.sigmoid_backward.default: rowwise(lambda g, y: g * (y * (lit(1.0) - y)), 2),
    aten.silu_backward.default: rowwise(_silu_backward, 2),
    aten.gelu_backward.default: rowwise(_gelu_backward, 2, "approximate"),
    aten.threshold_backward.default: rowwise(_threshold_backward, 2, "threshold"),
}

_OTHERS: dict[torch._ops.OpOverload, Lowerer] = {
    aten.add.Tensor: add_like("add"),
    aten.add.Scalar: add_like("add"),
    aten.sub.Tensor: add_like("sub"),
    aten.sub.Scalar: add_like("sub"),
    aten.rsub.Scalar: add_like("rsub"),
    aten.rsub.Tensor: add_like("rsub"),
    aten.div.Tensor: divide,
    aten.true_divide.Tensor: divide,
    aten.div.Scalar: divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: clamp,
    aten.clamp_max.Tensor: clamp,
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.addcmul.default: addc("mul"),
    aten.addcdiv.default: addc("div"),
    aten.nan_to_num.default: nan_to_num,
    aten._to_copy.default: to_copy,
    prims.convert_element_type.default: convert,
    aten.logical_and.default: truth(named("and")),
    aten.logical_or.default: truth(named("or")),
    aten.logical_xor.default: truth(named("ne")),
    aten.logical_not.default: truth(named("not")),
}


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(aten, name)
    wanted = ("Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar")
    if name in ("maximum", "minimum", *inverse.BINARY):
        return [packet.default]
    return [getattr(packet, o) for o in packet.overloads() if o in wanted]


def _table() -> dict[torch._ops.OpOverload, Lowerer]:
    rows = {**_SAME, **_OTHERS}
    for name, formula in _UNARY.items():
        rows[getattr(aten, name).default] = rowwise(formula, 1)
    for name, formula in _BINARY.items():
        for overload in _overloads(name):
            rows[overload] = rowwise(formula, 2)
    rows[aten.pow.Scalar] = rowwise(power, 2)
    return rows


#: ATen overload -> lowering.
TABLE: dict[torch._ops.OpOverload, Lowerer] = _table()
