"""Tile IR: one kernel as explicit loops over tiles, buffers and tile operations.

    Kernel ::= name, syms, sizes {dim: Expr}, tensors: TensorParam*, grid: Tiled*, body: Stmt*
    Stmt   ::= Alloc(buffer)                                    storage until the end of the enclosing body
             | For(dim, tile, start, stop, body)                sequential loop over tiles of a dim
             | Fill(buf, value)                                 every element = a constant
             | Map(buf, expr)                                   buf[dims] = expr
             | Reduce(buf, op, rdims, expr, accumulate, kept)   buf[dims] (op)= reduction over rdims of expr
             | Gemm(buf, a, b, rdims, accumulate, kept)         buf[dims] (+)= sum over rdims of a * b
             | Select(buf, index_buf, op, rdims, expr, payload, accumulate)   argmax, argmin, topk
             | Store(tensor, index, dims, expr, added)          tensor[index] = expr for all dims; added: see `block.ir`

**Ranges.** At any point every dim has a current range of index values: the tile that the
innermost enclosing `grid` or `For` entry of that dim is at, else its whole extent [0, size).
The last tile of a loop is ragged: its range stops at the loop's stop. A statement covers the
current ranges of its dims; a dim not among them may be used as a scalar where a loop over it has
tiles of 1, or its extent is 1. No two nested loops run over the same dim.

**Buffers** are indexed by named dims: `Load(buf, (Index(d), ...))` in the order of
`buffer.dims`, which is also the memory layout (last dim contiguous). A buffer holds the ranges
current at its Alloc; its element for index i lies at i - origin, origin being the range's
start there. Loads of tensors index globally. Elements outside the ranges written are undefined.

**Arithmetic** is in compute types (f32 for narrow floats); a Map into a narrower buffer, or a
Store, rounds. `Call("tile_start" | "tile_stop", (Index(d),))` is the current range of d: legal in
For bounds only, as is `Call("tile_min" | "tile_max", (e,))`, the extreme of an integer expression of arguments over the
current ranges of its dims. For bounds are over syms, sizes, enclosing ranges and these; an empty range runs no tile.

**Order.** `Reduce` and `Gemm` may sum in any order; `Select` breaks ties to the lowest position.
Grid iterations are independent: two never store to the same element, but for what is added, in any order, to a tensor
that has its values before the kernel (or raises them: "max"); where an index does not exist nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Load, walk

Role = Literal["in", "out", "scratch"]


@dataclass(frozen=True, slots=True)
class TensorParam:
    """A tensor argument: pointer, run-time strides (elements), extents over syms.

    `unit_axis` is the axis whose stride is known to be 1 (None: all strides are run-time values).
    scratch: allocated by the launcher, contiguous, carries values from one kernel to the next.
    """

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    role: Role
    unit_axis: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tile in fast memory. `extents[n]` bounds the range of `dims[n]`: Const or Size expression.

    scope "tile": a few tiles, expected in registers or L1/L2; "panel": whole extents, L2 or more.
    """

    name: str
    dims: tuple[str, ...]
    extents: tuple[Expr, ...]
    dtype: DType
    scope: Literal["tile", "panel"] = "tile"


@dataclass(frozen=True, slots=True)
class Tiled:
    """A dim of the parallel grid, cut into tiles of `tile` indices."""

    dim: str
    tile: int


@dataclass(frozen=True, slots=True)
class Alloc:
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class For:
    """Sequential loop; `start`/`stop` default to 0 and Size(dim). Tiles begin at start + n * tile."""

    dim: str
    tile: int
    body: tuple[Stmt, ...]
    start: Expr | None = None
    stop: Expr | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    buf: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Map:
    """`buf[dims] = expr`; expr may read `buf` itself at the same element."""

    buf: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class Reduce:
    """`op` of `ops.VALUE_REDUCERS`; accumulate combines with the old value of `buf`. `kept`: as in `Gemm`."""

    buf: str
    op: str
    rdims: tuple[str, ...]
    expr: Expr
    accumulate: bool
    kept: DType | None = None


@dataclass(frozen=True, slots=True)
class Gemm:
    """Contraction of two plain loads (tensor or buffer); dims of `buf` come from a, b or both (batch).

    `kept`: what computed operands keep where the other has 16 bits: None, back ends may round them to its type; f32:
    all; f16: the range of float32, with the precision of fp16.
    """

    buf: str
    a: Load
    b: Load
    rdims: tuple[str, ...]
    accumulate: bool
    kept: DType | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """The best elements over `rdims` with their integer `payload` (an expression over the same dims).

    argmax, argmin: `buf` and `index_buf` have the output dims. topk: their last dim is the slot
    dim, sorted best first. Candidates are ordered by position in rdims order after, when
    accumulating, the values already held. NaN outranks every number. Unfilled slots hold the
    identity and index -1, and rank below every candidate (-inf included). So what has a payload
    below 0 is no candidate: an unfilled slot of a segment that had fewer elements than slots.
    """

    buf: str
    index_buf: str
    op: str
    rdims: tuple[str, ...]
    expr: Expr
    payload: Expr
    accumulate: bool

    @property
    def may_lack(self) -> bool:
        """Whether a payload may be below 0: one that is loaded, not an index."""
        return any(isinstance(n, Load) for n in walk(self.payload))


@dataclass(frozen=True, slots=True)
class Store:
    tensor: str
    index: tuple[Expr, ...]
    dims: tuple[str, ...]
    expr: Expr
    added: str = ""


Stmt = Alloc | For | Fill | Map | Reduce | Gemm | Select | Store


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. `note` says in a line what it computes; `listing` is its block listing (comments).

    `cut`: dims that are pieces of a longer one (`tile.pieces`).
    """

    name: str
    syms: tuple[str, ...]
    sizes: Mapping[str, Expr]
    tensors: tuple[TensorParam, ...]
    grid: tuple[Tiled, ...]
    body: tuple[Stmt, ...]
    note: str = field(default="", compare=False)
    listing: str = field(default="", compare=False)
    cut: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))
