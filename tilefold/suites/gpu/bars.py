"""What Tilefold must reach, judged on geometric means over the rows of a run.

A ratio is the peer's time over Tilefold's, the smaller of the two repetitions; a row on which a peer was
timed and Tilefold was not counts against the bar. Nothing is judged that was not measured: a row without one of the
bar's peers (not run, or not installed) is left out and named. A peer that ran and could not compute a row is no gap.

Bars in bytes/s are those of an H100. On another device the same share of its own measured memory rate is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from tilefold.suites.gpu.cases import SUITES
from tilefold.suites.gpu.peers import OURS, PEERS
from tilefold.suites.gpu.results import Record, Results

#: Peers that a bar may mean together by "best".
BEST = "best peer"
#: The device that bars in bytes/s were stated for, and its measured memory rate.
STATED_FOR, STATED_MEMORY = "H100", 3.05e12
#: Bytes/s that decode of a long cache must reach: 85% of 3.0 TB/s.
DECODE_BANDWIDTH = 0.85 * 3.0e12
#: Bytes/s of softmax and RMSNorm where QuACK cannot be installed.
ROW_BANDWIDTH = 2.8e12
#: Seconds of a cold, untuned first call.
FIRST_CALL_SECONDS = 3.0
#: Entry of the startup study, what it may be at most, unit.
STARTUP = (("cold", FIRST_CALL_SECONDS, "s"), ("tuning", 30.0, "s"), ("warm", 0.5, "s"), ("host_us", 10.0, "us"))
_STARTUP = {
    "cold": "first call, empty caches",
    "tuning": "quick tuning",
    "warm": "first call of a second process",
    "host_us": "host, warm call of the custom operator",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Over the rows whose name or family matches one of `rows`: at least `least` times as fast as the quickest of
    `peers` (none: as all peers that were timed).
    """

    suite: str
    rows: tuple[str, ...]
    peers: tuple[str, ...]
    least: float

    @property
    def name(self) -> str:
        against = " and ".join(self.peers) if len(self.peers) < 3 else ", ".join(self.peers)
        return f"{', '.join(self.rows)}: {self.least:g}x {against or BEST}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value`: what was reached (NaN: nothing was measured), over `rows` of `known` rows of the suite.
    `met` is None where nothing could be judged. `missing`: rows that only peers were timed on. `without`: rows that are
    left out, each with the peers that it lacks.
    """

    suite: str
    name: str
    value: float
    met: bool | None
    rows: int
    missing: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        if self.met is None:
            return "not judged, peers missing" if self.without else "not measured"
        return "met" if self.met else "MISSED"


def _prefill(*names: str) -> tuple[str, ...]:
    return tuple(f"{n} prefill" for n in names)


BARS: tuple[Bar, ...] = (
    Bar("redfuser", ("mha",), ("flash",), 1.3),
    Bar("redfuser", ("mha",), ("cudnn",), 0.9),
    Bar("redfuser", ("mha decode",), (), 0.97),
    Bar("redfuser", ("mla",), ("compile",), 2.0),
    Bar("redfuser", ("moe routing",), ("compile",), 2.0),
    Bar("redfuser", ("quant gemm",), ("compile",), 1.1),
    Bar("redfuser", ("variance",), ("torch.var", "compile"), 1.0),
    Bar("redfuser", ("inertia",), ("compile",), 3.5),
    Bar("redfuser", ("softmax",), ("quack",), 0.95),
    Bar("redfuser", ("rms norm",), ("quack",), 0.95),
    *(Bar("neptune", (name,), ("flex",), 1.15) for name in _prefill("global", "causal", "gqa", "window", "alibi")),
    Bar("neptune", _prefill("softcap"), ("flex",), 1.8),
    Bar("neptune", _prefill("global", "causal", "gqa"), ("cudnn",), 0.8),
    *(
        Bar("neptune", (f"{name} decode",), ("cudnn", "flash", "flex"), 1.0)
        for name in ("causal", "alibi", "gqa", "softcap")
    ),
    Bar("neptune", ("l2 norm",), ("compile",), 1.2),
    Bar("neptune", ("rmsnorm max",), ("compile",), 1.2),
    Bar("neptune", ("performer",), ("compile",), 1.2),
)


def judge_all(results: Results, suites: Sequence[str] | None = None) -> tuple[Verdict, ...]:
    """Every bar of these suites (None: those that the results have rows of)."""
    measured = {s for s, _ in results.done} if suites is None else set(suites)
    found = []
    for bar in BARS:
        if bar.suite in measured:
            verdict = judge_bar(results, bar)
            if verdict.met is None and bar.peers == ("quack",):
                verdict = _judge_bandwidth(results, bar.suite, bar.rows[0], ROW_BANDWIDTH)
            found.append(verdict)
    if "neptune" in measured:
        found.append(_judge_bandwidth(results, "neptune", "* decode", DECODE_BANDWIDTH, 32768))
    found += [_judge_first_call(results, suite) for suite in ("redfuser", "neptune") if suite in measured]
    return tuple(found)


def judge_startup(results: Results) -> tuple[Verdict, ...]:
    """The bars of the startup study; none where it was not made."""
    return tuple(_judge_startup(results, *bar) for bar in STARTUP if results.startup)


def judge_bar(results: Results, bar: Bar) -> Verdict:
    """One bar on what was measured."""
    ratios: list[float] = []
    missing: list[str] = []
    without: list[str] = []
    for row, records in _rows(
        results, bar.suite, lambda r: any(fnmatch(x, p) for p in bar.rows for x in (r.family, r.row))
    ):
        peers = [
            r for r in records if r.kind == "peer" and r.microseconds and (not bar.peers or r.contender in bar.peers)
        ]
        ours = next((r for r in records if r.contender == OURS), None)
        if not peers:
            continue
        if ours is None or not ours.microseconds:
            missing.append(row)
            continue
        lacking = _lacking(bar, row, records)
        if lacking:
            without.append(f"{row} ({', '.join(lacking)})")
            continue
        ratios.append(min(against(p, ours) for p in peers))
    value = geometric_mean(ratios)
    met = None if not ratios and not missing else not missing and value >= bar.least
    return Verdict(bar.suite, bar.name, value, met, len(ratios), tuple(missing), tuple(without))


def _lacking(bar: Bar, row: str, records: Sequence[Record]) -> list[str]:
    """Peers that the bar means, that the row's case has, and that were not run on it."""
    case = next((c for c in SUITES.get(bar.suite, ()) if c.row == row), None)
    known = bar.peers if case is None else [p for p in case.peers if PEERS[p].kind == "peer"]
    wanted = [p for p in known if not bar.peers or p in bar.peers]
    answered = {r.contender for r in records if r.microseconds or (r.why and "cannot be imported" not in r.why)}
    return [p for p in wanted if p not in answered]


def against(peer: Record, ours: Record) -> float:
    """The peer's time over Tilefold's, the less flattering repetition."""
    return min(peer.over_ours, default=peer.best_us / ours.best_us)


def geometric_mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values)) if values else math.nan


def _rows(results: Results, suite: str, wanted: Callable[[Record], bool]) -> list[tuple[str, tuple[Record, ...]]]:
    names = dict.fromkeys(r.row for r in results.records if r.suite == suite and wanted(r))
    return [(n, results.row(suite, n)) for n in names]


def _judge_bandwidth(results: Results, suite: str, family: str, least: float, length: int = 0) -> Verdict:
    """Bytes/s of Tilefold itself on the rows of at least this length; `least`: what is asked for on an H100."""
    here, words = bandwidth_here(results, least)
    name = f"{family}{f' from {length // 1024}K keys' if length else ''}: {words}"
    rates, missing = [], []
    for row, records in _rows(results, suite, lambda r: fnmatch(r.family, family) and r.length >= length):
        ours = next((r for r in records if r.contender == OURS), None)
        if ours is not None and ours.microseconds:
            rates.append(ours.nbytes / (max(ours.microseconds) / 1e6))
        elif any(r.microseconds for r in records):
            missing.append(row)
    value = geometric_mean(rates)
    met = None if not rates and not missing else not missing and value >= here
    return Verdict(suite, name, value / 1e9, met, len(rates), tuple(missing))


def bandwidth_here(results: Results, stated: float) -> tuple[float, str]:
    """Bytes/s asked for on the device of the results where `stated` is asked for on an H100, and that in words."""
    share = stated / STATED_MEMORY
    if STATED_FOR in results.device.get("name", "").split() or "memory" not in results.rates:
        return stated, f"{stated / 1e9:,.0f} GB/s ({share:.0%} of an H100's memory rate)"
    here = share * results.rates["memory"]
    return here, f"{here / 1e9:,.0f} GB/s ({share:.0%} of the memory rate, as {stated / 1e9:,.0f} GB/s on an H100)"


def _judge_first_call(results: Results, suite: str) -> Verdict:
    """The slowest first call of Tilefold, in seconds."""
    name = f"slowest first call: under {FIRST_CALL_SECONDS:g} s"
    taken = {r.row: r.first_call for r in results.records if r.suite == suite and r.contender == OURS}
    measured = [s for s in taken.values() if not math.isnan(s)]
    slow = tuple(row for row, s in taken.items() if s > FIRST_CALL_SECONDS)
    worst = max(measured, default=math.nan)
    return Verdict(suite, name, worst, worst < FIRST_CALL_SECONDS if measured else None, len(measured), slow)


def _judge_startup(results: Results, entry: str, most: float, unit: str) -> Verdict:
    """The slowest row of the startup study."""
    measured = {e["row"]: e[entry] for e in results.startup if e.get(entry) is not None}
    slow = tuple(row for row, x in measured.items() if x > most)
    failed = tuple(e["row"] for e in results.startup if e.get(entry) is None and e["why"])
    worst = max(measured.values(), default=math.nan)
    met = None if not measured and not failed else not slow and not failed
    return Verdict("all", f"{_STARTUP[entry]}: under {most:g} {unit}", worst, met, len(measured), slow + failed)
