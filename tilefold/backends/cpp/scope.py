"""Where generated lines go: names, loop scopes, values and the facts of the kernel being rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, tensors_read
from tilefold.backends.cpp.affine import INT32, INT64, SIZE_LIMIT, interval
from tilefold.names import fresh
from tilefold.tile.ir import Buffer, Kernel, TensorParam

CType = Literal["float", "double", "int32_t", "int64_t", "bool"]

MEMORY: Mapping[DType, str] = {
    DType.F64: "double", DType.F32: "float", DType.F16: "tf::f16", DType.BF16: "tf::bf16",
    DType.E4M3: "tf::e4m3", DType.E5M2: "tf::e5m2", DType.I64: "int64_t", DType.I32: "int32_t",
    DType.I16: "int16_t", DType.I8: "int8_t", DType.U8: "uint8_t", DType.BOOL: "tf::bool8",
}  # fmt: skip

_TAKEN = frozenset(
    """alignas and auto bool break case char class const continue default delete do double else enum extern false
    float for friend goto if inline int long namespace new not operator or private public register return short
    signed sizeof static struct switch template this true try typedef union unsigned using virtual void volatile
    while xor tf args threads item item_rest mem mem_bytes arena w main""".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Value:
    """A C++ expression: `vec` has one value a lane of the strip, else one value. Atomic texts need no brackets."""

    text: str
    ctype: CType
    vec: bool


@dataclass(slots=True)
class Scope:
    """A block of generated code. `dims`: loop dims bound by it and by the scopes around it."""

    dims: frozenset[str]
    lines: list[str] = field(default_factory=list)
    known: dict[Expr | str, Value] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Values that were computed from `name`, which is being written, hold no longer."""
        for key in [k for k in self.known if isinstance(k, Expr) and name in tensors_read(k)]:
            del self.known[key]


@dataclass(slots=True)
class Tile:
    """A buffer in scope: where its range begins (C++ texts) and its row pitches in elements."""

    buffer: Buffer
    origin: tuple[str, ...]
    pitch: tuple[str, ...]


@dataclass(slots=True)
class Facts:
    """The kernel and what is in scope at the statement being rendered.

    `ranges`: current [start, stop) of every dim as C++ texts; `static`: bound of the length, where known.
    `wide`: integers are 64 bit throughout, for launches with sizes of `SIZE_LIMIT` and above.
    """

    kernel: Kernel
    wide: bool = False
    names: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[str, str]] = field(default_factory=dict)
    static: dict[str, int | None] = field(default_factory=dict)
    tiles: dict[str, Tile] = field(default_factory=dict)
    used: set[str] = field(default_factory=lambda: set(_TAKEN))
    gemms: dict[tuple[DType, DType, DType], None] = field(default_factory=dict)  # multiplications called, in order
    parts: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # of a strip that is written in pieces

    def name(self, wanted: str) -> str:
        """A C++ identifier near `wanted` that nothing else has."""
        base = re.sub(r"\W", "_", wanted) or "t"
        base = f"t{base}" if base[0].isdigit() else base
        return fresh(base, self.used)

    def tensor(self, name: str) -> TensorParam | None:
        return next((t for t in self.kernel.tensors if t.name == name), None)

    def dtype(self, name: str) -> DType:
        if name in self.tiles:
            return self.tiles[name].buffer.dtype
        param = self.tensor(name)
        assert param is not None, name
        return param.dtype

    def int_type(self, *parts: Expr) -> CType:
        """The narrowest of int32 and int64 that holds all of `parts`."""
        limit = 2**62 if self.wide else SIZE_LIMIT
        for e in parts:
            lo, hi = interval(e, self.dtype, limit)
            if lo < INT32[0] or hi > INT32[1]:
                return "int64_t"
        return "int32_t"

    def stride(self, name: str, axis: int) -> str:
        """C++ text of a stride in elements; "1" where it is known to be."""
        if name in self.tiles:
            return self.tiles[name].pitch[axis]
        param = self.tensor(name)
        assert param is not None
        return "1" if param.unit_axis == axis else f"{self.names[name]}_s{axis}"


def literal(value: float | int | bool, ctype: CType) -> str:
    """A number as C++ text; f32 constants are written exactly for f64 use."""
    if ctype == "bool":
        return "true" if value else "false"
    if ctype in ("int32_t", "int64_t"):
        if int(value) <= INT64[0]:
            return "INT64_MIN"
        return f"{int(value)}" if ctype == "int32_t" else f"int64_t({int(value)})"
    v = float(value)
    if v != v:
        text = '__builtin_nanf("")' if ctype == "float" else '__builtin_nan("")'
    elif v in (float("inf"), float("-inf")):
        text = ("-" if v < 0 else "") + ("__builtin_inff()" if ctype == "float" else "__builtin_inf()")
    else:
        text = repr(v) + ("f" if ctype == "float" else "")
    return f"({text})" if text.startswith("-") else text


def product(*factors: str) -> str:
    """A product of C++ texts, without factors of 1."""
    if "0" in factors:
        return "0"
    kept = [f for f in factors if f != "1"]
    return " * ".join(kept) if kept else "1"


def const_int(e: Expr) -> int | None:
    return int(e.value) if isinstance(e, Const) else None
