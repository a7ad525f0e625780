"""Operands of convolutions in the memory order that a library wants: channels last, converted by statements.

Law: a tensor stored with its axes in another order and read at the reordered indices is the same tensor. A
convolution whose result has contiguous channels takes operands that have them; the library converts others in every
call, with copies that read or write single elements. As statements the conversions run at the rate of memory, once for
all readers, and a map that is stored for the convolution alone is stored in the order that it wants to begin with.

Windows whose results lie so (means of an image's places beside convolutions of it) read the conversion too, where rows
of planes leave lanes idle: neighbours of theirs are neighbours there. A block with means of 3 x 3 over rows of 17
places took 194 us on an H200, and 179 so; one with maxima over rows of 28, which fill lanes, 94 either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used, loads
from tilefold.names import free, fresh
from tilefold.tensor.convolution import Convolution, axis_of, convolution, group_axes, is_channels_last
from tilefold.tensor.convolution_gradients import gradient, images_last, is_last, operand_orders
from tilefold.tensor.index_simplify import const, same
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product, spread, spread_order
from tilefold.tensor.rewrite import rename_loads

#: Places from which a window is one; lanes over places of a row from which too many are idle.
WINDOW, IDLE = 4, 3 / 2


def channels_last_operands(p: Program, contiguous: Mapping[str, int]) -> Program:
    """The program in which convolutions with channels-last results read channels-last operands, and those of groups
    with results in planes read planes.

    contiguous: of inputs, the axis along which neighbours lie side by side; the last one of those that are not named.
    Side conditions: an operand is read whole (no slice of it), at one place of the program's convolution.
    """
    for name in [c.name for c in p.body]:
        c = next(c for c in p.body if c.name == name)
        of = gradient(c, p)
        if of is not None:
            for load, order in operand_orders(of) if is_last(c, of) else ():
                p = _converted(p, name, load, order, contiguous)
            continue
        form = convolution(c, p)
        if form is None:
            p = _rows_together(p, c, contiguous)
            continue
        if not is_channels_last(c, form):
            if form.groups or form.spread > 1:
                p = _converted(p, name, form.x, _planes(form), contiguous)
            continue
        outs, taps = (*form.groups, *form.outs), [s.tap for s in form.space if s.tap is not None]
        of_w = [axis_of(form.w, d) for d in (*outs, *taps, *form.channels)]
        places, batch = [s.axis for s in form.space], [axis_of(form.x, d) for d in form.batch]
        of_x = [*batch, *places, *group_axes(form), *(axis_of(form.x, d) for d in form.channels)]
        for load, order in ((form.x, of_x), (form.w, of_w)):
            p = _converted(p, name, load, order, contiguous)
    return _windows_of_copies(p)


def _windows_of_copies(p: Program) -> Program:
    """The program in which windows that are stored as a reordered copy lies read that in place of what it is of."""
    inputs = {i.name for i in p.inputs}
    for copy in p.body:
        if not (copy.reducer is None and isinstance(copy.body, Load) and copy.body.tensor in inputs):
            continue
        of, shape = copy.body, p.shape_of(copy.body.tensor)
        moving = [n for d in copy.dims for n, i in enumerate(of.index) if i == Index(d)]
        if moving == sorted(moving) or not _is_copy(copy, of.tensor, moving, shape) or _fills_lanes(shape, moving):
            continue
        rest = [c if c is copy else _window_of(c, copy, of.tensor, moving, p) for c in p.body]
        if rest != list(p.body):  # it is of an input: it may come first
            p = replace(p, body=(copy, *(c for c in rest if c is not copy)))
    return p


def _fills_lanes(shape: Sequence[Expr], moving: Sequence[int]) -> bool:
    """Whether rows of a tensor's planes, whose channels are moved behind them, leave few lanes idle."""
    row = shape[max(moving[:-1])]
    return not isinstance(row, Const) or 1 << (int(row.value) - 1).bit_length() < IDLE * row.value


def _window_of(c: Compute, copy: Compute, tensor: str, moving: Sequence[int], p: Program) -> Compute:
    """A statement, reading the copy if it has windows of the tensor and is stored with the copy's last axis last."""
    mine = [x for x in dict.fromkeys(loads(c.body)) if x.tensor == tensor]
    along = bool(c.dims) and all(x.index[moving[-1]] == Index(c.dims[-1]) for x in mine)
    if along and sum(_taps(c, x, p) for x in mine) >= WINDOW:
        for x in mine:
            c = _reading(c, x, copy.name, moving)
    return c


def _taps(c: Compute, x: Load, p: Program) -> int:
    """Places that a statement reads a tensor in for each element, as far as extents are known."""
    dims = {d for i in x.index if not isinstance(i, Index) for d in dims_used(i)} & {*c.rdims}
    return prod(int(n.value) if isinstance(n := p.sizes[d], Const) else 1 for d in dims)


def library_turns(c: Compute, dims: Sequence[str], p: Program) -> bool:
    """Whether the library would turn a convolution's result, or the gradient of an image, that has contiguous channels,
    to store it in the order of these dims: a pass of its own (59 MB on an H100: 61 us, 42 in a kernel), and the
    operands would come to it in that order, too. Not of single taps, which are products, nor of groups.
    """
    turned = replace(c, dims=tuple(dims))
    of = gradient(c, p)
    if of is not None:
        windows = of.of == "image" and not of.groups and not all(same(w.taps, const(1)) for w in of.ways)
        return windows and images_last(c, of) and not images_last(turned, of)
    form = convolution(c, p)
    if form is None or form.pointwise or form.groups or form.spread > 1:
        return False
    return is_channels_last(c, form) and not is_channels_last(turned, form)


def _planes(v: Convolution) -> list[int]:
    """The axes of an image with channels in front of its places."""
    channels = [*group_axes(v), *(axis_of(v.x, d) for d in v.channels)]
    return [*(axis_of(v.x, d) for d in v.batch), *channels, *(s.axis for s in v.space)]


def taps_in_front(p: Program, names: Collection[str]) -> Program:
    """The program in which channels-last convolutions of one channel a group read weights with contiguous channels:
    where they are written out, each tap is a vector beside those of the image."""
    for c in [c for c in p.body if c.name in names]:
        form = convolution(c, p)
        if form is not None and is_channels_last(c, form):
            dims = (*(s.tap for s in form.space if s.tap is not None), *form.groups, *form.outs)
            p = _converted(p, c.name, form.w, [axis_of(form.w, d) for d in dims], {})
    return p


def _rows_together(p: Program, c: Compute, contiguous: Mapping[str, int]) -> Program:
    """The same for a product of matrices whose rows lie on both sides of what is summed (images with channels in
    front): the library would copy it, for its rows are one axis. Inputs that can be a batch (`spread`) stay as they lie
    in memory; the result is then written as such a batch, if the program needs no other order. What the
    program makes for several readers has the order that they are best with together (`plan.memory_orders`)."""
    product = library_product(c, p.sizes)
    if product is None or product.loads is None or product.batch:
        return p
    given = {i.name for i in p.inputs}
    for load, side in zip(product.loads, (product.rows, product.cols), strict=True):
        axes = [n for n, i in enumerate(load.index) if isinstance(i, Index)]
        rows = [n for n in axes if load.index[n] in [Index(d) for d in side]]
        depth = [n for n in axes if n not in rows]
        if len(depth) != 1 or not rows or not min(rows) < depth[0] < max(rows):
            continue
        if load.tensor not in given and _for_one_reader(p, load.tensor) is None:
            continue
        order = spread_order(product, p.sizes) if load.tensor in given else None
        if order is None or (c.name in p.outputs and not spread(product, p.sizes)):
            p = _converted(p, c.name, load, [*rows, *depth], contiguous)
        elif not spread(product, p.sizes):
            p = _turned(p, c, order)
    return p


def _for_one_reader(p: Program, name: str) -> Compute | None:
    """The map that makes a tensor, if one statement reads it, in one place, and the caller does not."""
    made = next((c for c in p.body if c.name == name), None)
    if made is None or made.reducer is not None or name in p.outputs:
        return None
    return made if sum(x.tensor == name for c in p.body for x in loads(c.body)) == 1 else None


def _turned(p: Program, c: Compute, dims: Sequence[str]) -> Program:
    """The program in which the result of c has its axes in that order."""
    at = [c.dims.index(d) for d in dims]

    def one(x: Load) -> Expr | None:
        return Load(x.tensor, tuple(x.index[n] for n in at)) if x.tensor == c.name else None

    body = [replace(x, body=rename_loads(x.body, one)) for x in p.body]
    return replace(p, body=tuple(replace(x, dims=tuple(dims)) if x.name == c.name else x for x in body))


def _converted(p: Program, reader: str, ld: Load, order: Sequence[int], contiguous: Mapping[str, int]) -> Program:
    """The program in which `reader` reads the tensor of `ld` with its axes in that order (others are of extent 1)."""
    shape = p.shape_of(ld.tensor)
    moving = [n for n in order if not same(shape[n], const(1))]
    last = contiguous.get(ld.tensor, max(moving, default=0))
    if not moving or moving[-1] == last or moving == sorted(moving) or not _whole(p, ld, shape):
        return p
    if ld.tensor in {c.index_name for c in p.body}:
        return p
    made = _for_one_reader(p, ld.tensor)
    if made is not None:
        turned = replace(made, dims=tuple(made.dims[n] for n in moving))
        body = [turned if c is made else _reading(c, ld, made.name, moving) if c.name == reader else c for c in p.body]
        return replace(p, body=tuple(body))
    copy = next((c for c in p.body if _is_copy(c, ld.tensor, moving, shape)), None)
    if copy is not None:  # a result of the program, which the reader may take
        body = [_reading(c, ld, copy.name, moving) if c.name == reader else c for c in p.body]
        if [c.name for c in body].index(reader) < body.index(copy):
            body.remove(copy)
            body.insert([c.name for c in body].index(reader), copy)
        return replace(p, body=tuple(body))
    taken = {i.name for i in p.inputs} | {r for c in p.body for r in c.results} | set(p.sizes) | set(p.syms)
    name = free(f"{ld.tensor}_last", taken)
    taken.add(name)
    dims = [fresh(f"{name}_{n}", taken) for n in range(len(shape))]
    index: list[Expr] = [Index(d) if n in moving else const(0) for n, d in enumerate(dims)]
    c = next(c for c in p.body if c.name == reader)
    copy = Compute(
        name, tuple(dims[n] for n in moving), p.dtype_of(ld.tensor), Load(ld.tensor, tuple(index)), loc=c.loc,
        origin=c.origin,
    )  # fmt: skip
    body = []
    for x in p.body:
        body += [copy, _reading(x, ld, name, moving)] if x is c else [x]
    return replace(p, body=tuple(body), sizes={**p.sizes, **{dims[n]: shape[n] for n in moving}})


def _is_copy(c: Compute, tensor: str, moving: Sequence[int], shape: Sequence[Expr]) -> bool:
    """Whether a statement is that tensor with its axes in that order."""
    if c.reducer is not None or not isinstance(c.body, Load) or c.body.tensor != tensor:
        return False
    plain = [i.dim for i in c.body.index if isinstance(i, Index)]
    whole = all(isinstance(i, Index) or same(n, const(1)) for i, n in zip(c.body.index, shape, strict=True))
    return (
        whole and len(set(plain)) == len(plain) and tuple(c.body.index[n] for n in moving) == tuple(map(Index, c.dims))
    )


def _reading(c: Compute, ld: Load, name: str, moving: Sequence[int]) -> Compute:
    """The reader with that one load reading the reordered tensor."""
    index = tuple(ld.index[n] for n in moving)
    return replace(c, body=rename_loads(c.body, lambda x: Load(name, index) if x == ld else None))


def _whole(p: Program, ld: Load, shape: Sequence[Expr]) -> bool:
    """Whether the axes that are indexed by a dim alone are read from end to end."""
    return all(same(p.sizes[i.dim], n) for i, n in zip(ld.index, shape, strict=True) if isinstance(i, Index)) and all(
        same(n, const(1)) for i, n in zip(ld.index, shape, strict=True) if isinstance(i, Const)
    )
