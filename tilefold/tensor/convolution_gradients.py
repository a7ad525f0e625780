"""Gradients of convolutions in index notation: which statements are one, and what a library has to be told.

Of out[n, o, y..] = sum over c, k.. of x[n, c, s y + d k - p ..] w[o, c, k..], with dy the gradient of out,

    image    dx[n, c, h..] = sum over o, k.. of dy[n, o, (h + p - d k) / s ..] w[o, c, k..]    where s divides it
    weight   dw[o, c, k..] = sum over n, y.. of x[n, c, s y + d k - p ..] dy[n, o, y..]

What is read outside of a tensor, or between two places, counts as 0, by a guard. One group, or one channel a group (o
and c are then the same). o and c may be several dims each (channels in groups, which a norm behind has cut). The
extents of image, taps and result are those of a convolution of a library. A weight's gradient is also a convolution
with large taps, and one of single taps a product of matrices: the operator that asked for it decides, for torch rounds
convolutions of float32 where it does not round products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used
from tilefold.tensor.convolution import MOST_SPACE, Guards, Steps, guarded, multiplied_in
from tilefold.tensor.index_simplify import const, poly, same
from tilefold.tensor.ir import Compute, Program

#: What the operator is called.
ASKED = "convolution_backward"


@dataclass(frozen=True, slots=True)
class Way:
    """An axis of space: its axes of what is convolved over it (the image, or the gradient of the result) and of the
    plain operand, None: it has none; the extents of image, result and taps; the dim of the statement's result, None:
    its extent is 1."""

    axis: int
    plain: int | None
    image: Expr
    made: Expr
    taps: Expr
    out: str | None
    stride: int
    dilation: int
    padding: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient `of` an image or a weight. read: what is read through windows (the gradient of the result, or the
    image); plain: the other operand (the weight, or the gradient of the result). batch: dim of the images, None: of
    extent 1; outs, channels: dims of the convolution's, the same where each group has one channel; none: of extent
    1."""

    of: Literal["image", "weight"]
    read: Load
    plain: Load
    dtype: DType
    batch: str | None
    outs: tuple[str, ...]
    channels: tuple[str, ...]
    ways: tuple[Way, ...]

    @property
    def groups(self) -> bool:
        """Whether each group has one channel."""
        return bool(self.outs) and self.outs == self.channels


def gradient(c: Compute, p: Program) -> Gradient | None:
    """The statement as a gradient of a convolution; None where it is none, or no such operator asked for it."""
    if (
        ASKED not in c.origin
        or c.reducer != "sum"
        or not c.dtype.is_float
        or not isinstance(c.body, Call)
        or c.body.op != "mul"
    ):
        return None
    for read, plain in (c.body.args, c.body.args[::-1]):
        x, conditions = guarded(read)
        w, none = guarded(plain)
        if isinstance(x, Load) and isinstance(w, Load) and not none and all(_is_plain(i) for i in w.index):
            of_w = [i.dim for i in w.index if isinstance(i, Index)]
            if len(set(of_w)) == len(of_w):
                reader = _Reader(c, p, x, w, of_w, conditions, multiplied_in(p, read, plain))
                found = reader.weight() or reader.image()
                if found is not None:
                    return found
    return None


def _is_plain(i: Expr) -> bool:
    return isinstance(i, Index) or i == const(0)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One statement, whose operand x has windows; every method gives None where it is no gradient."""

    c: Compute
    p: Program
    x: Load
    w: Load
    of_w: Sequence[str]
    conditions: Sequence[Expr]
    dtype: DType

    def weight(self) -> Gradient | None:
        guards = Guards.of(self.conditions)
        if guards is None:
            return None
        inner, outer = set(self.c.rdims), set(self.c.dims)
        batch: list[str] = []
        ways: list[Way] = []
        channels = [i.dim for i in self.x.index if isinstance(i, Index) and i.dim in outer]
        for axis, i in self._axes():
            if isinstance(i, Index) and i.dim in outer:
                continue
            if isinstance(i, Index) and i.dim in inner and not batch:
                batch.append(i.dim)
                continue
            way = self._taps(axis, i, guards)
            if way is None:
                return None
            ways.append(way)
        outs = [d for d in self.of_w if d in outer]
        named = {*batch, *outs, *channels, *(w.out for w in ways if w.out)}
        if not ways or not guards.done or named != {*batch, *outer} or self._summed(ways) != inner:
            return None
        return self._made("weight", batch, outs, channels, ways) if self._one_group(channels, outs) else None

    def _summed(self, ways: Sequence[Way]) -> set[str]:
        """The dims of both operands that are reduced: those of places or taps, and what each reads plainly."""
        plain = {i.dim for ld in (self.x, self.w) for i in ld.index if isinstance(i, Index)} & set(self.c.rdims)
        return plain if all(w.plain is None or isinstance(self.w.index[w.plain], Index) for w in ways) else set()

    def _taps(self, axis: int, i: Expr, guards: Guards) -> Way | None:
        """An axis of the image, read at s y + d k - p."""
        found = Steps.of(i, self.c, self.of_w)
        if found is None or found.outer < 0 or found.inner < 0:
            return None
        tap, dilation, place, stride, padding = found.out, found.outer, found.tap, found.inner, -found.shift
        terms = poly(i, {})
        extent, made, taps = self.p.shape_of(self.x.tensor)[axis], self._extent(place), self._extent(tap)
        known = _numbers(extent, made, taps)
        low, high = guards.of_index(terms, extent)
        if known is None or padding < 0 or (high is not None and not same(high, extent)):
            return None
        n, y, k = known
        if (padding and not low) or (high is None and stride * (y - 1) + dilation * (k - 1) - padding >= n):
            return None
        if place is None:
            stride = max(1, n + 2 * padding - dilation * (k - 1))
        if not _fits(n, y, k, stride, dilation, padding):
            return None
        plain = None if place is None else self.w.index.index(Index(place))
        return Way(axis, plain, extent, made, taps, tap, stride, dilation, padding)

    def image(self) -> Gradient | None:
        inner, outer = set(self.c.rdims), set(self.c.dims)
        batch: list[str] = []
        ways: list[Way] = []
        left = list(_each(self.conditions))
        outs = [i.dim for i in self.x.index if isinstance(i, Index) and i.dim in self.of_w]
        channels = [d for d in self.of_w if d in outer]
        for axis, i in self._axes():
            if isinstance(i, Index) and i.dim in self.of_w:
                continue
            if isinstance(i, Index) and i.dim in outer and not batch:
                batch.append(i.dim)
                continue
            way = self._places(axis, i, left)
            if way is None:
                return None
            ways.append(way)
        windows = [w for w in ways if w.plain is not None or w.stride > 1]
        named = {*batch, *channels, *(w.out for w in ways if w.out)}
        if not windows or left or named != outer or self._summed(ways) != inner:
            return None
        return self._made("image", batch, outs, channels, ways) if self._one_group(outs, channels) else None

    def _places(self, axis: int, i: Expr, left: list[Expr]) -> Way | None:
        """An axis of the result's gradient, read at (h + p - d k) / s; its guards are taken out of `left`."""
        stride, at = _quotient(i)
        found = Steps.of(at, self.c, self.of_w)
        if found is None or found.outer != 1 or (found.tap is not None and found.inner > 0):
            return None
        place, tap, dilation, padding = found.out, found.tap, abs(found.inner), found.shift
        terms = poly(at, {})
        made, extent, taps = self.p.shape_of(self.x.tensor)[axis], self._extent(place), self._extent(tap)
        known = _numbers(extent, made, taps)
        if known is None or padding < 0 or place is None:
            return None
        n, y, k = known
        low = high = whole = False
        for e in list(left):
            match e:
                case Call("ge", (a, Const(0, _))) if poly(a, {}) in (terms, poly(i, {})):
                    low = True
                case Call("lt", (a, b)) if poly(a, {}) == poly(i, {}) and same(b, made):
                    high = True
                case Call("lt", (a, b)) if poly(a, {}) == terms and same(b, made * stride):
                    high = True
                case Call("eq", (Call("mod", (a, Const(m, _))), Const(0, _))) if m == stride and _alike(a, at, stride):
                    whole = True
                case _:
                    continue
            left.remove(e)
        first, last = padding - dilation * (k - 1), (n - 1 + padding) // stride
        if (first < 0 and not low) or (last >= y and not high) or (stride > 1 and not whole):
            return None
        if not _fits(n, y, k, stride, dilation, padding):
            return None
        plain = None if tap is None else self.w.index.index(Index(tap))
        return Way(axis, plain, extent, made, taps, place, stride, dilation, padding)

    def _axes(self) -> Iterator[tuple[int, Expr]]:
        """The axes of x that are more than one place."""
        shape = self.p.shape_of(self.x.tensor)
        yield from ((n, i) for n, i in enumerate(self.x.index) if not (i == const(0) and same(shape[n], const(1))))

    def _extent(self, dim: str | None) -> Expr:
        return const(1) if dim is None else self.p.sizes[dim]

    def _one_group(self, of_x: Sequence[str], of_w: Sequence[str]) -> bool:
        """One group, or one channel of either side a group."""
        return tuple(of_x) == tuple(of_w) or not set(of_x) & set(of_w)

    def _made(
        self,
        of: Literal["image", "weight"],
        batch: Sequence[str],
        outs: Sequence[str],
        channels: Sequence[str],
        ways: Sequence[Way],
    ) -> Gradient | None:
        if len(ways) > MOST_SPACE or any(i == const(0) and not same(n, const(1)) for i, n in self._units()):
            return None
        if max(len(outs), len(channels)) > 1 and all(same(w.taps, const(1)) for w in ways):
            return None  # patches in order: a product of matrices
        n = next(iter(batch), None)
        return Gradient(of, self.x, self.w, self.dtype, n, tuple(outs), tuple(channels), tuple(ways))

    def _units(self) -> Iterator[tuple[Expr, Expr]]:
        """Indices of the plain operand, and the extents of its axes."""
        yield from zip(self.w.index, self.p.shape_of(self.w.tensor), strict=True)


def _each(conditions: Sequence[Expr]) -> Iterator[Expr]:
    """Conditions that must all hold, one by one."""
    for e in conditions:
        match e:
            case Call("and", args):
                yield from _each(args)
            case _:
                yield e


def _quotient(i: Expr) -> tuple[int, Expr]:
    """(s, e) with i = e // s: of a quotient, and of one with a number added."""
    terms = poly(i, {})
    for mono, by in terms.items():
        match mono:
            case (Call("floordiv", (inside, Const(s, _))),) if by == 1 and {*terms} <= {mono, ()}:
                return int(s), inside + terms.get((), 0) * int(s)
    return 1, i


def _alike(a: Expr, b: Expr, by: int) -> bool:
    """Whether a and b leave the same rest when divided by a number."""
    x, y = poly(a, {}), poly(b, {})
    return all((x.get(m, 0) - y.get(m, 0)) % by == 0 for m in {*x, *y})


def _numbers(*extents: Expr) -> tuple[int, ...] | None:
    known = [int(e.value) for e in extents if isinstance(e, Const)]
    return tuple(known) if len(known) == len(extents) and min(known) > 0 else None


def _fits(image: int, made: int, taps: int, stride: int, dilation: int, padding: int) -> bool:
    """Whether a convolution makes so many places of such an image."""
    return (image + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 == made


def is_last(c: Compute, g: Gradient) -> bool:
    """Whether channels are behind places in memory, of one of the two images that there are: of those read, or of the
    one read and the result."""
    first = g.outs if g.of == "image" else g.channels
    read: list[tuple[tuple[str, ...], list[int], Load]] = [(first, [w.axis for w in g.ways], g.read)]
    if g.of == "weight":
        read.append((g.outs, [w.plain for w in g.ways if w.plain is not None], g.plain))
    elif images_last(c, g):
        return True
    return any(bool(dims) and all(ld.index.index(Index(d)) > n for d in dims for n in axes) for dims, axes, ld in read)


def images_last(c: Compute, g: Gradient) -> bool:
    """Whether the channels of an image's gradient are behind its places in memory."""
    return bool(g.channels) and all(
        c.dims.index(d) > c.dims.index(w.out) for d in g.channels for w in g.ways if w.out is not None
    )


def operand_orders(g: Gradient) -> tuple[tuple[Load, list[int]], ...]:
    """The operands, and their axes in the order of memory that a library of images with channels last wants."""
    batch = () if g.batch is None else (g.batch,)

    def order(ld: Load, first: Sequence[str], last: Sequence[str]) -> list[int]:
        head, at = ([ld.index.index(Index(d)) for d in dims if Index(d) in ld.index] for dims in (first, last))
        behind = [n for n in at if n not in head]
        rest = [n for n, i in enumerate(ld.index) if n not in (*head, *behind) and dims_used(i)]
        return [*head, *rest, *behind]

    if g.of == "image":
        return (g.read, order(g.read, batch, g.outs)), (g.plain, order(g.plain, g.outs, g.channels))
    return (g.read, order(g.read, batch, g.channels)), (g.plain, order(g.plain, batch, g.outs))
