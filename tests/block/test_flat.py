"""Axes as one: the same values whichever of them is long, or left apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.expr import Const, Size, call
from tilefold.block import interp
from tilefold.block.flat import flattened
from tilefold.block.ir import Accumulate, Block, Loop, walk
from tilefold.block.split import share_of
from tilefold.block.text import parse, show
from tilefold.block.verify import verify
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.targets import gpu
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.sizes import estimate

GENERATOR = torch.Generator().manual_seed(0)


def columns(x, w):
    """A gradient of weights behind a norm, and of a bias."""
    rows = torch.rsqrt((w * w).mean(-1, keepdim=True) + 1e-6)
    return (x * w * rows).sum((0, 1, 2)), x.sum((0, 1, 2))


def written_beside(x, w):
    """A map that is written along the axes, and sums of it."""
    y = x * torch.tanh(w)
    return y, y.sum((0, 1, 2))


def moments(x, w):
    return torch.var_mean(x + w, (0, 1, 2))


def whole(x, w):
    return torch.logsumexp(x, (0, 1, 2, 3)), (x * w).mean()


def best(x, w):
    return x.flatten(0, 2).sum(1).argmax(0), (x - w).amax((0, 2))


def kernels(fn, monkeypatch: pytest.MonkeyPatch, segments: int | None) -> tuple[list[Block], tuple[str, ...]]:
    """The kernels of a function of [n0, n1, n2, 6] twice, as they are before axes become one, and its results."""
    torch._dynamo.reset()
    args = [torch.zeros(3, 4, 5, 6) for _ in range(2)]
    for x in args:
        for axis in range(3):
            torch._dynamo.mark_dynamic(x, axis)
    monkeypatch.setattr(gpu, "flattened", lambda b, **_: b)
    target = GpuTarget(given=None if segments is None else Given(segments=segments))
    p = trace(fn, *args, dynamic="auto").program
    return [k.block for k in fuse_for_gpu(p, target).kernels], p.outputs


def run(blocks: list[Block], given: dict[str, torch.Tensor], syms: dict[str, int]) -> dict[str, torch.Tensor]:
    for b in blocks:
        mine = {i.name: given[i.name] for i in b.inputs}
        given = given | interp.run(b, mine, syms, block_sizes=dict.fromkeys(b.sizes, 4), exact=True)
    return given


def folds(blocks: list[Block]) -> list[Accumulate]:
    return [n for b in blocks for n in walk(b.body) if isinstance(n, Accumulate)]


def loops(b: Block) -> list[Loop]:
    return [n for n in walk(b.body) if isinstance(n, Loop) and n.kind == "for"]


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("fn", [columns, written_beside, moments, whole, best])
def test_the_same_of_all_extents(fn, segments, monkeypatch):
    before, outputs = kernels(fn, monkeypatch, segments)
    after = [verify(flattened(b)) for b in before]
    assert [parse(show(b)) for b in after] == after
    assert any(len(n.rdims) > 1 for n in folds(before))
    assert all(
        len(n.rdims) == 1 or all(isinstance(b.sizes.get(d), Const) for d in n.rdims) for b in after for n in folds([b])
    )
    shapes = {i.name: i.shape for b in before for i in b.inputs if i.name in ("x", "w")}
    for extents in ((2, 7, 3), (1, 9, 1)):
        syms = dict(zip(before[0].syms, extents, strict=True))
        given = {
            n: torch.randn([estimate(e, syms) for e in shape], generator=GENERATOR).double()
            for n, shape in shapes.items()
        }
        was, now = run(before, given, syms), run(after, given, syms)
        for r in outputs:
            torch.testing.assert_close(now[r], was[r])


def test_shares_are_of_all_there_is(monkeypatch):
    before, _ = kernels(columns, monkeypatch, 4)
    cut = [b for b in before if any(n.stop is not None for n in loops(b))]
    assert cut
    for b in cut:
        (was,), (now,) = loops(b), loops(flattened(b))
        assert now.dim not in b.sizes and (now.start, now.stop) == share_of(now.dim, _segment(b), 4) != (
            was.start,
            was.stop,
        )


def _segment(b: Block) -> str:
    (found,) = [n.dim for n in walk(b.body) if isinstance(n, Loop) and n.single]
    return found


def test_what_is_bounded_otherwise_stays(monkeypatch):
    """A bound that is no segment's is of one axis, and says nothing of the others."""
    b = next(b for b in kernels(columns, monkeypatch, 1)[0] if folds([b]))

    def bounded(nodes):
        for n in nodes:
            if isinstance(n, Loop):
                n = replace(
                    n, body=tuple(bounded(n.body)), stop=call("floordiv", Size(n.dim), 2) if n.kind == "for" else None
                )
            yield n

    half = verify(replace(b, body=tuple(bounded(b.body))))
    assert flattened(half) is half
    assert flattened(b) is not b


def test_known_extents_stay_apart():
    torch._dynamo.reset()
    x = torch.zeros(300, 40, 5, 6)
    for k in fuse_for_gpu(trace(columns, x, x).program).kernels:
        assert flattened(k.block) is k.block


def mirrored(x):
    return torch.nn.functional.pad(x, (3, 5, 7, 2), mode="reflect").square().mean((1, 2, 3))


def windowed(x):
    """Mirrored images times a window along their rows, which no image has for its own."""
    y = torch.nn.functional.pad(x, (3, 5, 7, 2), mode="reflect")
    w = torch.cos(torch.arange(y.shape[2], device=y.device) * 0.1) + 1.5
    return (y * w[:, None]).square().mean((1, 2, 3))


@pytest.mark.parametrize("fn", [mirrored, windowed])
def test_known_extents_are_one_axis_where_a_block_cannot_hold_what_no_launch_joins(fn):
    torch._dynamo.reset()
    made = fuse_for_gpu(trace(fn, torch.zeros(16, 48, 123, 127, device="meta")).program).kernels
    over = [n for k in made for n in folds([k.block]) if n.rdims]
    assert over and all(len(n.rdims) == 1 for n in over)
    small = trace(fn, torch.zeros(2, 3, 9, 8)).program
    made = fuse_for_gpu(small, GpuTarget(given=Given(segments=2, stream=2))).kernels
    before = [k.block for k in made]
    after = [verify(flattened(b, known=True)) for b in before]
    assert any(len(n.rdims) > 1 for n in folds(before)) and all(len(n.rdims) < 2 for n in folds(after))
    given = {before[0].inputs[0].name: torch.randn(2, 3, 9, 8, generator=GENERATOR).double()}
    was, now = run(before, given, {}), run(after, given, {})
    for r in small.outputs:
        torch.testing.assert_close(now[r], was[r])
