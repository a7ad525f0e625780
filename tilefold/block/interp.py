"""The meaning of a block program: run its loops block by block, in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import (
    COMBINE,
    Env,
    Grid,
    apply,
    evaluate,
    identity_of,
    join_at,
    reader,
    reduce_values,
    select_values,
)
from tilefold.algebra.expr import Expr
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, walk
from tilefold.tensor.sizes import extent


@dataclass(slots=True)
class _Value:
    """A block value: its dims, the first index along each, and the elements."""

    dims: tuple[str, ...]
    origin: tuple[int, ...]
    data: torch.Tensor


class Interpreter:
    """State of one run. `block_sizes` cuts loops (missing dims: one block); results land in `tensors`."""

    def __init__(
        self,
        block: Block,
        inputs: Mapping[str, torch.Tensor],
        syms: Mapping[str, int],
        block_sizes: Mapping[str, int],
        exact: bool,
    ):
        self.block, self.block_sizes, self.exact = block, block_sizes, exact
        self.syms = dict(syms)
        self.sizes = {d: extent(e, syms) for d, e in block.sizes.items()}
        self.tensors = dict(inputs)
        for r in block.results:
            dtype = torch.float64 if exact and r.dtype.is_float else r.dtype.torch_dtype
            how = next((n.added for n in walk(block.body) if isinstance(n, Store) and n.tensor == r.name), "")
            begin = identity_of(how or "sum", dtype)
            self.tensors[r.name] = torch.full([self.sizes[d] for d in r.dims], begin, dtype=dtype)
        self.values: dict[str, _Value] = {}
        self.ranges: dict[str, tuple[int, int]] = {}

    def run(self) -> dict[str, torch.Tensor]:
        self.nodes(self.block.body)
        return self.tensors

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        outer = dict(self.values)
        for n in nodes:
            self.node(n)
        self.values = {k: v for k, v in self.values.items() if k in outer}

    def node(self, n: Node) -> None:
        match n:
            case Loop():
                self.loop(n)
            case Init(name, dims, dtype, value, index_name):
                self.new(name, dims, self.typed(dtype), value.value)
                if index_name is not None:
                    self.new(index_name, dims, torch.int64, -1)
            case Let(name, dims, dtype, expr, None):
                self.new(name, dims, self.typed(dtype))
                self.write(name, self.value(expr, dims).to(self.typed(dtype)))
            case Let(name, dims, dtype, expr, str(reducer), rdims, index_name, payload):
                self.new(name, dims, self.typed(dtype), identity_of(reducer, self.typed(dtype)))
                if index_name is not None:
                    self.new(index_name, dims, torch.int64, -1)
                self.accumulate(name, index_name, reducer, rdims, expr, payload)
            case Update(name, expr):
                self.write(name, self.value(expr, self.values[name].dims))
            case Accumulate(name, reducer, rdims, expr, payload):
                index = self.index_of(name) if payload is not None else None
                self.accumulate(name, index, reducer, rdims, expr, payload)
            case Store():
                self.store(n)

    def loop(self, n: Loop) -> None:
        start = 0 if n.start is None else self.scalar(n.start)
        stop = self.sizes[n.dim] if n.stop is None else min(self.scalar(n.stop), self.sizes[n.dim])
        step = 1 if n.single else self.block_sizes.get(n.dim) or max(1, stop - start)
        for at in range(start, stop, step):
            self.ranges[n.dim] = (at, min(at + step, stop))
            self.nodes(n.body)
            del self.ranges[n.dim]

    # -- values ---------------------------------------------------------------------------

    def typed(self, dtype: DType) -> torch.dtype:
        return torch.float64 if self.exact and dtype.is_float else dtype.torch_dtype

    def rounded(self, x: torch.Tensor, dtype: DType) -> torch.Tensor:
        """What storing in a quantised type keeps; `exact` holds it in float64."""
        if not self.exact or not dtype.is_float or not dtype.rounds:
            return x
        return x.to(torch.float32).to(dtype.torch_dtype).to(torch.float64)

    def range(self, dim: str) -> tuple[int, int]:
        return self.ranges.get(dim, (0, self.sizes[dim]))

    def grid(self, dims: tuple[str, ...]) -> Grid:
        return Grid({d: self.range(d) for d in dims})

    def scalar(self, e: Expr) -> int:
        grid = Grid({d: r for d, r in self.ranges.items()})
        return int(evaluate(e, grid, self.env()).reshape(-1)[0])

    def new(self, name: str, dims: tuple[str, ...], dtype: torch.dtype, fill: float = 0) -> None:
        grid = self.grid(dims)
        origin = tuple(a for a, _ in grid.ranges.values())
        self.values[name] = _Value(dims, origin, torch.full(grid.shape, fill, dtype=dtype))

    def env(self) -> Env:
        whole = reader(self.tensors)

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            v = self.values.get(name)
            if v is None:
                return whole(name, at)
            local = tuple(i - o for i, o in zip(at, v.origin, strict=True))
            return reader({name: v.data})(name, local)

        return Env(read, self.sizes, self.syms, self.exact)

    def value(self, e: Expr, dims: tuple[str, ...]) -> torch.Tensor:
        grid = self.grid(dims)
        return evaluate(e, grid, self.env()).broadcast_to(grid.shape)

    def window(self, name: str) -> torch.Tensor:
        """The elements of a value at the current ranges, as a view."""
        v = self.values[name]
        at = tuple(slice(a - o, b - o) for (a, b), o in zip((self.range(d) for d in v.dims), v.origin, strict=True))
        return v.data[at] if at else v.data

    def write(self, name: str, x: torch.Tensor) -> None:
        self.window(name).copy_(x)

    def index_of(self, name: str) -> str:
        for n in walk(self.block.body):
            if isinstance(n, Init | Let) and n.name == name and n.index_name is not None:
                return n.index_name
        raise KeyError(name)

    def accumulate(
        self, name: str, index: str | None, reducer: str, rdims: tuple[str, ...], e: Expr, payload: Expr | None
    ) -> None:
        v = self.values[name]
        out = v.dims[:-1] if reducer == "topk" else v.dims
        grid = self.grid((*out, *rdims))
        x = self.value(e, tuple(grid.ranges))
        if index is None:
            part = reduce_values(x, reducer, range(len(out), x.ndim))
            self.write(name, apply(COMBINE[reducer], self.window(name), part).to(v.data.dtype))
            return
        assert payload is not None
        at = self.value(payload, tuple(grid.ranges)).expand(grid.shape)
        held, held_at = self.window(name), self.window(index)
        if reducer != "topk":
            held, held_at = held[..., None], held_at[..., None]
        flat = (*grid.shape[: len(out)], -1)
        candidates = torch.cat([held, x.reshape(flat).to(held.dtype)], -1)
        places = torch.cat([held_at, at.reshape(flat)], -1)
        # empty slots hold the identity; they must lose against a real element of the same value
        real = torch.argsort((places < 0).to(torch.int8), dim=-1, stable=True)
        candidates, places = candidates.gather(-1, real), places.gather(-1, real)
        k = held.shape[-1]
        best, best_at = select_values(candidates, places, reducer, -1, k)
        if reducer != "topk":
            best, best_at = best[..., 0], best_at[..., 0]
        self.write(name, best)
        self.write(index, best_at)

    def store(self, n: Store) -> None:
        grid = self.grid(n.dims)
        env = self.env()
        x = evaluate(n.expr, grid, env).broadcast_to(grid.shape)
        at = tuple(evaluate(i, grid, env).broadcast_to(grid.shape) for i in n.index)
        target = self.tensors[n.tensor]
        x = self.rounded(x, next(r.dtype for r in self.block.results if r.name == n.tensor))
        if not at:
            target.copy_(x.reshape(()))
            return
        if n.added:
            known = [(i >= 0) & (i < size) for i, size in zip(at, target.shape, strict=True)]
            exist = torch.stack(known).all(0)
            join_at(target, [i[exist] for i in at], x[exist].to(target.dtype), n.added)
            return
        target[at] = x.to(target.dtype)


def run(
    block: Block,
    inputs: Mapping[str, torch.Tensor],
    syms: Mapping[str, int],
    *,
    block_sizes: Mapping[str, int] | None = None,
    exact: bool = False,
) -> dict[str, torch.Tensor]:
    """All tensors by name. `block_sizes`: dim -> indices a block. `exact`: float64 throughout."""
    return Interpreter(block, inputs, syms, block_sizes or {}, exact).run()
