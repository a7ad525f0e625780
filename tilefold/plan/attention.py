"""Attention of plain form, which the library computes in one call: softmax(scale q k^T) v, causal or not.

The Fold of such a program has the states maximum, sum and weighted sum, each element's lift being a scaled product of a
row of q and one of k; nothing else is added to a score or made of a probability. That is what is looked for in the
statements after normalisation, however it was written: no operator's name is asked for. Where the scores have a bias, a
mask by elements or another map, the form is another, and the kernel is ours.

Whether the call is worth it, a price decides (`plan.pace`): the library's against that of the better of our two forms,
of which `backends.triton.row_tiles` chooses by the same law. The library's heads are 64 columns wide or 128; a kernel
of ours needs one tile more of several, with a mask, where keys end within one, and pads heads that are no multiple of
16 wide to a power of two.

Of float32, which no matrix unit takes unrounded, the other form is that of `plan.gpu_library`: two products of the
library, which know of no causal mask, with the scores through memory between them; or a kernel of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, transform
from tilefold.plan.gpu_streams import PASSED
from tilefold.plan.hardware import Gpu
from tilefold.plan.pace import STREAMED, Scores, owned_seconds
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import Product, library_product
from tilefold.tile.pieces import power_of_two

#: Widest heads, and elements that their width is a multiple of, that the library takes.
WIDEST, WIDTHS = 128, 8
#: Columns that one instruction of a matrix unit contracts.
STEP = 16
#: What a price of another form must be beaten by: predictions are not better than that, of float32 and of 16 bits.
DOUBT_EXACT, DOUBT = 1.15, 1.03


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """softmax(scale q k^T) v, with keys up to a row's own place if `causal`.

    members: the statements that it stands for, the last of which is `out`. batch, rows, keys, width: dims; `rows` and
    `keys` are one each, `width` that of q and k; columns: that of v and the result.
    """

    members: tuple[str, ...]
    out: str
    dtype: DType
    q: Load
    k: Load
    v: Load
    dims: tuple[str, ...]
    batch: tuple[str, ...]
    rows: str
    keys: str
    width: str
    columns: str
    scale: float
    causal: bool


#: Bytes of the library's result of an attention that are copied.
Copied = Callable[[Program, AttentionCall], int]


@dataclass(frozen=True, slots=True)
class Extents:
    """Of an attention: heads of all batches, rows, keys, columns of a head. even: keys end with a tile, as far as is
    known. exact: of float32. copied: bytes of the library's result that are wanted in another order."""

    heads: int
    rows: int
    keys: int
    width: int
    causal: bool
    even: bool = True
    exact: bool = False
    copied: int = 0


def library_seconds(x: Extents, machine: Gpu) -> float:
    """Of the library's call, and of a copy of its result."""
    copy = machine.copied(x.copied) if x.copied else 0.0
    return copy + _call_seconds(x, machine)


def _call_seconds(x: Extents, machine: Gpu) -> float:
    if x.exact:
        tile = machine.one_tile
        rows, keys = -(-x.rows // tile), -(-x.keys // tile)
        seen = (keys + 1) / 2 if x.causal else keys
        return machine.call + _flops(x.heads * rows * seen * tile**2, x) / machine.exact_scores
    met, pace = _scores(x, x.width), machine.library_pace
    blocks = x.heads * -(-x.rows // pace.rows)
    idle = max(1.0, machine.cores / blocks)  # the call cuts no head's keys into segments, as kernels of ours do
    return machine.call + idle * pace.seconds(met)


def own_seconds(x: Extents, machine: Gpu) -> float:
    """Of a kernel of ours; of float32, of it or of products with the scores between them."""
    if x.exact:
        scores = x.heads * x.rows * x.keys
        rate, memory = machine.gemm_rate(DType.F32, library=True), machine.reached * machine.bandwidth
        apart = _flops(scores, x) / rate + PASSED * scores * DType.F32.nbytes / memory + 2 * machine.call
        return machine.call + min(apart, _flops(scores, x) / machine.fused_rate(DType.F32))
    whole = x.width % STEP == 0
    met = _scores(x, x.width if whole else power_of_two(x.width))
    if not x.even and not x.causal and x.keys > STREAMED:
        return machine.call + machine.usual_pace.seconds(replace(met, streamed=met.streamed + STREAMED))
    groups = owned_seconds(met, machine.owning_paces, machine.cores) if whole else math.inf
    return machine.call + min(machine.usual_pace.seconds(met), groups)


def _scores(x: Extents, columns: int) -> Scores:
    """Keys are whole tiles."""
    keys = -(-x.keys // STREAMED) * STREAMED
    return Scores(x.heads, x.rows, keys / 2 if x.causal else keys, x.causal, columns, longest=keys)


def _flops(scores: float, x: Extents) -> float:
    """Of so many scores and their share of the result."""
    return 4.0 * scores * x.width


def library_wins(x: Extents, machine: Gpu) -> bool:
    """Whether the library's call is predicted to be faster, by more than predictions are wrong. Of a few rows a head
    both are bound by memory, and the kernel of ours is cut into segments."""
    if x.width > WIDEST or x.width % WIDTHS or x.rows < machine.rows:
        return False
    doubt = DOUBT_EXACT if x.exact else DOUBT
    return doubt * library_seconds(x, machine) < own_seconds(x, machine)


def library_attentions(p: Program, machine: Gpu, copied: Copied = lambda p, x: 0) -> tuple[AttentionCall, ...]:
    """The attentions of a program that are predicted to be faster in the library. copied: bytes of a result that are
    wanted in another order."""
    g = Graph.of(p)
    found = [x for c in p.body if (x := attention_call(g, c)) is not None]
    return tuple(x for x in found if library_wins(replace(extents(g, x), copied=copied(p, x)), machine))


def extents(g: Graph, x: AttentionCall) -> Extents:
    """With typical ones where they are symbolic."""
    keys = g.program.sizes[x.keys]
    even = not isinstance(keys, Const) or int(keys.value) % STEP == 0
    heads, rows, width = (int(g.points(dims)) for dims in (x.batch, (x.rows,), (x.width,)))
    return Extents(heads, rows, int(g.extent(x.keys)), width, x.causal, even, x.dtype is DType.F32)


def attention_call(g: Graph, c: Compute) -> AttentionCall | None:
    """The attention whose result a statement is, None where it is none that the library computes."""
    values = _product(g, c)
    if values is None or values.loads is None or len(values.rows) != 1 or len(values.cols) != 1:
        return None
    weights, v = values.loads
    (keys,), rows, columns = values.rdims, values.rows[0], values.cols[0]
    found = _Members(g)
    scores = _normalised(g, found, weights, keys)
    if scores is None:
        return None
    parts = _scaled(scores, rows, keys, g)
    product = None if parts is None else g.by_name.get(parts[0].tensor)
    made = None if parts is None or product is None or not _whole(parts[0], product) else _product(g, product)
    if parts is None or product is None or made is None or made.loads is None:
        return None
    q, k = made.loads
    if (made.rows, made.cols, set(made.batch)) != ((rows,), (keys,), set(values.batch)):
        return None
    found.names.append(product.name)
    (width,), (_, scale, causal), sizes = made.rdims, parts, g.program.sizes
    kinds = {g.program.dtype_of(ld.tensor) for ld in (q, k, v)} | {c.dtype}
    if len(kinds) != 1 or not kinds <= {DType.F16, DType.BF16, DType.F32} or sizes[width] != sizes[columns]:
        return None
    if not isinstance(sizes[width], Const) or (causal and sizes[rows] != sizes[keys]):
        return None
    members = found.ordered(c)
    if members is None:
        return None
    return AttentionCall(
        members, c.name, c.dtype, q, k, v, c.dims, values.batch, rows, keys, width, columns, scale, causal
    )


class _Members:
    """Statements that make an attention's result, as they are found."""

    def __init__(self, g: Graph):
        self.g, self.names = g, list[str]()

    def statement(self, ld: Expr, reducer: str | None, over: tuple[str, ...] = ()) -> Compute | None:
        """The statement that makes what is loaded element by element, if it is such a one."""
        c = self.g.by_name.get(ld.tensor) if isinstance(ld, Load) else None
        if c is None or not isinstance(ld, Load) or not _whole(ld, c) or (c.reducer, c.rdims) != (reducer, over):
            return None
        self.names.append(c.name)
        return c

    def inlined(self, e: Expr) -> Expr:
        """An expression with maps in place of loads of what they make."""

        def body(n: Expr) -> Expr | None:
            c = self.statement(n, None)
            return None if c is None else self.inlined(c.body)

        return transform(e, body)

    def ordered(self, last: Compute) -> tuple[str, ...] | None:
        """The statements in the program's order, the last one given; None where another one reads, or the program
        returns, what is made on the way."""
        names = {*self.names, last.name}
        members = tuple(c.name for c in self.g.program.body if c.name in names)
        kept = any(self.g.escapes(m, members) for m in members if m != last.name)
        return None if kept or members[-1] != last.name else members


def _product(g: Graph, c: Compute) -> Product | None:
    """A product of two tensors over one dim, no operand of which is shared by heads."""
    p = library_product(c, g.program.sizes)
    return p if p is not None and p.loads is not None and len(p.rdims) == 1 and not p.shared else None


def _normalised(g: Graph, found: _Members, weights: Load, keys: str) -> Expr | None:
    """The scores, maps inlined, of which probabilities are the softmax over the keys; None where they are none."""
    w = found.statement(weights, None)
    if w is None:
        return None
    match w.body:
        case Call("div", (part, whole)):
            total = found.statement(_guarded(whole, 0.0, 1.0), "sum", (keys,))
        case _:
            return None
    if total is None or total.body != part:
        return None
    exponential = found.statement(part, None)
    match exponential.body if exponential is not None else part:
        case Call("exp", (Call("sub", (score, least)),)):
            most = found.statement(_guarded(least, -math.inf, 0.0), "max", (keys,))
        case _:
            return None
    if most is None:
        return None
    scores = found.inlined(score)
    return scores if found.inlined(most.body) == scores else None


def _guarded(e: Expr, unless: float, instead: float) -> Expr:
    """x where an expression is `where(x == unless, instead, x)`, as for rows without a key; else itself."""
    match e:
        case Call("where", (Call("eq", (x, Const(bad))), Const(other), y)) if x == y and (bad, other) == (
            unless,
            instead,
        ):
            return x
    return e


def _scaled(e: Expr, rows: str, keys: str, g: Graph) -> tuple[Load, float, bool] | None:
    """(product, scale, causal) of scores."""
    causal = False
    match e:
        case Call("where", (Call("le", (Index(a), Index(b))), inner, Const(out))) if out == -math.inf:
            if (a, b) != (keys, rows):
                return None
            causal, e = True, inner
    scale = 1.0
    while isinstance(e, Call):
        match e:
            case Call("mul", (inner, Const(by))) | Call("mul", (Const(by), inner)):
                e, scale = inner, scale * float(by)
            case Call("div", (inner, Const(by))) if by:
                e, scale = inner, scale / float(by)
            case _:
                return None
    return (e, scale, causal) if isinstance(e, Load) and 0 < scale < math.inf else None


def _whole(ld: Load, c: Compute) -> bool:
    """Whether a load is the element of the statement's own place."""
    return ld.index == tuple(map(Index, c.dims))


def statements(calls: Iterable[AttentionCall]) -> frozenset[str]:
    """All that calls stand for."""
    return frozenset(m for x in calls for m in x.members)
