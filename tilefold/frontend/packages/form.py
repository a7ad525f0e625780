"""What a package holds, but for the bytes of kernels and tensors: records, with values of torch by their names.

package  ::= arguments, weights, constants, node*, results, symbols' ranges
node     ::= name = target(args)
target   ::= region n | item (of a region's results) | an ATen operator | a function of sizes
value    ::= Ref to an earlier name | Of torch (a dtype, device ...) | number | text | bool | None | tuple of values
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym
from tilefold.backends.cpp.prebuilt import Built
from tilefold.errors import ParseError, SourceLoc
from tilefold.frontend.operators.bindings import OutputBinding, SymBinding
from tilefold.runtime.stored import StoredCall, StoredKernel, StoredProgram, StoredStep
from tilefold.runtime.tape import Kind, Op
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tile.ir import TensorParam

#: From the values of earlier names to one of theirs.
Value = Callable[[Mapping[str, Any]], Any]
#: Changes when a package of an earlier Tilefold cannot be read any more.
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Requires:
    """What a package needs of where it is loaded. cpu: `backends.cpp.prebuilt.needed`. capability: of a GPU, as (9, 0);
    python: the version that its module is for."""

    format: int
    tilefold: str
    torch: str
    device: str
    cpu: tuple[str, ...]
    capability: tuple[int, ...] = ()
    python: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`requires`, and the sha256 of every other member of the archive by its name."""

    requires: Requires
    members: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes of a member of the archive, packed: extents in memory order, and the axes of the tensor in that order."""

    member: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model: its name in `state_dict()`, and itself where it is included."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    included: StoredTensor | None


@dataclass(frozen=True, slots=True)
class Argument:
    """A flat argument: a tensor of this type and these extents on a device of this kind, or (dtype None) the value that
    was traced."""

    name: str
    dtype: str | None
    shape: tuple[Expr, ...] = ()
    value: int | float | bool | str | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier name."""

    name: str


@dataclass(frozen=True, slots=True)
class Of:
    """A value of torch, by its name."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """`name = target(*args, **kwargs)`. kind: of the target."""

    name: str
    kind: Literal["region", "item", "aten", "python"]
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredInput:
    """As `InputBinding`; `constant`: the number of a stored tensor."""

    name: str
    position: int | None
    axes: tuple[tuple[Expr, ...], ...]
    constant: int | None
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A stored program, and how a graph's arguments and results are its."""

    program: StoredProgram
    inputs: tuple[StoredInput, ...]
    syms: tuple[SymBinding, ...]
    outputs: tuple[OutputBinding, ...]
    placeholders: int


@dataclass(frozen=True, slots=True)
class TapeArgument:
    """What a tape takes: a tensor of this type, extents and strides, at an aligned address or any; or no tensor."""

    dtype: str | None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """As `runtime.tape.Slot`; `constant`: the number of a stored tensor."""

    kind: Kind
    source: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None
    constant: int | None


@dataclass(frozen=True, slots=True)
class StoredKernelCode:
    """A kernel of a GPU: its name, the digest of its machine code, and whether it takes a counter."""

    name: str
    code: str
    counter: bool


@dataclass(frozen=True, slots=True)
class StoredOperatorCall:
    """An ATen operator of the n-th tensors `Ref("n")`; wanted: its flat results that are tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredInstruction:
    """As `runtime.tape.Instruction`; maps: digests of tensor maps."""

    op: Op
    name: str
    where: str
    slots: tuple[int, ...]
    numbers: tuple[int, ...]
    scalars: tuple[float, ...]
    release: tuple[int, ...]
    kernel: StoredKernelCode | None
    maps: tuple[str, ...]
    call: StoredOperatorCall | None


@dataclass(frozen=True, slots=True)
class StoredTape:
    """A region of a GPU: its call, for such arguments."""

    slots: tuple[StoredSlot, ...]
    code: tuple[StoredInstruction, ...]
    outputs: tuple[int, ...]
    arena: int
    arguments: tuple[TapeArgument, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """A whole graph. in_tree, out_tree: how arguments and results are put together (torch's pytree, as JSON). ranges:
    smallest and largest values of symbols. tensors: constants, of the graph and of regions. runner: digest of the
    module that runs tapes, where there are some."""

    arguments: tuple[Argument, ...]
    weights: tuple[Weight, ...]
    constants: Mapping[str, int]
    nodes: tuple[Node, ...]
    results: tuple[Any, ...]
    regions: tuple[StoredRegion | StoredTape, ...]
    tensors: tuple[StoredTensor, ...]
    ranges: Mapping[str, tuple[int, int]]
    in_tree: str
    out_tree: str
    runner: str | None = None


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A whole graph on a device, by its name: one tape, or (`outer`, a text of `warm.text`) a graph whose parts have
    tapes, and constants. writes: over arguments; tensors: constants."""

    device: str
    writes: bool
    tape: StoredTape | None
    outer: str
    parts: Mapping[str, StoredTape]
    constants: Mapping[str, int]
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A condition on sizes (`registered.operator.Guard`)."""

    text: str
    relation: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class StoredOperator:
    """An operator of `tilefold.custom_op`: its name, the digest of its program, what it takes, and what it computes."""

    name: str
    digest: str
    arguments: tuple[Argument, ...]
    guards: tuple[Relation, ...]
    region: StoredRegion


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that a graph of others contains. tensors: constants of their regions."""

    operators: tuple[StoredOperator, ...]
    tensors: tuple[StoredTensor, ...]


#: All that the records of a package may hold.
CLASSES = (
    *(Operators, StoredOperator, Relation, Requires, Manifest, Package, StoredTensor, Weight, Argument, Ref, Of, Node),
    *(StoredRegion, StoredInput, SymBinding, OutputBinding, StoredProgram, StoredStep, StoredCall, StoredKernel, Built),
    *(StoredTape, StoredSlot, StoredInstruction, StoredKernelCode, StoredOperatorCall, TapeArgument, Kind, Op),
    *(StoredGraph, TensorParam, Program, Input, Compute, SourceLoc),
    *(Const, Index, Size, Sym, Load, Call, Cast, DType),
)

#: Functions of sizes that graphs contain.
PYTHON: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)},
    **{f.__name__: f for f in (operator.neg, operator.truediv, operator.pow, operator.getitem)},
    **{f.__name__: f for f in (torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float)},
}


def written(x: object) -> Any:
    """An argument of a graph's node; TypeError for what has no form."""
    match x:
        case None | bool() | int() | float() | str() | Ref():
            return x
        case tuple() | list():
            return tuple(map(written, x))
        case torch.dtype():
            return Of("dtype", str(x))
        case torch.device():
            return Of("device", str(x))
        case torch.layout():
            return Of("layout", str(x))
        case torch.memory_format():
            return Of("memory_format", str(x))
        case torch.fx.Node():
            return Ref(x.name)
    raise TypeError(f"{type(x).__name__} {x} has no form in packages")


def of_torch(x: Of) -> object:
    """The value again. ParseError: torch has no such."""
    kinds = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    if x.kind == "device":
        return torch.device(x.name)
    found = getattr(torch, x.name.removeprefix("torch."), None)
    if not isinstance(found, kinds[x.kind]):
        raise ParseError(f"torch has no {x.kind} {x.name}")
    return found


def operator_of(target: str) -> Callable[..., Any]:
    """`sort.default` -> `torch.ops.aten.sort.default`; `tilefold.put.default` is ours. ParseError: there is none."""
    ours = target.startswith("tilefold.")
    name, _, overload = target.removeprefix("tilefold.").partition(".")
    found = getattr(getattr(torch.ops.tilefold if ours else torch.ops.aten, name, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ParseError(f"this torch has no operator {target if ours else f'aten.{target}'}")
    return found


def value_of(x: Any) -> Value:
    """What takes a written value's references from the values of names."""
    if isinstance(x, Ref):
        name = x.name
        return lambda values: values[name]
    if isinstance(x, tuple):
        parts = tuple(map(value_of, x))
        return lambda values: tuple([p(values) for p in parts])
    fixed = of_torch(x) if isinstance(x, Of) else x
    return lambda values: fixed
