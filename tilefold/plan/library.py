"""Which contractions are left to the machine's matrix library, and as what calls.

A plain matrix product gains nothing from generated code that the library does not have;
fused into a neighbour it saves the traffic of its result but runs at the generated code's
rate. Both sides are charged with the rates of `plan.hardware`.

A bias that every reader adds to a product is added by the library's own epilogue: the product is
read once less, and rounded once, as eager's `addmm` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    dims_used,
    loads,
    places,
    tensors_read,
    transform,
    walk,
)
from tilefold.names import free
from tilefold.plan.hardware import Machine
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.convolution import Convolution, convolution
from tilefold.tensor.convolution_gradients import Gradient, gradient
from tilefold.tensor.convolution_tails import Tail, of_call
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.matrix_orders import Orders, best_orders, copied
from tilefold.tensor.product import Product, library_product, product_of, spread
from tilefold.tensor.sizes import estimate


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A product of `a` and `b`, with a bias over its columns or without: the statements that it stands for, the last of
    which is `out`. `matrices`: how dims become those of matrices."""

    members: tuple[str, ...]
    out: str
    dtype: DType
    a: Load
    b: Load
    product: Product
    matrices: Matrices
    bias: Load | None = None


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """A convolution, which stands for one statement, or for two with its tail (`tensor.convolution_tails`), which adds
    `shift` and `tail.added`. `form`: what the library has to be told."""

    compute: Compute
    form: Convolution
    tail: Tail | None = None
    shift: Load | None = None

    @property
    def out(self) -> str:
        return self.members[-1]

    @property
    def members(self) -> tuple[str, ...]:
        return (self.compute.name,) if self.tail is None else (self.compute.name, self.tail.map.name)


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A gradient of a convolution, which stands for one statement. `form`: what the library has to be told."""

    compute: Compute
    form: Gradient

    @property
    def out(self) -> str:
        return self.compute.name

    @property
    def members(self) -> tuple[str, ...]:
        return (self.compute.name,)


@dataclass(frozen=True, slots=True)
class Matrices:
    """How a product of dims becomes one of matrices.

    split: dim -> heads that share an operand; such a dim is two axes, `d` (the groups) and `d.in`. batch (empty: one
    product; an operand without these dims is the same for all), rows, cols, depth: dims in the order in which they are
    flattened. swap: columns are in front in the
    result, which is then B^T A^T. order: of the result's axes in those of batch, rows and columns; None where they are
    the same.
    """

    split: Mapping[str, int]
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    depth: tuple[str, ...]
    swap: bool
    order: tuple[int, ...] | None

    @staticmethod
    def of(p: Product, a: Load, sizes: Mapping[str, Expr]) -> Matrices:
        """Of a product whose first operand is `a`. Where operands have what is summed in different orders, it is that
        of the larger one, so that the smaller one is what is turned (images that a linear layer flattens). Else dims
        are in the order of the result, but where less is copied in another (`tensor.matrix_orders`)."""
        split, outer = p.shared, spread(p, sizes)
        inner = tuple(f"{d}.in" for d in p.batch if d in split)
        first_is_shared = any(isinstance(ix, Call) for ix in a.index)
        rows, cols = (tuple(d for d in side if d not in outer) for side in (p.rows, p.cols))
        rows, cols = (rows, (*inner, *cols)) if first_is_shared else ((*inner, *rows), cols)
        depth = tuple(ix.dim for ix in _turns_least(p, a, sizes).index if isinstance(ix, Index) and ix.dim in p.rdims)
        best = best_orders(p, sizes, Orders((*outer, *p.batch), rows, cols, depth))
        batch, rows, cols, depth = best.batch, best.rows, best.cols, best.depth
        have = [*batch, *rows, *cols]
        wanted = [x for d in p.dims for x in ((d, f"{d}.in") if d in split else (d,))]
        swap = wanted != have and wanted == [*batch, *cols, *rows]
        order = None if swap or wanted == have else tuple(have.index(d) for d in wanted)
        return Matrices(split, batch, rows, cols, depth, swap, order)

    @property
    def plain(self) -> bool:
        """Whether the result of `mm` or `bmm` has the axes of the product's."""
        return not self.split and len(self.batch) <= 1 and len(self.rows) == len(self.cols) == 1 and self.order is None


def _turns_least(p: Product, a: Load, sizes: Mapping[str, Expr]) -> Load:
    """The operand whose order of what is summed both take: the first one, unless the other is larger."""
    other = next((ld for ld in p.loads or () if ld != a), a)
    if len(p.rdims) < 2 or any(isinstance(ix, Call) for ix in (*a.index, *other.index)):
        return a
    elements = [math.prod(estimate(sizes[d]) for d in dims_used(ld)) for ld in (a, other)]
    return other if elements[1] > elements[0] else a


#: Rows and columns of the library's usual tile, and the depth from which it cuts contractions for want of tiles.
LIBRARY_TILE, SPLIT_DEPTH = 128, 512
#: Whether the library would rather not add a bias to such a result.
Bare = Callable[[Matrices, DType, Mapping[str, Expr]], bool]


def library_products(p: Program, machine: Machine) -> frozenset[str]:
    """Products that are faster as library calls than inside any fused kernel, and convolutions."""
    g = Graph.of(p)
    products = (c for c in p.body if library_product(c, p.sizes) is not None and _library_wins(g, c, machine))
    return frozenset(c.name for c in products) | library_convolutions(p)


def library_convolutions(p: Program) -> frozenset[str]:
    """Convolutions and their gradients: a kernel of ours computes one place at a time and reads its window again for
    each output."""
    return library_gradients(p) | {c.name for c in p.body if (form := convolution(c, p)) is not None and _shares(form)}


def _shares(form: Convolution) -> bool:
    """Whether any two sums read the same element: of one place for each group memory is all that counts."""
    return bool(form.batch or form.outs or any(s.out is not None for s in form.space))


def library_gradients(p: Program) -> frozenset[str]:
    """Gradients of convolutions, but of weights of one tap and one channel a group: sums of products of elements."""
    found = ((c.name, gradient(c, p)) for c in p.body)
    return frozenset(name for name, of in found if of is not None and not _of_elements(of))


def _of_elements(of: Gradient) -> bool:
    return of.of == "weight" and of.groups and all(w.out is None for w in of.ways)


def _library_wins(g: Graph, c: Compute, machine: Machine) -> bool:
    p = product_of(c)
    if p is None or p.left == p.right:
        return False  # dot products of rows: nothing is used twice, so memory is all that counts
    dtype = g.program.dtype_of(loads(p.a)[0].tensor)
    flops = 2 * g.points((*out_dims(c), *c.rdims))
    # in memory only for the library's sake: the result, and operands that nothing else reads
    moved = g.points(c.dims) * c.dtype.nbytes
    for r in g.producers[c.name]:
        before = g.by_name[r]
        if g.consumers[r] == (c.name,) and not g.escapes(r, (r, c.name)):
            moved += g.points(before.dims) * before.dtype.nbytes
    library = flops / machine.gemm_rate(dtype, library=True) + 2 * moved / machine.bandwidth + machine.launch
    return library < flops / machine.gemm_rate(dtype, library=False)


def bias_apart(m: Matrices, dtype: DType, sizes: Mapping[str, Expr], cores: int) -> bool:
    """Whether a GPU's library is slower with a bias than without one and a kernel that adds it, by more than that.

    Of 16 bits where rows are no multiple of 16 bytes (`ragged`): it copies the bias to the result first. Of float32
    where tiles of 128 x 128 leave multiprocessors without one: the library would cut the contraction, which its
    epilogue rules out (256 x 256 x 1024 on an H200: 29 us with a bias, 14 without).
    """
    if ragged(m, dtype, sizes):
        return True
    extents = [[sizes.get(d) for d in side] for side in (m.rows, m.cols, m.depth)]
    if dtype is not DType.F32 or m.batch or not all(isinstance(n, Const) for side in extents for n in side):
        return False
    rows, cols, depth = (math.prod(int(n.value) for n in side if isinstance(n, Const)) for side in extents)
    return depth >= SPLIT_DEPTH and -(-rows // LIBRARY_TILE) * -(-cols // LIBRARY_TILE) < cores


def ragged(m: Matrices, dtype: DType, sizes: Mapping[str, Expr]) -> bool:
    """Whether a result of 16 bits has rows that are no multiple of 16 bytes: the library of a GPU is slow to write it
    where it is packed. Symbolic extents are taken to be multiples."""
    extents = [
        Const(m.split[d.removesuffix(".in")], DType.I64) if d.endswith(".in") else sizes[d]
        for d in (m.rows if m.swap else m.cols)
    ]
    known = [int(n.value) for n in extents if isinstance(n, Const)]
    return dtype.nbytes == 2 and len(known) == len(extents) and math.prod(known) * dtype.nbytes % 16 != 0


def library_calls(
    p: Program,
    products: Iterable[str],
    *,
    bare: Bare = lambda m, dtype, sizes: False,
    tails: frozenset[str] = frozenset(),
    copied: bool = False,
) -> tuple[Program, dict[tuple[str, ...], LibraryCall | ConvolutionCall | GradientCall]]:
    """The calls for these products and convolutions by the statements that they stand for, and the program in which
    biases are statements of their own. bare: of which results no bias is added by the call. tails: convolutions that
    take what follows them along. copied: the library copies a bias to the result before it adds products, so that one
    is added by the maps that read the result, where it has no other readers."""
    wanted = set(products)
    alone = frozenset(c.name for c in p.body if c.name in wanted and _is_bare(p, c, bare))
    if copied:
        alone |= frozenset(c.name for c in p.body if c.name in wanted and _added_by_readers(p, c))
    for c in p.body:
        if c.name in wanted - alone - tails and convolution(c, p) is None:  # whose call adds none: its readers do
            p = _with_bias(p, c)
    found: dict[tuple[str, ...], LibraryCall | ConvolutionCall | GradientCall] = {}
    g = Graph.of(p)
    for c in p.body:
        if c.name in wanted:
            apart = frozenset(() if c.name in alone else g.consumers[c.name])
            call = library_call(g, c, apart, tails=c.name in tails)
            if call is not None:
                found[call.members] = call
    return p, found


def _is_bare(p: Program, c: Compute, bare: Bare) -> bool:
    found = library_product(c, p.sizes)
    if found is None or found.loads is None:
        return False
    return bare(Matrices.of(found, found.loads[0], p.sizes), c.dtype, p.sizes)


def _added_by_readers(p: Program, c: Compute) -> bool:
    """Whether maps of kernels alone read a product's sum with its bias: they add it as they read. A contraction would
    add it to each element as often as it is used; a product of 16 bits would be rounded twice."""
    if c.dtype.nbytes < DType.F32.nbytes:
        return False
    readers = _readers(p, c.name)
    sums = [m for m in readers if bias_of(p, c, unrounded(m))]
    if any(m.name in p.outputs for m in sums):
        return False
    if len(readers) == len(sums) == 1 and sums[0].reducer is None:
        readers = _readers(p, sums[0].name)
    return bool(readers) and readers != sums and all(m.reducer is None for m in readers) and c.name not in p.outputs


def library_call(
    g: Graph, c: Compute, apart: frozenset[str], *, tails: bool = False
) -> LibraryCall | ConvolutionCall | GradientCall | None:
    """The call for a convolution, or for a product, and for its tail (if `tails`) or bias if its only reader, one of
    `apart`, is one; None if c is nothing that a library computes."""
    of = gradient(c, g.program)
    if of is not None and not (_no_image(of.batch, of.read, of.plain) and _as_matrices(g.program, c)):
        return GradientCall(c, of)
    tail = of_call(g, c) if tails and apart.intersection(g.consumers[c.name]) else None
    if tail is not None:
        return ConvolutionCall(c, tail[0].form, *tail)
    form = convolution(c, g.program)
    if form is not None and not (_no_image_made(c, form) and _as_matrices(g.program, c)):
        return ConvolutionCall(c, form)
    p = library_product(c, g.program.sizes)
    if p is None or p.loads is None:
        return None
    a, b = p.loads
    alone = LibraryCall((c.name,), c.name, c.dtype, a, b, p, Matrices.of(p, a, g.program.sizes))
    if len(g.consumers[c.name]) != 1 or c.name in g.program.outputs:
        return alone
    m = g.by_name[g.consumers[c.name][0]]
    bias = bias_of(g.program, c, unrounded(m))
    plain = bias is not None and bias[0].index == tuple(map(Index, c.dims))
    if (
        m.name not in apart
        or bias is None
        or not plain
        or m.reducer is not None
        or m.dims != c.dims
        or m.dtype is not c.dtype
    ):
        return alone
    return replace(alone, members=(c.name, m.name), out=m.name, bias=bias[1])


def _no_image(batch: str | None, *operands: Load) -> bool:
    """Whether images of a convolution's gradient lie with channels in front of a batch: rows of a matrix."""
    return batch is not None and any(Index(batch) in ld.index and ld.index[0] != Index(batch) for ld in operands)


def _no_image_made(c: Compute, form: Convolution) -> bool:
    """Whether a convolution of single taps makes a matrix with outputs in front of a batch, which no call for images
    writes."""
    return form.pointwise and not form.groups and bool(form.batch) and c.dims[0] in form.outs


def _as_matrices(p: Program, c: Compute) -> bool:
    """Whether a product's operands and result are matrices as they lie."""
    x = library_product(c, p.sizes)
    if x is None or x.loads is None or x.shared:
        return False
    a, b = x.loads
    m = Matrices.of(x, a, p.sizes)
    shapes = p.shape_of(a.tensor), p.shape_of(b.tensor)
    return copied(x, p.sizes, Orders(m.batch, m.rows, m.cols, m.depth), shapes).all == 0


def bias_of(p: Program, c: Compute, e: Expr) -> tuple[Load, Load] | None:
    """(product, bias) if `e` adds to an element of the product c the one of its columns' bias that belongs to it, and
    there is one of each column (columns that a ragged product is widened by have none). `e` may read a part of the
    columns, as queries, keys and values of one product do."""
    match e:
        case Call("add", (Load() as x, Load() as y)):
            product, bias = (x, y) if x.tensor == c.name else (y, x)
        case _:
            return None
    found = library_product(c, p.sizes)
    if product.tensor != c.name or bias.tensor == c.name or found is None or found.loads is None:
        return None
    m = Matrices.of(found, found.loads[0], p.sizes)
    if m.batch or m.swap or m.order is not None or m.split:
        return None
    at = dict(zip(c.dims, product.index, strict=True))
    same_type = {c.dtype, *(p.dtype_of(ld.tensor) for ld in (bias, *found.loads))} == {c.dtype}
    one_each = len(set(bias.index)) == len(bias.index) == len(m.cols)
    if not (same_type and one_each and set(bias.index) == {at[d] for d in m.cols}):
        return None
    extents = dict(zip(bias.index, p.shape_of(bias.tensor), strict=True))
    return (product, bias) if all(extents[at[d]] == p.sizes[d] for d in m.cols) else None


def unrounded(m: Compute) -> Expr:
    """What a statement stores, which is rounded as it is stored: without a cast to its own type."""
    return m.body.arg if isinstance(m.body, Cast) and m.body.dtype is m.dtype else m.body


def _readers(p: Program, tensor: str) -> list[Compute]:
    return [m for m in p.body if tensor in tensors_read(m.body)]


def _with_bias(p: Program, c: Compute) -> Program:
    """The program in which all readers of c read a map that adds the bias, where they all add the same one."""
    readers = _readers(p, c.name)
    if c.name in p.outputs or not readers or (len(readers) == 1 and bias_of(p, c, unrounded(readers[0]))):
        return p
    wanted: dict[Expr, Load] = {}
    axes: set[tuple[str, tuple[str, ...]]] = set()
    for m in readers:
        for e in walk(m.body):
            found = bias_of(p, c, e)
            if found is not None:
                product, bias = found
                back = {ix: d for d, ix in zip(c.dims, product.index, strict=True) if ix in bias.index}
                wanted[e] = product
                axes.add((bias.tensor, tuple(back[ix] for ix in bias.index)))
        inside = sum(ld.tensor == c.name for e in places(m.body) for ld in ([e] if isinstance(e, Load) else []))
        if inside != sum(e in wanted for e in places(m.body)):
            return p  # it is also read without a bias
    if len(axes) != 1:
        return p
    ((tensor, dims),) = axes
    plain = Load(c.name, tuple(map(Index, c.dims)))
    body = Call("add", (plain, Load(tensor, tuple(map(Index, dims)))))
    # a sum that is there anyway (a result, what a backward reads) is what the others read
    there = (
        m
        for m in readers
        if wanted.get(unrounded(m)) == plain and (m.reducer, m.dims, m.dtype) == (None, c.dims, c.dtype)
    )
    biased = next(there, None)
    if biased is None:
        name = free(f"{c.name.removesuffix('_mm')}_biased", p.names)
        biased = Compute(name, c.dims, c.dtype, body, loc=c.loc, origin=c.origin)
    name = biased.name

    def read(e: Expr) -> Expr | None:
        return Load(name, wanted[e].index) if e in wanted else None

    out: list[Compute] = []
    for m in p.body:
        if m is readers[0]:
            out.append(biased)
        if m is not biased:
            out.append(replace(m, body=transform(m.body, read)) if m in readers else m)
    return replace(p, body=tuple(out))


def axis_extent(ix: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """Extent of what a dim, or d // c, or a place reads of an axis."""
    match ix:
        case Index(d):
            return sizes[d]
        case Call("floordiv", (Index(d), divisor)):
            return sizes[d] // divisor
    assert not dims_used(ix), ix
    return Const(1, DType.I64)
