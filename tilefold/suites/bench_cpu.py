"""`tilefold bench cpu`: Tilefold, eager, torch.compile and library kernels, interleaved in one process.

Every contender is compared with float64 before it is timed, and is not timed where it is wrong (peers are
judged less strictly than Tilefold is). All take the same arguments and allocate their own results.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import fuse, own_copy
from tilefold.frontend.torch_compile import backend
from tilefold.frontend.verify import FACTOR, compare
from tilefold.runtime.native.load import native
from tilefold.suites.gpu.environment import commit_here
from tilefold.suites.timing import Series, interleave, kept_memory
from tilefold.suites.workloads import WORKLOADS, Workload

OURS = "tilefold"
REPEATS = 2
#: A peer that takes longer than this is timed by one call: in rounds it would leave no time for the others.
SLOW_SECONDS = 1.0
#: Error allowed to peers, times eager's: they are timed unless they are plainly wrong.
PEER_FACTOR = 16.0
#: What a contender may raise while it is compiled: the row then says so.
_FAILURES = (TilefoldError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation. `ms`: median of each repetition (one entry where it is too slow for more than
    one call), empty where it was not timed; `why` says why. `ratios`: its time over Tilefold's, one a
    repetition; above 1 Tilefold is faster.
    """

    name: str
    error: float
    ms: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    why: str = ""

    @property
    def ratio(self) -> float:
        """The smaller (less flattering) of the repetitions; NaN where there is none."""
        return min(self.ratios, default=float("nan"))


@dataclass(frozen=True, slots=True)
class Target:
    """At least `least` times as fast as `peer`. `met` is None where the ratio could not be measured."""

    peer: str
    least: float
    met: bool | None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One workload; `floor_ms` is what the machine's measured rates allow at best."""

    name: str
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...]
    floor_ms: float = 0.0

    def contender(self, name: str) -> Contender | None:
        return next((c for c in self.contenders if c.name == name), None)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Where it ran, and its ceilings, measured here: matrix product GFLOP/s by dtype, copy GB/s (read + written)."""

    cpu: str
    capability: str
    threads: int
    torch: str
    gemm_gflops: tuple[tuple[str, float], ...]
    copy_gbps: float
    kept_memory: bool


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rows of one run, and the commit that was measured."""

    machine: MachineRates
    rows: tuple[BenchRow, ...]
    commit: str = ""


def run(
    names: Sequence[str] | None = None,
    *,
    budget: float = 6.0,
    rounds: int = 60,
    commit: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Time the workloads whose name contains one of `names` (None: all).

    `budget`: seconds a repetition of one workload; there are REPEATS of them. `progress` is told
    what is being done. TilefoldError where no workload matches.
    """
    chosen = [w for w in WORKLOADS if names is None or any(n.lower() in w.name.lower() for n in names)]
    if not chosen:
        raise TilefoldError(f"no workload is called {names}", hint="; ".join(w.name for w in WORKLOADS))
    tell = progress or (lambda _: None)
    tell("building what calls kernels")
    native().wait()  # once a machine; meanwhile they are called from Python, beside a compiler at work
    tell("measuring the machine's rates")
    with kept_memory() as kept, torch.no_grad():
        before = measure_machine(kept)
        rows = [_row(w, budget, rounds, tell) for w in chosen if not w.fresh]
        machine = best_of(before, measure_machine(kept))
    with torch.no_grad():
        rows += [_row(w, budget, rounds, tell) for w in chosen if w.fresh]
    floors = {w.name: floor_ms(w, machine) for w in chosen}
    return BenchReport(machine, tuple(replace(r, floor_ms=floors[r.name]) for r in rows), commit or commit_here())


def best_of(a: MachineRates, b: MachineRates) -> MachineRates:
    """The higher of two measurements of each rate: another process may have slowed one of them."""
    gemm = tuple((name, max(x, y)) for (name, x), (_, y) in zip(a.gemm_gflops, b.gemm_gflops, strict=True))
    return replace(a, gemm_gflops=gemm, copy_gbps=max(a.copy_gbps, b.copy_gbps))


def measure_machine(kept: bool = False) -> MachineRates:
    """Ceilings of this machine with torch's thread count; takes a second or two."""
    gemm = []
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        rate = _gemm_rate(dtype, 256)
        if dtype is torch.float32 or rate > 20:  # without instructions for bf16 a large product takes seconds
            rate = max(rate, _gemm_rate(dtype, 1024))
        gemm.append((name, rate))
    src, dst = torch.randn(1 << 24), torch.empty(1 << 24)
    seconds = interleave({"copy": lambda: dst.copy_(src)}, budget=0.5, rounds=20)
    copy = 2 * src.nbytes / min(seconds["copy"].seconds) / 1e9
    return MachineRates(
        cpu=_cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        gemm_gflops=tuple(gemm),
        copy_gbps=copy,
        kept_memory=kept,
    )


def _gemm_rate(dtype: torch.dtype, n: int) -> float:
    """GFLOP/s of torch's n x n x n product, the best of some calls."""
    a = torch.randn(n, n).to(dtype)
    out = torch.empty_like(a)
    series = interleave({"mm": lambda: torch.mm(a, a, out=out)}, budget=0.5, rounds=20)["mm"]
    return 2 * n**3 / min(series.seconds) / 1e9


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def floor_ms(w: Workload, machine: MachineRates) -> float:
    """Milliseconds that the machine's ceilings allow at best: flops at the GEMM rate, bytes at the copy rate.

    A narrow product may run at the f32 rate where that is the faster one (converted on the way).
    """
    rates = dict(machine.gemm_gflops)
    arithmetic = w.flops / (max(rates[w.peak], rates["f32"]) * 1e9) if w.peak else 0.0
    return 1e3 * max(arithmetic, w.nbytes / (machine.copy_gbps * 1e9))


def _row(w: Workload, budget: float, rounds: int, tell: Callable[[str], None]) -> BenchRow:
    args = w.make(torch.Generator().manual_seed(0))
    calls, found = prepare(w, args, tell)
    if OURS not in calls:
        targets = tuple(Target(peer, least, None) for peer, least in w.targets)
        return BenchRow(w.name, tuple(found), targets)
    series: list[dict[str, Series]] = []
    for n in range(REPEATS):
        tell(f"{w.name}: timing, repetition {n + 1} of {REPEATS}")
        thunks = {name: lambda f=f: f(*args) for name, f in calls.items()}  # type: ignore[misc]
        series.append(interleave(thunks, budget=budget, rounds=rounds))
    contenders = tuple(_timed(c, series) for c in found)
    by_name = {c.name: c for c in contenders}
    targets = tuple(_target(peer, least, by_name.get(peer)) for peer, least in w.targets)
    return BenchRow(w.name, contenders, targets)


def _timed(c: Contender, series: Sequence[dict[str, Series]]) -> Contender:
    """With the times of its series; those of one call are kept and divided by Tilefold's medians."""
    if all(c.name in s for s in series):
        ms = tuple(1e3 * s[c.name].median for s in series)
        return replace(c, ms=ms, ratios=tuple(s[c.name].over(s[OURS]) for s in series))
    return replace(c, ratios=tuple(t / (1e3 * s[OURS].median) for t in c.ms for s in series))


def _target(peer: str, least: float, c: Contender | None) -> Target:
    return Target(peer, least, c.ratio >= least if c is not None and c.ratios else None)


def prepare(
    w: Workload, args: Sequence[Any], tell: Callable[[str], None]
) -> tuple[dict[str, Callable[..., Any]], list[Contender]]:
    """The contenders that are right, ready to call, and what is known of all of them."""
    calls: dict[str, Callable[..., Any]] = {}
    found: list[Contender] = []
    makers: dict[str, Callable[[], Callable[..., Any]]] = {
        OURS: lambda: torch.compile(own_copy(w.fn), backend=backend) if w.planned else fuse(w.fn),
        "eager": lambda: w.fn,
        "compile": lambda: torch.compile(w.fn),
        **{name: lambda f=f: f for name, f in w.peers},  # type: ignore[misc]
    }
    for name, make in makers.items():
        tell(f"{w.name}: compiling and checking {name}")
        try:
            fast = make()
            checked = compare(name, w.fn, fast, args, factor=FACTOR if name == OURS else PEER_FACTOR)
        except _FAILURES as error:
            found.append(Contender(name, float("nan"), why=str(error).splitlines()[0]))
            continue
        if not checked.ok:
            why = f"wrong: {checked.why} (error {checked.max_rel_err:.1e}, bound {checked.bound:.1e})"
            found.append(Contender(name, checked.max_rel_err, why=why))
            continue
        begin = time.perf_counter()
        fast(*args)
        seconds = time.perf_counter() - begin
        if name != OURS and seconds > SLOW_SECONDS:
            found.append(Contender(name, checked.max_rel_err, (1e3 * seconds,), why="timed by one call"))
            continue
        found.append(Contender(name, checked.max_rel_err))
        calls[name] = fast
    return calls, found
