"""Dropout and random numbers are arithmetic on a seed: no region is cut, no mask is saved, and both passes, all
kernels and eager mode have the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tilefold import fuse
from tilefold.errors import UnsupportedError
from tilefold.frontend import torch_compile
from tilefold.frontend.capture.decompose import decompositions
from tilefold.frontend.capture.few_bits import few_bits
from tilefold.frontend.fuse import trace
from tilefold.frontend.operators.random import FEW_LIMIT, LIMIT, random16_op, random_op, seed_op
from tilefold.frontend.regions import assemble as regions


def compiled(fn, **options):
    torch._dynamo.reset()
    regions.compilations.clear()
    return torch.compile(fn, backend=torch_compile.backend, options=options or None)


def kept_by(seed: int, shape: tuple[int, ...], p: float, *, which: int = 0, few: bool = False) -> torch.Tensor:
    """The mask of the dropout number `which` of a graph that has the generator to itself; few: of 16 bits."""
    torch.manual_seed(seed)
    seeds = [seed_op(torch.device("cpu")) for _ in range(which + 1)]
    draw, limit = (random16_op, FEW_LIMIT) if few else (random_op, LIMIT)
    return draw(seeds[which], shape) < round((1 - p) * limit)


def saved_bytes(fn, *args) -> int:
    """Of tensors that a compiled forward keeps for its backward, beside the arguments."""
    found = {}
    known = {a.untyped_storage().data_ptr() for a in args}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fn(*args)
    return sum(found.values())


def test_a_network_with_dropout_is_one_region_each_way():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.25), nn.LayerNorm(16), nn.Dropout(0.5)).train()
    x = torch.randn(4, 8, requires_grad=True)
    compiled(model)(x).sum().backward()
    forward, backward = regions.compilations
    assert len(forward.regions) == len(backward.regions) == 1
    assert not forward.fallbacks and not backward.fallbacks and forward.left == 0


@pytest.mark.parametrize("p", [0.25, 0.9])
def test_gradients_use_the_mask_of_the_forward_which_is_the_definitions(p):
    x = torch.randn(64, 99, requires_grad=True)
    f = compiled(lambda v: F.dropout(F.dropout(v.exp(), p), 0.5))
    torch.manual_seed(11)
    y = f(x)
    y.sum().backward()
    kept = kept_by(11, (64, 99), p) & kept_by(11, (64, 99), 0.5, which=1)
    share = kept_by(11, (64, 99), p).double().mean().item()
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / y.numel()) ** 0.5  # five standard deviations
    want = torch.where(kept, x.exp() / (1 - p) / 0.5, 0.0)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize(
    "p, multiplied, few",
    [(0.1, True, True), (0.5, True, True), (0.001, True, False), (1 - 1e-6, True, False), (0.1, False, False)],
)
def test_16_bits_are_for_what_is_multiplied_where_their_steps_are_small(p, multiplied, few):
    def draws(x, y):
        x = F.dropout(x, p)
        return x @ y if multiplied else x + y

    torch._dynamo.reset()
    graphs = []

    def keep(gm, args):
        few_bits(gm.graph)
        graphs.append({n.target for n in gm.graph.nodes})
        return gm.forward

    backend = aot_autograd(fw_compiler=keep, decompositions=decompositions())
    torch.compile(draws, backend=backend)(torch.ones(2, 16, 16), torch.ones(2, 16, 16))
    assert (random16_op in graphs[0], random_op in graphs[0]) == (few, not few)


def test_no_mask_is_saved():
    x = torch.randn(64, 128, requires_grad=True)
    assert saved_bytes(compiled(lambda v: F.dropout(v.exp(), 0.25)), x) <= 16
    kept = saved_bytes(compiled(lambda v: F.dropout(v.exp(), 0.25), fallback_random=True), x)
    assert kept >= x.numel()  # eager's numbers cannot be drawn again


def test_attention_with_dropout_is_that_of_its_mask():
    q, k, v = (torch.randn(1, 2, 48, 16, requires_grad=True) for _ in range(3))
    f = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3))
    torch.manual_seed(5)
    y = f(q, k, v)
    y.square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = (wide[0] @ wide[1].mT / 4.0).masked_fill(torch.ones(48, 48).triu(1).bool(), -math.inf)
    want = (scores.softmax(-1) * kept_by(5, (1, 2, 48, 48), 0.3, few=True) / 0.7) @ wide[2]
    want.square().sum().backward()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    for a, b in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)
    assert all(len(c.regions) == 1 and not c.fallbacks for c in regions.compilations)


@pytest.mark.parametrize("partition", ["folds", "min_cut"])
def test_a_checkpoint_draws_its_mask_again(partition):
    def inner(v):
        return F.dropout(v.exp(), 0.4)

    f = compiled(lambda v: checkpoint(inner, v, use_reentrant=False).square(), partition=partition)
    x = torch.randn(32, 40, requires_grad=True)
    y = f(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y)
    assert 0.5 < (y != 0).double().mean() < 0.7


def test_numbers_are_fresh_and_the_seed_s():
    f = compiled(lambda v: (F.dropout(v, 0.5), F.dropout(v, 0.5)))
    x = torch.ones(32, 32)
    with torch.no_grad():
        torch.manual_seed(1)
        (first, other), (second, _) = f(x), f(x)
        torch.manual_seed(1)
        assert torch.equal(f(x)[0], first)
    for a, b in ((first, second), (first, other)):
        assert 0.4 < (a == b).double().mean() < 0.6  # half of the elements agree by chance


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False), (1.0, True)])
def test_edges(p, train):
    x = torch.randn(5, 7)
    with torch.no_grad():
        got = compiled(lambda v: F.dropout(v * 2, p, training=train))(x)
    torch.testing.assert_close(got, F.dropout(x * 2, p, training=train))


def test_lengths_are_symbolic():
    torch._dynamo.reset()
    f = torch.compile(lambda v: F.dropout(v + 1, 0.5), backend=torch_compile.backend, dynamic=True)
    for n in (5, 33):
        torch.manual_seed(2)
        got = f(torch.ones(n, 3, n + 1))
        assert torch.equal(got != 0, kept_by(2, (n, 3, n + 1), 0.5))


#: What is drawn, its mean and its variance.
DRAWN = {
    "rand": (lambda x: torch.rand_like(x), 1 / 2, 1 / 12),
    "rand in bfloat16": (lambda x: torch.rand(x.shape, dtype=torch.bfloat16), (1 - 2**-8) / 2, 1 / 12),
    "rand in float64": (lambda x: torch.rand(x.shape, dtype=torch.float64), 1 / 2, 1 / 12),
    "randn": (lambda x: torch.randn_like(x), 0.0, 1.0),
    "normal": (lambda x: torch.normal(x * 0 + 3.0, 2.0), 3.0, 4.0),
    "uniform": (lambda x: torch.empty_like(x).uniform_(2.0, 5.0), 3.5, 9 / 12),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "bernoulli of probabilities": (lambda x: torch.bernoulli(x * 0 + 0.3), 0.3, 0.21),
    "randint": (lambda x: torch.randint(-3, 17, x.shape), 6.5, (20**2 - 1) / 12),
    "channels": (lambda x: F.dropout2d(torch.ones(128, 200, 2, 2), 0.5)[:, :, 0, 0], 1.0, 1.0),
}


def test_distributions():
    """Mean and variance of all of them at five standard deviations, the latter's by their fourth moments."""
    f = compiled(lambda x: [draw(x) for draw, _, _ in DRAWN.values()])
    x = torch.randn(200, 512).t()
    with torch.no_grad():
        torch.manual_seed(4)
        found = f(x)
    (record,) = regions.compilations
    assert len(record.regions) == 1 and not record.fallbacks
    assert found[0].stride() == x.stride()
    for (name, (_, mean, variance)), y in zip(DRAWN.items(), found, strict=True):
        y = y.double()
        n = y.numel()
        fourth = (y - mean).pow(4).mean() - variance**2
        assert abs(y.mean() - mean) < 5 * (variance / n) ** 0.5, name
        assert abs((y - mean).square().mean() - variance) < 5 * (fourth / n) ** 0.5 + 1e-9, name
    assert found[1].max() < 1 and found[8].min() == -3 and found[8].max() == 16


def test_eagers_numbers_where_they_are_asked_for():
    x = torch.randn(64)

    def f(x):
        return F.dropout(x, 0.5, training=True) * 2

    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(f, fallback_random=True)(x), want)
    (record,) = regions.compilations
    assert {str(f.node) for f in record.fallbacks} == {"aten.bernoulli.p"}
    torch.manual_seed(3)
    assert not torch.equal(compiled(f)(x), want)


def test_fused_functions_draw_a_seed_a_call():
    f = fuse(lambda x: F.dropout(x.softmax(-1), 0.5, training=True))
    x = torch.randn(16, 64)
    torch.manual_seed(7)
    first, second = f(x), f(x)
    assert torch.equal(first != 0, kept_by(7, (16, 64), 0.5)) and not torch.equal(first, second)
    torch.testing.assert_close(first, torch.where(first != 0, x.softmax(-1) * 2, 0.0))


def test_a_program_alone_has_no_seed():
    """`trace` and operators have no generator: what draws is named."""
    with pytest.raises(UnsupportedError, match="seed"):
        trace(lambda x: torch.rand_like(x) + x, torch.randn(4))


@pytest.mark.parametrize("draw", [random_op, random16_op])
def test_a_seed_of_other_rank_is_refused(draw):
    with pytest.raises(Exception, match=r"a seed is a tensor of one axis, not of shape \(1, 2\)"):
        trace(lambda s: draw(s, [4, 4]), torch.empty(1, 2, dtype=torch.int64, device="meta"))
