"""Convolutions in index notation: which statements are one, and what a library has to be told to compute it.

    out[n, g, o, y..] = sum over c, k.. of x[n, g, c, s y + d k - p ..] w[g, o, c, k..]

Every axis of x has one role: a batch (a dim of the result that w lacks), a group (a dim of both, or o // q of the
place o among all dims that w alone has), a channel (reduced with w), or space (stride s, dilation d, padding p; k or
y may be absent). Padding is a guard: what is read outside counts as 0. The statement is a convolution of a library
where the result's extent is the library's, (H + 2 p - d (K - 1) - 1) // s + 1 on every axis of space. Nothing else is
assumed about where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used, walk
from tilefold.tensor.index_simplify import Poly, const, nonnegative, poly, same, simplify
from tilefold.tensor.ir import Compute, Program

#: Most axes of space that libraries convolve.
MOST_SPACE = 3
#: Axes of space of an image.
IMAGE = 2


@dataclass(frozen=True, slots=True)
class Space:
    """An axis of space: of x, its extent there, the dims of the result and of the taps (None: extent 1), and how x is
    read: at `stride` y + `dilation` k - `padding`."""

    axis: int
    extent: Expr
    out: str | None
    tap: str | None
    stride: int
    dilation: int
    padding: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution. x, w: what it reads, without casts; dtype: of both as they are multiplied. batch: dims of the
    result that index x alone; groups: those that index both; outs: those that index w alone; channels: reduced dims of
    both. spread: outputs a group where the group is o // spread, o the place among all `outs` (1: groups are dims of
    their own).
    """

    x: Load
    w: Load
    dtype: DType
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    outs: tuple[str, ...]
    channels: tuple[str, ...]
    spread: int
    space: tuple[Space, ...]

    @property
    def pointwise(self) -> bool:
        """Whether every tap is one and every place is read once: a matrix product."""
        return all(s.tap is None and s.stride == 1 and s.padding == 0 for s in self.space)

    def depthwise(self, sizes: Mapping[str, Expr]) -> bool:
        """Whether every group has one channel."""
        return bool(self.groups or self.spread > 1) and all(same(sizes[d], const(1)) for d in self.channels)


def convolution(c: Compute, p: Program) -> Convolution | None:
    """The statement as a convolution of a library; None where it is none."""
    if c.reducer != "sum" or not c.dtype.is_float or not isinstance(c.body, Call) or c.body.op != "mul":
        return None
    for read, weight in (c.body.args, c.body.args[::-1]):
        found = _Reader(c, p).convolution(read, weight)
        if found is not None:
            return found
    return None


def is_windowed(c: Compute) -> bool:
    """Whether a sum of products reads an operand through windows, s y + d k: its operands then stay tensors."""
    if c.reducer != "sum" or not isinstance(c.body, Call) or c.body.op != "mul":
        return False
    inner, outer = set(c.rdims), set(c.dims)
    return any(
        isinstance(load := guarded(a)[0], Load)
        and any(not isinstance(i, Index) and dims_used(i) & inner and dims_used(i) & outer for i in load.index)
        for a in c.body.args
    )


def guarded(e: Expr) -> tuple[Expr, list[Expr]]:
    """An operand without casts and zero padding, and the conditions under which it is read."""
    conditions: list[Expr] = []
    while True:
        match e:
            case Cast(arg, _):
                e = arg
            case Call("where", (condition, inside, Const(value, _))) if value == 0:
                conditions.append(condition)
                e = inside
            case _:
                return e, conditions


def multiplied_in(p: Program, *operands: Expr) -> DType:
    """What guarded operands are multiplied in: the type that all are rounded to, else the widest one of theirs."""
    kinds = []
    for e in operands:
        load = guarded(e)[0]
        assert isinstance(load, Load)
        rounded = [n.dtype for n in walk(e) if isinstance(n, Cast)]
        kinds.append(rounded[0] if rounded else p.dtype_of(load.tensor))
    return max(kinds, key=lambda k: k.nbytes)


def axis_of(ld: Load, dim: str) -> int:
    """The axis that a dim alone indexes."""
    return ld.index.index(Index(dim))


def group_axes(v: Convolution) -> list[int]:
    """Axes of x that tell the group."""
    if v.spread == 1:
        return [axis_of(v.x, d) for d in v.groups]
    rest = {axis_of(v.x, d) for d in (*v.batch, *v.channels)} | {s.axis for s in v.space}
    return [n for n, i in enumerate(v.x.index) if n not in rest and i != const(0)]


def is_channels_last(c: Compute, v: Convolution) -> bool:
    """Whether the channels of the result are behind its places in memory."""
    outs = (*v.groups, *v.outs)
    places = [s.out for s in v.space if s.out is not None]
    return bool(outs and places) and all(c.dims.index(d) > c.dims.index(s) for d in outs for s in places)


class _Reader:
    """Reads one statement; every method gives None where the statement is no convolution."""

    def __init__(self, c: Compute, p: Program):
        self.c, self.p = c, p

    def convolution(self, read: Expr, weight: Expr) -> Convolution | None:
        w, unguarded = guarded(weight)
        x, conditions = guarded(read)
        if not isinstance(x, Load) or not isinstance(w, Load) or unguarded:
            return None
        of_w = [i.dim for i in w.index if isinstance(i, Index)]
        units = sum(i == const(0) for i in w.index)
        if len(set(of_w)) != len(of_w) or len(of_w) + units != len(w.index):
            return None
        batch: list[str] = []
        groups: list[str] = []
        channels: list[str] = []
        windows: list[tuple[int, Expr]] = []
        spread = 1
        for axis, i in enumerate(x.index):
            match i:
                case Const(0, _) if same(self.p.shape_of(x.tensor)[axis], const(1)):
                    continue
                case Index(d) if d in self.c.dims:
                    (groups if d in of_w else batch).append(d)
                case Index(d) if d in of_w:
                    channels.append(d)
                case Call() if spread == 1 and (share := self._shared(x, axis, of_w)):
                    spread = share
                case _:
                    windows.append((axis, i))
        outs = tuple(d for d in of_w if d in self.c.dims and d not in groups)
        plain = not windows and not units and "conv" not in self.c.origin
        if plain and (len(batch) < 2 or len(outs) < 2):
            return None  # a product: no window, no tap of extent 1, no planes (`_ordered`)
        guards = Guards.of(conditions)
        if guards is None:
            return None
        space = [self._space(x, axis, i, of_w, guards) for axis, i in windows]
        found = Convolution(
            x, w, multiplied_in(self.p, read, weight), tuple(batch), tuple(d for d in of_w if d in groups),
            outs, tuple(d for d in of_w if d in channels), spread, tuple(s for s in space if s is not None),
        )  # fmt: skip
        return self._ordered(found, units) if None not in space and guards.done and self._covers(found, of_w) else None

    def _shared(self, x: Load, axis: int, of_w: Sequence[str]) -> int:
        """Outputs that share an index of an axis of x: of groups that are stretches of all outputs, which may be
        several dims (a group norm has groups of its own); 0 where that is not so."""
        outs = [d for d in of_w if d in self.c.dims]
        sizes = [n for d in outs if isinstance(n := self.p.sizes[d], Const)]
        groups = self.p.shape_of(x.tensor)[axis]
        match x.index[axis]:
            case Call("floordiv", (Index(d), Const(q, _))) if outs == [d] and same(groups * q, self.p.sizes[d]):
                return int(q)
        if (
            not {*dims_used(x.index[axis])} <= {*outs}
            or len(sizes) < len(outs)
            or not isinstance(groups, Const)
            or not groups.value
        ):
            return 0
        place: Expr = const(0)
        for d, n in zip(outs, sizes, strict=True):
            place = place * n + Index(d)
        share, rest = divmod(math.prod(int(n.value) for n in sizes), int(groups.value))
        whole = simplify(call("floordiv", place, const(share)), dict(zip(outs, sizes, strict=True)))
        return share if share > 1 and not rest and same(whole, x.index[axis]) else 0

    def _covers(self, v: Convolution, of_w: Sequence[str]) -> bool:
        """Whether each dim has its one role, and groups are told in one way."""
        taps = [s.tap for s in v.space if s.tap is not None]
        places = [s.out for s in v.space if s.out is not None]
        if sorted((*v.batch, *v.groups, *v.outs, *places)) != sorted(self.c.dims):
            return False
        if sorted((*v.channels, *taps)) != sorted(self.c.rdims) or not set(taps) <= set(of_w):
            return False
        return v.spread == 1 or not v.groups

    def _ordered(self, v: Convolution, units: int) -> Convolution | None:
        """Batches but the first that have no window are space of one tap, as 1 x 5 taps have it; space is in the order
        of the result. Without any window and tap the statement is a plain product, which is recognised elsewhere, but
        for images, whose channels are in front of their places, and groups that are stretches of one dim of outputs,
        which are no product of matrices; with one output of a place it is that of a matrix and a vector, which memory
        bounds."""
        windows = len(v.space)
        planes = not units and self._of_planes(v)
        rounded = bool(v.outs) and not planes and self._rounded(v)
        single = planes or rounded or (units and v.outs and (self._of_images(v) or v.spread > 1))
        if not any(s.tap or s.out for s in v.space) and not single:
            return None
        space, batch, channels = list(v.space), v.batch, v.channels
        # taps as many as the image has places are channels too; beside windows they are space
        while windows and len(channels) > 1 and len(space) < IMAGE:
            d, channels = channels[-1], channels[:-1]
            space.append(Space(axis_of(v.x, d), self.p.sizes[d], None, d, 1, 1, 0))
        # the places of a pointwise convolution are batches; one is left, which the library calls batch, unless all of
        # them are behind the channels: those of a single image
        most = MOST_SPACE if windows or planes or rounded else min(units, MOST_SPACE)
        first = min((axis_of(v.x, d) for d in channels), default=len(v.x.index))
        kept = int(any(axis_of(v.x, d) < first for d in batch))
        while len(batch) > kept and len(space) < most:
            space.append(Space(axis_of(v.x, batch[-1]), self.p.sizes[batch[-1]], batch[-1], None, 1, 1, 0))
            batch = batch[:-1]
        place = {d: n for n, d in enumerate(self.c.dims)}
        space.sort(key=lambda s: place.get(s.out or "", -1))
        if len(space) > MOST_SPACE:
            return None
        return replace(v, batch=batch, channels=channels, space=tuple(space))

    def _of_images(self, v: Convolution) -> bool:
        """Whether the weight's taps of extent 1 are its last axes, and x has places behind its channels. Groups are of
        each image: with none in front they are a batch of products (keys whose feature map ends in an axis of one)."""
        places = [axis_of(v.x, d) for d in v.batch]
        behind = bool(places) and all(axis_of(v.x, d) < max(places) for d in v.channels)
        if not behind or any(axis_of(v.x, d) < min(places) for d in v.groups):
            return False
        return not v.space and isinstance(v.w.index[-1], Const)

    def _rounded(self, v: Convolution) -> bool:
        """Whether it is one of images with channels behind places that libraries may round: torch lets convolutions of
        float32, and their images' gradients, be of TF32, which products may not be. Of the weight, two axes tell; they
        may be turned, without those of its one tap."""
        return not v.space and v.dtype is DType.F32 and "conv" in self.c.origin and len(v.batch) > 1

    def _of_planes(self, v: Convolution) -> bool:
        """Whether an image has several dims of channels in the result: the blocks that a transposed convolution makes
        of each place, in front of its places (as a product of all images the result would be turned) or behind."""
        places = v.batch[1:]
        of_images = bool(places) and all(axis_of(v.x, d) < axis_of(v.x, places[0]) for d in v.channels)
        orders = [(v.batch[0], *v.outs, *places)] if places else []
        if "conv" in self.c.origin:
            orders.append((*v.batch, *v.outs))
        return not v.space and len(v.outs) > 1 and of_images and self.c.dims in orders

    def _space(self, x: Load, axis: int, i: Expr, of_w: Sequence[str], guards: Guards) -> Space | None:
        """Axis of space read at s y + d k - p."""
        found = Steps.of(i, self.c, of_w)
        if found is None or found.outer < 0 or found.inner < 0:
            return None
        out, stride, tap, dilation, padding = found.out, found.outer, found.tap, found.inner, -found.shift
        terms = poly(i, {})
        extent = self.p.shape_of(x.tensor)[axis]
        low, high = guards.of_index(terms, extent)
        if out is None and tap is None:  # one place of the axis, the first: no window, so nothing but a product
            return None if padding else Space(axis, const(1), None, None, 1, 1, 0)
        extent = extent if high is None else high
        taps = const(1) if tap is None else self.p.sizes[tap]
        if not isinstance(taps, Const) or padding < 0 or (padding and not low):
            return None
        reach = dilation * (int(taps.value) - 1)
        places = const(1) if out is None else self.p.sizes[out]
        if out is None:  # one place: any stride that leaves no second one
            room = simplify(extent + (2 * padding - reach), {})
            if not isinstance(room, Const) or room.value < 1:
                return None
            stride = int(room.value)
        made = simplify(call("floordiv", extent + (2 * padding - reach - 1), const(stride)) + 1, {})
        if not same(made, places):
            return None
        last = simplify((places - 1) * stride + (reach - padding), {})
        if high is None and not nonnegative(poly(extent - 1 - last, {})):
            return None
        return Space(axis, extent, out, tap, stride, dilation, padding)


@dataclass(frozen=True, slots=True)
class Steps:
    """An index `outer out + inner tap + shift`: a dim of the result that the plain operand has not, and a reduced one
    that it has; None: there is none, and its step is 1."""

    out: str | None
    outer: int
    tap: str | None
    inner: int
    shift: int

    @staticmethod
    def of(i: Expr, c: Compute, of_w: Sequence[str]) -> Steps | None:
        """The index of a statement as such steps; None where it is none."""
        out = tap = None
        outer = inner = 1
        shift = 0
        for mono, by in poly(i, {}).items():
            match mono:
                case ():
                    shift = by
                case (Index(d),) if d in c.rdims and d in of_w and tap is None:
                    tap, inner = d, by
                case (Index(d),) if d in c.dims and d not in of_w and out is None:
                    out, outer = d, by
                case _:
                    return None
        return Steps(out, outer, tap, inner, shift)


class Guards:
    """Conditions 0 <= index and index < extent, and which of them some axis has asked for."""

    def __init__(self, low: list[Poly], high: list[tuple[Poly, Expr]]):
        self._low, self._high = low, high

    @staticmethod
    def of(conditions: Sequence[Expr]) -> Guards | None:
        """The conditions taken apart; None where one is of another form."""
        low: list[Poly] = []
        high: list[tuple[Poly, Expr]] = []
        todo = list(conditions)
        while todo:
            match todo.pop():
                case Call("and", (a, b)):
                    todo += [a, b]
                case Call("ge", (a, Const(0, _))):
                    low.append(poly(a, {}))
                case Call("lt", (a, bound)) if not dims_used(bound):
                    high.append((poly(a, {}), bound))
                case _:
                    return None
        return Guards(low, high)

    def of_index(self, index: Poly, extent: Expr) -> tuple[bool, Expr | None]:
        """Whether the index is known to be at least 0, and what it is known to be less than (`extent` where that is as
        much); both are used up."""
        low = [x for x in self._low if _same_start(x, index)]
        self._low = [x for x in self._low if x not in low]
        ended = [(h, _end(*h, index, extent)) for h in self._high]
        bounds, ends = [h for h, end in ended if end is not None], [end for _, end in ended if end is not None]
        self._high = [h for h, end in ended if end is None] + bounds[1:2]  # two bounds: not used up
        return bool(low), ends[0] if ends else None

    @property
    def done(self) -> bool:
        return not self._low and not self._high


def _times(a: Poly, index: Poly) -> int | None:
    """g where index = g a + a constant, a positive number; None where there is none."""
    varying = [m for m in index if m]
    if not varying or {m for m in a if m} != set(varying):
        return None
    g, rest = divmod(index[varying[0]], a[varying[0]])
    return g if not rest and g > 0 and all(index[m] == g * a[m] for m in varying) else None


def _same_start(a: Poly, index: Poly) -> bool:
    """Whether a >= 0 says that index >= 0: with index = g a + c it says that index >= c, and 0 <= c < g."""
    g = _times(a, index)
    return g is not None and 0 <= index.get((), 0) - g * a.get((), 0) < g


def _end(a: Poly, bound: Expr, index: Poly, extent: Expr) -> Expr | None:
    """The extent that a < bound says of index: with index = g a + c that it is at most g (bound - 1) + c, and less than
    each of the next g numbers (2 y + 2 k - 2 < 384 is y + k - 1 < 192)."""
    g = _times(a, index)
    if g is None:
        return None
    c = index.get((), 0) - g * a.get((), 0)
    most = (bound - 1) * g + c
    beyond = simplify(extent - most, {})
    if isinstance(beyond, Const) and 1 <= beyond.value <= g:
        return extent
    return bound if g == 1 and c == 0 else simplify(most + 1, {})
