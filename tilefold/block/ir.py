"""Block IR: a tensor program as nested loops over blocks. All fusion decisions live here.

    Block ::= name, syms, sizes {dim: Expr}, inputs, results, outputs, body: Node*
    Node  ::= Loop(kind "forall" | "for", dim, body, start, stop)
            | Let(name, dims, dtype, expr, reducer, rdims, ...)    a new block value (unbuffered edge)
            | Init(name, dims, dtype, value)                       a state before a loop
            | Update(name, expr)                                   name = expr over the current ranges
            | Accumulate(name, reducer, rdims, expr, ...)          name (+)= reduction of expr
            | Store(tensor, index, dims, expr, added)              write a global tensor (buffered edge)

A top-level nest of `forall` loops with its body is one kernel. Inside a loop a dim stands for
the block the loop is at, elsewhere for its whole extent; block sizes are not part of the
program, and with any sizes the meaning is the same up to the rounding of sums. Values are
indexed by named dims, tensors by their axes. `forall` iterations are independent; `for`
iterations run in order and carry the states that `Init` made outside.

A value keeps the ranges current at its Let or Init; Update and Accumulate inside further loops
touch the part at the current ranges (so a state over a streamed dim is a panel).

Correspondence to Blockbuster (section 2): Load of an input or result = buffered edge; Let = an
unbuffered edge; Loop forall = map operator; Loop for with Accumulate = rule 3's serial loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr
from tilefold.errors import SourceLoc
from tilefold.tensor.ir import Input


@dataclass(frozen=True, slots=True)
class Result:
    """A global tensor that the program writes. `dims` gives its axes."""

    name: str
    dims: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Let:
    """`name[dims] = expr`, or a reduction of expr over the current ranges of `rdims`.

    Index reducers (argmax, argmin, topk) define `name` (values) and `index_name` (i64); the
    index of an element is `payload`. topk's `dims` end with the slot dim. `kept`: see `block.kept`.
    """

    name: str
    dims: tuple[str, ...]
    dtype: DType
    expr: Expr
    reducer: str | None = None
    rdims: tuple[str, ...] = ()
    index_name: str | None = None
    payload: Expr | None = None
    kept: DType | None = None
    loc: SourceLoc | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Init:
    """A state with the value of nothing. `index_name` (filled with -1) for index reducers."""

    name: str
    dims: tuple[str, ...]
    dtype: DType
    value: Const
    index_name: str | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """`name[dims] = expr` for a state in scope; expr may read `name` at the same element."""

    name: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class Accumulate:
    """`name = name (+) reduction over the current ranges of rdims of expr`. `kept`: see `block.kept`."""

    name: str
    reducer: str
    rdims: tuple[str, ...]
    expr: Expr
    payload: Expr | None = None
    kept: DType | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """`tensor[index] = expr` for all current values of dims.

    added: how values join those that are there, in any order, where the index exists: "sum" adds them, "max" keeps the
    larger; "" writes. Others may name the same element, and the tensor has its values (the reducer's identity) before
    the kernel.
    """

    tensor: str
    index: tuple[Expr, ...]
    dims: tuple[str, ...]
    expr: Expr
    added: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """Blocks of a dim. A `for` loop may be bounded: [start, stop) over syms, sizes and outer blocks.

    `single`: every block is one index (segments, whose inner bounds differ).
    """

    kind: Literal["forall", "for"]
    dim: str
    body: tuple[Node, ...]
    start: Expr | None = None
    stop: Expr | None = None
    single: bool = False


Stmt = Let | Init | Update | Accumulate | Store
Node = Loop | Let | Init | Update | Accumulate | Store


@dataclass(frozen=True, slots=True)
class Block:
    """A block program. `results` are all tensors written, `outputs` those the caller wants."""

    name: str
    syms: tuple[str, ...]
    sizes: Mapping[str, Expr]
    inputs: tuple[Input, ...]
    results: tuple[Result, ...]
    outputs: tuple[str, ...]
    body: tuple[Node, ...]
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # found of it by others

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes, outer loops first."""
    todo = list(reversed(nodes))
    while todo:
        n = todo.pop()
        yield n
        if isinstance(n, Loop):
            todo += reversed(n.body)


def work_of(b: Block) -> int:
    """What there is to compile of a block, in nodes: those that take longest are compiled first."""
    return sum(1 for _ in walk(b.body))


def dims_of(n: Node) -> tuple[str, ...]:
    """The dims that a node names itself: its loop's, its own, or those it reduces."""
    match n:
        case Loop(_, dim):
            return (dim,)
        case Let(dims=dims, rdims=rdims):
            return (*dims, *rdims)
        case Init(dims=dims) | Store(dims=dims):
            return dims
        case Accumulate(rdims=rdims):
            return rdims
        case Update():
            return ()


def exprs_of(n: Node) -> tuple[Expr, ...]:
    """The expressions a node evaluates itself."""
    match n:
        case Loop(start=a, stop=b):
            return tuple(e for e in (a, b) if e is not None)
        case Let(expr=e, payload=p) | Accumulate(expr=e, payload=p):
            return (e,) if p is None else (e, p)
        case Update(expr=e):
            return (e,)
        case Store(index=ix, expr=e):
            return (*ix, e)
        case Init(value=v):
            return (v,)
    raise AssertionError(n)
