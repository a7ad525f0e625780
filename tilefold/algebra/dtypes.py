"""Element types, and the type that arithmetic on them is carried out in."""

from __future__ import annotations

from enum import Enum

import torch


class DType(Enum):
    """Element type of a tensor. The value is its name in every text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    __hash__ = object.__hash__  # a member is one object; the hash of Enum is slow, and expressions hash often

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TO_TORCH[self]

    @property
    def nbytes(self) -> int:
        """Bytes an element."""
        return _TO_TORCH[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_int(self) -> bool:
        return not self.is_float and self is not DType.BOOL

    @property
    def compute(self) -> DType:
        """Type that arithmetic on elements is done in: f32 for narrow floats, i64 for integers."""
        if self in (DType.F64, DType.BOOL):
            return self
        return DType.F32 if self.is_float else DType.I64

    @property
    def rounds(self) -> bool:
        """Whether a cast to this type is a quantisation, which no derivation may move or drop.

        Casts to f16 and bf16 are precision hints: keeping f32 instead is at least as exact.
        """
        return self in (DType.E4M3, DType.E5M2) or not self.is_float

    @staticmethod
    def of(dtype: torch.dtype) -> DType:
        """Tilefold's name of a torch dtype; KeyError where there is none."""
        return _FROM_TORCH[dtype]


_TO_TORCH = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.E4M3: torch.float8_e4m3fn,
    DType.E5M2: torch.float8_e5m2,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}
_FROM_TORCH = {v: k for k, v in _TO_TORCH.items()}
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.E4M3, DType.E5M2})


def promote(a: DType, b: DType) -> DType:
    """Arithmetic type of an operation on two *compute* types (bool < i64 < f32 < f64)."""
    order = (DType.BOOL, DType.I64, DType.F32, DType.F64)
    return order[max(order.index(a), order.index(b))]
