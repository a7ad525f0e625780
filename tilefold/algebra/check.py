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
from zlib import crc32

import torch

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate, reduce_values, select_values
from tilefold.algebra.expr import Index, Size, Sym, walk
from tilefold.algebra.fold import Check, Fold
from tilefold.algebra.nameless import Names
from tilefold.algebra.ops import INDEX_REDUCERS
from tilefold.algebra.run_fold import Runner, State

WAY, CASE = "%way", "%case"
CASES = (
    "normal", "positive", "ties", "zeros", "huge", "tiny", "offset", "some -inf", "all -inf", "some inf", "some nan",
)  # fmt: skip
LENGTH, WIDTH, TABLE = 7, 2, 61
TOLERANCE = 1e-7
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


def check_fold(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...], unbounded: frozenset[str] = frozenset()
) -> tuple[Check, ...]:
    """Numerical checks; `bodies` are the reductions the fold must equal (see `ignore_rounding`).

    `unbounded`: results whose own exponentials can overflow, so that huge inputs say nothing.
    """
    names = Names()
    same = names.fold(fold), names.reductions(bodies), frozenset(map(names.tensor, unbounded))
    found = _checks(names.cascade(cascade), *same)
    return found if all(c.ok for c in found) else _checks(cascade, fold, bodies, unbounded)


@lru_cache(maxsize=1024)
def _checks(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...], unbounded: frozenset[str]
) -> tuple[Check, ...]:
    dims = result_dims(cascade)
    out = []
    for n in (LENGTH, 1, 0):
        problem = Problem(cascade, bodies, n, unbounded)
        want = problem.reference()
        names, runner, state = _ways(fold, problem)
        got = runner.finish(state, dims)
        for way, name in enumerate(names):
            bad = problem.differences(want, {k: x[way] for k, x in got.items()})
            out.append(Check(name, "numeric", not bad, bad))
    return tuple(out)


def result_dims(cascade: Cascade) -> dict[str, tuple[str, ...]]:
    """Dims of every result by name."""
    out: dict[str, tuple[str, ...]] = {}
    for r in cascade.reductions:
        out[r.name] = r.dims
        if r.index_name is not None:
            out[r.index_name] = r.dims
    return out


def _ways(fold: Fold, p: Problem) -> tuple[tuple[str, ...], Runner, State]:
    """The final states of all ways to fold one problem, stacked along the first axis, with their names."""
    one = Runner(fold, p.env, ((WAY, 1), (CASE, len(CASES))))
    nothing = one.identity()
    if p.n == 0:
        return ("fold of nothing = identity",), one, nothing
    if p.n == 1:
        return ("fold of one = F",), one, one.lift(p.tile(0, 1))
    state = nothing
    for start, stop in ((0, 1), (1, 4), (4, p.n)):
        state = one.update(state, p.tile(start, stop))
    a, b, c = (one.lift(p.tile(*t)) for t in ((0, 2), (2, 3), (3, p.n)))
    two = Runner(fold, p.env, ((WAY, 2), (CASE, len(CASES))))
    pairs = two.merge(_stack(a, b), _stack(b, c))
    ab, bc = ({k: x[n : n + 1] for k, x in pairs.items()} for n in (0, 1))
    four = Runner(fold, p.env, ((WAY, 4), (CASE, len(CASES))))
    merged = four.merge(_stack(ab, a, c, nothing), _stack(c, bc, ab, state))
    five = Runner(fold, p.env, ((WAY, 5), (CASE, len(CASES))))
    names = (
        "incremental update = F",
        "merge(merge(a, b), c) = F",
        "merge(a, merge(b, c)) = F (associative)",
        "merge(c, merge(a, b)) = F (commutative)",
        "merge(identity, a) = a (neutral)",
    )
    return names, five, _stack(state, merged)


def _stack(*states: State) -> State:
    return {k: torch.cat([s[k] for s in states]) for k in states[0]}


@dataclass(frozen=True, slots=True)
class Problem:
    """All cases of one extent of the first axis (other axes: WIDTH)."""

    cascade: Cascade
    bodies: tuple[Reduction, ...]
    n: int
    unbounded: frozenset[str] = frozenset()

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
            own = r.dims[:-1] if r.reducer == "topk" else r.dims
            dims = {d: (0, inputs.sizes[d]) for d in (*own, *self.cascade.axes)}
            grid = Grid({WAY: (0, 1), CASE: (0, len(CASES))} | dims)
            env = _reading(results, inputs, len(grid.ranges))
            x = evaluate(r.body, grid, env).broadcast_to(grid.shape)[0]
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
                if not (case == "huge" and r.name in self.unbounded):
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
    """table[case, hash(at)] on a grid whose first dims are (way, case)."""
    if not at:
        return table[:, 0].reshape(1, -1)
    rank = at[0].ndim
    position = torch.zeros((1,) * rank, dtype=torch.int64)
    for i, p in zip(at, _PRIMES, strict=False):
        position = position + i.long() * p
    return table[_case(rank), position % TABLE]


def _case(rank: int) -> torch.Tensor:
    return torch.arange(len(CASES)).reshape(1, -1, *[1] * (rank - 2))


def _reading(results: Mapping[str, tuple[torch.Tensor, torch.Tensor]], inputs: Env, rank: int) -> Env:
    """The inputs, and the results so far, read on a grid of `rank` dims, the first two (way, case)."""

    def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if name not in results:
            x = inputs.read(name, at)
        else:
            x = results[name][0]
            x = x[(_case(rank), *at)] if at else x[None]
        return x if at else x.reshape(1, -1, *[1] * (rank - 2))

    return Env(read, inputs.sizes, inputs.syms, exact=True)


@lru_cache(maxsize=256)
def _table(name: str, dtype: DType) -> torch.Tensor:
    """Values of an input: [case, hash], the same for every run."""
    gen = torch.Generator().manual_seed(crc32(name.encode()))
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
