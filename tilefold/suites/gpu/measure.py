"""Timing on a GPU: every contender is a captured CUDA graph, and they take turns.

A round is one replay of each, in an order that changes from round to round (`timing.in_turn`). Cold: before each replay
a buffer larger than the L2 cache is overwritten, so that inputs come from memory; the events stand around the
replay alone, which is queued while the buffer is written (as in `triton.testing.do_bench`). Hot: the
graph holds several calls, nothing is flushed, and the time is divided by the calls.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tilefold.suites.timing import Series, in_turn, interleave

Thunk = Callable[[], object]
Cache = Literal["cold", "hot"]
FLUSH_BYTES = 256 << 20
#: Calls in a graph whose caches are hot.
HOT_CALLS = 20
WARMUP, CHUNK, LEAST_ROUNDS = 3, 10, 10
#: CU_GRAPH_NODE_TYPE_KERNEL
_KERNEL_NODE = 0
#: Calls of a contender that is timed outside the rounds.
APART_CALLS = 3
HOST_CALLS = 10


class Timer(Protocol):
    """How calls are timed on a device."""

    @property
    def policy(self) -> str:
        """How, in words."""
        ...

    def ready(self, call: Thunk) -> Thunk:
        """The call in the form that is timed. RuntimeError where it cannot be captured."""
        ...

    def kernels(self, ready: Thunk) -> float:
        """Kernels that a call launches; NaN where that is not known."""
        ...

    def once(self, call: Thunk) -> float:
        """Seconds of one plain call, host time included, and everything waited for."""
        ...

    def apart(self, call: Thunk) -> float:
        """Median seconds of a few plain calls, for a contender that is too slow or too large for the rounds."""
        ...

    def host(self, call: Thunk) -> float:
        """Median seconds of the process' processors until a plain call returns, nothing being queued before it: other
        processes, which compile meanwhile, do not count."""
        ...

    def rounds(self, calls: Mapping[str, Thunk], *, most: int, budget: float) -> dict[str, Series]:
        """Turns of what `ready` gave: at most so many, or for `budget` seconds (but LEAST_ROUNDS)."""
        ...

    def peak(self, call: Thunk) -> int:
        """Bytes that a call allocates at most, beyond what there was."""
        ...

    def memory(self) -> int:
        """Bytes of the device's memory."""
        ...

    def release(self) -> None:
        """Give memory back after a row."""
        ...


@dataclass(slots=True)
class CudaTimer:
    """Times on the current CUDA device."""

    cache: Cache = "cold"
    flush: torch.Tensor | None = None

    @property
    def policy(self) -> str:
        if self.cache == "cold":
            return f"CUDA graph replay, L2 flushed before each ({FLUSH_BYTES >> 20} MiB written)"
        return f"CUDA graph of {HOT_CALLS} calls, caches hot"

    @property
    def calls(self) -> int:
        return 1 if self.cache == "cold" else HOT_CALLS

    def ready(self, call: Thunk) -> Thunk:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up for a stream outside of the capture
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(self.calls):
                call()
        graph.instantiate()
        return graph.replay

    def kernels(self, ready: Thunk) -> float:
        graph = getattr(ready, "__self__", None)
        if not isinstance(graph, torch.cuda.CUDAGraph):
            return math.nan
        return kernels_of(graph.raw_cuda_graph()) / self.calls

    def once(self, call: Thunk) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def apart(self, call: Thunk) -> float:
        return statistics.median(self._turn({"": call})[""] for _ in range(APART_CALLS))

    def host(self, call: Thunk) -> float:
        seconds = []
        for _ in range(HOST_CALLS):
            torch.cuda.synchronize()
            begin = time.process_time()
            call()
            seconds.append(time.process_time() - begin)
        torch.cuda.synchronize()
        return statistics.median(seconds)

    def rounds(self, calls: Mapping[str, Thunk], *, most: int, budget: float) -> dict[str, Series]:
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(WARMUP):
            self._turn(calls)
        start, done = time.perf_counter(), 0
        while done < most and (done < LEAST_ROUNDS or time.perf_counter() - start < budget):
            for name, times in self._rounds(calls, done, min(CHUNK, most - done)).items():
                seconds[name] += [t / self.calls for t in times]
            done = len(next(iter(seconds.values())))
        return {name: Series(tuple(s)) for name, s in seconds.items()}

    def _turn(self, calls: Mapping[str, Thunk]) -> dict[str, float]:
        return {name: times[0] for name, times in self._rounds(calls, 0, 1).items()}

    def _rounds(self, calls: Mapping[str, Thunk], first: int, count: int) -> dict[str, list[float]]:
        """Seconds of each call in `count` rounds, queued without waiting in between."""
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for n in range(first, first + count):
            for name in in_turn(tuple(calls), n):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if self.cache == "cold":
                    self._flush()
                begin.record()
                calls[name]()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize()
        return {name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs] for name, pairs in marks.items()}

    def _flush(self) -> None:
        if self.flush is None:
            self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.flush.zero_()

    def peak(self, call: Thunk) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def memory(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(slots=True)
class CpuTimer:
    """Stands in for a GPU's where there is none: plain calls, timed on the host."""

    policy: str = "plain calls on a CPU: a dry run"

    def ready(self, call: Thunk) -> Thunk:
        return call

    def kernels(self, ready: Thunk) -> float:
        return math.nan

    def once(self, call: Thunk) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def apart(self, call: Thunk) -> float:
        return statistics.median(self.once(call) for _ in range(APART_CALLS))

    def host(self, call: Thunk) -> float:
        return math.nan

    def rounds(self, calls: Mapping[str, Thunk], *, most: int, budget: float) -> dict[str, Series]:
        return interleave(calls, budget=budget, rounds=most)

    def peak(self, call: Thunk) -> int:
        return 0

    def memory(self) -> int:
        return 1 << 62

    def release(self) -> None:
        return None


def kernels_of(graph: int) -> int:
    """Kernel nodes of a `CUgraph`, given by its address. RuntimeError where the driver refuses."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    _accepted(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _accepted(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    kind, found = ctypes.c_int(), 0
    for node in nodes:
        _accepted(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        found += kind.value == _KERNEL_NODE
    return found


def _accepted(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answers {status}")


def timer_for(device: str, cache: Cache) -> Timer:
    """The timer of a device."""
    return CudaTimer(cache) if device == "cuda" else CpuTimer()
