"""Scalar expressions: the right-hand sides of every IR.

    e ::= Const(value, dtype) | Index(dim) | Size(dim) | Sym(name)
        | Load(tensor, index: e*) | Call(op, args: e*) | Cast(e, dtype)

`Index(j)` is the value of loop index j, `Size(j)` the run-time extent of dim j,
`Sym(s)` a run-time integer symbol; all three are i64. A `Load` reads an element of a
tensor, a block value or a tile buffer. Nodes are immutable and hashable, and remember
their hash, what they read (`loads`, `tensors_read`, `dims_used`), and what they cost (`tensor.analysis`).

Planning makes millions of nodes: their constructors set slots by descriptors (`_setters`), in half the time of the
`object.__setattr__` by name that a frozen dataclass writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import is_, is_not
from typing import Any, TypeVar

from tilefold.algebra.dtypes import DType, promote
from tilefold.algebra.ops import OPS

Fact = TypeVar("Fact")
#: Readings of one object that are looked at: more tell no more about what is shared.
TWICE = 2


class Expr:
    """Base of the node classes; Python operators build `Call`s."""

    __slots__ = ("_dims", "_flops", "_hash", "_loads", "_named", "_ops", "_tensors")  # set when first asked for
    _dims: frozenset[str]
    _flops: int
    _hash: int
    _loads: tuple[Load, ...]
    _named: frozenset[str]
    _ops: frozenset[str]
    _tensors: frozenset[str]

    def __add__(self, o: ExprLike) -> Expr:
        return call("add", self, o)

    def __radd__(self, o: ExprLike) -> Expr:
        return call("add", o, self)

    def __sub__(self, o: ExprLike) -> Expr:
        return call("sub", self, o)

    def __rsub__(self, o: ExprLike) -> Expr:
        return call("sub", o, self)

    def __mul__(self, o: ExprLike) -> Expr:
        return call("mul", self, o)

    def __rmul__(self, o: ExprLike) -> Expr:
        return call("mul", o, self)

    def __truediv__(self, o: ExprLike) -> Expr:
        return call("div", self, o)

    def __rtruediv__(self, o: ExprLike) -> Expr:
        return call("div", o, self)

    def __floordiv__(self, o: ExprLike) -> Expr:
        return call("floordiv", self, o)

    def __mod__(self, o: ExprLike) -> Expr:
        return call("mod", self, o)

    def __pow__(self, o: ExprLike) -> Expr:
        return call("pow", self, o)

    def __neg__(self) -> Expr:
        return call("neg", self)


@dataclass(frozen=True, slots=True, init=False)
class Const(Expr):
    """A literal; dtype is a compute type (f32, f64, i64, bool). f32 constants adapt to f64 operands."""

    value: float | int | bool
    dtype: DType

    def __init__(self, value: float | int | bool, dtype: DType) -> None:
        _const_value(self, value)
        _const_dtype(self, dtype)

    # -0.0 == 0.0 and nan != nan, so equality goes by representation
    def __eq__(self, o: object) -> bool:
        return self is o or (isinstance(o, Const) and self.dtype is o.dtype and self._key() == o._key())

    def __hash__(self) -> int:
        known: int | None = getattr(self, "_hash", None)
        return remember(self, "_hash", hash(self._key())) if known is None else known

    def _key(self) -> str | int:
        return repr(float(self.value)) if self.dtype.is_float else int(self.value)


@dataclass(frozen=True, slots=True, init=False)
class Index(Expr):
    """The loop index of a dim."""

    dim: str

    def __init__(self, dim: str) -> None:
        _index_dim(self, dim)


@dataclass(frozen=True, slots=True, init=False)
class Size(Expr):
    """The run-time extent of a dim."""

    dim: str

    def __init__(self, dim: str) -> None:
        _size_dim(self, dim)


@dataclass(frozen=True, slots=True)
class Sym(Expr):
    """A run-time integer."""

    name: str


@dataclass(frozen=True, slots=True, init=False)
class Load(Expr):
    """One element of a tensor; `index` has one integer expression a tensor axis."""

    tensor: str
    index: tuple[Expr, ...]

    def __init__(self, tensor: str, index: tuple[Expr, ...]) -> None:
        _load_tensor(self, tensor)
        _load_index(self, index)

    def __eq__(self, o: object) -> bool:
        return self is o or _alike(self, o, set())

    def __hash__(self) -> int:
        known: int | None = getattr(self, "_hash", None)
        return remember(self, "_hash", hash((self.tensor, self.index))) if known is None else known


@dataclass(frozen=True, slots=True, init=False)
class Call(Expr):
    """An operation of `ops.OPS`."""

    op: str
    args: tuple[Expr, ...]

    def __init__(self, op: str, args: tuple[Expr, ...]) -> None:
        _call_op(self, op)
        _call_args(self, args)

    def __eq__(self, o: object) -> bool:
        return self is o or _alike(self, o, set())

    def __hash__(self) -> int:
        known: int | None = getattr(self, "_hash", None)
        return remember(self, "_hash", hash((self.op, self.args))) if known is None else known


@dataclass(frozen=True, slots=True, init=False)
class Cast(Expr):
    """Round to `dtype`'s precision and range (see `DType.rounds` for which casts are semantic)."""

    arg: Expr
    dtype: DType

    def __init__(self, arg: Expr, dtype: DType) -> None:
        _cast_arg(self, arg)
        _cast_dtype(self, dtype)

    def __eq__(self, o: object) -> bool:
        return self is o or _alike(self, o, set())

    def __hash__(self) -> int:
        known: int | None = getattr(self, "_hash", None)
        return remember(self, "_hash", hash((self.arg, self.dtype))) if known is None else known


def _alike(a: Any, b: Any, met: set[tuple[int, int]]) -> bool:
    """Whether two nodes are equal. met: pairs that were compared, which are looked at once: shared nodes are few,
    paths to them exponentially many."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is Call:
        if a.op != b.op:
            return False
    elif kind is Load:
        if a.tensor != b.tensor:
            return False
    elif kind is not Cast:
        return bool(a == b)
    elif a.dtype is not b.dtype:
        return False
    if (pair := (id(a), id(b))) in met:
        return True
    hashes = getattr(a, "_hash", None), getattr(b, "_hash", None)
    if hashes[0] != hashes[1] and None not in hashes:
        return False
    met.add(pair)
    ours, others = children(a), children(b)
    return len(ours) == len(others) and all(_alike(x, y, met) for x, y in zip(ours, others, strict=True))


def _setters(kind: type) -> list[Callable[[Any, Any], None]]:
    """What sets each slot of a node class."""
    return [vars(kind)[f.name].__set__ for f in fields(kind)]


_const_value, _const_dtype = _setters(Const)
(_index_dim,) = _setters(Index)
(_size_dim,) = _setters(Size)
_load_tensor, _load_index = _setters(Load)
_call_op, _call_args = _setters(Call)
_cast_arg, _cast_dtype = _setters(Cast)

ExprLike = Expr | int | float | bool


def lit(v: ExprLike) -> Expr:
    """An expression for a Python number: bool, i64 or f32."""
    if isinstance(v, Expr):
        return v
    if isinstance(v, bool):
        return Const(v, DType.BOOL)
    return Const(v, DType.I64) if isinstance(v, int) else Const(float(v), DType.F32)


def call(op: str, *args: ExprLike) -> Expr:
    """A `Call`, checked against the operation table."""
    spec = OPS[op]
    assert len(args) == spec.arity, (op, args)
    return Call(op, tuple(lit(a) for a in args))


#: What became of nodes in one rewriting, by identity, with the node itself, so that no other has it meanwhile.
Rewritten = dict[int, tuple[Expr, Expr]]


def children(e: Expr) -> tuple[Expr, ...]:
    kind = type(e)
    if kind is Call:
        return e.args  # type: ignore[attr-defined, no-any-return]
    if kind is Load:
        return e.index  # type: ignore[attr-defined, no-any-return]
    return (e.arg,) if kind is Cast else ()  # type: ignore[attr-defined]


def rebuild(e: Expr, kids: tuple[Expr, ...]) -> Expr:
    """`e` with its children replaced."""
    kind = type(e)
    if kind is Call:
        return e if all(map(is_, kids, e.args)) else Call(e.op, kids)  # type: ignore[attr-defined]
    if kind is Load:
        return e if all(map(is_, kids, e.index)) else Load(e.tensor, kids)  # type: ignore[attr-defined]
    if kind is Cast:
        return e if kids[0] is e.arg else Cast(kids[0], e.dtype)  # type: ignore[attr-defined]
    return e


def walk(e: Expr) -> Iterator[Expr]:
    """Every node, parents first: an object at most twice, however many paths lead to it, for that tells what is shared
    (`places` has it once a path)."""
    met: dict[int, int] = {}
    todo = [e]
    while todo:
        n = todo.pop()
        kind = type(n)
        if kind is Call or kind is Cast or kind is Load:
            times = met.get(id(n), 0)
            if times == TWICE:
                continue
            met[id(n)] = times + 1
        yield n
        if kind is Call:
            todo += n.args[::-1]  # type: ignore[attr-defined]
        elif kind is Load:
            todo += n.index[::-1]  # type: ignore[attr-defined]
        elif kind is Cast:
            todo.append(n.arg)  # type: ignore[attr-defined]


def places(e: Expr) -> Iterator[Expr]:
    """Every node, parents first, once a path to it: exponentially many of what is nested."""
    todo = [e]
    while todo:
        n = todo.pop()
        yield n
        todo += children(n)[::-1]


def times_read(e: Expr) -> dict[str, int]:
    """How often each tensor is read by an expression as it is written out."""
    order: dict[int, Expr] = {}
    todo = [(e, False)]
    while todo:
        n, below = todo.pop()
        if below:
            order[id(n)] = n
        elif id(n) not in order and loads(n):
            todo.append((n, True))
            todo += [(k, False) for k in children(n)]
    paths, found = {id(e): 1}, dict[str, int]()
    for n in reversed(order.values()):
        for k in children(n):
            paths[id(k)] = paths.get(id(k), 0) + paths[id(n)]
        if isinstance(n, Load):
            found[n.tensor] = found.get(n.tensor, 0) + paths[id(n)]
    return found


def transform(e: Expr, f: Callable[[Expr], Expr | None]) -> Expr:
    """Bottom-up rewriting: `f` maps a node (children done) to its replacement, None keeps it. Shared nodes stay so."""
    return _transformed(e, f, {})


def _transformed(e: Expr, f: Callable[[Expr], Expr | None], done: Rewritten) -> Expr:
    kids = children(e)
    if not kids:
        out = f(e)
        return e if out is None else out
    known = done.get(id(e))
    if known is not None:
        return known[1]
    new, made = tuple([_transformed(k, f, done) for k in kids]), e
    if any(map(is_not, new, kids)):
        made = rebuild(e, new)
    out = f(made)
    made = made if out is None else out
    done[id(e)] = e, made
    return made


def substitute(e: Expr, table: Mapping[Expr, Expr]) -> Expr:
    """Replace whole sub-expressions, outermost first; replacements are not revisited."""
    return _substituted(e, table, {})


def _substituted(e: Expr, table: Mapping[Expr, Expr], done: Rewritten) -> Expr:
    hit = table.get(e)
    if hit is not None:
        return hit
    kids = children(e)
    if not kids:
        return e
    known = done.get(id(e))
    if known is None:
        known = done[id(e)] = e, rebuild(e, tuple([_substituted(k, table, done) for k in kids]))
    return known[1]


def rename_dims(e: Expr, names: Mapping[str, str]) -> Expr:
    """Rename dims in `Index` and `Size`."""
    return _renamed(e, names, {})


def _renamed(e: Expr, names: Mapping[str, str], done: Rewritten) -> Expr:
    if dims_named(e).isdisjoint(names):
        return e
    match e:
        case Index(d):
            return Index(names[d])
        case Size(d):
            return Size(names[d])
    known = done.get(id(e))
    if known is None:
        known = done[id(e)] = e, rebuild(e, tuple([_renamed(k, names, done) for k in children(e)]))
    return known[1]


def loads(e: Expr) -> tuple[Load, ...]:
    """All loads, outermost first, duplicates removed."""
    found: tuple[Load, ...] | None = getattr(e, "_loads", None)
    if found is None:
        kids = [own for k in children(e) if (own := loads(k))]
        below = kids[0] if len(kids) == 1 else tuple(dict.fromkeys([ld for own in kids for ld in own]))
        found = (e, *below) if isinstance(e, Load) else below
        remember(e, "_loads", found)
    return found


def tensors_read(e: Expr) -> frozenset[str]:
    found: frozenset[str] | None = getattr(e, "_tensors", None)
    if found is None:
        found = frozenset([ld.tensor for ld in loads(e)])
        remember(e, "_tensors", found)
    return found


def dims_used(e: Expr) -> frozenset[str]:
    """Dims whose index the value depends on."""
    found: frozenset[str] | None = getattr(e, "_dims", None)
    if found is None:
        found = frozenset((e.dim,)) if type(e) is Index else _union([dims_used(k) for k in children(e)])
        remember(e, "_dims", found)
    return found


def dims_named(e: Expr) -> frozenset[str]:
    """Dims whose index or extent the expression has."""
    found: frozenset[str] | None = getattr(e, "_named", None)
    if found is None:
        own = type(e) is Index or type(e) is Size
        found = frozenset((e.dim,)) if own else _union([dims_named(k) for k in children(e)])  # type: ignore[attr-defined]
        remember(e, "_named", found)
    return found


def ops_used(e: Expr) -> frozenset[str]:
    """Names of the operations that the expression calls."""
    found: frozenset[str] | None = getattr(e, "_ops", None)
    if found is None:
        found = _union([below for k in children(e) if (below := ops_used(k))])
        if type(e) is Call and e.op not in found:
            found |= {e.op}
        remember(e, "_ops", found)
    return found


def _union(sets: list[frozenset[str]]) -> frozenset[str]:
    """All of them; the first itself where it has all."""
    if not sets:
        return _NOTHING
    first, *others = sets
    return first if all(x is first or x <= first for x in others) else first.union(*others)


_NOTHING: frozenset[str] = frozenset()


def remember(e: Expr, slot: str, fact: Fact) -> Fact:
    object.__setattr__(e, slot, fact)  # a node never changes
    return fact


def type_of(e: Expr, tensor_dtype: Callable[[str], DType]) -> DType:
    """The compute type (bool, i64, f32, f64) that `e` evaluates to.

    A `Const` of f32 is weak: beside an f64 operand it is exact f64. KeyError: unknown tensor.
    """
    return _type_of(e, tensor_dtype, {})


def _type_of(e: Expr, tensor_dtype: Callable[[str], DType], known: dict[int, DType]) -> DType:
    """known: of calls by identity."""
    match e:
        case Const(_, dtype):
            return dtype
        case Index() | Size() | Sym():
            return DType.I64
        case Load(tensor, _):
            return tensor_dtype(tensor).compute
        case Cast(_, dtype):
            return dtype.compute
        case Call(op, args):
            result = OPS[op].result
            if result == "bool":
                return DType.BOOL
            if result == "int":
                return DType.I64
            if id(e) not in known:
                kinds = [_type_of(a, tensor_dtype, known) for a in (args[1:] if op == "where" else args)]
                known[id(e)] = _promoted(op, kinds, floats=result == "float")
            return known[id(e)]
    raise AssertionError(e)


def _promoted(op: str, kinds: list[DType], *, floats: bool) -> DType:
    """Of an operation on such types; floats: it gives no integers."""
    t = kinds[0]
    for k in kinds[1:]:
        t = promote(t, k)
    if op in ("add", "mul", "sub", "neg") and t is DType.BOOL:
        return DType.I64
    return promote(t, DType.F32) if floats else t
