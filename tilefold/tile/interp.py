"""The meaning of a kernel: slow, direct execution of the tile IR with torch.

Fresh buffers are filled with NaN (floats) or 111 (integers), so that a use of an undefined
element shows. `exact=True` computes in float64 and drops precision casts, as
`algebra.evaluate` says; tensors may then be given in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import assert_never

import torch

from tilefold.algebra.dtypes import DType, promote
from tilefold.algebra.evaluate import (
    COMBINE,
    Env,
    Grid,
    apply,
    cast,
    compute_type,
    evaluate,
    join_at,
    reader,
    reduce_values,
    select_values,
)
from tilefold.algebra.expr import Expr, Load, dims_used, walk
from tilefold.tile.ir import Alloc, Buffer, Fill, For, Gemm, Kernel, Map, Reduce, Select, Stmt, Store
from tilefold.tile.reconcile import Irreconcilable, Reconciled, reconcile

Range = tuple[int, int]


def run_kernel(
    kernel: Kernel, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], *, exact: bool = False
) -> None:
    """Run one launch, writing the `out` and `scratch` tensors in place.

    `tensors` holds every parameter by name, with the declared dtype and shape (any strides).
    ValueError: a parameter is missing or does not fit; IndexError: a store out of range.
    """
    sizes = {d: _scalar(e, Env(reader({}), {}, syms)) for d, e in kernel.sizes.items()}
    _check_tensors(kernel, tensors, syms, sizes, exact)
    names = {t.name for t in kernel.tensors}
    run = _Run({n: t for n, t in tensors.items() if n in names}, kernel, sizes, syms, exact)
    whole = {d: (0, n) for d, n in sizes.items()}
    tiles = [list(_tiles(g.tile, 0, sizes[g.dim])) for g in kernel.grid]
    for point in itertools.product(*tiles):
        at = {g.dim: r for g, r in zip(kernel.grid, point, strict=True)}
        run.body(kernel.body, {**whole, **at}, {})


def _check_tensors(
    k: Kernel, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], sizes: Mapping[str, int], exact: bool
) -> None:
    env = Env(reader({}), sizes, syms)
    for t in k.tensors:
        if t.name not in tensors:
            raise ValueError(f"kernel {k.name}: no tensor {t.name}")
        x, shape = tensors[t.name], tuple(_scalar(e, env) for e in t.shape)
        if tuple(x.shape) != shape:
            raise ValueError(f"kernel {k.name}: {t.name} has shape {tuple(x.shape)}, not {shape}")
        wide = exact and t.dtype.is_float and x.dtype == torch.float64
        if x.dtype != t.dtype.torch_dtype and not wide:
            raise ValueError(f"kernel {k.name}: {t.name} is {x.dtype}, not {t.dtype.torch_dtype}")


def _scalar(e: Expr, env: Env, ranges: Mapping[str, Range] | None = None) -> int:
    return int(evaluate(e, Grid(ranges or {}), env))


def _tiles(tile: int, start: int, stop: int) -> Iterator[Range]:
    for at in range(start, stop, tile):
        yield at, min(at + tile, stop)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Storage of a buffer: `data` has an axis a dim, element `origin` first."""

    buffer: Buffer
    data: torch.Tensor
    origin: tuple[int, ...]


Scope = dict[str, _Tile]


@dataclass(frozen=True, slots=True)
class _Run:
    """What one launch needs; ranges and buffers in scope are passed down."""

    tensors: Mapping[str, torch.Tensor]
    kernel: Kernel
    sizes: Mapping[str, int]
    syms: Mapping[str, int]
    exact: bool
    dtypes: dict[str, DType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtypes.update({t.name: t.dtype for t in self.kernel.tensors})

    def body(self, body: Sequence[Stmt], ranges: Mapping[str, Range], outer: Scope) -> None:
        scope = dict(outer)
        for s in body:
            self.statement(s, ranges, scope)

    def statement(self, s: Stmt, ranges: Mapping[str, Range], scope: Scope) -> None:
        match s:
            case Alloc(b):
                scope[b.name] = self.allocate(b, ranges)
            case For(dim, tile, body, start, stop):
                env = Env(reader(self.tensors), self.sizes, self.syms)
                lo = 0 if start is None else _scalar(start, env, ranges)
                hi = self.sizes[dim] if stop is None else _scalar(stop, env, ranges)
                for r in _tiles(tile, lo, hi):
                    self.body(body, {**ranges, dim: r}, scope)
            case Fill(buf, value):
                self.write(scope[buf], ranges, self.values(value, scope[buf].buffer.dims, ranges, scope))
            case Map(buf, expr):
                self.write(scope[buf], ranges, self.values(expr, scope[buf].buffer.dims, ranges, scope))
            case Reduce(buf, op, rdims, expr, accumulate):
                t = scope[buf]
                x = self.values(expr, (*t.buffer.dims, *rdims), ranges, scope)
                x = reduce_values(x, op, range(len(t.buffer.dims), x.ndim))
                self.combine(t, ranges, x, COMBINE[op] if accumulate else None)
            case Gemm():
                self.combine(scope[s.buf], ranges, self.contract(s, ranges, scope), "add" if s.accumulate else None)
            case Select():
                self.select(s, ranges, scope)
            case Store():
                self.store(s, ranges, scope)
            case _:
                assert_never(s)

    def allocate(self, b: Buffer, ranges: Mapping[str, Range]) -> _Tile:
        env = Env(reader({}), self.sizes, self.syms)
        shape = [ranges[d][1] - ranges[d][0] for d in b.dims]
        for d, n, e in zip(b.dims, shape, b.extents, strict=True):
            if n > _scalar(e, env):
                raise ValueError(f"buffer {b.name}: the range of {d} has {n} elements, its extent is {_scalar(e, env)}")
        dtype = torch.float64 if self.exact and b.dtype.is_float else b.dtype.torch_dtype
        data = torch.full(shape, math.nan if b.dtype.is_float else 111).to(dtype)
        return _Tile(b, data, tuple(ranges[d][0] for d in b.dims))

    def env(self, scope: Scope) -> Env:
        """Reads of tensors (global indices) and buffers (indices less their origin)."""
        gather = reader({**self.tensors, **{n: t.data for n, t in scope.items()}})

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            if name in scope:
                at = tuple(i - o for i, o in zip(at, scope[name].origin, strict=True))
            return gather(name, at)

        def tile(load: Load, grid: Grid) -> torch.Tensor | None:
            return self.plain(load, grid, scope)

        return Env(read, self.sizes, self.syms, self.exact, tile)

    def plain(self, load: Load, grid: Grid, scope: Scope) -> torch.Tensor | None:
        """A load with an array form, in range, as a view; None otherwise."""
        form = reconcile(load, tuple(grid.ranges))
        if isinstance(form, Irreconcilable):
            return None
        view = self.region(load, form, grid.ranges, scope)
        return None if view is None else form.apply(view)

    def region(self, load: Load, form: Reconciled, ranges: Mapping[str, Range], scope: Scope) -> torch.Tensor | None:
        """The tile that an access covers, laid out as its axes; None where it leaves the tensor."""
        held = scope.get(load.tensor)
        view = self.tensors[load.tensor] if held is None else held.data
        origin = (0,) * view.ndim if held is None else held.origin
        env = Env(reader(self.tensors), self.sizes, self.syms)
        for axis, (e, dim) in enumerate(zip(load.index, form.order, strict=True)):
            if dim is None and any(isinstance(k, Load) for k in walk(e)):
                return None
            lo, hi = ranges[dim] if dim is not None else (_scalar(e, env), _scalar(e, env) + 1)
            lo, hi = lo - origin[axis], hi - origin[axis]
            if lo < 0 or hi > view.shape[axis] or hi <= lo:
                return None
            view = view.narrow(axis, lo, hi - lo)
        return view

    def grid(self, dims: Sequence[str], ranges: Mapping[str, Range], *exprs: Expr) -> Grid:
        """The dims that `exprs` use as scalars (one value in their current range), then `dims`."""
        used = frozenset().union(*(dims_used(e) for e in exprs)) - set(dims)
        for d in sorted(used):
            if ranges[d][1] - ranges[d][0] != 1:
                raise ValueError(f"index {d} has several values where one is needed")
        return Grid({d: ranges[d] for d in (*sorted(used), *dims)})

    def values(self, e: Expr, dims: Sequence[str], ranges: Mapping[str, Range], scope: Scope) -> torch.Tensor:
        """`e` over the current ranges of `dims`, an axis each, in compute type."""
        grid = self.grid(dims, ranges, e)
        shape = [ranges[d][1] - ranges[d][0] for d in dims]
        return evaluate(e, grid, self.env(scope)).broadcast_to(grid.shape).reshape(shape)

    def contract(self, s: Gemm, ranges: Mapping[str, Range], scope: Scope) -> torch.Tensor:
        dims = scope[s.buf].buffer.dims
        grid = self.grid((*dims, *s.rdims), ranges, s.a, s.b)
        a, b = (evaluate(x, grid, self.env(scope)) for x in (s.a, s.b))
        kind = DType.of(a.dtype), DType.of(b.dtype)
        wide = promote(promote(*kind), DType.I64).torch_dtype
        letters = dict(zip(grid.ranges, ascii_letters, strict=False))
        all_, out = "".join(letters.values()), "".join(letters[d] for d in dims)
        full = torch.einsum(f"{all_},{all_}->{out}", a.to(wide), b.to(wide))
        return full.broadcast_to([ranges[d][1] - ranges[d][0] for d in dims])

    def current(self, t: _Tile, ranges: Mapping[str, Range]) -> torch.Tensor:
        """The part of a buffer that the current ranges of its dims cover, as a view."""
        view = t.data
        for axis, (d, o) in enumerate(zip(t.buffer.dims, t.origin, strict=True)):
            view = view.narrow(axis, ranges[d][0] - o, ranges[d][1] - ranges[d][0])
        return view

    def combine(self, t: _Tile, ranges: Mapping[str, Range], x: torch.Tensor, op: str | None) -> None:
        old = compute_type(self.current(t, ranges), self.exact)
        self.write(t, ranges, x if op is None else apply(op, old, x))

    def write(self, t: _Tile, ranges: Mapping[str, Range], x: torch.Tensor) -> None:
        self.current(t, ranges).copy_(cast(x, t.buffer.dtype, self.exact))

    def select(self, s: Select, ranges: Mapping[str, Range], scope: Scope) -> None:
        best, where = scope[s.buf], scope[s.index_buf]
        dims = best.buffer.dims[:-1] if s.op == "topk" else best.buffer.dims
        slots = self.sizes[best.buffer.dims[-1]] if s.op == "topk" else 1
        x, at = (self.values(e, (*dims, *s.rdims), ranges, scope).flatten(len(dims)) for e in (s.expr, s.payload))
        if s.accumulate:
            old, old_at = (compute_type(self.current(t, ranges), self.exact) for t in (best, where))
            if s.op != "topk":
                old, old_at = old.unsqueeze(-1), old_at.unsqueeze(-1)
            x, at = torch.cat([old.to(x.dtype), x], -1), torch.cat([old_at, at], -1)
        if s.accumulate or s.may_lack:
            # an unfilled slot ranks below every candidate: move those behind, order otherwise kept
            order = torch.argsort((at < 0).to(torch.int8), dim=-1, stable=True)
            x, at = x.gather(-1, order), at.gather(-1, order)
        x, at = select_values(x, at, s.op, -1, slots)
        if s.op != "topk":
            x, at = x[..., 0], at[..., 0]
        self.write(best, ranges, x)
        self.write(where, ranges, at)

    def store(self, s: Store, ranges: Mapping[str, Range], scope: Scope) -> None:
        target, dtype = self.tensors[s.tensor], self.dtypes[s.tensor]
        grid = self.grid(s.dims, ranges, *s.index, s.expr)
        if 0 in grid.shape:
            return
        x = cast(evaluate(s.expr, grid, self.env(scope)), dtype, self.exact).to(target.dtype).broadcast_to(grid.shape)
        form = None if s.added else reconcile(Load(s.tensor, s.index), tuple(grid.ranges))
        if isinstance(form, Reconciled) and all(grid.shape[a] == 1 for a in form.new_axes):
            view = self.region(Load(s.tensor, s.index), form, grid.ranges, {})
            if view is not None:
                view.copy_(form.invert(x))
                return
        at = [evaluate(i, grid, self.env(scope)).broadcast_to(grid.shape) for i in s.index]
        if s.added:
            exist = torch.stack([(i >= 0) & (i < n) for i, n in zip(at, target.shape, strict=True)]).all(0)
            join_at(target, [i[exist] for i in at], x[exist], s.added)
            return
        for axis, i in enumerate(at):
            if int(i.min()) < 0 or int(i.max()) >= target.shape[axis]:
                raise IndexError(f"store to {s.tensor}: axis {axis} out of range")
        if target.dtype.itemsize == 1:  # index_put_ has no fp8
            target, x = target.view(torch.uint8), x.contiguous().view(torch.uint8)
        target[tuple(at)] = x
