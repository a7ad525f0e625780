"""What lowering an FX node works with: lazy values, and the program being built.

A `Value` is a function from output indices to an expression. Views compose as index
arithmetic and never compute; `Context.map` and `Context.reduce` append statements.
Expressions that load nothing (constants, iotas, masks over indices) stay lazy for ever.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate, reader
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Size,
    Sym,
    ops_used,
    substitute,
    tensors_read,
    transform,
    type_of,
    walk,
)
from tilefold.algebra.ops import OPS
from tilefold.errors import SourceLoc, UnsupportedError
from tilefold.frontend.operators import sizes as fx_sizes
from tilefold.frontend.operators.images import IMAGES
from tilefold.names import fresh
from tilefold.tensor.index_simplify import const, is_one, simplify
from tilefold.tensor.ir import Compute, Input

Indices = tuple[Expr, ...]
At = Callable[[Indices], Expr]


@dataclass(frozen=True, slots=True)
class Value:
    """A lazy tensor: `at` maps one index expression an axis to the element's expression."""

    shape: tuple[Expr, ...]
    dtype: DType
    at: At


@dataclass(slots=True)
class Context:
    """The program under construction. `base` and `loc` belong to the node being lowered."""

    sizes: dict[str, Expr] = field(default_factory=dict)
    body: list[Compute] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    dtypes: dict[str, DType] = field(default_factory=dict)
    values: dict[torch.fx.Node, Value | tuple[Value, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    base: str = "t"
    origin: str = ""
    loc: SourceLoc | None = None
    #: Axes of the node's result in memory order, where that is not their own order.
    order: tuple[int, ...] | None = None
    #: Numbers of axes of images, whose channels are stored side by side where the metadata say so.
    ranks: frozenset[int] = IMAGES

    # -- reading FX arguments -------------------------------------------------------------

    def value(self, x: object) -> Value:
        """A tensor argument, or a scalar as a tensor without axes."""
        if isinstance(x, torch.fx.Node):
            v = self.values.get(x)
            if isinstance(v, Value):
                return v
            return self.scalar_value(x.meta["val"])
        return self.scalar_value(x)

    def scalar_value(self, x: object) -> Value:
        """A Python or symbolic scalar as a lazy 0-d value."""
        if not isinstance(x, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedError(f"{self.origin}: {type(x).__name__} where a tensor is expected")
        e = fx_sizes.scalar(x)
        return Value((), type_of(e, self.dtypes.__getitem__), lambda _: e)

    def int_arg(self, x: object) -> Expr:
        """An integer argument (int, SymInt, or a node holding one)."""
        v = x.meta["val"] if isinstance(x, torch.fx.Node) else x
        if not isinstance(v, int | torch.SymInt):
            raise UnsupportedError(f"{self.origin}: {v!r} where an integer is expected")
        return fx_sizes.size(v)

    def static_int(self, x: object, what: str) -> int:
        """An integer argument that must be known while compiling: a symbolic one is taken at its value, and guarded."""
        e = self.int_arg(x)
        if isinstance(e, Const):
            return int(e.value)
        v = x.meta["val"] if isinstance(x, torch.fx.Node) else x
        assert isinstance(v, torch.SymInt)
        if free_unbacked_symbols(v):
            raise UnsupportedError(f"{self.origin}: {what} must be a constant")
        return int(v)

    def compute_dtype(self, args: Sequence[object]) -> DType:
        """The dtype torch promotes these FX arguments to (tensors by kind and rank, scalars weakly)."""
        metas = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        return dtype_of(elementwise_dtypes(*metas, type_promotion_kind=kind)[1])

    # -- naming ---------------------------------------------------------------------------

    def fresh(self, wanted: str) -> str:
        """A name that nothing in the program bears yet."""
        name = re.sub(r"\W", "_", wanted) or "t"
        if name[0].isdigit():
            name = f"t{name}"
        if keyword.iskeyword(name) or name in OPS or name in _RESERVED:
            name += "_"
        return fresh(name, self.taken)

    def dim(self, size: Expr) -> str:
        """A new dim of that extent."""
        name = fresh(f"d{len(self.sizes)}", self.taken)
        self.sizes[name] = size
        return name

    def indices(self, shape: Sequence[Expr]) -> tuple[tuple[str, ...], Indices]:
        """New dims for the axes that are not of extent 1, and an index an axis (0 for those)."""
        dims: list[str] = []
        at: list[Expr] = []
        for s in shape:
            if is_one(s):
                at.append(const(0))
            else:
                dims.append(self.dim(s))
                at.append(Index(dims[-1]))
        return tuple(dims), tuple(at)

    # -- building -------------------------------------------------------------------------

    def type_of(self, e: Expr) -> DType:
        return type_of(e, self.dtypes.__getitem__)

    def simplify(self, e: Expr) -> Expr:
        """Canonical form of an integer expression."""
        return simplify(e, self.sizes)

    def input(self, name: str, shape: tuple[Expr, ...], dtype: DType, order: Sequence[int] = ()) -> Value:
        """A program argument; its axes are in `order` (empty: their own), which is that of memory."""
        name = self.fresh(name)
        axes = tuple(order) or tuple(range(len(shape)))
        self.inputs.append(Input(name, dtype, tuple(shape[a] for a in axes)))
        self.dtypes[name] = dtype
        return Value(shape, dtype, lambda at: Load(name, tuple(self.simplify(at[a]) for a in axes)))

    def stored(self, name: str, shape: tuple[Expr, ...], dtype: DType) -> Value:
        """The value held by tensor `name`; results of statements have no axes of extent 1."""
        kept = self._in_memory(shape)
        return Value(shape, dtype, lambda at: Load(name, tuple(self.simplify(at[n]) for n in kept)))

    def _in_memory(self, shape: tuple[Expr, ...]) -> list[int]:
        """Axes that a statement's result of that shape has, the outermost first."""
        order = self.order if self.order is not None and len(self.order) == len(shape) else range(len(shape))
        return [n for n in order if not is_one(shape[n])]

    def map(self, shape: tuple[Expr, ...], dtype: DType, at: At, name: str = "") -> Value:
        """`out[indices] = at(indices)`; lazy where it loads nothing or only renames a tensor."""
        dims, idx = self.indices(shape)
        e = self.folded(self.typed(self.exact_literals(at(idx)), dtype))
        if _bare(e) or not (tensors_read(e) or _costly(e)):
            return self.lazy(shape, dtype, e, idx)
        return self.emit(shape, dims, dtype, e, None, (), name)

    def tensor(self, v: Value, name: str) -> Value:
        """A value as a tensor that is read at plain indices, stored if it is not one yet (a library's operand)."""
        dims, idx = self.indices(v.shape)
        e = v.at(idx)
        if isinstance(e, Load) and sorted(i.dim for i in e.index if isinstance(i, Index)) == sorted(dims):
            return v
        return self.emit(v.shape, dims, v.dtype, self.typed(e, v.dtype), None, (), name)

    def lazy(self, shape: tuple[Expr, ...], dtype: DType, e: Expr, idx: Indices) -> Value:
        """A value recomputed wherever it is used."""
        variables = [(n, i) for n, i in enumerate(idx) if isinstance(i, Index)]

        def at(where: Indices) -> Expr:
            return self.retouch(substitute(e, {i: where[n] for n, i in variables}))

        return Value(shape, dtype, at)

    def retouch(self, e: Expr) -> Expr:
        """Canonical index arithmetic inside an expression whose indices were substituted."""
        match e:
            case Call("add" | "sub" | "mul" | "floordiv" | "mod" | "neg", _) if self._pure_int(e):
                return self.simplify(e)
            case Call(op, args):
                return Call(op, tuple(self.retouch(a) for a in args))
            case Cast(arg, dtype):
                return Cast(self.retouch(arg), dtype)
            case Load(tensor, index):
                return Load(tensor, tuple(self.simplify(i) for i in index))
            case _:
                return e

    def _pure_int(self, e: Expr) -> bool:
        match e:
            case Call("add" | "sub" | "mul" | "floordiv" | "mod" | "neg", args):
                return all(self._pure_int(a) for a in args)
            case Const(_, dtype):
                return dtype is DType.I64
            case Index() | Size() | Sym():
                return True
        return False

    def reduce(
        self,
        reducer: str,
        shape: tuple[Expr, ...],
        over: tuple[Expr, ...],
        dtype: DType,
        at: Callable[[Indices, Indices], Expr],
        name: str = "",
    ) -> Value:
        """`out[i] = reducer over r of at(i, r)`, r ranging over extents `over`."""
        dims, idx = self.indices(shape)
        rdims, ridx = self.indices(over)
        e = self.exact_literals(at(idx, ridx))
        if not rdims:
            if reducer in ("argmax", "argmin"):
                return Value(shape, dtype, lambda _: const(0))
            return self.map(shape, dtype, lambda i: at(i, ridx), name)
        return self.emit(shape, dims, dtype, e, reducer, rdims, name)

    def emit(
        self,
        shape: tuple[Expr, ...],
        dims: tuple[str, ...],
        dtype: DType,
        e: Expr,
        reducer: str | None,
        rdims: tuple[str, ...],
        name: str,
    ) -> Value:
        """Append a statement with one result; `dims`: of its axes that are not of extent 1, in the axes' order."""
        out = self.fresh(name or self.base)
        self.dtypes[out] = dtype
        places = sorted(self._in_memory(shape))
        dims = tuple(dims[places.index(n)] for n in self._in_memory(shape))
        self.body.append(Compute(out, dims, dtype, e, reducer, rdims, loc=self.loc, origin=self.origin))
        return self.stored(out, shape, dtype)

    def emit_output(self, dims: tuple[str, ...], dtype: DType, e: Expr) -> str:
        """Append a map that stores a result of the program; its name."""
        out = self.fresh(f"{self.base.removesuffix('_out')}_out")
        self.dtypes[out] = dtype
        self.body.append(Compute(out, dims, dtype, e, loc=self.loc, origin=self.origin))
        return out

    def emit_topk(self, dims: tuple[str, ...], dtype: DType, e: Expr, rdim: str) -> tuple[str, str]:
        """Append `values, indices = topk[rdim; dims[-1]] e`; the names of both results."""
        values, indices = self.fresh(f"{self.base}_values"), self.fresh(f"{self.base}_indices")
        self.dtypes.update({values: dtype, indices: DType.I64})
        self.body.append(Compute(values, dims, dtype, e, "topk", (rdim,), indices, loc=self.loc, origin=self.origin))
        return values, indices

    # -- types ----------------------------------------------------------------------------

    def typed(self, e: Expr, dtype: DType) -> Expr:
        """`e` with the meaning "converted to dtype"; no node is added where that changes nothing.

        Rounding to f16 / bf16 is left to the store (a precision hint, see `DType.rounds`).
        """
        if isinstance(e, Const):
            return self.constant(e.value, dtype)
        have = self.type_of(e)
        if have is dtype.compute and (dtype in (DType.I64, DType.BOOL) or not dtype.rounds):
            return e
        if have is dtype.compute and self._holds(e) is dtype:
            return e
        return Cast(e, dtype)

    def exact_literals(self, e: Expr) -> Expr:
        """f64 arithmetic with its f32 literals widened, so that they are not rounded first."""
        if self.type_of(e) is not DType.F64:
            return e
        return transform(e, lambda n: Const(n.value, DType.F64) if isinstance(n, Const) and _f32(n) else None)

    def folded(self, e: Expr) -> Expr:
        """A float of literals alone as one literal (the scale d ** -0.5 of a symbolic d that became a number)."""
        if isinstance(e, Const) or not all(isinstance(n, Call | Cast | Const) for n in walk(e)):
            return e
        kind = self.type_of(e)
        if not kind.is_float:
            return e
        with _disable_current_modes():  # torch computes it: not under AOT's fake mode
            value = evaluate(e, Grid({}), Env(reader({}), {}, {})).item()
        return Const(value, kind) if math.isfinite(value) else e

    def _holds(self, e: Expr) -> DType | None:
        """The narrow dtype an expression's values are known to be in."""
        match e:
            case Load(tensor, _):
                return self.dtypes[tensor]
            case Cast(_, dtype):
                return dtype
        return None

    def constant(self, value: float | int | bool, dtype: DType) -> Const:
        """A literal of that dtype, rounded as torch would."""
        if dtype is DType.F32 or dtype is DType.F64:
            return Const(float(value), dtype)
        return Const(_rounded(value, repr(value), dtype), dtype.compute)

    def operand(self, v: Value, at: Indices, dtype: DType) -> Expr:
        """An operand of arithmetic carried out in `dtype.compute`."""
        e = self.folded(broadcast(v, at))  # the only element of a range, say
        if isinstance(e, Const):
            if dtype.is_float:
                return Const(float(e.value), dtype.compute)
            return e
        if self.type_of(e) is DType.F64 and dtype.compute is not DType.F64:
            return Cast(e, dtype.compute)
        if dtype is DType.F64 and self.type_of(e) is not DType.F64:
            return Cast(e, DType.F64)
        return e


@lru_cache(maxsize=1 << 10)
def _rounded(value: float | int | bool, written: str, dtype: DType) -> float | int | bool:
    """A number as torch rounds it. written: what it is as text, for 1 and True, 0.0 and -0.0 are equal."""
    found: float | int | bool = torch.tensor(value).to(dtype.torch_dtype).item()
    return found


_COSTLY = frozenset(
    {
        "exp",
        "exp2",
        "log",
        "log2",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "erf",
        "erfinv",
        "lgamma",
        "pow",
        "random",
        "random16",
    }
)
_RESERVED = frozenset(d.value for d in DType) | {"inf", "nan", "size", "f64const"}


def _bare(e: Expr) -> bool:
    """A load, or a cast of one to a type that holds it exactly as far as arithmetic can tell.

    None with a check of an index in it, which is for the elements alone that there are: not for what padding asks for.
    """
    match e:
        case Load(_, index):
            return not any("within" in ops_used(i) for i in index)
        case Cast(arg, dtype):
            return not dtype.rounds and _bare(arg)
    return False


def _f32(e: Const) -> bool:
    return e.dtype is DType.F32


def _costly(e: Expr) -> bool:
    """Whether recomputing `e` at every use would be a waste though it loads nothing."""
    return not ops_used(e).isdisjoint(_COSTLY)


def broadcast(v: Value, at: Indices) -> Expr:
    """Element of `v` broadcast (torch's rules) to a shape that `at` indexes."""
    tail = at[len(at) - len(v.shape) :] if v.shape else ()
    return v.at(tuple(const(0) if is_one(s) else i for s, i in zip(v.shape, tail, strict=True)))


def dtype_of(dtype: torch.dtype) -> DType:
    """Tilefold's dtype; UnsupportedError where there is none."""
    try:
        return DType.of(dtype)
    except KeyError:
        raise UnsupportedError(f"dtype {dtype} is not covered") from None


def meta_of(node: torch.fx.Node, part: int | None = None) -> tuple[tuple[Expr, ...], DType]:
    """Shape and dtype of a node's (part'th) result."""
    val = node.meta["val"]
    fake = val if part is None else val[part]
    if not isinstance(fake, torch.Tensor):
        raise UnsupportedError(f"{node.name} is not a tensor")
    return fx_sizes.shape(fake.shape), dtype_of(fake.dtype)


def normal_axis(axis: int, rank: int) -> int:
    """A non-negative axis number. UnsupportedError: there is no such axis, which some fake operators do not notice."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise UnsupportedError(f"a tensor of {rank} axes has no axis {axis}", hint="count from 0, or back from -1")
    return axis + rank if axis < 0 else axis


def reduced(
    axes: Sequence[int] | int | None, shape: tuple[Expr, ...]
) -> tuple[tuple[int, ...], tuple[Expr, ...], tuple[Expr, ...]]:
    """Normalised axes (None or empty: all), the extents kept and the extents reduced."""
    listed = [axes] if isinstance(axes, int) else list(axes or range(len(shape)))
    gone = tuple(sorted(normal_axis(a, len(shape)) for a in listed)) if shape else ()
    kept = tuple(s for n, s in enumerate(shape) if n not in gone)
    return gone, kept, tuple(shape[n] for n in gone)


def weave(gone: Sequence[int], kept_at: Indices, gone_at: Indices) -> Indices:
    """Indices of all axes from those of the kept and of the reduced ones."""
    out = list(kept_at)
    for axis, i in zip(gone, gone_at, strict=True):
        out.insert(axis, i)
    return tuple(out)


def keep_axes(v: Value, gone: Sequence[int], keepdim: bool) -> Value:
    """Reinsert reduced axes with extent 1 if `keepdim`."""
    if not keepdim:
        return v
    shape = weave(gone, v.shape, tuple(const(1) for _ in gone))
    return Value(shape, v.dtype, lambda at: v.at(tuple(i for n, i in enumerate(at) if n not in gone)))


def attrs(node: torch.fx.Node, **defaults: object) -> Mapping[str, object]:
    """All arguments of a node by their schema names, with the schema's defaults."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    out: dict[str, object] = {}
    for n, arg in enumerate(target._schema.arguments):
        if n < len(node.args) and not arg.kwarg_only:
            out[arg.name] = node.args[n]
        elif arg.name in node.kwargs:
            out[arg.name] = node.kwargs[arg.name]
        else:
            out[arg.name] = arg.default_value if arg.has_default_value() else None
    return {**defaults, **out}
