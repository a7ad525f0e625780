"""Values of generated Triton code: text with the dims of its axes, and how they are brought together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.names import ARITHMETIC, python_value

TRITON_TYPE = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.E4M3: "tl.float8e4nv",
    DType.E5M2: "tl.float8e5",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int16",
    DType.I8: "tl.int8",
    DType.U8: "tl.uint8",
    DType.BOOL: "tl.int1",
}
#: Names of element types in kernel signatures.
POINTER_TYPE = {
    DType.F64: "*fp64",
    DType.F32: "*fp32",
    DType.F16: "*fp16",
    DType.BF16: "*bf16",
    DType.E4M3: "*fp8e4nv",
    DType.E5M2: "*fp8e5",
    DType.I64: "*i64",
    DType.I32: "*i32",
    DType.I16: "*i16",
    DType.I8: "*i8",
    DType.U8: "*u8",
    DType.BOOL: "*i1",
}


@dataclass(frozen=True, slots=True)
class Value:
    """`code` evaluates to a tensor with one axis a dim of `axes` (a scalar for none) of compute type `kind`.

    `level`: the innermost loop nest level that it depends on.
    """

    code: str
    axes: tuple[str, ...]
    kind: DType
    level: int = 0


def fitted(v: Value, frame: Sequence[str]) -> str:
    """Code of `v` with axes in the order of `frame`, extent 1 where it lacks a dim.

    Scalars stay scalars. Every axis of `v` is in `frame`.
    """
    if not v.axes or v.axes == tuple(frame):
        return v.code
    code = v.code
    order = [d for d in frame if d in v.axes]
    if tuple(order) != v.axes:
        perm = ", ".join(str(v.axes.index(d)) for d in order)
        code = f"tl.permute({code}, ({perm},))"
    if len(order) == len(frame):
        return code
    subscript = ", ".join(":" if d in v.axes else "None" for d in frame)
    return f"{_atom(code)}[{subscript}]"


def union(values: Sequence[Value], frame: Sequence[str]) -> tuple[str, ...]:
    """The dims that some value has, in frame order."""
    used = {d for v in values for d in v.axes}
    return tuple(d for d in frame if d in used)


def _atom(code: str) -> str:
    return code if code.isidentifier() or (code.endswith(")") and code.startswith(("tl.", "tf_"))) else f"({code})"


def converted(v: Value, kind: DType) -> Value:
    """`v` in another compute type."""
    if v.kind is kind:
        return v
    if kind is DType.I64 and v.kind is DType.BOOL and not v.axes:  # perhaps a constant, which has no method `to`
        return Value(f"tl.where({v.code}, 1, 0)", (), kind, v.level)
    if kind.is_float and v.kind is DType.BOOL and not v.axes:
        return Value(f"tl.where({v.code}, 1.0, 0.0).to({TRITON_TYPE[kind]})", (), kind, v.level)
    if is_number(v.code):
        if kind.is_float and not v.kind.is_float:
            return Value(repr(float(v.code)), (), kind, v.level)
        if kind.is_float:
            return Value(v.code, (), kind, v.level)
    if kind is DType.BOOL:
        return Value(f"({v.code} != 0)", v.axes, kind, v.level)
    if kind.is_float and v.kind is DType.I64 and not v.axes and set(v.code) <= ARITHMETIC:
        return Value(repr(float(python_value(v.code))), (), kind, v.level)  # neither int nor `tl.constexpr` has `to`
    return Value(f"{_atom(v.code)}.to({TRITON_TYPE[kind]})", v.axes, kind, v.level)


def is_number(code: str) -> bool:
    """Whether the code is a Python literal."""
    try:
        float(code)
    except ValueError:
        return code.startswith('float("')
    return True


def number(v: float | int | bool, kind: DType) -> str:
    """A literal."""
    if kind is DType.BOOL:
        return "True" if v else "False"
    if not kind.is_float:
        return str(int(v))
    f = float(v)
    return repr(f) if f == f and abs(f) != float("inf") else f'float("{f}")'


def float32(v: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", v))[0])


def in_parts(v: float) -> tuple[float, float]:
    """Two float32 whose sum is v, but for 2^-48 of it, of the same sign (a product of an infinity has a sum): the next
    one towards 0, and what it lacks."""
    near = float32(v)
    if abs(near) > abs(v):
        (bits,) = struct.unpack("I", struct.pack("f", near))
        (near,) = struct.unpack("f", struct.pack("I", bits - 1))
    return near, float32(v - near)


def inverse(n: int) -> tuple[int, int]:
    """m and s with x // n = (x m) >> (32 + s) for all 0 <= x < 2^31, m < 2^32. Two instructions, where the compiler,
    which does not know the sign or knows that 16 bits are enough and divides those, has five to ten.

    With m n = 2^(32 + s) + e, x m is (x 2^(32 + s) + x e) / n: right while x e < 2^(32 + s), so for e <= 2^(1 + s).
    """
    for s in range(n.bit_length()):
        m = -(-(1 << (32 + s)) // n)
        if m < 1 << 32 and m * n - (1 << (32 + s)) <= 1 << (1 + s):
            return m, s
    raise AssertionError(n)
