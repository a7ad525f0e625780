"""Tensor IR: index notation. One statement computes one tensor element-wise or as a reduction.

    program   ::= name, syms, inputs: Input*, sizes: {dim: Expr over syms}, body: Compute*, outputs: name*
    Input     ::= name: dtype[Expr over syms, ...]
    Compute   ::= out[dims]: dtype = e                              map
                | out[dims]: dtype = reducer[rdims] e               reduction
                | val[dims, r]: dtype, idx[dims, r]: i64 = topk[j; r] e

Laws: every dim is a plain name with one size in the whole program; a Compute's body loads
only inputs and earlier results; an output dim of a Compute is never one of its rdims.
Dims of results are positional: `out`'s axes are `dims` in order. A load may use any integer
expression as an index (views, masks, gathers), in range for all values of its dims.

Text form, which `tensor.text` prints and parses:

    program softmax(n)
      input x: f32[4, n]
      dim i = 4
      dim j = n
      m[i]: f32 = max[j] x[i, j]
      e[i, j]: f32 = exp(x[i, j] - m[i])
      t[i]: f32 = sum[j] e[i, j]
      y[i, j]: f32 = e[i, j] / t[i]
      return y
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.errors import SourceLoc


@dataclass(frozen=True, slots=True)
class Input:
    """A program argument. `shape` holds one integer expression over `Program.syms` an axis. row_major: whether it
    is known to lie in memory in this order, without gaps."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    row_major: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Compute:
    """`name[dims] = reducer over rdims of body`; `reducer` None makes it a map.

    topk: `dims` ends with the slot dim r (its size is k, results sorted descending, or
    ascending for `largest=False` by negating the body), `index_name` is the second result.
    argmax / argmin: `name` is the index (i64), `index_name` None. Over several rdims the
    index is the flattened position in rdims order.
    """

    name: str
    dims: tuple[str, ...]
    dtype: DType
    body: Expr
    reducer: str | None = None
    rdims: tuple[str, ...] = ()
    index_name: str | None = None
    loc: SourceLoc | None = field(default=None, compare=False)
    origin: str = field(default="", compare=False)  # operator it came from, e.g. "aten.mm"

    @property
    def results(self) -> tuple[str, ...]:
        return (self.name,) if self.index_name is None else (self.name, self.index_name)


@dataclass(frozen=True, slots=True)
class Program:
    """A straight-line tensor program. `sizes` maps each dim to its extent over `syms`."""

    name: str
    inputs: tuple[Input, ...]
    sizes: Mapping[str, Expr]
    body: tuple[Compute, ...]
    outputs: tuple[str, ...]
    syms: tuple[str, ...] = ()
    _of: Mapping[str, Input | Compute] = field(init=False, repr=False, compare=False)
    #: Its `analysis.Graph`, once asked for.
    _graph: Callable[[], Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))
        made: dict[str, Input | Compute] = {r: c for c in self.body for r in c.results}
        object.__setattr__(self, "_of", made | {i.name: i for i in self.inputs})

    @property
    def names(self) -> frozenset[str]:
        """Every name that the program gives: tensors, results, dims and symbols."""
        return frozenset({*self._of, *self.sizes, *self.syms})

    def dtype_of(self, tensor: str) -> DType:
        """dtype of an input or result; KeyError if there is none of that name."""
        found = self._of[tensor]
        return found.dtype if found.name == tensor else DType.I64

    def is_input(self, tensor: str) -> bool:
        """Whether a tensor is given, and not computed."""
        return isinstance(self._of[tensor], Input)

    def is_row_major(self, tensor: str) -> bool:
        """Whether a tensor is an input that is known to lie row-major."""
        found = self._of[tensor]
        return isinstance(found, Input) and found.row_major

    def shape_of(self, tensor: str) -> tuple[Expr, ...]:
        """Extents of an input or result, over syms."""
        found = self._of[tensor]
        return found.shape if isinstance(found, Input) else tuple(self.sizes[d] for d in found.dims)
