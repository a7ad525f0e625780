"""The step of a convolution that torch's library computes (`tensor.convolution`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch.backends import cudnn

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, Load
from tilefold.backends.triton.precision import matmul_precision
from tilefold.plan.library import ConvolutionCall
from tilefold.runtime.library import Part, part_of
from tilefold.runtime.step import LIBRARY, Code, Result, handed_over
from tilefold.tensor.convolution import Space, axis_of, group_axes, is_channels_last
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import shape_function

log = logging.getLogger("tilefold")

#: Formats in which channels are contiguous, by the number of axes; of one axis of space torch has none.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Axes of tensors with one axis of space: contiguous channels are asked for with another one, of one place.
LINE = 3
#: Space of one place: the library wants an axis of it at least.
NOWHERE = Space(-1, const(1), None, None, 1, 1, 0)


class ConvolutionStep:
    """A convolution as one call of the library; of single taps a product, or one an image, by the result's order.

    The order of the result's dims is its memory order: x is converted where it has another one, as the library
    converts weights. Operands and the result are viewed; nothing else is done between calls.
    """

    def __init__(self, call: ConvolutionCall, p: Program):
        c, v = self.compute, self.form = call.compute, call.form
        self.name, self.members, self.tail, self.shift = call.out, call.members, call.tail, call.shift
        added = None if call.tail is None else call.tail.added
        also = [ld for ld in (call.shift, added) if ld is not None]
        self.reads = (v.x.tensor, v.w.tensor, *(ld.tensor for ld in also))
        outs = (*v.groups, *v.outs)
        places = [s.out for s in v.space if s.out is not None]
        self.last = is_channels_last(c, v)
        rows = tuple(d for d in c.dims if d not in outs)
        dense = v.pointwise and not v.groups and v.spread == 1
        short = v.dtype in (DType.F16, DType.BF16)
        # of float32 torch's settings for products are others: convolutions may be rounded to TF32, four times as fast
        rounded = v.dtype is DType.F32 and "conv" in c.origin and cudnn.allow_tf32
        dense = dense and self.tail is None
        self.product = dense and (not places or (c.dims == (*rows, *outs) and not rounded))
        self.planes = dense and short and not self.product and c.dims == (*v.batch, *outs, *places)
        sizes = {**p.sizes, "": const(1)}
        of_x = [axis_of(v.x, d) for d in v.batch], group_axes(v), [axis_of(v.x, d) for d in v.channels]
        space = v.space or (NOWHERE,)
        of_space = [s.axis for s in v.space]
        taps = [s.tap or "" for s in space]
        self._read_x = read_part(v.x, p, v.space)
        self._read_w = read_part(v.w, p)
        if self.product:
            by_dim = {d: axis_of(v.x, d) for d in v.batch} | {s.out: s.axis for s in v.space if s.out is not None}
            self._order_x = _all_axes([*[by_dim[d] for d in rows], *of_x[2]], v.x)
        else:
            self._order_x = _all_axes([*of_x[0], *of_x[1], *of_x[2], *of_space], v.x)
        self._order_w = _all_axes([axis_of(v.w, d) for d in (*outs, *v.channels, *filter(None, taps))], v.w)
        batch, channels = [sizes[d] for d in v.batch], [sizes[d] for d in v.channels]
        cut = [sizes[d] for d in v.groups] if v.spread == 1 else [p.shape_of(v.x.tensor)[a] for a in of_x[1]]
        self._sizes = [shape_function(e) for e in (batch, cut, channels, [s.extent for s in space])]
        self._sizes_w = [shape_function([sizes[d] for d in ds]) for ds in (outs, v.channels)]
        self._taps = shape_function([sizes[d] for d in taps])
        made = (*rows, *outs) if self.product else (*v.batch, *outs, *places)
        self._made = shape_function([sizes[d] for d in made])
        self._turn = [made.index(d) for d in c.dims]
        self._order_z = [] if added is None else [axis_of(added, d) for d in made]
        self._apart = False  # the library has no such call for these operands
        shape = shape_function([sizes[d] for d in c.dims])
        self.results: tuple[Result, ...] = ((call.out, c.dtype.torch_dtype, shape),)
        self._space = [[s.stride for s in space], [s.padding for s in space], [s.dilation for s in space]]
        self._line = self.last and len(space) == 1
        if self._line:
            self._space = [[first, *each] for first, each in zip((1, 0, 1), self._space, strict=True)]
        first = space[0]
        # windows of one place along the first of three axes are of the images along it: the library's kernels of
        # volumes are slow with contiguous channels (H100, bf16, 1 x 3 x 3, 4 x 32 x 16 x 56 x 56: 552 us, 48 of images)
        self._images = self.last and len(space) == 3 and first.tap is None and (first.stride, first.padding) == (1, 0)
        if self._images:
            self._space = [each[1:] for each in self._space]

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        x, w, *also = (tensors[t] for t in self.reads)
        kind = self.form.dtype.torch_dtype
        x = self._read_x(x, syms).to(kind).permute(self._order_x)
        w = self._read_w(w, syms).to(kind).permute(self._order_w)
        if self.planes:
            y = self._as_products(x, w, syms)
        else:
            y = self._as_product(x, w, syms) if self.product else self._as_convolution(x, w, also, syms)
        y = y.to(self.compute.dtype.torch_dtype)
        handed_over(tensors, self.name, y)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """There is none of ours."""
        return LIBRARY

    def _as_product(self, x: torch.Tensor, w: torch.Tensor, syms: Mapping[str, int]) -> torch.Tensor:
        outs, channels = (_product(f(syms)) for f in self._sizes_w)
        made = self._made(syms)
        rows = _product(made) // max(1, outs)
        return torch.mm(x.reshape(rows, channels), w.reshape(outs, channels).T).view(made).permute(self._turn)

    def _as_products(self, x: torch.Tensor, w: torch.Tensor, syms: Mapping[str, int]) -> torch.Tensor:
        """Of the planes of each image: the library would convert them to channels last and back."""
        outs, channels = (_product(f(syms)) for f in self._sizes_w)
        batch, _, _, space = (_product(f(syms)) for f in self._sizes)
        w = w.reshape(outs, channels).expand(batch, outs, channels)
        return torch.bmm(w, x.reshape(batch, channels, space)).view(self._made(syms))

    def _as_convolution(
        self, x: torch.Tensor, w: torch.Tensor, also: Sequence[torch.Tensor], syms: Mapping[str, int]
    ) -> torch.Tensor:
        batch, groups, channels, space = (f(syms) for f in self._sizes)
        outs, inside = (_product(f(syms)) for f in self._sizes_w)
        count = _product(groups)
        x = x.reshape(_product(batch), count * _product(channels), *space)
        w = w.reshape(outs, inside, *self._taps(syms))
        if self._line:
            x, w = as_plane(x), as_plane(w)
        if self.last:
            x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        elif count > 1 and not self.last:
            x, w = x.contiguous(), w.contiguous()  # either one would have the library convert the other
        deep = space[0]
        if self._images:
            x, w = _as_images(x), w.squeeze(2)
        y = self._convolve(x, w, count) if self.tail is None else self._with_tail(x, w, also)
        if self._images:
            y = y.unflatten(0, (-1, deep)).transpose(1, 2)
        return y.reshape(self._made(syms)).permute(self._turn)

    def _with_tail(self, x: torch.Tensor, w: torch.Tensor, also: Sequence[torch.Tensor]) -> torch.Tensor:
        """relu(conv(x, w) + shift + z) in one call where cuDNN has it, else op by op."""
        b = also[0].reshape(-1) if self.shift is not None else None
        z = None
        if self._order_z:
            z = also[-1].permute(self._order_z)
            places = z.shape[z.dim() - len(self._space[0]) + self._line - self._images :]
            z = z.reshape(-1, w.shape[0], *([1] if self._line else []), *places)
            z = _as_images(z) if self._images else z
        if x.is_cuda and torch.version.hip is None and cudnn.enabled and not self._apart:
            try:
                if z is None:
                    return torch.ops.aten.cudnn_convolution_relu.default(x, w, b, *self._space, 1)
                return torch.ops.aten.cudnn_convolution_add_relu.default(x, w, z, 1.0, b, *self._space, 1)
            except torch.OutOfMemoryError:
                raise
            # Hidden: cuDNN finds no engine for such operands. The same is then computed one by one.
            except RuntimeError as err:
                if "CUDA error" in str(err):
                    raise
                log.info("a convolution and what follows it are not one call: %s", err)
                self._apart = True
        y = self._convolve(x, w, 1)
        y = y if b is None else y + b.reshape(-1, *[1] * len(self._space[0]))
        return torch.relu(y if z is None else y + z)

    def _convolve(self, x: torch.Tensor, w: torch.Tensor, groups: int) -> torch.Tensor:
        """Float32 may be rounded to TF32 where torch lets convolutions be, which it does by default. A sum over windows
        that the program computes as a product is rounded where torch lets products be, which by default it does not."""
        settings = (None, *self._space, False, [0] * len(self._space[0]), groups)
        if "conv" in self.compute.origin:
            return torch.ops.aten.convolution.default(x, w, *settings)
        how = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, matmul_precision() == "tf32")
        return torch.ops.aten._convolution.default(x, w, *settings, *how)


def as_plane(x: torch.Tensor) -> torch.Tensor:
    """[N, C, L] as [N, C, 1, L], of which torch knows contiguous channels."""
    return x.unsqueeze(2) if x.dim() == LINE else x


def _as_images(x: torch.Tensor) -> torch.Tensor:
    """[N, C, D, H, W] as [N D, C, H, W]: of contiguous channels the same memory."""
    return x.transpose(1, 2).flatten(0, 1)


def read_part(ld: Load, p: Program, space: Sequence[Space] = ()) -> Part:
    """The part of a tensor that is read: of axes that windows run over all, or what their guards let be seen."""
    whole = p.shape_of(ld.tensor)
    seen = {n: whole[n] for n, i in enumerate(ld.index) if not isinstance(i, Index | Const)}
    return part_of(ld, p.sizes, whole, seen | {s.axis: s.extent for s in space})


def _all_axes(order: Sequence[int], ld: Load) -> list[int]:
    """The axes in order, and those of extent 1 that have no dim."""
    return [*order, *(n for n in range(len(ld.index)) if n not in order)]


def _product(extents: Sequence[int]) -> int:
    n = 1
    for x in extents:
        n *= x
    return n
