"""Steps that torch's libraries compute: matrix products, with a bias where one follows, and 8-bit ones with scales.

A product is one call of `mm`, `bmm` or `addmm`. How its operands become matrices is chosen once, from the dims alone:

    batch dims           flattened into the one of bmm
    several rows, cols   flattened (a view where the operand is row-major, else a copy, as the library would need)
    cols before rows     (A B)^T = B^T A^T
    shared heads         q[h, i, k] * k[h // 4, j, k]: 4 heads of q are rows of one product, and k is read once

On a GPU, ragged extents of 16-bit operands are rounded up where that pays (`runtime.aligned`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used, loads
from tilefold.plan.aligned import AT_CALL, Along, Ragged
from tilefold.plan.hardware import gpu_here
from tilefold.plan.library import LibraryCall, Matrices, axis_extent
from tilefold.plan.library_rates import Sizes
from tilefold.plan.scaled import ScaledProduct
from tilefold.runtime import aligned
from tilefold.runtime.step import LIBRARY, Code
from tilefold.tensor.ir import Program
from tilefold.tensor.matrix_orders import taken
from tilefold.tensor.sizes import shape_function

#: From a tensor to what a step does with it.
Part = Callable[[torch.Tensor, Mapping[str, int]], torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]


def part_of(
    load: Load,
    sizes: Mapping[str, Expr],
    whole: Sequence[Expr] | None = None,
    seen: Mapping[int, Expr] = MappingProxyType({}),
) -> Part:
    """The part that a load of dims and places reads, with all axes: `x[:, :300] @ w` reads 300 columns of x.

    whole: what the tensor's extents are known to be. seen: how much is read of axes with other indices (windows)."""
    wanted_shape = [seen[n] if n in seen else axis_extent(ix, sizes) for n, ix in enumerate(load.index)]
    if whole is not None and list(whole) == wanted_shape:
        return lambda x, syms: x
    shape = shape_function(wanted_shape)
    first = [int(ix.value) if isinstance(ix, Const) and n not in seen else 0 for n, ix in enumerate(load.index)]

    def part(x: torch.Tensor, syms: Mapping[str, int]) -> torch.Tensor:
        wanted = shape(syms)
        return x if x.shape == wanted else x[tuple([slice(at, at + n) for at, n in zip(first, wanted, strict=True)])]

    return part


def operand(m: Matrices, ld: Load, first: Sequence[str], second: Sequence[str]) -> View:
    """What makes a matrix, or a batch of them, of an operand: axes `first` x `second`. Where that takes a copy, what
    lies side by side stays so in it: the matrix is then a transposed one.

    Gradients of weights of heads, sums over sequences of [batch, heads, tokens, features]: on an H100 a copy of 8 MB
    that turns them took 14 us, and a product of float32 that reads it 70 instead of 49."""
    dims: list[str] = []
    steps: list[View] = []
    for ix in ld.index:
        if isinstance(ix, Const):  # one place
            steps.append(partial(torch.squeeze, dim=len(dims)))
            continue
        (d,) = dims_used(ix)
        if d in m.split and isinstance(ix, Index):
            steps.append(partial(_unflattened, at=len(dims), inner=m.split[d]))
            dims += [d, f"{d}.in"]
        else:
            dims.append(d)
    batch = tuple(d for d in m.batch if d in dims)
    turned = bool(dims) and dims[-1] in first and max(map(len, (batch, first, second))) > 1
    sides = (second, first) if turned else (first, second)
    order = [dims.index(d) for d in (*batch, *sides[0], *sides[1])]
    if order == [1, 0]:
        steps.append(torch.t)
    elif order != sorted(order):
        steps.append(partial(torch.permute, dims=order))
    for at, group in enumerate([*([batch] if m.batch else []), *sides]):
        if not group:
            steps.append(partial(torch.unsqueeze, dim=at))
        elif len(group) > 1:
            steps.append(partial(torch.flatten, start_dim=at, end_dim=at + len(group) - 1))
    if turned:
        steps.append(partial(torch.transpose, dim0=-2, dim1=-1))
    return _composed(steps)


def _order(m: Matrices, ld: Load, first: Sequence[str], second: Sequence[str]) -> tuple[int, ...] | None:
    """See `LibraryStep.wanted_order`: batch, rows and columns each side by side, the last axis still the last."""
    axes = [ix.dim for ix in ld.index if isinstance(ix, Index)]
    groups = [tuple(g) for g in (m.batch, first, second) if g]
    if len(axes) < len(ld.index) or sorted(axes) != sorted(d for g in groups for d in g):
        return None  # one place of an axis, or heads that share an operand
    if all(axes[axes.index(g[0]) : axes.index(g[0]) + len(g)] == list(g) for g in groups):
        return None
    batch = [groups[0]] if m.batch else []
    for inner in (groups[len(batch) :], groups[len(batch) :][::-1]):
        order = tuple(axes.index(d) for g in (*batch, *inner) for d in g)
        if order[-1] == len(axes) - 1:
            return order
    return None


def _unflattened(x: torch.Tensor, *, at: int, inner: int) -> torch.Tensor:
    return x.unflatten(at, (-1, inner))


class _Viewed:
    """Views in a row, as one of the same kind where the last tensor had the same extents and strides and none was a
    copy: a step costs the host less than what it calls."""

    def __init__(self, steps: Sequence[View]):
        self.steps = steps
        self._last: tuple[torch.Size, tuple[int, ...], torch.Size, tuple[int, ...]] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        last = self._last
        if last is not None and x.shape == last[0] and x.stride() == last[1]:
            return x.as_strided(last[2], last[3])
        y = x
        for step in self.steps:
            y = step(y)
        if y.data_ptr() == x.data_ptr() and x.numel() and y.storage_offset() == x.storage_offset():
            self._last = x.shape, x.stride(), y.shape, y.stride()  # one assignment: other threads may be here too
        return y


def _composed(steps: Sequence[View]) -> View:
    if not steps:
        return _same
    return steps[0] if len(steps) == 1 and steps[0] is torch.t else _Viewed(steps)


def _as_linear(call: LibraryCall) -> View | None:
    """What makes the second operand the weight of torch's `linear`, which takes rows of several axes as they are and so
    costs the host a view less at each end; None where the product is no such one."""
    m = call.matrices
    mine, other = (tuple(ix.dim for ix in ld.index if isinstance(ix, Index)) for ld in (call.a, call.b))
    if m.batch or m.swap or m.order is not None or len(m.rows) < 2 or len(m.cols) != 1 or len(m.depth) != 1:
        return None
    if mine != (*m.rows, *m.depth) or any(isinstance(ix, Const) for ld in (call.a, call.b) for ix in ld.index):
        return None
    return torch.t if other == (*m.depth, *m.cols) else _same


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class LibraryStep:
    """A matrix product, and the bias that is added to it, as one call of torch's library.

    apart: whether those who read the result take it with its rows apart (`runtime.aligned`)."""

    def __init__(self, call: LibraryCall, p: Program):
        self.call, self.name, self.members = call, call.out, call.members
        m = self.matrices = call.matrices
        both = (call.a, call.b)
        self.reads = tuple(ld.tensor for ld in (*both, *([call.bias] if call.bias else [])))
        self.dtype = call.dtype.torch_dtype
        self.shape = shape_function([p.sizes[d] for d in call.product.dims])
        self.results = ((self.name, self.dtype, self.shape),)
        self._parts = tuple(part_of(ld, p.sizes, p.shape_of(ld.tensor)) for ld in both)
        views = operand(m, call.a, m.rows, m.depth), operand(m, call.b, m.depth, m.cols)
        if m.swap:
            views = operand(m, call.b, m.cols, m.depth), operand(m, call.a, m.depth, m.rows)
        self._views = views
        self._bias = None if call.bias is None else self._vector(call.bias, p)
        self._weight = _as_linear(call)
        self.apart = False
        widths = {p.dtype_of(ld.tensor).nbytes for ld in both}
        sides = (*((m.batch, m.cols, m.rows) if m.swap else (m.batch, m.rows, m.cols)), m.depth)
        self._sides = shape_function([self._extent(side, p) for side in sides]) if widths == {2} else None
        self._along = Along.of(call.product, m.rows if m.swap else m.cols)
        self._pads: dict[tuple[int, ...], bool] = {}
        self._shaped = not m.plain  # the library's result has not the shape of the step's
        self._expanded = shape_function(self._axes(p)) if m.order is not None else self.shape
        #: Extents of the result's matrices, where they are views of it in an order of its own.
        self._viewed = None
        groups = [*([m.batch] if m.batch else []), m.rows, m.cols]
        if m.order is not None and not m.split and taken(call.product.dims, groups, {*m.rows, *m.cols}):
            self._viewed = shape_function([self._extent(side, p) for side in groups])

    def _vector(self, bias: Load, p: Program) -> Part:
        """The bias as a row of what is computed."""
        m, part = self.matrices, part_of(bias, p.sizes, p.shape_of(bias.tensor))
        dims = [ix.dim for ix in bias.index if isinstance(ix, Index)]
        order = [dims.index(d) for d in m.cols]
        return part if order == [0] else lambda x, syms: part(x, syms).permute(order).flatten()

    def _axes(self, p: Program) -> list[Expr]:
        """Extents of batch, rows and columns, each dim by itself."""
        m = self.matrices
        out: list[Expr] = []
        for d in (*m.batch, *m.rows, *m.cols):
            whole = d.removesuffix(".in")
            if d != whole:
                out.append(Const(m.split[whole], DType.I64))
            else:
                out.append(p.sizes[d] // Const(m.split[d], DType.I64) if d in m.split else p.sizes[d])
        return out

    def _extent(self, side: Sequence[str], p: Program) -> Expr:
        """Elements of a side of the matrices."""
        n: Expr = Const(1, DType.I64)
        for d in side:
            whole = d.removesuffix(".in")
            if d != whole:
                n = n * Const(self.matrices.split[whole], DType.I64)
            else:
                n = n * (
                    p.sizes[d] // Const(self.matrices.split[d], DType.I64) if d in self.matrices.split else p.sizes[d]
                )
        return n

    def wanted_order(self, tensor: str) -> tuple[int, ...] | None:
        """The axes of an operand in the order in which memory has to have them to be matrices without a copy; None
        where row-major memory will do, or nothing will."""
        m, found = self.matrices, None
        for ld, first, second in ((self.call.a, m.rows, m.depth), (self.call.b, m.depth, m.cols)):
            if ld.tensor == tensor:
                found = _order(m, ld, first, second) if found is None else found
        return found

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Compute the result; where `tensors` has one, into that."""
        reads, parts = self.reads, self._parts
        a, b = parts[0](tensors[reads[0]], syms), parts[1](tensors[reads[1]], syms)
        pads = a.is_cuda and self._padded(syms)
        if self._weight is not None and a.dtype is b.dtype is self.dtype and a.is_contiguous() and not pads:
            bias = None if self._bias is None else self._bias(tensors[reads[2]], syms)
            out = torch.nn.functional.linear(a, self._weight(b), bias)
            target = tensors.get(self.name)
            if target is None:
                tensors[self.name] = out
            else:
                target.copy_(out)
            return
        if self.matrices.swap:
            a, b = b, a
        x, y = self._views[0](a), self._views[1](b)
        bias = None if self._bias is None else self._bias(tensors[reads[2]], syms)
        target = tensors.get(self.name)
        if target is not None and not self._shaped and x.dtype is y.dtype is self.dtype:
            self._into(target, x, y, bias)
            return
        if self._viewed is not None and x.is_cuda and not pads and bias is None and x.dtype is y.dtype is self.dtype:
            self._within(tensors, x, y, syms)
            return
        out = self._product(x, y, bias, pads=pads)
        if self._shaped:
            out = out.view(self._expanded(syms))
            if self.matrices.order is not None:
                out = out.permute(self.matrices.order)
                if target is not None and target.is_contiguous():
                    target.view(out.shape).copy_(out)
                    return
                out = out.reshape(self.shape(syms)).contiguous()
        if target is None:
            tensors[self.name] = out
        else:
            target.copy_(out)

    def _within(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, syms: Mapping[str, int]
    ) -> None:
        """The matrices as views of the result, which the library writes with its strides. A CPU's library would rather
        write them one behind the other."""
        order, target = self.matrices.order, tensors.get(self.name)
        assert order is not None and self._viewed is not None
        whole = target is not None and target.is_contiguous()
        out = target if target is not None and whole else x.new_empty(self.shape(syms))
        back = [order.index(n) for n in range(len(order))]
        self._into(out.permute(back).view(self._viewed(syms)), x, y, None)
        if target is None:
            tensors[self.name] = out
        elif not whole:
            target.copy_(out)

    def _padded(self, syms: Mapping[str, int]) -> bool:
        """Whether ragged extents are rounded up."""
        if self._sides is None:
            return False
        batch, rows, columns, depth = sides = self._sides(syms)
        found = self._pads.get(sides)
        if found is None:
            along, packed = self._along, not self.apart
            whole = not along.rows or aligned.rounded(rows, 2) == rows  # copies of rows are made before a call alone
            found = whole and Ragged(Sizes(batch, rows, columns, depth), along, packed).worth(gpu_here(), AT_CALL)
            self._pads[sides] = found
        return found

    def rows_apart(self, syms: Mapping[str, int]) -> tuple[int, ...] | None:
        """Strides of the result, in elements, where its rows lie apart; None where it is packed."""
        if not self.apart or self.matrices.order is not None or not self._padded(syms):
            return None
        assert self._sides is not None
        columns, shape = self._sides(syms)[2], self.shape(syms)
        if len(shape) < 2 or shape[-1] != columns:
            return None
        strides = [1, aligned.rounded(columns, self.dtype.itemsize)]
        for n in reversed(shape[1:-1]):
            strides.append(strides[-1] * n)
        return tuple(reversed(strides))

    def _into(self, target: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        if bias is not None:
            torch.addmm(bias, x, y, out=target)
        elif self.matrices.batch:
            torch.bmm(*aligned.alike(x, y), out=target)
        else:
            torch.mm(x, y, out=target)

    def _product(
        self, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, *, pads: bool = False
    ) -> torch.Tensor:
        """Row-major. Operands of 16 bits and a float32 result: their products are summed in float32 anyway. Floats of 8
        bits, which torch promotes to nothing, are numbers of bfloat16 too."""
        dtype = self.dtype
        if x.dtype is not dtype or y.dtype is not dtype:
            x, y = (t.to(torch.bfloat16) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t for t in (x, y))
            if x.is_cuda and x.dtype is y.dtype and x.dtype.itemsize == 2 and dtype is torch.float32:
                multiply = torch.bmm if self.matrices.batch else torch.mm
                return multiply(*aligned.alike(x, y), out_dtype=dtype)
            kind = torch.promote_types(torch.promote_types(x.dtype, y.dtype), dtype)
            x, y = x.to(kind), y.to(kind)
        if pads:
            out = aligned.product(x, y, bias, deep=self._along.depth)
            return out if self.apart and self.matrices.order is None else out.contiguous()
        if bias is not None:
            return torch.addmm(bias, x, y)
        out = torch.bmm(*aligned.alike(x, y)) if self.matrices.batch else torch.mm(x, y)
        return out if out.dtype is dtype else out.to(dtype)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """There is none of ours."""
        return LIBRARY


class ScaledStep:
    """An 8-bit product with row and column scales in the library's epilogue (`plan.scaled`)."""

    def __init__(self, scaled: ScaledProduct, p: Program):
        self.scaled = scaled
        self.name = scaled.out
        self.members = (scaled.product, scaled.out)
        self.reads = (scaled.a, scaled.b, scaled.rows, scaled.columns)
        self.results = ((self.name, scaled.dtype.torch_dtype, shape_function(p.shape_of(scaled.out))),)
        both = [ld for c in p.body if c.name in (scaled.product, scaled.out) for ld in loads(c.body)]
        self._parts = tuple(part_of(next(ld for ld in both if ld.tensor == t), p.sizes) for t in self.reads)

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        a, b, rows, columns = (part(tensors[t], syms) for part, t in zip(self._parts, self.reads, strict=True))
        a = a if a.stride(1) == 1 else a.contiguous()
        b = b if b.stride(0) == 1 else b.T.contiguous().T
        out = torch._scaled_mm(
            a,
            b,
            scale_a=rows.reshape(-1, 1).contiguous(),
            scale_b=columns.reshape(1, -1).contiguous(),
            out_dtype=self.scaled.dtype.torch_dtype,
        )
        target = tensors.get(self.name)
        if target is None:
            tensors[self.name] = out
        else:
            target.copy_(out)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """There is none of ours."""
        return LIBRARY
