"""The step of a convolution's gradient that torch's library computes (`tensor.convolution_gradients`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load
from tilefold.plan.hardware import Gpu, gpu_here
from tilefold.plan.library import GradientCall
from tilefold.runtime.convolution import CHANNELS_LAST, as_plane, read_part
from tilefold.runtime.step import LIBRARY, Code, Result, handed_over
from tilefold.tensor.convolution_gradients import Gradient, Way, is_last
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import shape_function

#: Places from which a product of single taps is long; how many times as long as memory it may take.
LONG, DOUBT = 1 << 16, 1.5


class GradientStep:
    """One of a convolution's two gradients, as one call of the library, of operands as they lie in memory.

    An image's gradient is the transposed convolution of the result's gradient. On a GPU it is asked for as that: the
    operator for gradients wants the image too, which is large, and converts the gradient to the memory order of that.
    A weight's asks for the weight, for its extents alone. One of single taps over many places is a product there
    (`long_product`).
    """

    def __init__(self, call: GradientCall, p: Program):
        c, g = self.compute, self.form = call.compute, call.form
        self.name, self.members = c.name, (c.name,)
        self.reads = (g.read.tensor, g.plain.tensor)
        image, last = g.of == "image", is_last(c, g)
        self._line = last and len(g.ways) == 1
        self.format = CHANNELS_LAST[max(4, len(g.ways) + 2)] if last else None
        batch = () if g.batch is None else (g.batch,)
        inner = () if g.groups else g.channels
        outs = _whole(p, g.outs)
        images = [_whole(p, batch), _whole(p, g.channels), *(w.image for w in g.ways)]
        made = [_whole(p, batch), outs, *(w.made for w in g.ways)]
        taps = [outs, _whole(p, inner), *(w.taps for w in g.ways)]
        ways = [w.axis for w in g.ways], [w.plain for w in g.ways]
        first = (*batch, *(g.outs if image else g.channels))
        second = (*g.outs, *inner) if image else (*batch, *g.outs)
        self._parts = read_part(g.read, p), read_part(g.plain, p)
        self._orders = _order(g.read, first, ways[0]), _order(g.plain, second, ways[1])
        self._shapes = [shape_function(x) for x in ((made, taps) if image else (images, made))]
        self._other = shape_function(images if image else taps)
        self._groups = shape_function([outs])
        self._settings: tuple[list[int], ...] = (
            [w.stride for w in g.ways],
            [w.padding for w in g.ways],
            [w.dilation for w in g.ways],
        )
        self._product = last and long_product(self.form, p, gpu_here())
        self._unread = [_unread(w) for w in g.ways] if image else []
        if self._line:
            self._settings = tuple([n, *each] for n, each in zip((1, 0, 1), self._settings, strict=True))
            self._unread = [0, *self._unread]
        result = (*batch, *g.channels) if image else (*g.outs, *inner)
        dims = [*result, *(w.out for w in g.ways if w.out is not None)]
        self._turn = [dims.index(d) for d in c.dims]
        self._kept = shape_function([p.sizes[d] for d in dims])
        extents: list[Expr] = [p.sizes[d] for d in c.dims]
        self.results: tuple[Result, ...] = ((c.name, c.dtype.torch_dtype, shape_function(extents)),)

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        kind = self.form.dtype.torch_dtype
        x, w = (
            self._in_format(part(tensors[t], syms).to(kind).permute(order).reshape(shape(syms)))
            for t, part, order, shape in zip(self.reads, self._parts, self._orders, self._shapes, strict=True)
        )
        found = self._called(x, w, syms)
        y = found.reshape(self._kept(syms)).permute(self._turn).to(self.compute.dtype.torch_dtype)
        handed_over(tensors, self.name, y)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """There is none of ours."""
        return LIBRARY

    def _called(self, x: torch.Tensor, w: torch.Tensor, syms: Mapping[str, int]) -> torch.Tensor:
        groups = math.prod(self._groups(syms)) if self.form.groups else 1
        if self.form.of == "image" and x.is_cuda:
            return self._transposed(x, w, groups)
        if self._product and x.is_cuda:
            return self._multiplied(x, w)
        settings = (*self._settings, False, [0] * len(self._settings[0]), groups)
        extents = list(self._other(syms))
        other = torch.empty(
            extents[:2] + [1] * self._line + extents[2:], dtype=x.dtype, device=x.device, memory_format=self.format
        )
        backward = torch.ops.aten.convolution_backward.default
        if self.form.of == "image":
            return backward(x, other, w, None, *settings, [True, False, False])[0]  # type: ignore[no-any-return]
        return backward(w, x, other, None, *settings, [False, True, False])[1]  # type: ignore[no-any-return]

    def _transposed(self, dy: torch.Tensor, w: torch.Tensor, groups: int) -> torch.Tensor:
        return torch.ops.aten.convolution.default(dy, w, None, *self._settings, True, self._unread, groups)

    def _multiplied(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        image, made = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (x, dy))
        return made.T @ image

    def _in_format(self, x: torch.Tensor) -> torch.Tensor:
        """In channels-last memory where the result is, with strides that say so for weights of one tap as well."""
        if self.format is None:
            return x
        x = as_plane(x).contiguous(memory_format=self.format)
        channels, places = x.shape[1], list(x.shape[2:])
        strides = [channels * math.prod(places[n + 1 :]) for n in range(len(places))]
        return x.as_strided(x.shape, [channels * math.prod(places), 1, *strides])


def long_product(form: Gradient, p: Program, machine: Gpu) -> bool:
    """Whether a weight's gradient of single taps is taken as a product of float32, unrounded: over so many places that
    the library of convolutions, which rounds, may leave the contraction to a thread block or two, and of so few outputs
    and channels that memory takes about as long as the product does.

    64 outputs of 163,840 places on an H100: of 128 channels 1255 us, of 6 1420; cut, 54. Of 46,656 places it cuts.
    """
    batch = () if form.batch is None else (form.batch,)
    places = [*(p.sizes[d] for d in batch), *(w.made for w in form.ways)]
    sides = [[p.sizes[d] for d in dims] for dims in (form.outs, form.channels)]
    if form.of != "weight" or form.groups or form.dtype is not DType.F32:
        return False
    if not all(isinstance(n, Const) for n in (*places, *sides[0], *sides[1])):
        return False
    if any(w.taps != const(1) or w.stride != 1 or w.padding or w.image != w.made for w in form.ways):
        return False
    depth, rows, columns = (math.prod(int(n.value) for n in x if isinstance(n, Const)) for x in (places, *sides))
    moved = DType.F32.nbytes * (rows + columns) / (machine.reached * machine.bandwidth)
    return depth >= LONG and 2.0 * rows * columns / machine.gemm_rate(DType.F32, library=True) <= DOUBT * moved


def _unread(w: Way) -> int:
    """Places at an image's end that no window reaches."""
    n, y, k = (int(e.value) for e in (w.image, w.made, w.taps) if isinstance(e, Const))
    return n + 2 * w.padding - w.dilation * (k - 1) - 1 - w.stride * (y - 1)


def _whole(p: Program, dims: Sequence[str]) -> Expr:
    """The extent of dims that are one axis of the library's."""
    return math.prod((p.sizes[d] for d in dims), start=const(1))


def _order(ld: Load, first: Sequence[str], ways: Sequence[int | None]) -> list[int]:
    """Axes of an operand: images or outputs, channels, places or taps; then those of extent 1."""
    at = [ld.index.index(Index(d)) for d in first]
    order = [*at, *(n for n in ways if n is not None)]
    return [*order, *(n for n in range(len(ld.index)) if n not in order)]
