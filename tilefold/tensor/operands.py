"""Operands of products stored as the products read them.

`bf16(s) * v`, where nothing reads s but rounded to bf16: s is stored in bf16, and the product reads plain tensors,
which is what a matrix library takes. A matrix unit rounds its operands so anyway. So are integers (`one_hot(t) @ w`):
a conversion rounds once, wherever it is done.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads, substitute, transform, walk
from tilefold.names import fresh
from tilefold.tensor.analysis import readings
from tilefold.tensor.convolution import Convolution, convolution
from tilefold.tensor.convolution_gradients import gradient
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product, product_of
from tilefold.tensor.rewrite import in_order
from tilefold.tensor.sizes import estimate

_SHORT = (DType.F16, DType.BF16)
#: Rows of one instruction of a matrix unit, and columns that make it worth one.
TILE = 64
#: Bytes of channels that a library's kernel of convolutions reads at once; products of a sum from which one is long.
VECTOR, LONG = 16, 1024


def plain_operands(p: Program) -> Program:
    """The program in which results of float32 and maps of integers that products read, and that all their readers round
    to one type of 16 bits, have that type."""
    operands = {x.tensor for c in p.body for x in _operands(c)}
    if not operands:
        return p
    read: dict[str, set[DType | None]] = {}
    for c in p.body:
        for ld, dtype in readings(c.body):
            read.setdefault(ld.tensor, set()).add(dtype)
    stored: dict[str, DType] = {}
    for c in p.body:
        types = read.get(c.name, set())
        wider = c.dtype is DType.F32 or (c.dtype is DType.I64 and c.reducer is None)
        if c.name in operands and c.name not in p.outputs and c.index_name is None and wider and len(types) == 1:
            (dtype,) = types
            if dtype in _SHORT:
                stored[c.name] = dtype

    def plain(x: Expr) -> Expr | None:
        match x:
            case Cast(Load(tensor, _) as ld, dtype) if stored.get(tensor) is dtype:
                return ld
        return None

    def rounded_once(c: Compute) -> Expr:
        e = transform(c.body, plain)
        return Cast(e, stored[c.name]) if c.name in stored and c.dtype is DType.I64 else e

    body = [replace(c, dtype=stored.get(c.name, c.dtype), body=rounded_once(c)) for c in p.body]
    return replace(p, body=tuple(body)) if stored else p


def multiplied_alike(p: Program, products: Collection[str]) -> Program:
    """The program in which these products, which a matrix library computes, have operands of one type: where the result
    and one operand have the same 16 bits and the other is of float32 (weights of values, gradients of scores), that one
    is stored in 16 bits, which a kernel of ours rounds it to for a matrix unit. A library would convert the narrow one,
    and multiply without such a unit. What others read as it is, or is given, is copied.
    """
    wider = {c.name: ld for c in p.body if c.name in products and (ld := wider_operand(p, c)) is not None}
    if not wider:
        return p
    kinds: dict[str, set[DType | None]] = {ld.tensor: set() for ld in wider.values()}
    for c in p.body:
        for ld in loads(c.body):
            if ld.tensor in kinds:
                kinds[ld.tensor].add(c.dtype if wider.get(c.name) == ld else None)
    whole = (c for c in p.body if c.reducer is None or c.name in products)
    own = {c.name for c in whole if c.name not in p.outputs and len(kinds.get(c.name, ())) == 1} - {
        t for t, found in kinds.items() if None in found
    }
    taken, copies, body = set(p.names), dict[tuple[Load, DType], Load](), list[Compute]()
    for c in p.body:
        ld = wider.get(c.name)
        if ld is None or ld.tensor in own:
            body.append(replace(c, dtype=next(iter(kinds[c.name])) or c.dtype) if c.name in own else c)
            continue
        if (key := (ld, c.dtype)) not in copies:
            name, dims = fresh(f"{ld.tensor}_short", taken), tuple(d for ix in ld.index for d in sorted(dims_used(ix)))
            body.append(Compute(name, dims, c.dtype, ld, loc=c.loc, origin=c.origin))
            copies[key] = Load(name, tuple(map(Index, dims)))
        body.append(replace(c, body=substitute(c.body, {ld: copies[key]})))
    return replace(p, body=tuple(body))


def wider_operand(p: Program, c: Compute) -> Load | None:
    """The operand of float32 of a product whose other one, and result, have 16 bits."""
    x = product_of(c)
    if x is None or x.loads is None or c.dtype not in _SHORT or not all(_plain(ld) for ld in x.loads):
        return None
    found = [ld for ld in x.loads if p.dtype_of(ld.tensor) is DType.F32]
    kinds = {p.dtype_of(ld.tensor) for ld in x.loads}
    return found[0] if len(found) == 1 and kinds == {DType.F32, c.dtype} else None


def _plain(ld: Load) -> bool:
    """Whether each axis is read at a dim of its own, or at one place."""
    dims = [ix.dim for ix in ld.index if isinstance(ix, Index)]
    return len(dims) == len(set(dims)) and all(isinstance(ix, Index | Const) for ix in ld.index)


def stored_operands(p: Program) -> Program:
    """The program in which products of float32 read plain tensors: what one reads at computed positions (a shifted
    window, rows that are taken in another order) is stored so first. So is, of any type, what is read at several summed
    dims in one axis (pixels of a sequence of them: the gradient of an embedding of patches) or at one dim in several
    axes (its digits), or where rows or columns are of short dims alone (windows of a shifted image) or several dims are
    summed (heads and their columns, of the tokens behind the first: 4 x 1024 x 8 x 64 times 512 x 512 took 75 us on an
    H100 where the library takes 7), and a matrix that is made of nothing (the identity).

    No matrix unit takes float32 as it is: the library multiplies it ten times as fast as a kernel that reads its
    operands where they are, and a copy is one pass, also of a table's rows that others name. Of summed dims a kernel's
    loop streams one and holds the others whole, so that nothing is left for rows and columns; its tiles have rows of
    one dim, and columns of one. A copy that the program has (a result) is read, and none stored. Not of windows that
    overlap, and not of a library's convolutions, unless those are slow and the program has them as products
    (`_better_as_patches`).
    """
    taken = {i.name for i in p.inputs} | {r for c in p.body for r in c.results} | set(p.sizes) | set(p.syms)
    body: list[Compute] = []
    there = {_copied(p, c): c.name for c in p.body if c.reducer is None and isinstance(c.body, Load)}
    made: dict[object, str] = {}  # products of one operand (experts) may have other names for what they sum
    for c in p.body:
        reads: dict[Expr, Load] = {}
        for e, name, dtype in (
            *((ld, f"{ld.tensor}_read", p.dtype_of(ld.tensor)) for ld in _to_be_stored(p, c)),
            *_of_nothing(p, c),
        ):
            dims = tuple(d for d in (*c.dims, *c.rdims) if d in dims_used(e))
            copy = Compute(name, dims, dtype, e, loc=c.loc, origin=c.origin)
            same = _copied(p, copy)
            if same not in made:
                made[same] = there.get(same) or fresh(name, taken)
                body += [replace(copy, name=made[same])] if same not in there else []
            reads[e] = Load(made[same], tuple(map(Index, dims)))
        body.append(replace(c, body=substitute(c.body, reads)) if reads else c)
    return in_order(replace(p, body=tuple(body))) if made else p


def _copied(p: Program, c: Compute) -> object:
    """What a map of all that it reads is, without names of dims."""
    places: dict[Expr, Expr] = {Index(d): Index(str(n)) for n, d in enumerate(c.dims)}
    return substitute(c.body, places), c.dtype, tuple(p.sizes[d] for d in c.dims)


def _to_be_stored(p: Program, c: Compute) -> list[Load]:
    x = product_of(c)
    factors = () if x is None else (x.a, x.b)
    if x is None or not all(isinstance(e, Load) for e in factors) or not x.whole or not x.is_matrix():
        return []
    form = convolution(c, p)
    if form is not None and "conv" not in c.origin and _better_as_patches(p, form):
        return [ld for ld in factors if ld == form.x]  # type: ignore[misc]
    if form is not None or library_product(c, p.sizes) is not None or gradient(c, p) is not None:
        return []
    read = [e for e in factors if isinstance(e, Load)]
    wide = (p.dtype_of(ld.tensor) is DType.F32 for ld in read)
    sides = [[estimate(p.sizes[d]) for d in side] for side in (x.rows, x.cols)]
    short = any(max(side) < TILE <= math.prod(side) for side in sides)
    several = short or len(x.rdims) > 1
    computed = (
        ld for ld, w in zip(read, wide, strict=True) if _computed(ld) and (w or several or _flat(ld, c) or _torn(ld))
    )
    return [ld for ld in computed if _looked_up(ld) or not _overlaps(p, ld)]


def _better_as_patches(p: Program, v: Convolution) -> bool:
    """Whether windows that a program multiplies as matrices are to stay that, stored as patches. A library of
    convolutions has no matrix units' kernel for less than 16 bytes of channels, and the patches of so few are no more
    than the result; nor does it cut a long sum for a few places (the gradient of a projection of patches: 16 places of
    28,224 products each for 128 outputs, H100: 4331 us, 10 as a product of matrices)."""
    if v.groups or v.spread > 1 or not v.space:
        return False
    taps = [d for s in v.space if (d := s.tap) is not None]
    places = [*v.batch, *(d for s in v.space if (d := s.out) is not None)]
    sizes = [p.sizes[d] for d in (*taps, *places, *v.channels, *v.outs)]
    if not all(isinstance(n, Const) for n in sizes) or not taps:
        return False
    channels, outs, rows = (_points(p.sizes[d] for d in dims) for dims in (v.channels, v.outs, places))
    depth = channels * _points(p.sizes[d] for d in taps)
    few = channels * v.dtype.nbytes < VECTOR and depth <= outs
    return few or (rows < TILE and depth >= LONG)


def _of_nothing(p: Program, c: Compute) -> list[tuple[Expr, str, DType]]:
    """The factor of a product of matrices that reads nothing, with a name and the type of the other."""
    x = product_of(c)
    if x is None or not x.whole or not x.is_matrix():
        return []
    pairs = ((x.a, x.b), (x.b, x.a))
    return [
        (e, f"{c.name}_constant", p.dtype_of(other.tensor))
        for e, other in pairs
        if not loads(e) and isinstance(other, Load) and p.dtype_of(other.tensor).is_float
    ]


def _points(extents: Iterable[Expr]) -> int:
    return math.prod(map(estimate, extents))


def _computed(ld: Load) -> bool:
    """Whether an axis is read at anything but a dim, one place, or a head that several share."""
    shared = (isinstance(ix, Call) and ix.op == "floordiv" and isinstance(ix.args[0], Index) for ix in ld.index)
    return any(not isinstance(ix, Index | Const) and not s for ix, s in zip(ld.index, shared, strict=True))


def _looked_up(ld: Load) -> bool:
    """Whether what it reads is at places that others give: rows of a table."""
    return len(loads(ld)) > 1


def _overlaps(p: Program, ld: Load) -> bool:
    """Whether its windows have more elements than what they are of."""
    return _points(p.sizes[d] for d in dims_used(ld)) > _points(p.shape_of(ld.tensor))


def _flat(ld: Load, c: Compute) -> bool:
    """Whether an axis is read at several summed dims."""
    return any(len({*dims_used(ix)} & {*c.rdims}) > 1 for ix in ld.index)


def _torn(ld: Load) -> bool:
    """Whether several axes are read at one dim: its digits, as of frames that were repeated."""
    used = [d for ix in ld.index for d in dims_used(ix)]
    return len(set(used)) < len(used)


def _operands(c: Compute) -> list[Load]:
    """What a product reads rounded, also through a guard (the padding of a convolution)."""
    p = product_of(c)
    found = [] if p is None else [x for side in (p.a, p.b) for x in walk(side)]
    return [x.arg for x in found if isinstance(x, Cast) and isinstance(x.arg, Load)]
