"""Products of 16-bit operands on a GPU, with columns and contracted elements in multiples of 16 bytes.

cuBLAS takes any extents, but where rows of operands or results are no multiple of 16 bytes (50257 columns, 1023
features) its kernels move them element by element, or two by two, at a fraction of their rate (`Gpu.ragged`,
`Gpu.ragged_pairs`), wherever the rows begin.
What counts is the axis along which an operand lies in memory: its rows, if it is a transposed one. So operands are
copied with zeros behind their rows, one kernel each, or made so where the program computes them, and the result has
columns that nobody reads, where that is estimated faster. torch.compile pads such products too, decided by timing them.

Law: sum over k of x[k] y[k]  is  sum over k' of where(k' < K, x[k'], 0) where(k' < K, y[k'], 0), K <= K'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used, loads, substitute, tensors_read
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.plan.library_rates import Sizes
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import Product, library_product
from tilefold.tensor.rewrite import drop_dead, rename_loads, substitute_map

#: Bytes that rows are a multiple of; of two elements of 16 bits, and of one.
BYTES, PAIR, ITEM = 16, 4, 2
#: Times as long as a kernel of ours torch takes for a copy with zeros, at a call (H100: 25 MB of bf16 34 us and 1.5).
AT_CALL = 2
SHORT = (DType.F16, DType.BF16)


def rounded(n: int, itemsize: int) -> int:
    """The least extent from n on whose rows are a multiple of 16 bytes."""
    each = max(1, BYTES // itemsize)
    return -(-n // each) * each


@dataclass(frozen=True, slots=True)
class Along:
    """Which extents of a product are those of an axis along which memory lies; that of its columns always is, for the
    result has them."""

    rows: bool = False
    depth: bool = True

    @staticmethod
    def of(x: Product, columns: Collection[str]) -> Along:
        """Of tensors that are row-major, and a result with these columns."""
        last = {ld.index[-1].dim for ld in x.loads or () if ld.index and isinstance(ld.index[-1], Index)}
        return Along(bool(last & x.of_one_side - {*columns}), not last.isdisjoint(x.rdims))


@dataclass(frozen=True, slots=True)
class Ragged:
    """A product of 16-bit operands: its extents, which of them lie along memory, and whether its result is packed.

    made: operands, of its rows and its columns, that need no copy (`made_by_maps`)."""

    sizes: Sizes
    along: Along = Along()
    packed: bool = True
    made: tuple[bool, bool] = (False, False)

    def worth(self, gpu: Gpu, copies: float = 1) -> bool:
        """Whether it is estimated faster with operands copied, and, if it has to be packed, the result too. False where
        nothing is ragged. copies: times as long as kernels of ours they take."""
        slower, moved = self.seconds(gpu, copies)
        return slower > moved

    def seconds(self, gpu: Gpu, copies: float = 1) -> tuple[float, float]:
        """Seconds that it takes more than one of whole rows, as it is and with copies; none where it is one.

        Of batches whose elements are moved one by one memory gives as small a share as a matrix unit does: 768 products
        of 49 x 49 and 49 x 32, 8.5 MB, took 8.6 to 9.8 us on an H200, 32 of 33 x 33 and 33 x 8,192, 35 MB, 37 and 169.
        Torch's copies at a call save nothing of that."""
        rows, depth, columns = self.sizes.rows, self.sizes.depth, self.sizes.cols
        tall, deep, wide = (
            counts and rounded(n, ITEM) != n
            for n, counts in ((rows, self.along.rows), (depth, self.along.depth), (columns, True))
        )
        areas = (
            (rows * depth, (tall or deep) and not self.made[0]),
            (depth * columns, (deep or wide) and not self.made[1]),
            (rows * columns, (tall or wide) and self.packed),
        )
        moved = sum(gpu.copied(copies * self.sizes.batch * n * ITEM) for n, moves in areas if moves)
        each = rows * depth + depth * columns + rows * columns
        moved_once = self.sizes.batch * each * ITEM / (gpu.reached * gpu.bandwidth)
        multiplied = self.sizes.flops / gpu.gemm_rate(DType.BF16, library=True)
        seconds = max(multiplied, moved_once if self.sizes.batch > 1 and copies == 1 else 0.0)
        ragged = [n for n, found in ((rows, tall), (depth, deep), (columns, wide)) if found]
        share = gpu.ragged if any(n * ITEM % PAIR for n in ragged) else gpu.ragged_pairs
        return (seconds / share - seconds, moved) if ragged else (0.0, 0.0)


def slowed(p: Program, c: Compute, gpu: Gpu) -> float:
    """Seconds that a product in the library takes more for its ragged extents, as it is or with copies."""
    found = ragged(p, c)
    return 0.0 if found is None else min(found[1].seconds(gpu))


def made_by_maps(p: Program, c: Compute, x: Product) -> tuple[bool, bool]:
    """Whether the operand of a product's rows, and that of its columns, is what a map of the program computes: its copy
    is that map, with zeros behind its rows. Not behind a reduction of those rows (gradients of scores): in a kernel
    with it they are as long as what it reduces, so that the copy is one more pass."""
    by_name = {m.name: m for m in p.body}
    reduced = frozenset(d for d in (*c.dims, *c.rdims) if d in x.of_one_side or d in c.rdims)

    def made(tensor: str) -> bool:
        m = by_name.get(tensor)
        given = m is None or m.reducer is not None or tensor in p.outputs
        return not given and not _behind_sum(by_name, tensor, reduced)

    rows, columns = (
        all(made(ld.tensor) for ld in x.loads or () if (c.dims[-1] in dims_used(ld)) is side) for side in (False, True)
    )
    return rows, columns


def _behind_sum(at: Mapping[str, Compute], name: str, dims: Collection[str]) -> bool:
    """Whether a map is made, by maps, of a reduction over one of these dims. at: the program's statements."""
    seen, left = {name}, [at[name]]
    while left:
        for t in tensors_read(left.pop().body) - seen:
            seen.add(t)
            c = at.get(t)
            if c is not None and c.reducer is None:
                left.append(c)
            elif c is not None and not {*dims}.isdisjoint(c.rdims):
                return True
    return False


def aligned(p: Program, products: frozenset[str], gpu: Gpu) -> tuple[Program, frozenset[str]]:
    """The program in which ragged products of the library are of copies that are not, where that pays, and the names of
    the library's products in it. Of sizes known before the call; `runtime.aligned` does it at a call for others."""
    made = dict(p.sizes)
    taken = set(p.names)
    body: list[Compute] = []
    names = set(products)
    maps, whole, copies = read_once(p), dict[str, str](), Copies()
    shared = {c.name: c for c in p.body if c.reducer is None and c.name not in {*p.outputs, *maps}}
    for c in p.body:
        found = ragged(p, c) if c.name in products else None
        if found is None or not found[1].worth(gpu):
            body.append(c)
            continue
        new = copied(c, found[0], made, taken, maps, shared, lengthened(c, found[0], found[1].along), copies)
        maps |= {c.name: new[-1]} if c.name in maps else {}
        product = next(s.name for s in new if s.reducer is not None)
        names = names - {c.name} | {product}
        whole[c.name] = product  # which those that read `c` read instead
        body += new
    if len(body) == len(p.body):
        return p, products
    body = made_wide(body, shared, copies, whole)
    body = [
        replace(c, body=rename_loads(c.body, lambda x: replace(x, tensor=whole.get(x.tensor, x.tensor)))) for c in body
    ]
    return drop_dead(replace(p, body=tuple(body), sizes=made)), frozenset(names)


@dataclass(frozen=True, slots=True)
class Copies:
    """What several products read: the longer dim of each, and the copy of each tensor at these indices."""

    longer: dict[str, str] = field(default_factory=dict)
    of: dict[Load, str] = field(default_factory=dict)


def made_wide(
    body: Sequence[Compute], shared: Mapping[str, Compute], copies: Copies, whole: dict[str, str]
) -> list[Compute]:
    """The statements with a copy of a map that others read too in its place, which those read as well: what is written
    with its zeros is not written without them. whole: what is read instead of what."""
    wide: dict[str, str] = {}
    for ld, copy in copies.of.items():
        if ld.tensor in shared and is_whole(ld):
            wide.setdefault(ld.tensor, copy)
    whole |= wide
    by_name, moved = {c.name: c for c in body}, {*wide.values()}
    return [by_name[wide[c.name]] if c.name in wide else c for c in body if c.name not in moved]


def is_whole(ld: Load) -> bool:
    """Whether all of a tensor is read as it is."""
    return all(isinstance(ix, Index) for ix in ld.index) and len(dims_used(ld)) == len(ld.index)


def read_once(p: Program) -> dict[str, Compute]:
    """Maps and products that one statement reads, in one place: a copy computes such maps itself."""
    reads = Counter(ld.tensor for c in p.body for ld in loads(c.body))
    return {c.name: c for c in p.body if reads[c.name] == 1 and c.name not in p.outputs}


def _inlined(e: Expr, maps: Mapping[str, Compute]) -> Expr:
    """With maps in place of their elements."""
    for ld in loads(e):
        m = maps.get(ld.tensor)
        if m is not None and m.reducer is None:
            return _inlined(substitute(e, {ld: substitute_map(m, ld)}), maps)
    return e


def _zeros_behind(e: Expr, d: str, stop: Expr, zero: Const) -> Expr:
    """e, and from `stop` on zeros, which are one more part of what is a concatenation along d."""
    match e:
        case Cast(arg=arg):
            return Cast(_zeros_behind(arg, d, stop, zero), e.dtype)
        case Call("where", (Call("lt", (Index(at), Const(n))) as first, x, rest)) if at == d:
            if isinstance(stop, Const) and n <= stop.value:
                return call("where", first, x, _zeros_behind(rest, d, stop, zero))
    return call("where", call("lt", Index(d), stop), e, zero)


def ragged(p: Program, c: Compute) -> tuple[Product, Ragged] | None:
    """A product of plain matrices of 16 bits, whose columns are the last dim of the result."""
    x = library_product(c, p.sizes)
    if x is None or x.loads is None or c.dtype not in SHORT or not x.is_matrix():
        return None
    plain = all(isinstance(ix, Index | Const) for ld in x.loads for ix in ld.index)
    if not plain or any(p.dtype_of(ld.tensor) is not c.dtype for ld in x.loads) or c.dims[-1] not in x.of_one_side:
        return None
    sizes = {d: e.value for d in (*c.dims, *c.rdims) if isinstance(e := p.sizes[d], Const)}
    if len(sizes) < len(c.dims) + len(c.rdims) or not all(sizes.values()):
        return None
    cols, one = c.dims[-1], x.of_one_side
    beside = [d for d in one if d in (x.rows if cols in x.rows else x.cols) and d != cols]
    n = {d: int(v) for d, v in sizes.items()}
    if beside and rounded(n[cols], ITEM) != n[cols]:  # columns of several dims lie side by side in memory
        return None
    rows = math.prod(n[d] for d in one if d != cols and d not in beside)
    depth, columns = math.prod(n[d] for d in c.rdims), math.prod(n[d] for d in (cols, *beside))
    along = Along.of(x, (cols, *beside))
    along = Along(along.rows and rounded(rows, ITEM) != rows, along.depth and rounded(depth, ITEM) != depth)
    if len(c.rdims) > 1 and along.depth:  # sequences of a batch are summed whole
        return None
    found = Sizes(math.prod(n[d] for d in x.batch), rows, columns, depth)
    return x, Ragged(found, along, c.name in p.outputs, made_by_maps(p, c, x))


def lengthened(c: Compute, x: Product, along: Along) -> tuple[str, ...]:
    """The dims of a call's product that are rounded up."""
    own = x.of_one_side - {c.dims[-1]}
    last = [d for ld in x.loads or () for d in (*c.dims, *c.rdims) if d in own & dims_used(ld.index[-1])]
    return (*(last if along.rows else ()), *(c.rdims if along.depth else ()), c.dims[-1])


def copied(
    c: Compute,
    x: Product,
    sizes: dict[str, Expr],
    taken: set[str],
    maps: Mapping[str, Compute],
    shared: Mapping[str, Compute],
    lengthened: Sequence[str],
    copies: Copies,
) -> list[Compute]:
    """Copies of operands, their product, and the part of it that is `c`."""
    longer: dict[str, str] = {}
    every = (*c.dims, *c.rdims)
    for d in lengthened:
        have = sizes[d]
        assert isinstance(have, Const)
        if (want := rounded(int(have.value), ITEM)) != have.value:
            longer[d] = copies.longer.get(d) or fresh(f"{d}_wide", taken)
            copies.longer[d], sizes[longer[d]] = longer[d], const(want)
    made: list[Compute] = []

    def copy(ld: Expr) -> Load:
        assert isinstance(ld, Load)
        dims = tuple(longer.get(d, d) for ix in ld.index for d in every if d in dims_used(ix))
        at = Load(
            ld.tensor, tuple(Index(longer.get(ix.dim, ix.dim)) if isinstance(ix, Index) else ix for ix in ld.index)
        )
        inside = {new: sizes[d] for d, new in longer.items() if new in dims}
        if not inside:
            return ld
        if at in copies.of:
            return Load(copies.of[at], tuple(map(Index, dims)))
        whole = shared[ld.tensor] if ld.tensor in shared and is_whole(ld) else None
        e: Expr = at if whole is None else substitute_map(whole, at)
        e = Cast(_inlined(e, maps), c.dtype) if whole is not None or ld.tensor in maps else e
        for d, stop in inside.items():
            e = _zeros_behind(e, d, stop, Const(0.0, c.dtype.compute))
        made.append(Compute(fresh(f"{ld.tensor}_wide", taken), dims, c.dtype, e, loc=c.loc))
        copies.of[at] = made[-1].name
        return Load(made[-1].name, tuple(map(Index, dims)))

    factors = copy(x.a), copy(x.b)
    dims, rdims = (tuple(longer.get(d, d) for d in ds) for ds in (c.dims, c.rdims))
    whole = replace(c, dims=dims, rdims=rdims, body=call("mul", *factors))
    if dims == c.dims:
        return [*made, whole]
    whole = replace(whole, name=fresh(f"{c.name}_wide", taken))
    part = Load(whole.name, tuple(map(Index, c.dims)))
    return [*made, whole, replace(c, body=part, reducer=None, rdims=(), origin="")]
