"""A cascade by its definition, one reduction after the other, and where that can be trusted.

The definition is evaluated in float64, which overflows and rounds too: sum exp(x) of x = 800 is
inf, (x - r)/r + 1 has lost x if r is large. To know where, it is evaluated a second time with
every operation disturbed. What differs then, or comes from an overflow, says nothing about a Fold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tilefold.algebra.cascade import Reduction
from tilefold.algebra.evaluate import Env, Grid, apply, cast, evaluate, reduce_values, select_values
from tilefold.algebra.expr import Call, Cast, Expr, tensors_read
from tilefold.algebra.ops import INDEX_REDUCERS, TILE_BOUNDS, TILE_EXTREMES
from tilefold.algebra.trials import CASE, WAY, case_index

NOISE, AGREES = 1e-13, 1e-8
LOG_RANGE = 700.0  # exp(+-700) are float64 numbers

Evaluate = Callable[[Expr, Grid, Env], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Defined:
    """A reduction's result [case, dims] and its elements [case, dims (top-k: without the slots), all elements]."""

    value: torch.Tensor
    elements: torch.Tensor

    def size(self, reducer: str) -> torch.Tensor:
        """What differences are relative to [case, dims]: the magnitude of all that is summed."""
        size = self.value.double().abs()
        if reducer == "prod":
            return size
        total = self.elements.double().abs().nan_to_num(0, 0, 0).reshape(len(size), -1).sum(1)
        return torch.maximum(size, total.reshape(-1, *[1] * (size.ndim - 1)))

    def farthest(self, reducer: str) -> torch.Tensor:
        """The largest finite magnitude [case] on the way to the result, for sums: they may go far and come back."""
        way = self.elements.double().cumsum(-1) if reducer == "sum" else self.value.double()
        return way.abs().nan_to_num(0, 0, 0).reshape(len(way), -1).amax(1)


def define(
    bodies: tuple[Reduction, ...], axes: tuple[str, ...], inputs: Env, cases: int, value: Evaluate = evaluate
) -> dict[str, Defined]:
    """Every reduction over `axes` in `cases` cases; `inputs` reads on grids whose first dims are (way, case)."""
    out: dict[str, Defined] = {}
    for r in bodies:
        own = r.dims[:-1] if r.reducer == "topk" else r.dims
        dims = {d: (0, inputs.sizes[d]) for d in (*own, *axes)}
        grid = Grid({WAY: (0, 1), CASE: (0, cases)} | dims)
        env = _reading(out, inputs, len(grid.ranges), cases)
        x = value(r.body, grid, env).broadcast_to(grid.shape)[0]
        lead = 1 + len(own)
        flat = x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))
        if r.reducer in INDEX_REDUCERS:
            k = env.sizes[r.dims[-1]] if r.reducer == "topk" else 1
            best, _ = select_values(flat, torch.arange(flat.shape[-1]), r.reducer, -1, k)
            out[r.name] = Defined(best if r.reducer == "topk" else best[..., 0], flat)
        else:
            out[r.name] = Defined(reduce_values(x, r.reducer, range(lead, x.ndim)), flat)
    return out


def _reading(results: Mapping[str, Defined], inputs: Env, rank: int, cases: int) -> Env:
    """The inputs, and the results so far, read on a grid of `rank` dims, the first two (way, case)."""

    def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if name not in results:
            x = inputs.read(name, at)
        else:
            x = results[name].value
            x = x[(case_index(rank, cases), *at)] if at else x[None]
        return x if at else x.reshape(1, -1, *[1] * (rank - 2))

    return Env(read, inputs.sizes, inputs.syms, exact=True)


@dataclass(slots=True)
class _Disturbed:
    """Expressions with noise on every operation; `overflow[n]`: cases of evaluation n that left the range."""

    cases: int
    gen: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    overflow: list[torch.Tensor] = field(default_factory=list)

    def evaluate(self, e: Expr, grid: Grid, env: Env) -> torch.Tensor:
        self.overflow.append(torch.zeros(self.cases, dtype=torch.bool))
        return self._noise(self._value(e, grid, env))

    def _value(self, e: Expr, grid: Grid, env: Env) -> torch.Tensor:
        match e:
            case Call(op, args) if op not in (*TILE_BOUNDS, *TILE_EXTREMES):
                parts = [self._value(a, grid, env) for a in args]
                out = apply(op, *parts)
            case Cast(arg, dtype):
                parts = [self._value(arg, grid, env)]
                out = cast(parts[0], dtype, env.exact)
            case _:
                return evaluate(e, grid, env)
        if not out.is_floating_point():
            return out
        wild = ~out.isfinite()
        if wild.any():
            for p in parts:
                wild = wild & p.isfinite()
            wild = wild[0].reshape(wild.shape[1], -1).any(1)
            self.overflow[-1] |= wild
        return self._noise(out)

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        return x * (1 + NOISE * torch.randn(x.shape, generator=self.gen, dtype=x.dtype))


def trusted(
    bodies: tuple[Reduction, ...], axes: tuple[str, ...], inputs: Env, cases: int, want: Mapping[str, Defined]
) -> dict[str, torch.Tensor]:
    """The cases of each result that neither rounding nor an overflow of the definition decides.

    Sums and products must stay in range in any order: a Fold joins parts in another one.
    """
    disturbed = _Disturbed(cases)
    again = define(bodies, axes, inputs, cases, disturbed.evaluate)
    out: dict[str, torch.Tensor] = {}
    for r, overflow in zip(bodies, disturbed.overflow, strict=True):
        a, b = want[r.name].value.double(), again[r.name].value.double()
        near = (a - b).abs() <= AGREES * want[r.name].size(r.reducer)
        ok = ((a == b) | (a.isnan() & b.isnan()) | near).reshape(cases, -1).all(1) & ~overflow
        x = want[r.name].elements.double()
        if r.reducer == "sum":
            ok &= x.abs().sum(-1).isfinite().reshape(cases, -1).all(1)
        if r.reducer == "prod":
            logs = torch.where(x == 0, 1.0, x).abs().log().abs().sum(-1)
            ok &= (logs < LOG_RANGE).reshape(cases, -1).all(1)
        for name in tensors_read(r.body) & out.keys():
            ok = ok & out[name]
        out[r.name] = ok
    return out


def uncertainty(
    bodies: tuple[Reduction, ...], axes: tuple[str, ...], inputs: Env, cases: int, want: Mapping[str, Defined]
) -> dict[str, torch.Tensor]:
    """How far noise on every operation moves each result [case, dims]: what is smaller is rounding, not a value. (The
    moment of one mass about its own centre, x - m x / m, is 0 but for that.)"""
    again = define(bodies, axes, inputs, cases, _Disturbed(cases).evaluate)
    return {r.name: (want[r.name].value.double() - again[r.name].value.double()).abs().nan_to_num(0.0) for r in bodies}
