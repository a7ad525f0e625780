"""Arguments that kernels write over: optimisers' steps, averages, and what may not be written over."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.capture import written_back
from tilefold.frontend.regions.assemble import compilations
from tilefold.runtime.steps import KernelStep


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adamw(p, g, m, v):
    p.mul_(0.99)
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, v.sqrt().add_(1e-3), value=-0.1)


def momentum(p, g, m):
    m.copy_(m * 0.9 + g)
    p.sub_(m, alpha=0.1)


def average(p, mean):
    mean.lerp_(p, 0.1)


def both(p, g):
    p.add_(g)
    g.mul_(p)


def old(p, g):
    before = p * 2
    p.add_(g)
    return before


def turned(p, g):
    p.copy_(p.t() + g)


def of_rows(p, g):
    p.sub_(p.mean(-1, keepdim=True) * g)


def kept(p, g):
    new = p + g
    p.copy_(new)
    return new


def viewed(p, g):
    p.add_(g)
    return p.view(-1)


def compared(fn, *shapes, calls=3):
    """What the last compilation's programs write over, once values are eager's after some calls."""
    given = [torch.rand(s, generator=torch.Generator().manual_seed(k)) for k, s in enumerate(shapes)]
    ours = [x.clone() for x in given]
    where = [x.data_ptr() for x in ours]
    fast = torch.compile(fn, backend="tilefold")
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(fast(*ours), fn(*given))
            for x, y in zip(ours, given, strict=True):
                torch.testing.assert_close(x, y)
    assert where == [x.data_ptr() for x in ours]
    return [set(r.runner.replacing_inputs.values()) for r in compilations[-1].regions]


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize(
    ("fn", "count", "over"), [(adamw, 4, {"p", "m", "v"}), (momentum, 3, {"p", "m"}), (average, 2, {"mean"})]
)
def test_steps_of_optimisers_write_where_their_state_lies(monkeypatch, fn, count, over, strict):
    monkeypatch.setenv("TILEFOLD_STRICT", strict)
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *xs: copied.append(xs))
    assert compared(fn, *[(4, 9)] * count) == [over] and not copied


@pytest.mark.parametrize(
    ("fn", "over"),
    [(both, {"p", "g"}), (old, {"p"}), (turned, set()), (of_rows, set()), (kept, {"p"}), (viewed, set())],
)
def test_only_what_is_read_where_it_is_written_is_written_over(fn, over):
    assert compared(fn, (6, 6), (6, 6)) == [over]


def test_many_parameters_of_several_shapes():
    shapes = [(), (4, 1, 3), (0, 2)]

    def step(*xs):
        for k in range(0, len(xs), 3):
            momentum(*xs[k : k + 3])

    (over,) = compared(step, *[s for s in shapes for _ in range(3)])
    assert len(over) == 4  # of one element: too little to care


def test_other_strides_are_copied():
    def step(p, g):
        p.mul_(g)

    p, g = torch.rand(4, 6).t(), torch.rand(6, 4)
    want = p * g
    torch.compile(step, backend="tilefold")(p, g)
    torch.testing.assert_close(p, want)
    assert not compilations[-1].regions[0].runner.replacing_inputs


@pytest.mark.parametrize(
    "make",
    [
        lambda t: (t[:10], t[:10]),  # one tensor, twice
        lambda t: (t[:10], t[5:15]),  # which overlap
        lambda t: (t[:10], t[10:20]),  # neighbours
        lambda t: (t[0:20:2], t[1:20:2]),
    ],
)
def test_arguments_that_share_memory(lenient, make):
    def step(p, q):
        p.mul_(0.9).add_(1)
        q.add_(p.flip(0))

    given, ours = torch.arange(20.0), torch.arange(20.0)
    fast = torch.compile(step, backend="tilefold")
    for _ in range(2):
        step(*make(given))
        fast(*make(ours))
        torch.testing.assert_close(ours, given)


def test_a_graph_of_several_parts_is_recorded_once_it_has_run(lenient):
    def step(p, g):
        p.mul_(0.5).add_(g)
        return torch.linalg.det(g @ g.t()) + p.sum()

    p, g = torch.rand(4, 4), torch.rand(4, 4)
    ours = p.clone()
    fast = torch.compile(step, backend="tilefold", options={"leftover": "eager"})
    for _ in range(4):
        torch.testing.assert_close(fast(ours, g), step(p, g))
        torch.testing.assert_close(ours, p)
    assert {"p"} in [set(r.runner.replacing_inputs.values()) for r in compilations[-1].regions]


def two(p, q):
    p.mul_(2).add_(1)
    return q.mul_(2)


@pytest.mark.parametrize("where", ["prepare", "_start"])
def test_a_call_that_has_written_is_not_repeated(lenient, monkeypatch, where):
    p, q = torch.zeros(5), torch.ones(3, 4)
    own, calls = getattr(KernelStep, where), []

    def fails(self, *given):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError("no more")
        return own(self, *given)

    monkeypatch.setattr(KernelStep, where, fails)
    fast = torch.compile(two, backend="tilefold")
    if where == "prepare":  # all is as it was: the call runs by operators
        torch.testing.assert_close(fast(p, q), torch.full((3, 4), 2.0))
        assert p.tolist() == [1.0] * 5
    else:
        with pytest.raises(MemoryError, match="no more"):
            fast(p, q)
        assert p.tolist() in ([0.0] * 5, [1.0] * 5)  # and not 3


def test_what_is_in_its_place_is_not_copied(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, new: calls.append((to, new)))
    x, y = torch.zeros(3), torch.ones(3)
    written_back._copied([x, y], [x.detach(), x])
    ((to, new),) = calls
    assert to[0] is y and new[0] is x
