"""One row: every contender is compared with float64, then those that are right take turns.

A contender that fails becomes a record that says so. Tilefold's error may be twice eager's own in the
same dtype, that of peers more: they are left out only where they are plainly wrong.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves, tree_map

from tilefold.errors import TilefoldError
from tilefold.frontend.hostile import Args
from tilefold.frontend.regions import assemble as regions
from tilefold.frontend.verify import FACTOR, Comparison, judge
from tilefold.runtime.native.load import native
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.exact import Draws, Reference, by_luck, references, training_step
from tilefold.suites.gpu.floors import Rates
from tilefold.suites.gpu.measure import Thunk, Timer
from tilefold.suites.gpu.peers import OURS, Peer
from tilefold.suites.gpu.results import Record
from tilefold.suites.timing import Series

REPEATS = 2
#: Error allowed to peers, times eager's.
PEER_FACTOR = 16.0
#: A contender slower than this, or that allocates more than this part of the memory, is timed outside the rounds.
SLOW_SECONDS, LARGE_SHARE = 0.05, 0.2
SLOW_TRIES = 3
SETTLING_CALLS = 3
#: Characters of a reason that a record has.
REASON = 160
#: Relative error of eager's above which a gradient says nothing.
HOPELESS = 0.5
#: What a contender may raise while it is built, run or captured; anything else ends the process, which the
#: supervisor notes and survives.
FAILURES = (
    TilefoldError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
)
#: Told (contender, what is being done) before anything that may hang or kill the process.
Tell = Callable[[str, str], None]
#: Makes a context in which nothing else uses the device.
Alone = Callable[[], AbstractContextManager[None]]
#: The same as `Tell` with the row first.
Said = Callable[[str, str, str], None]


class DeviceLost(Exception):
    """The device does not answer after a contender's failure: this process can measure nothing more."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Rounds at most, and seconds for each of the repetitions; contenders that are not begun after `row_seconds`
    are left out.
    """

    rounds: int = 100
    seconds: float = 0.5
    row_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Compared:
    """What contenders are compared with: the parts of a row, and eager on other draws."""

    parts: Sequence[Reference]
    draws: Draws


@dataclass(slots=True)
class _Entry:
    """A contender on its way: its record so far, and how it is called once it was found right."""

    record: Record
    call: Thunk | None = None
    ready: Thunk | None = None
    apart: list[float] = field(default_factory=list)


def measure_row(
    case: GpuCase,
    peers: Sequence[Peer],
    timer: Timer,
    rates: Rates,
    device: str,
    *,
    effort: Effort | None = None,
    known: Mapping[str, Record] | None = None,
    tell: Tell = lambda contender, doing: None,
    alone: Alone = nullcontext,
    seed: int = 0,
) -> tuple[Record, ...]:
    """The records of a row. `known` contenders (they killed an earlier process) are not tried again."""
    effort = effort or Effort()
    known = known or {}
    deadline = time.monotonic() + effort.row_seconds
    floor, bound_by = rates.floor(case.work) if case.work is not None else (math.nan, "")
    with torch.no_grad():
        tell("", "drawing arguments and computing the reference")
        blanks = [blank_record(case, peer, floor * 1e6, bound_by) for peer in peers]
        try:
            draws = Draws(case, device, seed)
            case = case.placed(device)
            args = case.args(device, seed)
            compared = Compared(references(case, args), draws)
        except FAILURES as error:
            _recover(timer)
            return tuple(replace(b, why=f"no reference: {first_line(error)}") for b in blanks)
        found: dict[str, _Entry] = {}

        # a contender with graphs of its own frees the libraries' workspaces, which graphs captured before it would use
        # of a whole model Tilefold comes last, so that a long compilation costs its own figures alone
        def place(pair: tuple[Peer, Record]) -> tuple[bool, bool]:
            return not pair[0].graphs, case.steps and pair[0].kind in ("ours", "own")

        for peer, blank in sorted(zip(peers, blanks, strict=True), key=place):
            if peer.name in known:
                found[peer.name] = _Entry(replace(blank, why=known[peer.name].why))
            elif time.monotonic() > deadline:
                found[peer.name] = _Entry(replace(blank, why="left out: the row's time was used up"))
            else:
                found[peer.name] = _prepare(peer, blank, case, args, compared, timer, tell, alone)
                if peer.graphs:
                    torch._dynamo.reset()
        entries = [found[peer.name] for peer in peers]
        tell("", "waiting to be alone on the device")
        with alone():
            _time(entries, timer, effort, tell)
    records = _with_ratios([e.record for e in entries])
    del entries, found, compared, args
    torch._dynamo.reset()
    gc.collect()
    timer.release()
    return records


def blank_record(case: GpuCase, peer: Peer, floor_us: float = math.nan, bound_by: str = "") -> Record:
    """What is known of a contender before it is tried."""
    return Record(
        suite=case.suite,
        row=case.row,
        family=case.family,
        shape=case.shape,
        length=case.length,
        contender=peer.name,
        kind=peer.kind,
        floor_us=floor_us,
        bound_by=bound_by,
        flops=case.work.flops if case.work is not None else 0.0,
        nbytes=case.work.nbytes if case.work is not None else 0.0,
    )


def failed_records(case: GpuCase, peers: Sequence[Peer], why: str) -> list[Record]:
    """The records of a row that could not be measured."""
    return [replace(blank_record(case, peer), why=why) for peer in peers]


def _prepare(
    peer: Peer,
    blank: Record,
    case: GpuCase,
    args: Args,
    compared: Compared,
    timer: Timer,
    tell: Tell,
    alone: Alone,
) -> _Entry:
    """Built, run once, compared, and captured; or why not."""
    entry = _Entry(blank)
    try:
        tell(peer.name, "compiling")
        regions.compilations.clear()
        built = peer.build(case, args)
        made = training_step(built, case.fn) if case.train else built
        results: list[Any] = []
        with peer.cold():
            cpu = _processor_seconds()
            first = timer.once(lambda: results.append(made(*args)))
            cpu = _processor_seconds() - cpu
        entry.record = replace(entry.record, first_call=first, first_cpu=cpu)
        tell(peer.name, "checking")
        if peer.kind != "floor":
            worst = _checked(peer, compared, results.pop(), hopeless=case.train)
            entry.record = replace(entry.record, error=worst.max_rel_err, eager_error=worst.eager_rel_err)
            if not worst.ok:
                told = f"error {worst.max_rel_err:.1e}, bound {worst.bound:.1e}"
                why = f"wrong: {worst.why} ({', '.join(filter(None, (worst.name, told)))})"
                entry.record = replace(entry.record, why=why)
                if not case.steps:
                    return replace(entry, record=_with_left_over(entry.record)) if peer.kind == "ours" else entry
        results.clear()
        entry.call = lambda: made(*args)
        tell(peer.name, "capturing")
        _make_ready(entry, timer, alone, captured=not peer.graphs)
        if case.steps:
            settle(entry.call, ours=peer.kind in ("ours", "own"))
            with alone():
                step, host = timer.apart(entry.call), timer.host(entry.call)
            peak = timer.peak(entry.call)  # of a step as all later ones: the first ones hold what they may run again
            entry.record = replace(entry.record, step_us=1e6 * step, host_us=1e6 * host, peak_bytes=float(peak))
    except FAILURES as error:
        entry.record = replace(entry.record, why=first_line(error))
        entry.call = None
    if peer.kind == "ours":
        entry.record = _with_left_over(entry.record)
    if entry.record.why:
        _recover(timer)
    return entry


def settle(call: Thunk, *, ours: bool) -> None:
    """Call a step until it costs what it will always cost: ours is recorded once the module that runs it is built."""
    if ours:
        native().wait()
    for _ in range(SETTLING_CALLS):
        call()


def _make_ready(entry: _Entry, timer: Timer, alone: Alone, *, captured: bool = True) -> None:
    """Captured; or timed by plain calls where it is slow, large, or cannot be captured."""
    assert entry.call is not None
    peak = timer.peak(entry.call)
    entry.record = replace(entry.record, peak_bytes=float(peak))
    # a worker that is stopped meanwhile looks slow: once more
    slow = all(timer.once(entry.call) > SLOW_SECONDS for _ in range(SLOW_TRIES))
    if not captured:
        _time_apart(entry, timer, alone, "it has graphs of its own")
        return
    if peak > LARGE_SHARE * timer.memory() or slow:
        _time_apart(entry, timer, alone, "slow or large")
        return
    try:
        entry.ready = timer.ready(entry.call)
        entry.record = replace(entry.record, how=timer.policy, kernels=timer.kernels(entry.ready))
    except RuntimeError as error:
        _recover(timer)
        _time_apart(entry, timer, alone, first_line(error))


def _time_apart(entry: _Entry, timer: Timer, alone: Alone, why: str) -> None:
    assert entry.call is not None
    with alone():
        entry.apart = [timer.apart(entry.call) for _ in range(REPEATS)]
    entry.record = replace(entry.record, how=f"plain calls outside the rounds: {why}")


def _with_left_over(r: Record) -> Record:
    """With what the compilations of a contender have left to others by now (kernels may fail at any call), each once,
    and why."""
    found = {f.node: f.reason for c in reversed(regions.compilations) for f in reversed(c.fallbacks)}
    why = (f"{node}: {reason[:REASON]}" for node, reason in reversed(found.items()))
    return replace(r, left=", ".join(reversed(found)), left_why="; ".join(why))


def _processor_seconds() -> float:
    """Of this process and of those that it waited for (compilers)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _checked(peer: Peer, compared: Compared, result: Any, *, hopeless: bool = False) -> Comparison:
    """The worst comparison of all results on all parts; of few elements, by eager's luck on other draws as well.

    hopeless: results of which eager has no digit right, as gradients that cancel to nothing, are left out.
    """
    factor = FACTOR if peer.kind in ("ours", "own") else PEER_FACTOR
    found = []
    if all(_finite(r.exact.result) for r in compared.parts) and not _finite(result):
        return Comparison("", False, math.inf, 0.0, math.inf, 0.0, "not finite outside the parts, or in them")
    for at, r in enumerate(compared.parts):
        # the part's own leaf keeps its identity: selections are recognised by it
        results, exact = tree_leaves(tree_map(r.part.select, result)), tree_leaves(r.exact.result)
        if len(results) != len(exact):
            return Comparison("", False, math.inf, 0.0, math.inf, 0.0, f"{len(results)} results, not {len(exact)}")
        for leaf, (y, own, e) in enumerate(zip(results, r.eager, exact, strict=True)):
            name = f"result {leaf + 1} of {len(results)}"
            comparison = judge(name, y, own, e, factor, r.exact.selections)
            if not comparison.ok and by_luck(y, e):
                luck = compared.draws.luck(at, leaf)
                comparison = judge(name, y, own, e, factor, r.exact.selections, luck=luck)
            if not (hopeless and comparison.eager_rel_err > HOPELESS):
                found.append(comparison)
    return max(found, key=lambda c: (not c.ok, c.max_rel_err / c.bound if c.bound else c.max_rel_err))


def _finite(result: Any) -> bool:
    """Of the whole result: parts see a wrong tile elsewhere only if it is in them."""
    tensors = (y for y in tree_leaves(result) if isinstance(y, torch.Tensor))
    return all(bool((y.float() if y.dtype.itemsize == 1 else y).isfinite().all()) for y in tensors)


def _recover(timer: Timer) -> None:
    gc.collect()
    try:
        timer.release()
    except RuntimeError as error:
        raise DeviceLost(first_line(error)) from error


def _time(entries: Sequence[_Entry], timer: Timer, effort: Effort, tell: Tell) -> None:
    """REPEATS series of those that are ready, taking turns; the others' times are in `apart` already."""
    calls = {e.record.contender: e.ready for e in entries if e.ready is not None}
    series: list[dict[str, Series]] = []
    for n in range(REPEATS if calls else 0):
        tell("", f"timing, repetition {n + 1} of {REPEATS}")
        series.append(timer.rounds(calls, most=effort.rounds, budget=effort.seconds))
    ours = [s[OURS] for s in series if OURS in s]
    base = next((e.apart for e in entries if e.record.contender == OURS and e.apart), [o.median for o in ours])
    for e in entries:
        name = e.record.contender
        mine = [s[name] for s in series if name in s]
        medians = [s.median for s in mine] or e.apart
        if mine and ours:
            ratios = [a.over(b) for a, b in zip(mine, ours, strict=True)]
        else:
            ratios = [a / b for a, b in zip(medians, base, strict=False)]
        e.record = replace(
            e.record,
            microseconds=tuple(1e6 * m for m in medians),
            over_ours=tuple(ratios),
            spread=max((_spread(s) for s in mine), default=math.nan),
        )


def _spread(s: Series) -> float:
    if len(s.seconds) < 2:
        return math.nan
    low, _, high = statistics.quantiles(s.seconds, n=4)
    return (high - low) / s.median


def _with_ratios(records: Sequence[Record]) -> tuple[Record, ...]:
    """`ratio`: the best peer's time over the contender's."""
    best = min((r.best_us for r in records if r.kind == "peer" and r.microseconds), default=math.nan)
    return tuple(replace(r, ratio=best / r.best_us) if r.microseconds else r for r in records)


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message; of a backend's failure, those of what failed in it."""
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    text = next((ln.strip() for ln in str(error).splitlines() if ln.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]
