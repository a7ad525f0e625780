"""Folds run on torch tensors: the meaning of `lift`, `update`, `merge` and `finish`.

A state maps each variable (and the index payload of argmax, argmin, topk) to a tensor whose
axes are the batch dims, then the variable's dims. Batch dims are extra leading dims over
which whole problems are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilefold.algebra import simplify as sm
from tilefold.algebra.evaluate import Env, Grid, evaluate, reduce_values, select_values
from tilefold.algebra.expr import Expr, Index, Load
from tilefold.algebra.fold import NEW, OLD, Fold, StateVar
from tilefold.algebra.ops import INDEX_REDUCERS

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Merge:
    """One variable of merge(a, b): `a` and `b` are the parts moved to the common D, joined by `reducer`.

    Loads: `var@a`, `var@b` the parts, `var@new` merged earlier variables.
    """

    name: str
    a: Expr
    b: Expr
    reducer: str


def merge_exprs(fold: Fold) -> tuple[Merge, ...]:
    """merge(a, b) as expressions, in dependency order (RedFuser eq. 11)."""
    return tuple(Merge(v.name, _side(fold, v, "@a"), _side(fold, v, "@b"), v.reducer) for v in fold.state)


def _side(fold: Fold, v: StateVar, side: str) -> Expr:
    e = v.repair if v.repair is not None else Load(v.name, tuple(Index(d) for d in v.dims))
    names = {u.name + OLD: u.name + side for u in fold.state}
    return sm.rename_loads(e, {**names, v.name: v.name + side})


@dataclass(frozen=True, slots=True)
class Runner:
    """A fold with its problem: inputs and sizes (`env`), batch dims with their extents."""

    fold: Fold
    env: Env
    batch: tuple[tuple[str, int], ...] = ()

    def identity(self) -> State:
        """The state of no elements."""
        out: State = {}
        for v in self.fold.state:
            shape = (*(n for _, n in self.batch), *(self.env.sizes[d] for d in v.dims))
            out[v.name] = torch.full(shape, v.identity.value, dtype=self._dtype(v))
            if v.index_name is not None:
                out[v.index_name] = torch.full(shape, -1)
        return out

    def lift(self, tile: Mapping[str, tuple[int, int]]) -> State:
        """The state of one tile, given by index ranges of the axes."""
        return self.update(self.identity(), tile)

    def update(self, state: State, tile: Mapping[str, tuple[int, int]]) -> State:
        """var' = repair(var, D, D') (+) R over the tile of element(x, D')."""
        out: State = {}
        for v in self.fold.state:
            grid = Grid(dict(self._grid(v).ranges) | {a: tile[a] for a in self.fold.axes})
            env = self._env(grid, {OLD: state, NEW: out, "": state})
            x = evaluate(v.element, grid, env).broadcast_to(grid.shape)
            if v.reducer in INDEX_REDUCERS:
                self._select(v, out, [self._held(v, state, out), self._tile_candidates(x, tile)])
                continue
            axes = range(x.ndim - len(self.fold.axes), x.ndim)
            part = reduce_values(x, v.reducer, axes)
            out[v.name] = _join(v, self._repaired(v, state, out), part, self._dtype(v))
        return out

    def merge(self, a: State, b: State) -> State:
        """The state of two disjoint parts."""
        out: State = {}
        for v in self.fold.state:
            if v.reducer in INDEX_REDUCERS:
                self._select(v, out, [self._held(v, a, out), self._held(v, b, out)])
                continue
            out[v.name] = _join(v, self._repaired(v, a, out), self._repaired(v, b, out), self._dtype(v))
        return out

    def finish(self, state: State, dims: Mapping[str, tuple[str, ...]]) -> State:
        """Results by name; `dims` gives the dims of each."""
        out: State = {}
        for name, e in self.fold.finish:
            grid = Grid({**{b: (0, n) for b, n in self.batch}, **{d: (0, self.env.sizes[d]) for d in dims[name]}})
            out[name] = evaluate(e, grid, self._env(grid, {"": state})).broadcast_to(grid.shape)
        return out

    # -- inside ---------------------------------------------------------------------------

    def _dtype(self, v: StateVar) -> torch.dtype:
        return torch.float64 if self.env.exact and v.dtype.is_float else v.dtype.torch_dtype

    def _grid(self, v: StateVar) -> Grid:
        dims = v.dims[:-1] if v.reducer == "topk" else v.dims
        return Grid({**{b: (0, n) for b, n in self.batch}, **{d: (0, self.env.sizes[d]) for d in dims}})

    def _repaired(self, v: StateVar, state: State, new: State) -> torch.Tensor:
        if v.repair is None:
            return state[v.name]
        grid = Grid({**{b: (0, n) for b, n in self.batch}, **{d: (0, self.env.sizes[d]) for d in v.dims}})
        env = self._env(grid, {OLD: state, NEW: new, "": state})
        return evaluate(v.repair, grid, env).broadcast_to(grid.shape)

    def _env(self, grid: Grid, states: Mapping[str, State]) -> Env:
        names = {v.name for v in self.fold.state} | {v.index_name for v in self.fold.state if v.index_name}
        rank = len(grid.ranges)
        lead = []
        for n, (_, extent) in enumerate(self.batch):
            shape = [1] * rank
            shape[n] = extent
            lead.append(torch.arange(extent).reshape(shape))

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            base, _, tag = name.partition("@")
            if base not in names:
                x = self.env.read(name, at)
                return x if at else x.reshape(*x.shape, *[1] * (rank - x.ndim))
            x = states["@" + tag if tag else ""][base]
            index = (*lead, *at)
            return x[index] if index else x

        return Env(read, self.env.sizes, self.env.syms, self.env.exact)

    def _held(self, v: StateVar, state: State, new: State) -> tuple[torch.Tensor, torch.Tensor]:
        assert v.index_name is not None
        x, at = self._repaired(v, state, new), state[v.index_name]
        return (x, at) if v.reducer == "topk" else (x[..., None], at[..., None])

    def _tile_candidates(
        self, x: torch.Tensor, tile: Mapping[str, tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements of a tile, axes flattened, with their position in the whole axes."""
        n_axes = len(self.fold.axes)
        position = torch.zeros((1,) * n_axes, dtype=torch.int64)
        for n, axis in enumerate(self.fold.axes):
            shape = [1] * n_axes
            shape[n] = -1
            position = position * self.env.sizes[axis] + torch.arange(*tile[axis]).reshape(shape)
        flat = x.reshape(*x.shape[: x.ndim - n_axes], math.prod(x.shape[x.ndim - n_axes :]))
        return flat, position.reshape(-1).expand(flat.shape)

    def _select(self, v: StateVar, out: State, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The best candidates of all parts; ties go to the lowest position, empty slots come last."""
        x = torch.cat([p[0].to(self._dtype(v)) for p in parts], -1)
        at = torch.cat([p[1] for p in parts], -1)
        key = torch.where(at < 0, torch.iinfo(torch.int64).max, at)
        order = torch.argsort(key, dim=-1, stable=True)
        k = self.env.sizes[v.dims[-1]] if v.reducer == "topk" else 1
        values, index = select_values(x.gather(-1, order), at.gather(-1, order), v.reducer, -1, k)
        if v.reducer != "topk":
            values, index = values[..., 0], index[..., 0]
        assert v.index_name is not None
        out[v.name], out[v.index_name] = values, index


def _join(v: StateVar, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return reduce_values(torch.stack(torch.broadcast_tensors(a.to(dtype), b.to(dtype))), v.reducer, (0,)).to(dtype)
