"""Recurrences whose states are stacked, and fast transforms: what is computed again has a price for all it reads."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.expr import Call, Index, Load, loads
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_again import MOST_ELEMENTS
from tilefold.plan.hardware import H100
from tilefold.plan.nearer import ALIKE, _tried
from tilefold.plan.parts import MOST_COMPUTED, of_parts, repeated
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor import interp
from tilefold.tensor.analysis import Graph
from tilefold.tensor.index_simplify import const
from tilefold.tensor.text import parse
from tilefold.tensor.unify import unify

STEPS = 24


def scores(x, y, decay):
    """A recurrence of steps, whose states are normalised together."""
    state, states = torch.zeros_like(x[0]), []
    for a, b in zip(x, y, strict=True):
        state = a + b * decay * state
        states.append(state)
    every = torch.stack(states)
    return (every - every.mean()) / (every.std() + 1e-8)


def hadamard(x, levels):
    n, y = x.shape[-1], x
    for k in range(levels):
        y = y.view(x.shape[0], n >> (k + 1), 2, 1 << k)
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2).reshape(x.shape)
    return y


def test_stacked_states_are_not_computed_again_for_each_step():
    p = trace(scores, torch.zeros(STEPS, 8192), torch.zeros(STEPS, 8192), torch.zeros(8192)).program
    *_, last = fuse_for_gpu(p).kernels
    assert "x" not in {i.name for i in last.block.inputs}


def test_a_fast_transform_is_a_few_kernels_of_several_levels():
    p = trace(hadamard, torch.zeros(4096, 256), 8).program
    fused = fuse_for_gpu(p)
    assert len(fused.kernels) == 2
    g = Graph.of(fused.program)
    for k in fused.kernels:
        made = {*k.plan.group.members}
        read = {ld for m in made for ld in loads(g.by_name[m].body) if ld.tensor not in made}
        assert len(read) <= MOST_ELEMENTS


@pytest.mark.parametrize("rows", [1, 3])
def test_a_fast_transform_means_the_same(rows):
    p = trace(hadamard, torch.zeros(rows, 64), 6).program
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    (name,) = p.outputs
    got = interp.run(fuse_for_gpu(p).program, {p.inputs[0].name: x})[name]
    torch.testing.assert_close(got.reshape(rows, 64), hadamard(x, 6))


SUMS = """program f()
  input x: f32[4096, 512]
  dim i = 4096
  dim j = 256
  dim k = 256
  dim q = 2
  a[i, j, q]: f32 = where(q < 1, x[i, j * 2], x[i, j * 2 + 1] * 2.0)
  b[i, k, q]: f32 = where(q < 1, x[i, k * 2] * 3.0, x[i, k * 2 + 1])
  return a, b
"""


def test_sums_and_differences_of_neighbours_are_one_kernel():
    p = unify(parse(SUMS))
    assert p.body[0].dims == p.body[1].dims
    assert len(fuse_for_gpu(p, GpuTarget()).kernels) == 1


STACKED = """program f()
  input x: f32[4, 4096]
  dim i = 4096
  dim j = 3
  z[j, i]: f32 = where(j < 1, x[0, i], where(j < 2, x[0, i] + x[1, i], x[0, i] + x[1, i] * x[2, i]))
  return z
"""


def test_what_parts_share_is_counted_for_each():
    p = parse(STACKED)
    found = of_parts(p.body[0].body)
    assert found is not None
    assert sorted((e.index[0].value, n) for e, n in found if isinstance(e, Load)) == [(0, 3), (1, 2), (2, 1)]
    assert repeated(Graph.of(p), [x for x in found if isinstance(x[0], Load)], H100) > 0


def test_parts_are_counted_up_to_a_limit():
    """Each step chooses from the one before it, by another dim: there are 2^40 parts."""
    p = parse(STACKED)
    state = p.body[0].body
    for n in range(40):
        state = Call("where", (Call("lt", (Index("j"), const(n))), state, Call("neg", (state,))))
    assert of_parts(state) is None and MOST_COMPUTED > 1000


def test_cuts_between_steps_are_not_all_that_are_tried():
    p = trace(scores, torch.zeros(STEPS, 8192), torch.zeros(STEPS, 8192), torch.zeros(8192)).program
    g = Graph.of(p)
    members = tuple(c.name for c in p.body)
    tried = _tried(g, members)
    assert any("stack" in a and not any(g.by_name[m].reducer for m in a) for a, _ in tried)
    ends = [frozenset(m for m in a if g.by_name[m].reducer or g.escapes(m, members)) for a, _ in tried]
    assert max(map(ends.count, ends)) <= ALIKE
