"""Parts over rows that one chunk has all of: gradients against float64, and what makes room for what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.training.test_chunks import arguments, capped, right, smooth, step, weighed
from tilefold.frontend.regions import rows
from tilefold.frontend.regions.assemble import compilations
from tilefold.frontend.training import chunks

ROWS, WIDE, COLUMNS = 256, 512, 2048


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """Logits of these sizes are large, and all rows are one chunk; no loop may run."""
    monkeypatch.setattr(chunks, "MOST_BYTES", 1 << 10)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 30)

    def refused(loop, *args):
        raise AssertionError(loop.rows)

    monkeypatch.setattr(rows.Loop, "__call__", refused)
    torch._dynamo.reset()
    compilations.clear()


@pytest.mark.parametrize(("fn", "dtype"), [(smooth, torch.bfloat16), (capped, torch.float32), (weighed, torch.float32)])
@torch._functorch.config.patch(donated_buffer=False)
def test_gradients_are_right_and_a_backward_can_be_repeated(fn, dtype):
    args = arguments(dtype)
    fast = torch.compile(fn, backend="tilefold")
    for factor in (0.25, 0.5, 1.0, 0.25):  # calls that come again may be recorded
        right(step(fast, args, factor), fn, args, factor)
    x, w = (a.requires_grad_() for a in args[:2])
    torch._dynamo.reset()
    loss = 2 * fast(x, w, args[2])
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * first)
    assert all(not c.fallbacks for c in compilations)


def hidden_loss(x, inner, w, y):
    return F.cross_entropy(F.linear(torch.tanh(F.linear(x, inner)).square(), w), y)


def test_hidden_states_make_room_for_their_gradient():
    gen = torch.Generator().manual_seed(0)
    x, inner = torch.randn(ROWS, 8, generator=gen), torch.randn(WIDE, 8, generator=gen) * 0.3
    w, y = torch.randn(COLUMNS, WIDE, generator=gen) * 0.1, torch.randint(COLUMNS, (ROWS,), generator=gen)
    fast = torch.compile(hidden_loss, backend="tilefold")
    fast(*(a.requires_grad_() for a in (x, inner, w)), y)
    (record,) = (c for c in compilations if c.name.endswith("forward"))
    (region,) = record.regions
    shapes = {n: shape({}) for s in region.runner.steps for n, _, shape in s.results}
    at = {n: k for k, s in enumerate(region.runner.steps) for n, _, _ in s.results}
    last = {n: k for k, s in enumerate(region.runner.steps) for n in s.reads}
    (of_weight,) = (n for n, shape in shapes.items() if shape == (COLUMNS, WIDE))
    hidden, of_hidden = sorted((n for n, shape in shapes.items() if shape == (ROWS, WIDE)), key=at.__getitem__)
    assert at[hidden] < at[of_weight] == last[hidden] < at[of_hidden]
    assert hidden not in region.lowered.program.outputs
