"""The GPU's timer on a pretended device: what is captured, flushed and divided, in which order."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tilefold.suites.gpu import measure
from tilefold.suites.gpu.floors import Rates, measure_rates
from tilefold.suites.gpu.measure import CpuTimer, CudaTimer, timer_for


class Device:
    """A clock that calls advance, and a log of what happened."""

    def __init__(self):
        self.now, self.log, self.capturing = 0.0, [], None

    def work(self, name, seconds):
        def call():
            if self.capturing is not None:
                self.capturing.append(call_now)
                return
            call_now()

        def call_now():
            self.log.append(name)
            self.now += seconds

        return call


@pytest.fixture
def device(monkeypatch):
    d = Device()

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = d.now
            d.log.append("event")

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    class Graph:
        def __init__(self, keep_graph=False):
            assert keep_graph  # its kernels are counted
            self.calls, self.made = [], False

        def instantiate(self):
            self.made = True

        def replay(self):
            assert self.made
            for call in self.calls:
                call()

    class Stream:
        def wait_stream(self, other):
            d.log.append("wait")

    @contextmanager
    def graph(g, stream=None):
        assert isinstance(stream, Stream)
        d.capturing = g.calls
        yield
        d.capturing = None

    @contextmanager
    def on(stream):
        yield

    fakes = {"Event": Event, "CUDAGraph": Graph, "Stream": Stream, "graph": graph, "stream": on}
    fakes |= {"current_stream": Stream, "synchronize": lambda: d.log.append("sync")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return d


class Buffer:
    def __init__(self, device):
        self.device = device

    def zero_(self):
        self.device.log.append("flush")
        self.device.now += 0.5  # outside the events: must not count


def test_cold_rounds_flush_before_every_replay_and_time_the_replay_alone(device):
    timer = CudaTimer("cold", Buffer(device))
    calls = {"a": timer.ready(device.work("a", 0.001)), "b": timer.ready(device.work("b", 0.002))}
    device.log.clear()
    series = timer.rounds(calls, most=4, budget=10.0)
    assert series["a"].seconds == pytest.approx((0.001,) * 4) and series["b"].median == pytest.approx(0.002)
    kept = [e for e in device.log if e != "sync"]
    turns = [kept[n : n + 4] for n in range(0, len(kept), 4)]
    assert all(t[0] == "flush" and t[1] == t[3] == "event" for t in turns)
    order = "".join(t[2] for t in turns)
    rounds = [order[n : n + 2] for n in range(0, len(order), 2)]
    assert rounds[: measure.WARMUP] == ["ab"] * measure.WARMUP
    assert sorted(rounds[measure.WARMUP :]) == ["ab", "ab", "ba", "ba"]  # each follows the other equally often
    assert "flushed" in timer.policy


def test_hot_graphs_hold_several_calls_and_nothing_is_flushed(device):
    timer = CudaTimer("hot", Buffer(device))
    ready = timer.ready(device.work("a", 0.001))
    device.log.clear()
    assert timer.rounds({"a": ready}, most=2, budget=10.0)["a"].seconds == pytest.approx((0.001, 0.001))
    assert "flush" not in device.log
    assert device.log.count("a") == measure.HOT_CALLS * (2 + measure.WARMUP)


def test_a_call_runs_before_it_is_captured_and_not_while(device):
    ready = CudaTimer().ready(device.work("a", 0.001))
    assert device.log == ["wait", "a", "a", "wait", "sync"]
    ready()
    assert device.log[-1] == "a"


def test_rounds_end_with_the_budget_but_not_before_the_least(device):
    timer = CudaTimer("cold", Buffer(device))
    ready = timer.ready(device.work("a", 0.001))
    assert len(timer.rounds({"a": ready}, most=500, budget=0.0)["a"].seconds) == measure.LEAST_ROUNDS
    assert timer.apart(device.work("a", 0.003)) == pytest.approx(0.003)


def test_timers_and_rates_of_a_cpu():
    assert isinstance(timer_for("cpu", "cold"), CpuTimer) and isinstance(timer_for("cuda", "hot"), CudaTimer)
    rates = measure_rates("cpu", CpuTimer())
    assert isinstance(rates, Rates) and rates.f16 > 1e6 and rates.memory > 1e6 and rates.f8 == 0.0
