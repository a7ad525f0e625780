"""Which products of a block program must keep what they read, and compute, in float32.

A matrix unit takes two operands of one type. Where one is a tensor of 16 bits and the other is computed, back ends for
GPUs round the computed one to 16 bits. That is what PyTorch does where the program itself multiplies in 16 bits; it is
wrong where the program multiplies in float32, and where a fold multiplies other values than the program (a factor that
it applies at the end: x * g for x * g / rms), which fp16 may not hold. Such sums say what they keep (`Let.kept`):

    f32   the program computes this sum in float32: no computed operand is rounded
    f16   it computes it in fp16, of other values: their precision is enough, their range is not
    bf16  it computes it in 16 bits, of a tensor that lies in memory in float32: that one is rounded as well

Law: |a| <= 1 is held by every type of 16 bits with its own precision (2^-9 of the result's scale: what the rounding of
the other operand to 16 bits has cost already), so that probabilities are not kept. What is known of a value:

    m = max x            x - m <= 0, and exp(x - m) <= 1
    t = sum x, x >= 0    x / t <= 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, loads, tensors_read, transform
from tilefold.algebra.facts import UNIT, Range, after_reduction, from_dtype, range_of
from tilefold.block.contract import as_contraction
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Update, walk
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute

#: Stands for a value that is between 0 and 1.
_UNIT = Load("0 to 1", ())


def kept_of(g: Graph, c: Compute, *, delayed: bool = False) -> DType | None:
    """What a sum keeps. delayed: it sums other values than the statement says, which are repaired at the end."""
    if c.reducer != "sum":
        return None
    match _multiplied_in(g, c):
        case DType.F32:
            return DType.F32
        case DType.F16 if delayed:
            return DType.F16
        case DType.F16 | DType.BF16 if any(_narrowed(g, x) for x in _operands(c)):
            return DType.BF16
    return None


def _operands(c: Compute) -> tuple[Cast | Load, ...]:
    """Two tensors that a statement multiplies, perhaps rounded; empty where it does something else."""
    match c.body:
        case Call("mul", (Load() | Cast(arg=Load()) as a, Load() | Cast(arg=Load()) as b)):
            return a, b
    return ()


def _narrowed(g: Graph, x: Expr) -> bool:
    """Whether an operand is one of float32, rounded: a kernel may read that one, as it lies in memory."""
    while True:
        e = x.arg if isinstance(x, Cast) else x
        if not isinstance(e, Load):
            return False
        if g.program.dtype_of(e.tensor) is DType.F32:
            return isinstance(x, Cast)
        c = g.by_name.get(e.tensor)
        if c is None or c.reducer is not None:
            return False
        x = Cast(c.body, c.dtype) if isinstance(c.body, Load) else c.body


def _multiplied_in(g: Graph, c: Compute) -> DType:
    """The type that the program multiplies in: of both tensors if they have 16 bits, whatever the sum has (scores of
    normalised queries), else that of the sum."""
    if found := _operands(c):
        kinds = {x.dtype if isinstance(x, Cast) else g.program.dtype_of(x.tensor) for x in found}
        if len(kinds) == 1 and kinds <= {DType.F16, DType.BF16}:
            return kinds.pop()
    return _rounded_to(g, c)


def _rounded_to(g: Graph, c: Compute) -> DType:
    """The type of a sum: of partial sums, what their sum is rounded to, which the program says."""
    readers = g.consumers[c.name]
    if c.dtype is DType.F32 and len(readers) == 1 and c.name not in g.program.outputs:
        whole = g.by_name[readers[0]]
        if whole.reducer == "sum" and isinstance(whole.body, Load) and whole.body.tensor == c.name:
            return whole.dtype
    return c.dtype


def settled(b: Block) -> Block:
    """`b` with sums keeping what they have to: products with a computed operand that is not known to be small."""
    if not any(n.kept for n in walk(b.body) if isinstance(n, Let | Accumulate)):
        return b
    dims = {n.name: n.dims for n in walk(b.body) if isinstance(n, Let | Init)}
    # with no input of 16 bits nothing is rounded to them
    narrow = any(i.dtype.is_float and i.dtype.nbytes < 4 for i in b.inputs)
    stored = {i.name for i in b.inputs} if narrow else {*dims, *(i.name for i in b.inputs)}
    wide = frozenset(i.name for i in b.inputs if i.dtype.is_float and i.dtype.nbytes >= 4)
    known = _Known({i.name: from_dtype(i.dtype) for i in b.inputs}, wide if narrow else frozenset())
    return replace(b, body=_settled(b.body, dims, stored, known))


def _settled(
    nodes: tuple[Node, ...], dims: Mapping[str, tuple[str, ...]], stored: Collection[str], known: _Known
) -> tuple[Node, ...]:
    out: list[Node] = []
    for n in nodes:
        match n:
            case Loop(body=body):
                known.forget(n.name for n in walk(body) if isinstance(n, Let | Update | Accumulate))
                out.append(replace(n, body=_settled(body, dims, stored, known)))
                known.forget(n.name for n in walk(body) if isinstance(n, Let | Update | Accumulate))
                continue
            case Let(kept=kept) | Accumulate(kept=kept) if kept is not None:
                n = replace(n, kept=kept if _needed(n, dims[n.name], stored, known) else None)
        out.append(n)
        known.note(n)
    return tuple(out)


def _needed(n: Let | Accumulate, dims: tuple[str, ...], stored: Collection[str], known: _Known) -> bool:
    """Whether a product has a computed operand that rounding could change by more than it does to small numbers. Of two
    beside an input of float32 neither need be of 16 bits: their own precision is that of no other operand."""
    match n.expr:
        case Call("mul", (Load() as a, Load() as b)) if n.kept is DType.BF16:
            return not known.wide.isdisjoint({a.tensor, b.tensor})
        case Call("mul", (Load() as a, Load() as b)) if (
            known.wide and n.kept is DType.F32 and {a.tensor, b.tensor}.isdisjoint(stored)
        ):
            return not {a.tensor, b.tensor} <= known.narrow
        case Call("mul", (Load() as a, Load() as b)) if as_contraction(n.expr, dims, n.rdims) is not None:
            return not all(x.tensor in stored or known.harmless(x) for x in (a, b))
    return False


class _Known:
    """What is known at a point of a block program, of values with plain indices: their ranges, and what they bound.

    above: value -> expressions that it is no less than, at the same indices. narrow: what the program rounds. wide:
    inputs of float32, where others have 16 bits.
    """

    def __init__(self, ranges: dict[str, Range], wide: frozenset[str] = frozenset()):
        self.ranges, self.wide = ranges, wide
        self.above: dict[str, frozenset[Expr]] = {}
        self.narrow: set[str] = set()

    def note(self, n: Node) -> None:
        """A statement has run."""
        match n:
            case Let(name, _, _, e, None):
                self.forget((name,))
                self.ranges[name] = self.range(e)
                self._bounds(name, self.bounded_by(e))
                if isinstance(e, Cast) and e.dtype.is_float and e.dtype.nbytes < 4:
                    self.narrow.add(name)
            case Let(name, _, _, e, str() as reducer) | Accumulate(name, reducer, _, e):
                element, old = self.range(e), self.above.get(name, frozenset())
                self.forget((name,))
                if isinstance(n, Let):
                    self.ranges[name] = after_reduction(reducer, element)
                if reducer == "max":
                    self._bounds(name, {e} | self.bounded_by(e) | (old if isinstance(n, Accumulate) else set()))
                elif reducer == "sum" and element.nonneg and isinstance(n, Let):
                    self._bounds(name, {e})
            case Update(name) | Init(name):
                self.forget((name,))

    def forget(self, names: Iterable[str]) -> None:
        """These values change, or are others from here on."""
        gone = set(names)
        for x in gone:
            self.ranges.pop(x, None)
            self.above.pop(x, None)
            self.narrow.discard(x)
        for x, found in self.above.items():
            self.above[x] = frozenset(e for e in found if not gone & set(tensors_read(e)))

    def _bounds(self, name: str, found: Iterable[Expr]) -> None:
        self.above[name] = frozenset(e for e in found if name not in tensors_read(e) and _plain(e))

    def bounded_by(self, e: Expr) -> frozenset[Expr]:
        """Expressions that e is no less than, with plain indices."""
        match e:
            case Load(tensor=x) if _plain(e):
                return self.above.get(x, frozenset()) | {e}
            case Call("where", (Call("eq", (x, Const(least, _))), _, y)) if x == y and float(least) == -float("inf"):
                return self.bounded_by(y)  # anything, where all that y bounds is -inf
            case Call("maximum", (x, y)):
                return self.bounded_by(x) | self.bounded_by(y)
        return frozenset()

    def range(self, e: Expr) -> Range:
        """What is proved of the value of e."""
        return range_of(transform(e, self._unit), lambda x: UNIT if x == _UNIT else self.ranges.get(x.tensor, Range()))

    def _unit(self, e: Expr) -> Expr | None:
        match e:
            case Call("exp", (x,)) if self.nonpositive(x):
                return _UNIT
            case Call("div", (x, y)) if x in self.bounded_by(y) and self.range(x).nonneg:
                return _UNIT
        return None

    def nonpositive(self, e: Expr) -> bool:
        """Whether e <= 0 is proved."""
        match e:
            case Call("sub", (x, y)):
                return x in self.bounded_by(y) or (self.nonpositive(x) and self.range(y).nonneg)
            case Call("where", (_, x, y)):
                return self.nonpositive(x) and self.nonpositive(y)
            case Call("mul", (x, Const(k, _))) if float(k) >= 0:
                return self.nonpositive(x)
        return range_of(e, lambda x: self.ranges.get(x.tensor, Range())).nonpos

    def harmless(self, x: Load) -> bool:
        """Whether |x| <= 1 is proved, or the program itself rounds x."""
        r = self.ranges.get(x.tensor, Range())
        return x.tensor in self.narrow or (r.lo >= -1.0 and r.hi <= 1.0)


def _plain(e: Expr) -> bool:
    """Whether all that e loads of the block's own values stands at plain indices: then so does e where it is used."""
    return all(isinstance(ix, Index | Const) for ld in loads(e) for ix in ld.index)
