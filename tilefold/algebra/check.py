"""A Fold is checked before it is used: run in pieces against the cascade itself, in float64.

Problems are stacked along one batch dim: random values, ties, zeros, huge and tiny
magnitudes, a large common offset, infinities, masked rows, NaN. Every problem is folded
sequentially in uneven tiles, merged from parts in both orders and both groupings, and with
one and with no element. Inputs are drawn from a hash of their index, so that any index
expression (views, masks, gathers) can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate, reduce_values, select_values
from tilefold.algebra.expr import Index, Size, Sym, walk
from tilefold.algebra.fold import Check, Fold
from tilefold.algebra.ops import INDEX_REDUCERS
from tilefold.algebra.run_fold import Runner, State

CASE = "%case"
CASES = (
    "normal", "positive", "ties", "zeros", "huge", "tiny", "offset", "some -inf", "all -inf", "some inf", "some nan",
)  # fmt: skip
LENGTH, WIDTH, TABLE = 7, 2, 61
TOLERANCE = 1e-7
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


def check_fold(cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...]) -> tuple[Check, ...]:
    """Numerical checks; `bodies` are the reductions the fold must equal (see `ignore_rounding`)."""
    dims = result_dims(cascade)
    out = []
    for n, label in ((LENGTH, "random splits"), (1, "one element"), (0, "no elements")):
        problem = Problem(cascade, bodies, n)
        want = problem.reference()
        runner = Runner(fold, problem.env, ((CASE, len(CASES)),))
        for how, state in _states(runner, problem, n).items():
            bad = problem.differences(want, runner.finish(state, dims))
            out.append(Check(f"{label}: {how}", "numeric", not bad, bad))
    return tuple(out)


def result_dims(cascade: Cascade) -> dict[str, tuple[str, ...]]:
    """Dims of every result by name."""
    out: dict[str, tuple[str, ...]] = {}
    for r in cascade.reductions:
        out[r.name] = r.dims
        if r.index_name is not None:
            out[r.index_name] = r.dims
    return out


def _states(run: Runner, p: Problem, n: int) -> dict[str, State]:
    if n == 0:
        return {"fold of nothing = identity": run.identity()}
    if n == 1:
        return {"fold of one = F": run.lift(p.tile(0, 1))}
    state = run.identity()
    for a, b in ((0, 1), (1, 4), (4, n)):
        state = run.update(state, p.tile(a, b))
    a, b, c = (run.lift(p.tile(*t)) for t in ((0, 2), (2, 3), (3, n)))
    ab, bc = run.merge(a, b), run.merge(b, c)
    return {
        "incremental update = F": state,
        "merge is associative (left)": run.merge(ab, c),
        "merge is associative (right)": run.merge(a, bc),
        "merge is commutative": run.merge(c, run.merge(b, a)),
        "identity is neutral": run.merge(run.identity(), run.merge(run.merge(ab, run.identity()), c)),
    }


@dataclass(frozen=True, slots=True)
class Problem:
    """All cases of one extent of the first axis (other axes: WIDTH)."""

    cascade: Cascade
    bodies: tuple[Reduction, ...]
    n: int

    @property
    def env(self) -> Env:
        exprs = [r.body for r in self.bodies]
        nodes = [x for e in exprs for x in walk(e)]
        dims = {x.dim for x in nodes if isinstance(x, Index | Size)} | {d for r in self.bodies for d in r.dims}
        sizes = dict.fromkeys(dims, WIDTH) | dict.fromkeys(self.cascade.axes, WIDTH)
        sizes[self.cascade.axes[0]] = self.n
        dtypes = dict(self.cascade.input_dtypes)

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return _gather(_table(name, dtypes.get(name, DType.F32)), at)

        return Env(read, sizes, {x.name: 3 for x in nodes if isinstance(x, Sym)}, exact=True)

    def tile(self, start: int, stop: int) -> Mapping[str, tuple[int, int]]:
        sizes = self.env.sizes
        return {a: (0, sizes[a]) for a in self.cascade.axes} | {self.cascade.axes[0]: (start, stop)}

    def reference(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Each reduction by its definition: result, and for index reducers all its elements (flat)."""
        inputs, results = self.env, {}  # type: ignore[var-annotated]
        for r in self.bodies:
            env = _reading(results, inputs, 1 + len(r.dims) - (r.reducer == "topk") + len(self.cascade.axes))
            own = r.dims[:-1] if r.reducer == "topk" else r.dims
            dims = {CASE: (0, len(CASES))} | {d: (0, env.sizes[d]) for d in (*own, *self.cascade.axes)}
            grid = Grid(dims)
            x = evaluate(r.body, grid, env).broadcast_to(grid.shape)
            lead = 1 + len(own)
            flat = x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))
            if r.reducer in INDEX_REDUCERS:
                k = env.sizes[r.dims[-1]] if r.reducer == "topk" else 1
                best, _ = select_values(flat, torch.arange(flat.shape[-1]), r.reducer, -1, k)
                results[r.name] = (best if r.reducer == "topk" else best[..., 0], flat)
            else:
                results[r.name] = (reduce_values(x, r.reducer, range(lead, x.ndim)), flat)
        return results

    def differences(self, want: Mapping[str, tuple[torch.Tensor, torch.Tensor]], got: State) -> str:
        """Which results differ, in which cases; empty if none does."""
        bad = []
        for r in self.bodies:
            ref, elements = want[r.name]
            if r.reducer == "topk" and elements.shape[-1] < ref.shape[-1]:
                continue
            for case in _unequal(ref, got[r.name], elements):
                bad.append(f"{r.name} ({case})")
            if r.index_name is not None and elements.shape[-1]:
                at = got[r.index_name].clamp(min=0)
                chosen = elements.gather(-1, at if r.reducer == "topk" else at[..., None])
                for case in _unequal(ref, chosen if r.reducer == "topk" else chosen[..., 0], elements):
                    bad.append(f"{r.index_name} ({case})")
        return ", ".join(bad)


def _unequal(want: torch.Tensor, got: torch.Tensor, elements: torch.Tensor) -> list[str]:
    """Cases in which NaN or infinities differ, or values by more than the tolerance of what is summed."""
    want, got = want.double(), got.double()
    size = elements.double().abs().nan_to_num(0, 0, 0).reshape(len(CASES), -1).sum(1)
    size = size.reshape(-1, *[1] * (want.ndim - 1)).clamp(min=1e-300)
    close = (want - got).abs() <= TOLERANCE * torch.maximum(want.abs(), size)
    same = (want == got) | (want.isnan() & got.isnan()) | (want.isfinite() & got.isfinite() & close)
    overflow = CASES.index("huge")  # an overflow of the original: which non-finite value comes out is not specified
    same[overflow] |= ~want[overflow].isfinite()
    return [CASES[n] for n, ok in enumerate(same.reshape(len(CASES), -1).all(1).tolist()) if not ok]


def _gather(table: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """table[case, hash(at)], shaped as the grid."""
    rank = at[0].ndim if at else 1
    case = torch.arange(len(CASES)).reshape(-1, *[1] * (rank - 1))
    position = torch.zeros((1,) * rank, dtype=torch.int64)
    for i, p in zip(at, _PRIMES, strict=False):
        position = position + i.long() * p
    return table[case, position % TABLE]


def _reading(results: Mapping[str, tuple[torch.Tensor, torch.Tensor]], inputs: Env, rank: int) -> Env:
    """The inputs, and the results so far, read on a grid of `rank` dims (the first one is the case)."""

    def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if name not in results:
            x = inputs.read(name, at)
        else:
            x = results[name][0]
            x = x[(torch.arange(len(CASES)).reshape(-1, *[1] * (rank - 1)), *at)] if at else x
        return x if at else x.reshape(-1, *[1] * (rank - 1))

    return Env(read, inputs.sizes, inputs.syms, exact=True)


@lru_cache(maxsize=256)
def _table(name: str, dtype: DType) -> torch.Tensor:
    """Values of an input: [case, hash], the same for every run."""
    gen = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + len(name))
    if not dtype.is_float:
        top = 2 if dtype is DType.BOOL else LENGTH
        return torch.randint(0, top, (len(CASES), TABLE), generator=gen).to(dtype.torch_dtype)
    x = torch.randn(len(CASES), TABLE, generator=gen, dtype=torch.float64)
    x[1] = x[1].abs() + 0.1
    x[2] = (x[2] * 1.5).round()
    x[3] = 0
    x[4] *= 1e4
    x[5] *= 1e-30
    x[6] += 1e5
    x[7, ::2] = -math.inf
    x[8] = -math.inf
    x[9, ::5] = math.inf
    x[10, ::5] = math.nan
    return x
