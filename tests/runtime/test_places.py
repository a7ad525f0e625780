"""Kernels of a program with calls of the library: those with nothing between them know that they follow one another."""

from __future__ import annotations

import pytest
import torch

from tilefold import pipeline
from tilefold.backends.triton.dependent import ALONE, Place
from tilefold.frontend.fuse import trace
from tilefold.runtime import steps
from tilefold.runtime.steps import AddedStep, GpuStep
from tilefold.tensor.text import parse

FIRST, MIDDLE, LAST = Place(False, True), Place(True, True), Place(True, False)


def layer(x, w, v):
    """Statistics down columns, in segments, and what they normalise; two products; one's maxima."""
    x = x.float()
    z = ((x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5)).bfloat16() @ w
    return z @ v, z.float().amax(0)


#: Values added up by keys, in zeros, of which a map is made.
ADDED = """program added()
  input at: i64[4096]
  input x: f32[4096, 512]
  dim r = 64
  dim k = 4096
  dim j = 512
  m[k, j]: f32 = exp(x[k, j])
  y[r, j]: f32 = sum[k] where(at[k] == r, m[k, j], 0.0)
  z[r, j]: f32 = y[r, j] * 2.0
  return z, m
"""


def places(p):
    """Runs of kernels, the library's calls between them."""
    found = [[]]
    for s in pipeline.compile_program(p, device="cuda").steps:
        if isinstance(s, GpuStep):
            found[-1].append(s)
        else:
            found.append([])
    return [run for run in found if run]


def of_layer(**more):
    x, w = torch.empty(8192, 512, dtype=torch.bfloat16), torch.empty(512, 512, dtype=torch.bfloat16)
    return trace(layer, x, w, w, **more).program


def test_kernels_between_calls_of_the_library_follow_one_another():
    front, *behind = places(of_layer())
    assert [s.place for s in front] == [FIRST, *[MIDDLE] * (len(front) - 2), LAST] and len(front) > 2
    for run in behind:
        assert [s.place for s in run] in ([ALONE], [FIRST, LAST])


def test_what_is_added_to_is_filled_between_kernels():
    (run,) = places(parse(ADDED))
    at = next(n for n, s in enumerate(run) if isinstance(s, AddedStep))
    assert not run[at].zeroed and not run[at].place.follows and run[at].place.followed
    assert not run[at - 1].place.followed


def test_kernels_of_varying_sizes_may_have_no_thread_blocks():
    assert {s.place for run in places(of_layer(dynamic=True)) for s in run} == {ALONE}


@pytest.mark.parametrize("on", [True, False])
def test_kernels_are_planned_at_their_places_where_the_device_has_that(on, monkeypatch):
    x = torch.empty(8192, 512, dtype=torch.bfloat16)
    front = places(of_layer())[0]
    monkeypatch.setattr(steps, "enabled", lambda device: on)
    seen = []
    for s in front:
        monkeypatch.setattr(s.triton, "launch", lambda xs, syms, place: seen.append(place))
        s.run({n: torch.empty(shape({}), dtype=d) for n, d, shape in s.results} | {n: x for n in s.reads}, {})
    assert seen == ([s.place for s in front] if on else [ALONE] * len(front))
