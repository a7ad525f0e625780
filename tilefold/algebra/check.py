"""A Fold is checked before it is used: run in pieces against the cascade itself, in float64.

Problems are stacked along one batch dim (see `algebra.trials`): random values, ties, infinities,
NaN, and scales at which results move by hundreds from one part to the next. Every problem is
folded sequentially in uneven tiles, merged from parts in both orders and both groupings, and
with one and with no element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.definition import Defined, define, trusted, uncertainty
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Expr, Index, Size, Sym, dims_used, loads, tensors_read, walk
from tilefold.algebra.fold import Check, Fold
from tilefold.algebra.nameless import Names
from tilefold.algebra.run_fold import Runner, State
from tilefold.algebra.threads import one_thread
from tilefold.algebra.trials import CASE, CASES, LARGEST, NAMED, WAY, gather, largest

LENGTH, WIDTH = 7, 2
TOLERANCE = 1e-7
#: Of the scaled cases, which look for what leaves the range of numbers: that is wrong by more. They also have weights
#: that all but cancel in a part of the data, where dividing by their sum costs digits.
ROUGH = 1e-2
#: What is larger than the inputs by this factor is not one of them.
BEYOND = 1.05


def check_fold(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...], unbounded: frozenset[str] = frozenset()
) -> tuple[Check, ...]:
    """Numerical checks; `bodies` are the reductions the fold must equal (see `ignore_rounding`).

    `unbounded`: results whose own exponentials can overflow, so that huge inputs say nothing.

    Reductions that have nothing to do with each other are checked one by one: a Fold of many sums costs no more than
    the different ones among them. What fails is checked again as a whole, under its own names.
    """
    found = [_nameless(*part, unbounded) for part in _parts(cascade, fold, bodies)]
    if all(c.ok for part in found for c in part):
        return found[0]
    return _checks(cascade, fold, bodies, unbounded)


def reads_other_rows(cascade: Cascade, fold: Fold) -> list[str]:
    """What is made from a state of rows that problems, which have few, may not have: of the last token, of every
    second one, of one that data choose."""
    state = {v.name for v in fold.state} | {v.index_name for v in fold.state if v.index_name}
    used = [*fold.finish, *((v.name, e) for v in fold.state for e in (v.element, v.repair) if e is not None)]
    read = [(name, ld) for name, e in used for ld in loads(e) if ld.tensor.partition("@")[0] in state]
    moved = [(name, ix) for name, ld in read for ix in ld.index if not isinstance(ix, Index)]
    problem = Problem(cascade, cascade.reductions, LENGTH)
    return list(dict.fromkeys(name for name, ix in moved if tensors_read(ix) & state or not problem.has(ix)))


def _nameless(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...], unbounded: frozenset[str]
) -> tuple[Check, ...]:
    names = Names()
    own = unbounded & {r.name for r in bodies}
    same = names.fold(fold), names.reductions(bodies), frozenset(map(names.tensor, own))
    return _checks(names.cascade(cascade), *same)


def _parts(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...]
) -> list[tuple[Cascade, Fold, tuple[Reduction, ...]]]:
    """The Fold as several that share no variable and read nothing of each other, each with its reductions."""
    linked: list[tuple[str, frozenset[str]]] = [(r.name, tensors_read(r.body)) for r in bodies]
    linked += [(name, tensors_read(e)) for name, e in fold.finish]
    linked += [(r.name, frozenset({r.index_name})) for r in bodies if r.index_name is not None]
    for v in fold.state:
        moved = frozenset[str]() if v.repair is None else tensors_read(v.repair)
        linked.append((v.name, tensors_read(v.element) | moved | ({v.index_name} if v.index_name else set())))
    own = {name for name, _ in linked} | {r.index_name for r in bodies if r.index_name is not None}
    part = {name: {name} for name in own}
    for name, read in linked:
        for other in {t.partition("@")[0] for t in read} & own:
            if part[other] is not part[name]:
                part[name] |= part[other]
                part.update(dict.fromkeys(part[other], part[name]))
    together = {id(part[r.name]): part[r.name] for r in bodies}.values()
    if len(together) == 1 or any(v.name not in set().union(*together) for v in fold.state):
        return [(cascade, fold, bodies)]
    return [
        (
            replace(cascade, reductions=tuple(r for r in cascade.reductions if r.name in names)),
            Fold(
                fold.axes,
                tuple(v for v in fold.state if v.name in names),
                tuple((n, e) for n, e in fold.finish if n in names),
            ),
            tuple(r for r in bodies if r.name in names),
        )
        for names in together
    ]


@lru_cache(maxsize=1024)
def _checks(
    cascade: Cascade, fold: Fold, bodies: tuple[Reduction, ...], unbounded: frozenset[str]
) -> tuple[Check, ...]:
    with one_thread():
        return tuple(c for n in (LENGTH, 1, 0) for c in _checks_of(Problem(cascade, bodies, n, unbounded), fold))


def _checks_of(p: Problem, fold: Fold) -> list[Check]:
    names, runner, state = _ways(fold, p)
    got = runner.finish(state, result_dims(p.cascade))
    return [
        Check(name, "numeric", not bad, ", ".join(bad))
        for name, bad in zip(names, p.differences(got, len(names)), strict=True)
    ]


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
    one = Runner(fold, p.env, ((WAY, 1), (CASE, p.cases)))
    nothing = one.identity()
    if p.n == 0:
        return ("fold of nothing = identity",), one, nothing
    if p.n == 1:
        return ("fold of one = F",), one, one.lift(p.tile(0, 1))
    state = nothing
    for start, stop in ((0, 1), (1, 4), (4, p.n)):
        state = one.update(state, p.tile(start, stop))
    a, b, c = (one.lift(p.tile(*t)) for t in ((0, 2), (2, 3), (3, p.n)))
    two = Runner(fold, p.env, ((WAY, 2), (CASE, p.cases)))
    pairs = two.merge(_stack(a, b), _stack(b, c))
    ab, bc = ({k: x[n : n + 1] for k, x in pairs.items()} for n in (0, 1))
    four = Runner(fold, p.env, ((WAY, 4), (CASE, p.cases)))
    merged = four.merge(_stack(ab, a, c, nothing), _stack(c, bc, ab, state))
    five = Runner(fold, p.env, ((WAY, 5), (CASE, p.cases)))
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


@dataclass(frozen=True)
class Problem:
    """All cases of one extent of the first axis (other axes: WIDTH)."""

    cascade: Cascade
    bodies: tuple[Reduction, ...]
    n: int
    unbounded: frozenset[str] = frozenset()

    @cached_property
    def cases(self) -> int:
        """How many cases there are: the scaled ones only where results depend on results, and move."""
        names = {r.name for r in self.bodies}
        moves = self.n > 1 and any(tensors_read(r.body) & names for r in self.bodies)
        return len(CASES if moves else NAMED)

    @cached_property
    def env(self) -> Env:
        exprs = [r.body for r in self.bodies]
        nodes = [x for e in exprs for x in walk(e)]
        dims = {x.dim for x in nodes if isinstance(x, Index | Size)} | {d for r in self.bodies for d in r.dims}
        sizes = dict.fromkeys(dims, WIDTH) | dict.fromkeys(self.cascade.axes, WIDTH)
        sizes[self.cascade.axes[0]] = self.n
        dtypes = dict(self.cascade.input_dtypes)

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return gather(name, dtypes.get(name, DType.F32), self.cases, at)

        return Env(read, sizes, {x.name: 3 for x in nodes if isinstance(x, Sym)}, exact=True)

    def has(self, row: Expr) -> bool:
        """Whether results have such a row, whatever the row that reads it."""
        dims = {WAY: (0, 1), CASE: (0, self.cases), **{d: (0, self.env.sizes[d]) for d in sorted(dims_used(row))}}
        at = evaluate(row, Grid(dims), self.env)
        return bool((at < WIDTH).all() and (at >= -WIDTH).all())

    def tile(self, start: int, stop: int) -> Mapping[str, tuple[int, int]]:
        sizes = self.env.sizes
        return {a: (0, sizes[a]) for a in self.cascade.axes} | {self.cascade.axes[0]: (start, stop)}

    @cached_property
    def want(self) -> dict[str, Defined]:
        """Each reduction by its definition."""
        return define(self.bodies, self.cascade.axes, self.env, self.cases)

    @cached_property
    def judged(self) -> dict[str, torch.Tensor]:
        """Cases in which a result must be that of the definition: the named ones, scaled ones if it can be trusted."""
        every = torch.ones(self.cases, dtype=torch.bool)
        if self.cases == len(NAMED):
            return {r.name: every for r in self.bodies}
        found = trusted(self.bodies, self.cascade.axes, self.env, self.cases, self.want)
        every[len(NAMED) :] = False
        return {name: (ok & self.moved) | every for name, ok in found.items()}

    @cached_property
    def uncertainty(self) -> dict[str, torch.Tensor]:
        """What rounding in the definition decides of the sums of each result."""
        sums = {r.name for r in self.bodies if r.reducer == "sum"}
        found = uncertainty(self.bodies, self.cascade.axes, self.env, self.cases, self.want)
        return {name: noise for name, noise in found.items() if name in sums}

    @cached_property
    def moved(self) -> torch.Tensor:
        """Scaled cases in which what moves is results: those of moderate inputs, and where a result that others read
        is beyond the inputs. A maximum of an input is as large as that is; it may be all that bounds another input,
        and drawn apart from it bounds nothing.
        """
        read = {n for r in self.bodies for n in tensors_read(r.body)}
        inputs, results = (torch.zeros(self.cases, dtype=torch.float64) for _ in range(2))
        dtypes = dict(self.cascade.input_dtypes)
        for name in read - self.want.keys():
            inputs = torch.maximum(inputs, largest(name, dtypes.get(name, DType.F32), self.cases))
        for r in self.bodies:
            if r.name in read:
                results = torch.maximum(results, self.want[r.name].farthest(r.reducer))
        return (inputs <= LARGEST) | (results > BEYOND * inputs)

    @cached_property
    def sizes(self) -> dict[str, torch.Tensor]:
        """What differences of each result are relative to."""
        return {r.name: self.want[r.name].size(r.reducer) for r in self.bodies}

    def differences(self, got: State, ways: int) -> list[list[str]]:
        """For each way [way, case, dims] which results differ, in which cases; empty if none does."""
        bad: list[list[str]] = [[] for _ in range(ways)]
        for r in self.bodies:
            want = self.want[r.name]
            if r.reducer == "topk" and want.elements.shape[-1] < want.value.shape[-1]:
                continue
            skip = {"huge"} if r.name in self.unbounded else set()
            self._unequal(r, r.name, got[r.name], skip, bad)
            if r.index_name is not None and want.elements.shape[-1]:
                at = got[r.index_name].clamp(min=0)
                at = at if r.reducer == "topk" else at[..., None]
                chosen = want.elements.expand(ways, *want.elements.shape).gather(-1, at)
                self._unequal(r, r.index_name, chosen if r.reducer == "topk" else chosen[..., 0], set(), bad)
        return bad

    def _unequal(self, r: Reduction, name: str, got: torch.Tensor, skip: set[str], bad: list[list[str]]) -> None:
        """Cases in which NaN or infinities differ, or values by more than the tolerance of what is summed."""
        want, got = self.want[r.name].value.double(), got.double()
        tolerance = torch.full((self.cases, *[1] * (want.ndim - 1)), ROUGH, dtype=torch.float64)
        tolerance[: len(NAMED)] = TOLERANCE
        close = (want - got).abs() <= tolerance * self.sizes[r.name].clamp(min=1e-300)
        same = (want == got) | (want.isnan() & got.isnan()) | (want.isfinite() & got.isfinite() & close)
        overflow = CASES.index("huge")  # of the original: which non-finite value comes out is not specified
        same[:, overflow] |= ~want[overflow].isfinite()
        if not same.all() and name in self.uncertainty:
            noise = self.uncertainty[name].clone()
            noise[len(NAMED) :] = 0  # of the scaled cases, those that rounding decides are not judged
            same |= want.isfinite() & got.isfinite() & ((want - got).abs() <= noise)
        right = same.reshape(len(bad), self.cases, -1).all(2) | ~self.judged[r.name]
        for way, case in (~right).nonzero().tolist():
            if CASES[case] not in skip:
                bad[way].append(f"{name} ({CASES[case]})")
