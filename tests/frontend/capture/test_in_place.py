"""Parts of arguments are written where they lie, if nobody reads what was there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilefold.frontend import torch_compile
from tilefold.frontend.capture.in_place import written_in_place
from tilefold.frontend.operators.put import put_op, scattered_op


class Cache(nn.Module):
    """A buffer [4, 9, 6] to which `step` writes parts of x [4, 9, 6]."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("c", torch.randn(4, 9, 6))

    def forward(self, x, at):
        return self.step(self.c, x, at)


def places(c, x, at):
    c[:, at] = x[:, :2]
    return c.exp()


def parts_of_parts(c, x, at):
    c[:2, :, at] = x[:2, :, :2]
    c[1:3, 2:4, 1:5:2] = 7
    return c @ x.mT


def never_read(c, x, at):
    c.index_put_((torch.zeros_like(at),), x[:2])
    return x + 1


def rows(c, x, at):
    c[-1] = x[0]
    c[:, 3] = x[:, 0]
    return c.sum(-1)


def scattered(c, x, at):
    c.scatter_(1, at[:1].view(1, 1, 1).expand(4, 1, 6), x[:, :1])
    return c[:, :5] * 2


def added(c, x, at):
    c.index_put_((torch.zeros_like(at),), x[:2], accumulate=True)
    return x + 1


def old_values(c, x, at):
    y = c * 2
    c[:, at] = x[:, :2]
    return y + c


def between(c, x, at):
    c[:, at] = x[:, :2]
    y = c.sum()
    c[:, 0] = x[:, 1] + y
    return c.mean()


def moved(c, x, at):
    c.copy_(torch.index_put(c, (at - at,), c[1:3]))
    return c + 1


def copied(c, x, at):
    new = c.index_copy(1, at, x[:, :2])
    c.copy_(new)
    return new


@pytest.mark.parametrize(
    ("step", "count"),
    [(places, 1), (parts_of_parts, 2), (rows, 2), (never_read, 1), (scattered, 1)]
    + [(s, 0) for s in (added, old_values, between, moved, copied)],
)
def test_writes(step, count, monkeypatch):
    made: list[int] = []

    def noted(gm):
        written_in_place(gm)
        made.append(sum(n.target in (put_op, scattered_op) for n in gm.graph.nodes))

    monkeypatch.setattr(torch_compile, "written_in_place", noted)
    torch.manual_seed(0)
    eager = Cache(step)
    ours = copy.deepcopy(eager)
    torch._dynamo.reset()
    run = torch.compile(ours, backend="tilefold", options={"runner": "interpreter", "leftover": "eager"})
    kept = ours.c.data_ptr()
    for k in range(2):
        x, at = torch.randn(4, 9, 6), torch.tensor([k, 5])
        with torch.no_grad():
            torch.testing.assert_close(run(x, at), eager(x, at))
        torch.testing.assert_close(ours.c, eager.c)
    assert made == [count] and ours.c.data_ptr() == kept
