"""Operations of expressions as Triton spells them."""

from __future__ import annotations

#: Operations that have a sign in Python, between operands.
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "bits_and": "&", "bits_or": "|", "bits_xor": "^", "bits_up": "<<", "bits_down": ">>",
}  # fmt: skip
#: Functions of one value, as Triton has them.
UNARY = {
    "neg": "-({})",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "tl.rsqrt({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "sigmoid": "tl.sigmoid({})",
    "erf": "tl.erf({})",
    "erfinv": "libdevice.erfinv({})",
    "lgamma": "libdevice.lgamma({})",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "expm1": "libdevice.expm1({})",
    "log1p": "libdevice.log1p({})",
    "tanh": "libdevice.tanh({})",
    "trunc": "libdevice.trunc({})",
    "round": "libdevice.rint({})",
}
#: Powers as products, each within the last places that a power has.
PRODUCTS = {
    1.0: "{0}",
    2.0: "tf_square({0})",
    3.0: "tf_cube({0})",
    4.0: "tf_square(tf_square({0}))",
    5.0: "(tf_square(tf_square({0})) * {0})",
    6.0: "tf_cube(tf_square({0}))",
    7.0: "(tf_cube(tf_square({0})) * {0})",
    8.0: "tf_square(tf_square(tf_square({0})))",
}
#: Powers of normal numbers as roots.
ROOTS = {
    0.25: "tl.sqrt(tl.sqrt({0}))",
    0.75: "(tl.sqrt({0}) * tl.sqrt(tl.sqrt({0})))",
    1.25: "({0} * tl.sqrt(tl.sqrt({0})))",
    1.5: "({0} * tl.sqrt({0}))",
}
#: What stands for those that the interpreter lacks.
IN_INTERPRETER = {
    "sqrt": "tl.sqrt({})",
    "expm1": "tf_expm1({})",
    "erfinv": "tf_erfinv({})",
    "lgamma": "tf_lgamma({})",
    "log1p": "tf_log1p({})",
    "tanh": "tf_tanh({})",
    "trunc": "tf_trunc({})",
    "round": "tf_round({})",
}
