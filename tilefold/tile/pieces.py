"""Cut an extent that is no power of two into pieces that are.

Law: a reduction over d is the reduction over its pieces, one after the other; a statement for all
of d is one statement a piece. Vector machines whose vectors are powers of two then waste nothing:
576 = 512 + 64 (a latent with its positional part), 80 = 64 + 16, 192 = 128 + 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, loads, transform
from tilefold.names import fresh
from tilefold.tensor.narrow import decided
from tilefold.tensor.product import product
from tilefold.tile import ir
from tilefold.tile.uses import every, expressions

#: Least extent of a matrix unit; no piece is shorter.
MATRIX_UNIT = 16
#: More pieces than this cost more than padding.
MOST = 3
#: Longest dim that is cut into single indices.
MOST_SINGLES = 7
#: The same of one along which rows that others name are summed.
MOST_NAMED = 16
#: The same of one along which a store chooses what it writes: what is stacked is stored part by part.
MOST_STACKED = 16
#: Indices of a loop from which what it computes along a dim counts for more than what is stored along it once.
LONG = 32


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def largest_power(n: int) -> int:
    """The greatest power of two that is not above n; 1 of less."""
    return 1 << max(1, n).bit_length() - 1


def is_single(n: int) -> bool:
    """Whether a vector of n neighbours, which is longer than n, is cut into single indices."""
    return 1 < n <= MOST_SINGLES and n & (n - 1) != 0


@dataclass(frozen=True, slots=True)
class _Piece:
    dim: str
    start: int


def lengths(n: int) -> tuple[int, ...]:
    """Extents of the pieces of n, largest first; (n,) where cutting gains nothing.

    The last may be longer than what is left of n (it is masked).
    """
    if n < MATRIX_UNIT or n & (n - 1) == 0:
        return (n,)
    parts: list[int] = []
    left = n
    while left > 0 and len(parts) < MOST:
        size = largest_power(left)
        if size < MATRIX_UNIT or (len(parts) == MOST - 1 and size < left):
            size = left
        parts.append(size)
        left -= size
    padded = sum(max(MATRIX_UNIT, power_of_two(p)) for p in parts)
    return tuple(parts) if padded < power_of_two(n) else (n,)


def cut(kernel: ir.Kernel, dims: Iterable[str]) -> ir.Kernel:
    """`kernel` with those of `dims` cut that no loop runs over and that are used by plain indices only."""
    looped = {t.dim for t in kernel.grid} | _looped(kernel.body)
    for d in dims:
        e = kernel.sizes.get(d)
        if d in looped or not isinstance(e, Const):
            continue
        parts = lengths(int(e.value))
        if len(parts) > 1:
            cutter = _Cutter(kernel, d, parts)
            done = cutter.run()
            if done is not kernel:
                kernel = replace(done, cut=(*kernel.cut, *(p.dim for p in cutter.pieces)))
    return kernel


def singles(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with its short dims cut into single indices: three coordinates are three values, not a vector of four.

    Short dims are those of at most `MOST_SINGLES` indices that no loop runs over: no power of two, or such that rows
    are summed which others name along it (`named_rows`), or of elements far from each other that a loop sums (the parts
    of complex numbers, in planes: as a vector they would be other warps'), or of what a loop computes for pairs and
    sums (two coordinates of differences, of which nothing is read: a vector of them is exchanged, not loaded). Loads
    along one are then as many loads of every n-th element, which share their cache lines. Left whole are dims that are
    stored beside others (stores would not share the lines; but for what a long loop computes elements along, as forces
    of pairs, in three coordinates, that it sums: stored once; and for what is stacked in lines of its own), selected
    from, or reduced together with others (one reduction would become several).
    """
    return [kernel, *(k for _, k in _singled(kernel))][-1]


def singled(kernel: ir.Kernel) -> frozenset[str]:
    """The dims that `singles` cuts."""
    return frozenset(d for d, _ in _singled(kernel))


def _singled(kernel: ir.Kernel) -> Iterator[tuple[str, ir.Kernel]]:
    """A dim that is cut, and the kernel after it, dim by dim."""
    scalars = frozenset(t.dim for t in kernel.grid if t.tile == 1)
    left = {t.dim for t in kernel.grid} | _looped(kernel.body)
    left |= _together(kernel, kernel.body, scalars, computed_along(kernel, kernel.body))
    named, along = named_rows(kernel), stacked(kernel, kernel.body)
    for d, e in kernel.sizes.items():
        n = int(e.value) if isinstance(e, Const) and d not in left else 0
        short = is_single(n) or (1 < n <= MOST_SINGLES and (_far_apart(kernel, d) or _along_pairs(kernel, d)))
        if short or (1 < n <= MOST_NAMED and d in named) or (1 < n <= MOST_STACKED and d in along):
            done = _Cutter(kernel, d, [1] * n).run()
            if done is not kernel:
                kernel = done
                yield d, done


def _far_apart(kernel: ir.Kernel, d: str) -> bool:
    """Whether a loop's body reduces over a dim alone, and no tensor's neighbours lie along it."""
    tensors = {t.name: t for t in kernel.tensors}
    read = {ld for e in expressions(kernel.body) for ld in loads(e) if ld.tensor in tensors and d in dims_used(ld)}
    along = {(ld, axis) for ld in read for axis, e in enumerate(ld.index) if d in dims_used(e)}
    far = all(axis != tensors[ld.tensor].unit_axis for ld, axis in along)
    loops = [s for s in kernel.body if isinstance(s, ir.For)]
    return bool(read) and far and any(d in x.rdims for x in _reduced(loops))


def _along_pairs(kernel: ir.Kernel, d: str) -> bool:
    """Whether a loop's body reduces, over a dim alone, what belongs to pairs of an index of the loop and of others, and
    no tensor that is read along the dim has both."""
    tensors = {t.name for t in kernel.tensors}
    for loop in (s for s in kernel.body if isinstance(s, ir.For)):
        pairs = [dims_used(x.expr) - {d} for x in _reduced([loop]) if x.rdims == (d,)]
        read = [dims_used(ld) for e in expressions(loop.body) for ld in loads(e) if ld.tensor in tensors]
        for pair in pairs:
            if loop.dim in pair and len(pair) > 1 and not any(d in x and pair <= x for x in read):
                return True
    return False


def named_rows(kernel: ir.Kernel) -> frozenset[str]:
    """Dims along which rows that others name are reduced (a few embeddings of a bag): neighbours are along the rows
    alone, so that a tile of all of them is spread over lanes and warps which then meet (106,496 means of 4 rows of 64:
    85 us on an H100)."""
    return frozenset(s.rdims[0] for s in _reduced(kernel.body) if len(s.rdims) == 1 and _named(s.expr, s.rdims[0]))


def _reduced(stmts: Sequence[ir.Stmt]) -> Iterator[ir.Reduce]:
    """Reductions of statements, and in loops among them."""
    for s in stmts:
        if isinstance(s, ir.For):
            yield from _reduced(s.body)
        if isinstance(s, ir.Reduce):
            yield s


def _named(e: Expr, d: str) -> bool:
    """Whether an element is read at a place that depends on a dim by what others hold."""
    return any(d in dims_used(x) for ld in loads(e) for ix in ld.index for x in loads(ix))


def computed_along(kernel: ir.Kernel, stmts: Sequence[ir.Stmt]) -> frozenset[str]:
    """Dims of the elements that long loops reduce: of what they compute for each of their indices."""
    found = frozenset[str]()
    for s in stmts:
        if isinstance(s, ir.For):
            extent = kernel.sizes.get(s.dim)
            every = [dims_used(x.expr) for x in s.body if isinstance(x, ir.Reduce) and s.dim in x.rdims]
            if isinstance(extent, Const) and extent.value >= LONG:
                found |= frozenset().union(*every)
            found |= computed_along(kernel, s.body)
    return found


def _together(
    kernel: ir.Kernel, stmts: Sequence[ir.Stmt], scalars: frozenset[str], along: frozenset[str] = frozenset()
) -> set[str]:
    """Dims that statements need as a whole. along: those that are computed so much along that stores do not count."""
    found: set[str] = set()
    for s in stmts:
        match s:
            case ir.For(body=body):
                found |= _together(kernel, body, scalars)
            case ir.Store(dims=dims) if len(set(dims) - scalars) > 1:
                found |= set(dims) - along - stacked(kernel, [s]) if (lines := _lines(kernel, s)) is None else lines
            case ir.Select(op="topk", rdims=rdims, expr=e):
                found |= {*rdims, *dims_used(e)}
            case ir.Reduce(rdims=rdims) | ir.Gemm(rdims=rdims) if len(rdims) > 1:
                found |= set(rdims)
    return found


def stacked(kernel: ir.Kernel, stmts: Iterable[ir.Stmt]) -> frozenset[str]:
    """Dims along which stores choose what they write, and write each choice in lines of its own: nine planes, say."""
    found, units = set[str](), {t.name: t.unit_axis for t in kernel.tensors}
    for s in stmts:
        if isinstance(s, ir.For):
            found |= stacked(kernel, s.body)
        axis = units[s.tensor] if isinstance(s, ir.Store) else None
        if isinstance(s, ir.Store) and axis is not None and dims_used(s.index[axis]):
            found |= set(s.dims) & chosen_by(s.expr) - dims_used(s.index[axis])
    return frozenset(found)


def chosen_by(e: Expr) -> frozenset[str]:
    """Dims of the indices that alone decide which of several parts an element is of."""
    match e:
        case Call("where", (condition, a, b)):
            own = frozenset() if loads(condition) else dims_used(condition)
            return own | chosen_by(a) | chosen_by(b)
    return frozenset()


def _looped(stmts: Sequence[ir.Stmt]) -> set[str]:
    found: set[str] = set()
    for s in stmts:
        if isinstance(s, ir.For):
            found |= {s.dim} | _looped(s.body)
    return found


def _lines(kernel: ir.Kernel, s: ir.Store) -> set[str] | None:
    """The dims of the lines that a tile of a tensor is stored in, if tiles of the grid have lines of their own (pixels
    of planes of three colours)."""
    axis = next(t.unit_axis for t in kernel.tensors if t.name == s.tensor)
    dims = set() if axis is None else set(dims_used(s.index[axis]))
    return dims if dims and dims <= {t.dim for t in kernel.grid if t.tile > 1} else None


def is_plain_sum(e: Expr, rdims: tuple[str, ...], sizes: Mapping[str, Expr], areas: Iterable[frozenset[str]]) -> bool:
    """Whether the sum of e over `rdims` is a product of a few numbers (`Product.is_small`); or one with fewer rows or
    columns than a matrix unit has, beside statements that compute something for each of its terms. areas: the dims of
    these.

    Lanes that fill a matrix unit would be lanes of theirs: of neighbours' differences in two coordinates, and
    velocities summed, one of eight would be of use (1,971 us on an H100 for 2,048 places).
    """
    p = product("sum", e, tuple(sorted(dims_used(e) - set(rdims))), rdims)
    known = {d: int(n.value) for d, n in sizes.items() if isinstance(n, Const)}
    if p is None or p.is_small(lambda d: known.get(d, math.inf)):
        return p is not None
    if not any((p.left | p.right) <= x for x in areas):
        return False
    sides = (p.left - p.right, p.right - p.left)
    return any(x and math.prod(known.get(d, MATRIX_UNIT) for d in x) < MATRIX_UNIT for x in sides)


def summed(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with products that no matrix unit is for (`is_plain_sum`) as the sums that they are."""
    own = [s.expr for s in every(kernel.body) if isinstance(s, ir.Map | ir.Reduce)]
    return replace(kernel, body=_summed(kernel.body, kernel.sizes, [frozenset(dims_used(e)) for e in own]))


def _summed(
    stmts: Sequence[ir.Stmt], sizes: Mapping[str, Expr], areas: Sequence[frozenset[str]]
) -> tuple[ir.Stmt, ...]:
    out: list[ir.Stmt] = []
    for s in stmts:
        match s:
            case ir.For(body=body):
                out.append(replace(s, body=_summed(body, sizes, areas)))
            case ir.Gemm(a=a, b=b) if is_plain_sum(e := Call("mul", (a, b)), s.rdims, sizes, areas):
                out.append(ir.Reduce(s.buf, "sum", s.rdims, e, s.accumulate, s.kept))
            case _:
                out.append(s)
    return tuple(out)


class _Cutter:
    def __init__(self, kernel: ir.Kernel, dim: str, parts: Sequence[int]):
        self.kernel, self.dim = kernel, dim
        self.sizes: dict[str, Expr] = dict(kernel.sizes)
        self.pieces: list[_Piece] = []
        taken = {*kernel.sizes, *kernel.syms, *(t.name for t in kernel.tensors)}
        start = 0
        for n, extent in enumerate(parts):
            name = fresh(f"{dim}_{n}", taken)
            self.sizes[name] = Const(extent, DType.I64)
            self.pieces.append(_Piece(name, start))
            start += extent
        self.buffers: dict[str, ir.Buffer] = {}

    def run(self) -> ir.Kernel:
        try:
            body = self.body(self.kernel.body)
        except _Computed:
            return self.kernel
        return replace(self.kernel, body=body, sizes=self.sizes)

    def body(self, stmts: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
        return tuple(x for s in stmts for x in self.stmt(s))

    def stmt(self, s: ir.Stmt) -> list[ir.Stmt]:
        d = self.dim
        match s:
            case ir.Alloc(b):
                if d not in b.dims:
                    return [s]
                self.buffers[b.name] = b
                return [ir.Alloc(self.piece_of(b, p)) for p in self.pieces]
            case ir.For():
                bounds = [None if e is None else self.expr(e, None) for e in (s.start, s.stop)]
                return [replace(s, body=self.body(s.body), start=bounds[0], stop=bounds[1])]
            case ir.Fill(buf, value):
                return [ir.Fill(n, value) for n, _ in self.targets(buf)]
            case ir.Map(buf, e):
                return [ir.Map(n, self.expr(e, p)) for n, p in self.targets(buf)]
            case ir.Reduce(rdims=rdims) | ir.Gemm(rdims=rdims) | ir.Select(rdims=rdims) if d in rdims:
                return [self.reduced(s, p, first=n == 0) for n, p in enumerate(self.pieces)]
            case ir.Reduce(buf, expr=e):
                return [replace(s, buf=n, expr=self.expr(e, p)) for n, p in self.targets(buf)]
            case ir.Gemm(buf, a, b2):
                return [replace(s, buf=n, a=self.load(a, p), b=self.load(b2, p)) for n, p in self.targets(buf)]
            case ir.Select():
                if s.buf in self.buffers:
                    raise _Computed
                return [replace(s, expr=self.expr(s.expr, None), payload=self.expr(s.payload, None))]
            case ir.Store(index=index, dims=dims, expr=e):
                if d not in dims:
                    return [replace(s, expr=self.expr(e, None))]
                out: list[ir.Stmt] = []
                for p in self.pieces:
                    at = tuple(self.expr(ix, p) for ix in index)
                    own = tuple(p.dim if x == d else x for x in dims)
                    part = transform(self.expr(e, p), lambda x: decided(x, self.sizes))
                    out.append(replace(s, index=at, dims=own, expr=part))
                return out
        raise AssertionError(s)

    def reduced(self, s: ir.Stmt, p: _Piece, *, first: bool) -> ir.Stmt:
        assert isinstance(s, ir.Reduce | ir.Gemm | ir.Select)
        if s.buf in self.buffers:
            raise _Computed
        rdims = tuple(p.dim if x == self.dim else x for x in s.rdims)
        accumulate = s.accumulate or not first
        match s:
            case ir.Reduce():
                return replace(s, rdims=rdims, expr=self.expr(s.expr, p), accumulate=accumulate)
            case ir.Gemm():
                return replace(s, rdims=rdims, a=self.load(s.a, p), b=self.load(s.b, p), accumulate=accumulate)
            case ir.Select():
                e, payload = self.expr(s.expr, p), self.expr(s.payload, p)
                return replace(s, rdims=rdims, expr=e, payload=payload, accumulate=accumulate)

    def targets(self, buf: str) -> list[tuple[str, _Piece | None]]:
        b = self.buffers.get(buf)
        return [(buf, None)] if b is None else [(self.piece_of(b, p).name, p) for p in self.pieces]

    def piece_of(self, b: ir.Buffer, p: _Piece) -> ir.Buffer:
        at = b.dims.index(self.dim)
        dims = (*b.dims[:at], p.dim, *b.dims[at + 1 :])
        extents = (*b.extents[:at], self.sizes[p.dim], *b.extents[at + 1 :])
        return replace(b, name=f"{b.name}_{p.dim}", dims=dims, extents=extents)

    def load(self, ld: Load, p: _Piece | None) -> Load:
        new = self.expr(ld, p)
        assert isinstance(new, Load)
        return new

    def expr(self, e: Expr, p: _Piece | None) -> Expr:
        """`e` with the dim's index replaced by the piece's; without a piece the dim may not vary in it."""
        if p is None:
            if self.dim in dims_used(e) or any(isinstance(x, Load) and x.tensor in self.buffers for x in _nodes(e)):
                raise _Computed
            return e
        here = p

        def one(x: Expr) -> Expr | None:
            if isinstance(x, Load) and x.tensor in self.buffers:
                b = self.buffers[x.tensor]
                at = b.dims.index(self.dim)
                if x.index[at] != shifted(here):
                    raise _Computed
                index = (*x.index[:at], Index(here.dim), *x.index[at + 1 :])
                return Load(self.piece_of(b, here).name, index)
            if x == Index(self.dim):
                return shifted(here)
            return None

        return transform(e, one)


class _Computed(Exception):
    """A value is read along the dim in a way that pieces cannot express."""


def shifted(p: _Piece) -> Expr:
    """The dim's index in terms of the piece's."""
    return Index(p.dim) + p.start if p.start else Index(p.dim)


def _nodes(e: Expr) -> list[Expr]:
    out: list[Expr] = []
    transform(e, lambda n: out.append(n))
    return out


def product_dims(kernel: ir.Kernel) -> tuple[str, ...]:
    """Dims of sums of products of two loads: those a matrix unit sees."""
    found: dict[str, None] = {}

    def visit(stmts: Sequence[ir.Stmt]) -> None:
        for s in stmts:
            match s:
                case ir.For(body=body):
                    visit(body)
                case ir.Gemm(a=a, b=b, rdims=rdims):
                    if len(dims_used(a) ^ dims_used(b)) > 1:
                        found.update(dict.fromkeys((*rdims, *sorted(dims_used(a) | dims_used(b)))))

    visit(kernel.body)
    return tuple(found)
