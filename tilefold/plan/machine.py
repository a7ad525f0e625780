"""The description of the machine we are on: measured once, kept in the cache directory.

Only quotients of the rates decide anything, so a quick measurement does: the best of a few calls each,
well under a second in all. Where it cannot be kept (no writable cache) it is made once a process.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tilefold import artifacts, config
from tilefold.algebra.dtypes import DType
from tilefold.algebra.threads import one_thread
from tilefold.files import cache_folder, put, read_trusted
from tilefold.plan.hardware import Machine, Tier, TierName

#: Form of the kept measurement; another number measures again.
FORMAT = 2
#: Generated products over the library's rate, f32 and narrow types; `docs/design/backend-cpp.md` has the measurements.
OWN_SHARE = 0.83
#: Element-wise units (`dataflow.element_units`) in the time of a FLOP of the library's f32 product.
VECTOR_SHARE = 0.2
#: Cores that together draw what memory gives; more of them do not get more.
MEMORY_STREAMS = 2
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured: library products in FLOP/s by dtype; copies in bytes/s (read + written) in L2, in L3, of memory."""

    f32: float
    f64: float
    bf16: float
    near: float
    shared: float
    memory: float


#: Of a nominal core pair; what `nominal` scales from.
NOMINAL = Rates(f32=90e9, f64=45e9, bf16=1e9, near=90e9, shared=45e9, memory=20e9)


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """This CPU, as measured when it was first asked for on this machine."""
    capability = torch.backends.cpu.get_cpu_capability()
    identity = f"{_cpu_name()}|{capability}|{torch.__version__}|{torch.get_num_threads()}|{FORMAT}"
    rates = _kept(identity) or _keep(identity, measure())
    artifacts.used(_file())  # plans are for these rates
    return describe(rates, "measured on this machine")


def nominal() -> Machine:
    """A CPU with fixed rates (two AVX2 cores): the same plans everywhere, for tests."""
    return describe(NOMINAL, "nominal", cores=2, caches=(32 << 10, 512 << 10, 32 << 20))


def describe(r: Rates, source: str, *, cores: int | None = None, caches: tuple[int, int, int] | None = None) -> Machine:
    """The machine with these rates; sizes of the caches as the system tells them."""
    cores = cores or torch.get_num_threads()
    first, second, third = caches or cache_sizes()
    tiers = (
        _tier("L1", first, 4 * r.near, 1.2e-9, 1, "bandwidth: four times L2's"),
        _tier("L2", second, r.near, 4e-9, 1, source),
        _tier("L3", third, r.shared, 15e-9, cores, source),
        _tier("global", 64e9, r.memory, 90e-9, cores, source),
    )
    library = {DType.F64: r.f64, DType.F32: r.f32, DType.BF16: r.bf16, DType.F16: r.bf16}
    own = {DType.F64: 0.9 * r.f64, **dict.fromkeys((DType.F32, DType.BF16, DType.F16), OWN_SHARE * r.f32)}
    name = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    return Machine(
        name, "cpu", tiers, cores, 10e-6, 4e-9, VECTOR_SHARE * r.f32, own, library, f"{source}; times nominal"
    )


def _tier(name: TierName, size: float, rate: float, latency: float, sharing: int, source: str) -> Tier:
    return Tier(name, float(size), rate, latency, sharing, source)


def cache_sizes() -> tuple[int, int, int]:
    """Bytes of L1 (data) and L2 of one core and of L3; typical ones where the system does not tell."""
    found: dict[int, int] = {}
    for level in (1, 2, 3):
        for entry in sorted(_CACHE.glob("index*")):
            try:
                kind = (entry / "type").read_text().strip()
                same = int((entry / "level").read_text()) == level
                size = (entry / "size").read_text().strip()
            except (OSError, ValueError):
                continue
            if same and kind != "Instruction" and size[:-1].isdigit():
                found[level] = int(size[:-1]) << {"K": 10, "M": 20}.get(size[-1], 0)
    return found.get(1, 32 << 10), found.get(2, 512 << 10), found.get(3, 32 << 20)


def measure() -> Rates:
    """Time products and copies of at most a millisecond on one thread, and scale: other processes may be running,
    and would slow a team of threads much more than the planner cares to know. Under half a second."""
    cores = torch.get_num_threads()
    with one_thread(), torch.no_grad():
        bf16 = _product(torch.bfloat16, 64, 0.02)
        return Rates(
            f32=cores * _product(torch.float32, 256, 0.06),
            f64=cores * _product(torch.float64, 192, 0.04),
            # without instructions for it: slow code, seconds at larger sizes
            bf16=cores * (bf16 if bf16 < 10e9 else _product(torch.bfloat16, 256, 0.05)),
            near=cores * _copy(192 << 10, 1, 0.03),
            shared=cores * _copy(1 << 20, 4, 0.03),
            memory=min(cores, MEMORY_STREAMS) * _copy(1 << 20, 96, 0.08),
        )


def _product(dtype: torch.dtype, n: int, seconds: float) -> float:
    """FLOP/s of an n x n x n product."""
    a = torch.randn(n, n).to(dtype)
    out = torch.empty_like(a)
    return 2 * n**3 / min(_times([lambda: torch.mm(a, a, out=out)], seconds))


def _copy(nbytes: int, pieces: int, seconds: float) -> float:
    """Bytes/s (read + written) of copies of `nbytes`, going around `pieces` of them."""
    src, dst = torch.ones(pieces, nbytes // 4), torch.ones(pieces, nbytes // 4)
    calls = [lambda k=k: dst[k].copy_(src[k]) for k in range(pieces)]
    return 2 * nbytes / sorted(_times(calls, seconds))[pieces // 4]


def _times(calls: Sequence[Callable[[], object]], budget: float) -> list[float]:
    """Seconds of the calls, in turn, all of them at least three times."""
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < 3 * len(calls) or time.perf_counter() - start < budget:
        for call in calls:
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return taken


def _file() -> Path:
    return config.load().cache_dir / "machine.json"


def _kept(identity: str) -> Rates | None:
    try:
        held = json.loads(read_trusted(_file()))
        found = Rates(**held["rates"]) if held["identity"] == identity else None
        sound = found is not None and all(0 < rate < math.inf for rate in asdict(found).values())
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if sound else None


def _keep(identity: str, r: Rates) -> Rates:
    try:
        cache_folder("")
        put(_file(), json.dumps({"identity": identity, "rates": asdict(r)}))
    except OSError:
        pass  # an unwritable cache: measured again by the next process
    return r


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
