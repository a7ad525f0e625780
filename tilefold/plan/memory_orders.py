"""In which order memory has operands and results of a GPU's library products, so that the library copies none.

What the library cannot take as it lies (`tensor.matrix_orders`), torch copies in front of a call or behind it, element
by element where its two orders have other inner axes: a third of the memory's rate, and none of it is seen by whoever
makes or reads the tensor. Here, before kernels are formed,

    what the program makes   is made with its axes in another order, if the products that make or read it all take that;
                             kernels write and read any order (Law: a tensor stored with its axes in another order and
                             read at the reordered indices is the same tensor)
    one operand for rows     that are not side by side is stored once for each, so that they are a batch, if that is
                             less than turning the other operand and the result:
                                 a[i, j, k, m] * b[j, m, l]  ->  a[i, j, k, m] * b'[i, j, m, l]
    what a call makes        has the inner axis that its readers move otherwise, where the library writes that as well:
                             it writes a matrix or the transposed one
    what is left             is copied by statements, which kernels compute at the memory's rate, once for all readers;
                             a copy that is a result of the program is read in their place

Not what conventions fix: results of the program (a copy is made of them), operands of convolutions and other calls. Not
inputs either whose copy would have the same inner axis, where nobody knows how they lie: whoever gives them may have
them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import factorial, prod

from tilefold.algebra.expr import Expr, Index, Load, loads, substitute, tensors_read
from tilefold.block.twins import skeleton
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.plan.library import Matrices, bias_of
from tilefold.tensor.analysis import is_map
from tilefold.tensor.convolution import convolution
from tilefold.tensor.convolution_gradients import gradient
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.matrix_orders import Copied, Orders, copied
from tilefold.tensor.product import Product, library_product
from tilefold.tensor.rewrite import in_order, rename_loads
from tilefold.tensor.sizes import estimate

#: Orders of a tensor that are looked at; the share of its bytes that a kernel with another inner axis costs.
MOST_ORDERS, INNER = factorial(5), 0.5
#: An order of axes: that which comes first, and so on.
Order = tuple[int, ...]
#: How many times as long as a kernel of ours the library takes to copy what has another inner axis.
BY_ELEMENTS = 3
Shape = Callable[[str], tuple[Expr, ...]]


def without_copies(
    p: Program, products: frozenset[str], gpu: Gpu, fixed: Collection[str] = (), given: Collection[str] = ()
) -> tuple[Program, frozenset[str]]:
    """The program whose library products take operands as they lie, and the names of the products in it. fixed:
    statements whose tensors stay as they are. given: results that come in whatever order their call gives them
    (attention's, with heads side by side), which are not copied."""
    calls = [c for c in p.body if c.name in products and c.name not in fixed and _plain(p, c) is not None]
    names = [c.name for c in calls]
    kept = _kept(p, {*fixed, *(products - {*names})})
    copies = any(library_copies(p, c) for c in calls)
    for name in names if copies else ():
        p = _for_rows(p, name, gpu, kept)
    p = _turned(p, names, gpu, kept)
    if not any(library_copies(p, _of_name(p, name)) for name in names):
        return p, products
    names_of = set(products)
    for name in names:
        p = _copies(p, name, given)
        p, made = _apart(p, name)
        names_of = names_of - {name} | {made}
    return p, frozenset(names_of)


def library_copies(p: Program, c: Compute) -> int:
    """Bytes that the library copies for a product: of operands and of the result."""
    found = _copied(c, p.sizes, p.shape_of)
    if found is None:
        return 0
    a, b = loads_of(c, p.sizes)
    widths = p.dtype_of(a.tensor).nbytes, p.dtype_of(b.tensor).nbytes
    return found.a * widths[0] + found.b * widths[1] + found.out * c.dtype.nbytes


def seconds_of_copies(p: Program, c: Compute, gpu: Gpu) -> float:
    """Seconds that copies for a product take: at the memory's rate where kernels of ours make them, at a third of it
    where its result has more axes than are looked at here, and the library copies."""
    looked_at = bool(_orders(_runs([(c.dims, c)], p.sizes)))
    slower = 1 if looked_at else BY_ELEMENTS
    n = library_copies(p, c)
    return gpu.copied(slower * n) if n else 0.0


def loads_of(c: Compute, sizes: Mapping[str, Expr]) -> tuple[Load, Load]:
    """The operands of a library's product."""
    found = library_product(c, sizes)
    assert found is not None and found.loads is not None, c
    return found.loads


def _of_name(p: Program, name: str) -> Compute:
    return next(c for c in p.body if c.name == name)


def _plain(p: Program, c: Compute) -> Product | None:
    """A product of plain operands, with matrices of more than one row and column, that is no convolution."""
    if gradient(c, p) is not None or convolution(c, p) is not None:
        return None
    found = library_product(c, p.sizes)
    matrix = found is not None and found.loads is not None and not found.shared
    return found if matrix and found is not None and found.is_matrix(lambda d: estimate(p.sizes[d]) > 1) else None


def _copied(c: Compute, sizes: Mapping[str, Expr], shape: Shape) -> Copied | None:
    found = library_product(c, sizes)
    if found is None or found.loads is None or found.shared:
        return None
    a, b = found.loads
    m = Matrices.of(found, a, sizes)
    return copied(found, sizes, Orders(m.batch, m.rows, m.cols, m.depth), (shape(a.tensor), shape(b.tensor)))


def _kept(p: Program, fixed: Collection[str]) -> frozenset[str]:
    """Tensors that have to lie as they do."""
    at = {c.name: c for c in p.body}
    read = {ld.tensor for n in fixed if n in at for ld in loads(at[n].body)}
    pairs = ((at[t], m) for m in p.body for t in tensors_read(m.body) if t in at)
    biased = {t for c, m in pairs if bias_of(p, c, m.body) for t in (c.name, m.name)}
    positions = {r for c in p.body if c.index_name is not None for r in c.results}
    return frozenset({*p.outputs, *fixed, *read, *biased, *positions, *(i.name for i in p.inputs)})


# -- what the program makes -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Around:
    """A tensor that the program makes: the calls that make or read it, which axis each kernel that does would have as
    the inner one."""

    made: Compute
    calls: tuple[Compute, ...]
    kernels: tuple[int, ...]


def _turned(p: Program, calls: Sequence[str], gpu: Gpu, kept: Collection[str]) -> Program:
    """The program in which tensors have the order of axes in which least is copied around them."""
    near = {t for c in p.body if c.name in calls for t in (c.name, *tensors_read(c.body))}
    known = dict[Hashable, Order | None]()  # of tensors that differ in names only (the layers of a model)
    for name in [c.name for c in reversed(p.body) if c.name in near and c.name not in kept]:
        around = _around(p, name, calls)
        if around is None:
            continue
        key = _nameless(p, around)
        if key not in known:
            known[key] = _best(p, around, gpu)
        best = known[key]
        if best is not None:
            p = replace(p, body=tuple(read_turned(c, name, best) for c in p.body))
    return p


def _best(p: Program, around: _Around, gpu: Gpu) -> Order | None:
    """The order of axes in which least is copied; None: the present one."""
    across = around.made in around.calls and any(n < len(around.made.dims) - 1 for n in around.kernels)
    if not across and not any(library_copies(p, c) for c in around.calls):
        return None
    usual = tuple(range(len(around.made.dims)))
    orders = _orders_around(p, around.made, around.calls) or (usual,)
    best = min(orders, key=lambda o: _seconds(p, around, o, gpu))
    return None if best == usual else best


def _nameless(p: Program, around: _Around) -> Hashable:
    """All that decides the order of a tensor's axes, with numbers in the place of names."""
    dims, tensors, rows = dict[str, int](), dict[str, int](), list[Hashable]()
    for c in (around.made, *around.calls):
        number, own, read = skeleton(c)
        places = tuple([tensors.setdefault(t, len(tensors)) for t in read])
        rows.append((number, tuple([dims.setdefault(d, len(dims)) for d in own]), places))
    extents = tuple([p.sizes[d] for d in dims])
    return tuple(rows), around.kernels, extents, tuple([(p.dtype_of(t), p.shape_of(t)) for t in tensors])


def _around(p: Program, name: str, calls: Sequence[str]) -> _Around | None:
    readers = [c for c in p.body if name in tensors_read(c.body)]
    made = _of_name(p, name)
    mine = tuple(c for c in (made, *readers) if c.name in calls)
    if not mine or len(made.dims) < 2:
        return None
    return _Around(made, mine, tuple(_inner(p, c, made) for c in (made, *readers) if c.name not in calls))


def _inner(p: Program, c: Compute, made: Compute) -> int:
    """The axis of a tensor that is the inner one of most that a kernel moves beside it, if that is about as much as the
    tensor; else its last. What varies along one axis alone is not: the nearest of 1,024 centres took 364 us on an H200
    with distances of a point side by side, 460 with those of a centre, of which there are fewer."""
    last, weights = len(made.dims) - 1, dict[str, int]()
    beside = [(ld.tensor, _dims_of(ld)) for ld in loads(c.body) if ld.tensor != made.name]
    for tensor, dims in [*beside, *([(c.name, c.dims)] if is_map(c) else [])]:
        if dims and dims[-1] is not None:
            nbytes = prod(map(estimate, p.shape_of(tensor))) * p.dtype_of(tensor).nbytes
            weights[dims[-1]] = weights.get(dims[-1], 0) + nbytes
    much = INNER * prod(map(estimate, p.shape_of(made.name))) * made.dtype.nbytes
    most = max((d for d, n in weights.items() if n >= much), key=weights.__getitem__, default=None)
    mine = next((_dims_of(ld) for ld in loads(c.body) if ld.tensor == made.name), ())
    return mine.index(most) if c is not made and most is not None and most in mine else last


def _orders_around(p: Program, made: Compute, calls: Sequence[Compute]) -> tuple[Order, ...]:
    """Orders of the axes of a tensor that these calls make or read."""
    read = ((_dims_of(ld), c) for c in calls for ld in loads(c.body) if ld.tensor == made.name)
    return _orders(_runs([*((made.dims, c) for c in calls if c.name == made.name), *read], p.sizes))


def _dims_of(ld: Load) -> tuple[str | None, ...]:
    return tuple(ix.dim if isinstance(ix, Index) else None for ix in ld.index)


def _runs(seen: Sequence[tuple[Sequence[str | None], Compute]], sizes: Mapping[str, Expr]) -> tuple[Order, ...]:
    """Axes of a tensor, in runs that stay as they are: each by itself where they are few; of many (windows of images
    and places in them), those side by side that all products take as one, rows or columns or a batch. seen: the dims
    that the axes are to products."""
    axes = len(seen[0][0])
    if factorial(axes) <= MOST_ORDERS:
        return tuple((n,) for n in range(axes))
    sides = [{d: side for side, group in enumerate(_groups(c, sizes)) for d in group} for _, c in seen]
    kinds = [tuple(side.get(dims[n] or "") for side, (dims, _) in zip(sides, seen, strict=True)) for n in range(axes)]
    runs: list[Order] = []
    for n, kind in enumerate(kinds):
        joined = n and kind == kinds[n - 1] and None not in kind
        runs = [*runs[:-1], (*runs[-1], n)] if joined else [*runs, (n,)]
    return tuple(runs)


def _groups(c: Compute, sizes: Mapping[str, Expr]) -> tuple[tuple[str, ...], ...]:
    """The dims of a product that are batch, rows, columns and summed."""
    found = library_product(c, sizes)
    if found is None or found.loads is None or found.shared:
        return ()
    m = Matrices.of(found, found.loads[0], sizes)
    return m.batch, m.rows, m.cols, m.depth


def _orders(runs: Sequence[Order]) -> tuple[Order, ...]:
    """Orders of axes, those that are most like the present one first; none where they are too many."""
    if factorial(len(runs)) > MOST_ORDERS:
        return ()
    return tuple(sorted((tuple(n for run in x for n in run) for x in permutations(runs)), key=_moves))


def _by_sides(c: Compute, sizes: Mapping[str, Expr], dims: Sequence[str]) -> tuple[Order, ...]:
    """Orders of an operand's axes that have a batch, rows or columns, and what is summed over one behind the other, as
    they are: of patches of images, whose places and channels take turns, there are too many others (19 MB of them 39 us
    on an H200 where the library copies element by element, 21 in a kernel)."""
    sides = (tuple(n for n, d in enumerate(dims) if d in group) for group in _groups(c, sizes))
    runs = [run for run in sides if run]
    return _orders(runs) if sum(map(len, runs)) == len(dims) else ()


def _moves(order: Order) -> tuple[bool, int]:
    pairs = sum(a > b for n, a in enumerate(order) for b in order[n + 1 :])
    return order[-1] != len(order) - 1, pairs


def _seconds(p: Program, around: _Around, order: Sequence[int], gpu: Gpu) -> float:
    """Of copies that the library makes with the tensor in this order, and what kernels lose by another inner axis."""
    made, memory = around.made, gpu.reached * gpu.bandwidth
    nbytes = prod(estimate(p.sizes[d]) for d in made.dims) * made.dtype.nbytes
    turned = read_turned(made, made.name, order)

    def shape(tensor: str) -> tuple[Expr, ...]:
        return tuple(p.sizes[d] for d in turned.dims) if tensor == made.name else p.shape_of(tensor)

    seconds = INNER * sum(n != order[-1] for n in around.kernels) * nbytes / memory
    if order[-1] != len(order) - 1 and not (is_map(made) or made in around.calls):
        return float("inf")  # a reduction's kernel has the rows that it has
    for c in around.calls:
        found = _copied(read_turned(c, made.name, order), p.sizes, shape)
        if found is None:
            return float("inf")
        widths = [p.dtype_of(ld.tensor).nbytes for ld in loads_of(c, p.sizes)]
        for n, width in zip((found.a, found.b, found.out), (*widths, c.dtype.nbytes), strict=True):
            seconds += gpu.copied(n * width) if n else 0.0
    return seconds


def read_turned(c: Compute, name: str, order: Sequence[int]) -> Compute:
    """A statement where that tensor, if it makes or reads it, has its axes in this order."""
    if c.name != name and name not in tensors_read(c.body):
        return c

    def one(x: Load) -> Expr | None:
        return Load(name, tuple(x.index[n] for n in order)) if x.tensor == name else None

    dims = tuple(c.dims[n] for n in order) if c.name == name else c.dims
    return replace(c, dims=dims, body=rename_loads(c.body, one))


# -- copies of operands -----------------------------------------------------------------------


def _for_rows(p: Program, name: str, gpu: Gpu, kept: Collection[str]) -> Program:
    """The program in which a dim of rows is a batch, and the other operand stored for each, where that takes less."""
    c = _of_name(p, name)
    x = _plain(p, c)
    if x is None or not x.batch or not library_copies(p, c):
        return p
    memory, best = gpu.reached * gpu.bandwidth, (_least_seconds(p, name, gpu, kept), p)
    assert x.loads is not None
    for side, ld in ((x.rows, x.loads[1]), (x.cols, x.loads[0])):
        for d in side if len(side) > 1 else ():
            dims = (d, *(ix.dim for ix in ld.index if isinstance(ix, Index)))
            once = prod(estimate(p.sizes[e]) for e in dims[1:]) * p.dtype_of(ld.tensor).nbytes
            q = _stored(p, c, ld, dims)
            cost = gpu.second_kernel + (1 + estimate(p.sizes[d])) * once / memory
            best = min(best, (cost + _least_seconds(q, name, gpu, kept), q), key=lambda found: found[0])
    return best[1]


def _least_seconds(p: Program, name: str, gpu: Gpu, kept: Collection[str]) -> float:
    """Of copies for a product, where one of its tensors that the program makes may have another order."""
    c = _of_name(p, name)
    made = (_of_name(p, t) for t in _own(p, c) if t not in kept)
    ways = [_seconds(p, _Around(m, (c,), ()), o, gpu) for m in made for o in _orders_around(p, m, (c,))]
    n = library_copies(p, c)
    return min([gpu.copied(n) if n else 0.0, *ways])


def _own(p: Program, c: Compute) -> list[str]:
    """What a product makes, and what it reads of the program."""
    return [c.name, *(ld.tensor for ld in loads(c.body) if not p.is_input(ld.tensor))]


def _copies(p: Program, name: str, given: Collection[str]) -> Program:
    """The program in which the operands of a product that are copied are so by statements."""
    for side in (0, 1):
        c = _of_name(p, name)
        found = _copied(c, p.sizes, p.shape_of)
        if found is None or not (found.a, found.b)[side]:
            continue
        ld = loads_of(c, p.sizes)[side]
        axes = [ix for ix in ld.index if isinstance(ix, Index)]
        dims = [ix.dim for ix in axes]
        orders = (_orders(_runs([(dims, c)], p.sizes)) or _by_sides(c, p.sizes, dims)) if len(dims) > 1 else ()
        if ld.tensor in given or not orders:
            continue
        ways = ([dims[n] for n in order] for order in orders)
        stored = (_stored(p, c, ld, way) for way in ways)
        q = min(stored, key=lambda q: (library_copies(q, _of_name(q, name)), len(q.body)))  # one that is there
        given_so = p.is_input(ld.tensor) and not p.is_row_major(ld.tensor)
        if not (given_so and loads_of(_of_name(q, name), p.sizes)[side].index[-1] == axes[-1]):
            p = q
    return p


def _stored(p: Program, c: Compute, ld: Load, dims: Sequence[str]) -> Program:
    """The program in which a product reads a copy of what it loads with axes in this order, which may be there."""
    wanted = _places(dims, ld.index), tuple(p.sizes[d] for d in dims)
    there = next((m for m in p.body if _is_copy(p, m, ld, wanted)), None)
    name = there.name if there is not None else fresh(f"{ld.tensor}_turned", set(p.names))
    reader = replace(c, body=substitute(c.body, {ld: Load(name, tuple(map(Index, dims)))}))
    copy = Compute(name, tuple(dims), p.dtype_of(ld.tensor), ld, loc=c.loc, origin=c.origin)
    body = [y for x in p.body for y in (([copy] if there is None else []) + [reader] if x is c else [x])]
    return in_order(replace(p, body=tuple(body)))


def _is_copy(p: Program, m: Compute, ld: Load, wanted: object) -> bool:
    """Whether a statement copies just that."""
    if m.reducer is not None or not isinstance(m.body, Load) or m.body.tensor != ld.tensor:
        return False
    plain = all(isinstance(a, Index) == isinstance(b, Index) for a, b in zip(m.body.index, ld.index, strict=True))
    places = all(isinstance(b, Index) or a == b for a, b in zip(m.body.index, ld.index, strict=True))
    return plain and places and (_places(m.dims, m.body.index), tuple(p.sizes[d] for d in m.dims)) == wanted


def _places(dims: Sequence[str], index: Sequence[Expr]) -> tuple[int | None, ...]:
    """Where each dim of an index stands among these."""
    known = {d: n for n, d in enumerate(dims)}
    return tuple(known.get(ix.dim) for ix in index if isinstance(ix, Index))


def _apart(p: Program, name: str) -> tuple[Program, str]:
    """The program in which a result that the library would copy is so by a statement, and the product's new name."""
    c = _of_name(p, name)
    found = _copied(c, p.sizes, p.shape_of)
    orders = _orders(_runs([(c.dims, c)], p.sizes))
    if found is None or not found.out or not orders:
        return p, name
    made = replace(c, name=fresh(f"{name}_made", set(p.names)))
    ways = [read_turned(made, made.name, order) for order in orders]
    best = min(ways, key=lambda m: library_copies(replace(p, body=(*p.body, m)), m))
    copy = replace(c, body=Load(best.name, tuple(map(Index, best.dims))), reducer=None, rdims=(), origin="")
    return replace(p, body=tuple(y for x in p.body for y in ((best, copy) if x is c else (x,)))), best.name
