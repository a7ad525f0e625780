"""Sums of products: the one place that says what is a matrix product.

    out[batch, rows, cols] = sum over depth of a[batch, rows, depth] * b[batch, depth, cols]

A dim is sorted by which of the two factors vary with it. Heads that share an operand (`q[h] * k[h // 4]`) are in the
batch, and `shared` says so: a program that has the heads of one key side by side may count them among the rows.
What more a place asks for (bare loads, plain indices, no sum over one factor alone) it asks of the `Product`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, children, dims_used, loads, walk
from tilefold.tensor.ir import Compute

#: Elements that are summed, and rows or columns, of the smallest matrices (colours, coordinates): the products that
#: they have are added one after the other, for no matrix unit has tiles so small.
FEW = 7
#: Elements that are summed of the shortest rows that are long: where they are few on both sides, a tile of a library
#: runs along them alone, all but empty.
LONG = 1024


@dataclass(frozen=True, slots=True)
class Product:
    """sum over `rdims` of a * b, kept over `dims`. `left`, `right`: the dims that a and b vary with."""

    a: Expr
    b: Expr
    dims: tuple[str, ...]
    rdims: tuple[str, ...]
    left: frozenset[str]
    right: frozenset[str]

    @property
    def rows(self) -> tuple[str, ...]:
        """Kept dims of `a` alone."""
        return tuple(d for d in self.dims if d in self.left and d not in self.right)

    @property
    def cols(self) -> tuple[str, ...]:
        """Kept dims of `b` alone."""
        return tuple(d for d in self.dims if d in self.right and d not in self.left)

    @property
    def batch(self) -> tuple[str, ...]:
        """Kept dims of both."""
        return tuple(d for d in self.dims if d in self.left and d in self.right)

    @property
    def depth(self) -> tuple[str, ...]:
        """Summed dims of both."""
        return tuple(d for d in self.rdims if d in self.left and d in self.right)

    @property
    def of_one_side(self) -> frozenset[str]:
        """Rows and columns."""
        return (self.left ^ self.right) & frozenset(self.dims)

    @property
    def shared(self) -> dict[str, int]:
        """Dim d of the batch -> least c, where one factor is indexed by d // c: c neighbours share what it holds."""
        found: dict[str, int] = {}
        for d, c in divided(self.a) + divided(self.b):
            if d in self.left and d in self.right:
                found[d] = min(c, found.get(d, c))
        return found

    @property
    def loads(self) -> tuple[Load, Load] | None:
        """The factors, if both are bare loads whose indices load nothing."""
        return (self.a, self.b) if _bare(self.a) and _bare(self.b) else None  # type: ignore[return-value]

    @property
    def distinct(self) -> bool:
        """Whether neither factor, a bare load, has a dim in two of its axes (pixels in rows and columns)."""
        used = [[d for ix in ld.index for d in dims_used(ix)] for ld in self.loads or ()]
        return all(len(set(dims)) == len(dims) for dims in used)

    @property
    def whole(self) -> bool:
        """Whether both factors vary with all that is summed over."""
        return self.left.issuperset(self.rdims) and self.right.issuperset(self.rdims)

    def is_matrix(self, counts: Callable[[str], bool] = lambda d: True) -> bool:
        """Whether there are rows and columns, and sums over both factors: each element of an operand is used several
        times, which matrix units and libraries live on. `counts`: dims that are more than one index."""
        a, b = (frozenset(filter(counts, x)) for x in (self.left, self.right))
        kept, over = frozenset(self.dims), frozenset(self.rdims)
        return bool((a - b) & kept and (b - a) & kept and over & self.left and over & self.right)

    def is_small(self, extent: Callable[[str], float]) -> bool:
        """Whether one operand is a matrix of a few numbers, or a few of these, or the result is, of long rows: see
        `FEW`, `LONG`."""
        few, many = sorted((prod(map(extent, self.rows)), prod(map(extent, self.cols))))
        summed = prod(map(extent, self.rdims))
        return self.whole and (max(few, summed) <= FEW or (many <= FEW and summed >= LONG))

    def packed(self) -> tuple[frozenset[str], frozenset[str]]:
        """`left` and `right` on a tile of heads that share an operand: it is one index of that, and they are rows."""
        return varying(self.a), varying(self.b)


def product_of(c: Compute) -> Product | None:
    """The product that a statement sums, None where it sums or computes something else."""
    return product(c.reducer, c.body, c.dims, c.rdims)


def matrices(c: Compute, extent: Callable[[str], float]) -> Product | None:
    """The product of matrices that a statement is, of more than one row, column and summed element; else None."""
    p = product_of(c)
    return p if p is not None and p.is_matrix(lambda d: extent(d) > 1) else None


def product(reducer: str | None, body: Expr, dims: tuple[str, ...], rdims: tuple[str, ...]) -> Product | None:
    """The same of a statement in any of the IRs, by its parts."""
    if reducer != "sum" or not isinstance(body, Call) or body.op != "mul":
        return None
    a, b = body.args
    return Product(a, b, dims, rdims, dims_used(a), dims_used(b))


def library_product(c: Compute, sizes: Mapping[str, Expr]) -> Product | None:
    """The product that a matrix library computes without copying an operand: floats, each axis of both operands another
    dim or one place (a view: `x[0, i, k]`), but that one operand may be shared by heads (`k[h // 4]`) of a known
    number, a multiple of those that share.

    Dot products of rows are products too, but not `is_matrix`.
    """
    p = product_of(c)
    if p is None or p.loads is None or not c.dtype.is_float or not p.whole or p.left | p.right != {*c.dims, *c.rdims}:
        return None
    plain = [not any(isinstance(ix, Call) for ix in ld.index) for ld in p.loads]
    if not any(plain) or not p.distinct:
        return None
    shared = p.shared
    for ld in p.loads:
        for ix in ld.index:
            match ix:
                case Index():
                    pass
                case Const(n, DType.I64) if n >= 0:
                    pass
                case Call("floordiv", (Index(d), Const(n, DType.I64))) if d in shared and _divides(int(n), sizes[d]):
                    pass
                case _:
                    return None
    return p


#: Elements that rows and columns of a matrix of a batch have at least, and that the inner ones are a multiple of.
SIDE, ALIGNED = 128, 8


def spread(p: Product, sizes: Mapping[str, Expr]) -> tuple[str, ...]:
    """Kept dims of one factor alone that are better a batch, over which the other factor is the same: those in front of
    what is summed, where others lie behind it, and of others the first that the result has in front.

        out[e, n, f] = sum over c of x[n, c] * a[e, c, f]: a product for each e, of a as it lies in memory

    As one product it would have e and f side by side in a copy of a, or of the result. The result must have the order
    of such a batch, and its matrices rows and columns enough for the library's tiles. Empty where there is nothing to
    gain.
    """
    front = (outer for outer, orders in _batches(p, sizes) if p.dims in orders)
    behind = (outer for outer, orders in _batches(p, sizes, in_front=False) if p.dims == orders[0])
    return next(chain(front, behind), ())


def spread_order(p: Product, sizes: Mapping[str, Expr]) -> tuple[str, ...] | None:
    """The order of the result's dims in which some would be a batch (`spread`); None where there is none."""
    return next((orders[0] for _, orders in _batches(p, sizes)), None)


def _batches(
    p: Product, sizes: Mapping[str, Expr], *, in_front: bool = True
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]]]:
    """Dims that might be a batch, and the orders in which the library writes its result. in_front: of what is summed;
    else the first dim behind it."""
    if p.batch or p.loads is None or not p.depth:
        return
    for ld, mine, other in zip(p.loads, (p.rows, p.cols), (p.cols, p.rows), strict=True):
        axes = [ix.dim for ix in ld.index if isinstance(ix, Index)]
        at = [axes.index(d) for d in p.depth if d in axes]
        if len(axes) < len(ld.index) or len(at) < len(p.depth):
            continue
        outer, inner = tuple(axes[: min(at)]), tuple(axes[max(at) + 1 :])
        if not in_front:
            outer, inner = (inner[:1], inner[1:]) if not outer else ((), inner)
        whole = {*outer, *inner} == set(mine) and len(at) == max(at) - min(at) + 1
        few = [_points(dims, sizes) for dims in (inner, other)]
        if outer and inner and whole and min(few) >= SIDE and few[0] % ALIGNED == 0:
            yield outer, ((*outer, *other, *inner), (*outer, *inner, *other))


def _points(dims: tuple[str, ...], sizes: Mapping[str, Expr]) -> int:
    """Elements of these dims; none where an extent is not known."""
    n = 1
    for d in dims:
        e = sizes[d]
        n *= int(e.value) if isinstance(e, Const) else 0
    return n


def _divides(n: int, extent: Expr) -> bool:
    return isinstance(extent, Const) and n > 0 and int(extent.value) % n == 0


@lru_cache(maxsize=1 << 14)
def divided(e: Expr) -> tuple[tuple[str, int], ...]:
    """(d, c) for each d // c in the indices of an expression."""
    found: list[tuple[str, int]] = []
    for n in walk(e):
        match n:
            case Call("floordiv", (Index(d), Const(c, DType.I64))):
                found.append((d, int(c)))
    return tuple(found)


def varying(e: Expr) -> frozenset[str]:
    """Dims that an expression varies with where those it only has divided are in tiles of the divisor."""
    match e:
        case Call("floordiv", (Index(), Const())):
            return frozenset()
        case Index(d):
            return frozenset({d})
    return frozenset(d for k in children(e) for d in varying(k))


def _bare(e: Expr) -> bool:
    return isinstance(e, Load) and len(loads(e)) == 1
