"""Every score and mask function of `flex_mods` as torch's operator in a model that Tilefold compiles, trained.

torch's own tests (test/inductor/test_flex_attention.py) judge the mean error against float64 by that of eager mode in
the same type. Here as there, results are as good as that times 1.1 (in float32: 10). Gradients in half precision may
have twice eager's error: a row's sum of gradients times weights is taken from the rounded result, as FlashAttention and
torch's kernels do. What runs is the definition, which takes no C++: the kernels are `test_flex`'s.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import create_block_mask

import tilefold
from tests.frontend.flex_mods import MASKS, MORE_MASKS, MORE_SCORES, SCORES, B, D, H, L, S, rand
from tilefold.frontend.regions.assemble import compilations

OPTIONS = {"runner": "interpreter", "leftover": "eager"}
#: Lengths of queries and keys, and heads of keys: as many as of queries, shared by two, by all, and one query.
SHAPES = ((L, S, H), (L, S, H // 2), (32, S, 1), (L, 33, H // 2), (1, S, H // 2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A mask, and one score function or two (one after the other) with it: all of both, in every shape and type by turns.
_FIRST, _LAST = list(MORE_SCORES), list(SCORES)
_MASKS = list({**MORE_MASKS, **MASKS})
CASES = list(itertools.zip_longest(_MASKS, [*_FIRST, *_LAST][: len(_MASKS)], [*_FIRST, *_LAST][len(_MASKS) :]))


@pytest.fixture(autouse=True)
def _compiled_afresh():
    torch._dynamo.reset()
    compilations.clear()  # the last are kept: their number stops growing


def made(case, n):
    """Inputs, the score function and the mask of a case."""
    mask, *names = case
    scores = [({**SCORES, **MORE_SCORES})[name] for name in names if name]
    (lq, lk, shared), dtype = SHAPES[n % len(SHAPES)], DTYPES[n % len(DTYPES)]
    given = (rand(B, H, lq, D), rand(B, shared, lk, D, seed=1), rand(B, shared, lk, D + 3, seed=2))

    def score(s, *at):
        for f in scores:
            s = f(s, *at)
        return s

    masked = create_block_mask({**MASKS, **MORE_MASKS}[mask], B, H, lq, lk, device="cpu", BLOCK_SIZE=16)
    return tuple(x.to(dtype) for x in given), score, masked


def trained(attend, given, dtype):
    """Results, logarithms and the gradients of q, k and v, where both have some."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in given)
    out, lse = attend(q, k, v)
    live = torch.where(lse.isfinite(), lse, 0.0)
    total = (out * rand(*out.shape, seed=9).to(out.dtype)).sum() + (live * rand(*lse.shape, seed=8).to(lse.dtype)).sum()
    return out.detach(), live.detach(), lse.isinf(), *torch.autograd.grad(total, (q, k, v))


def by_definition(score, mask):
    def attend(q, k, v):
        out, lse, _ = math_attention(q, k, v, score, mask.as_tuple(), D**-0.5, {})
        return out, lse * math.log(2)

    return attend


def error(got, exact):
    return float((got.double() - exact).abs().mean())


def agree(got, eager, exact, dtype):
    """By torch's rule."""
    results, gradients = (10.0, 10.0) if dtype is torch.float32 else (1.1, 2.0)
    assert torch.equal(got[2], exact[2])
    for n, name in ((0, "out"), (1, "lse"), (3, "dq"), (4, "dk"), (5, "dv")):
        rounding = 2**-24 * float(exact[n].abs().mean())  # of float32, which logarithms have always
        allowed = error(eager[n], exact[n]) * (results if n < 2 else gradients) + rounding
        assert error(got[n], exact[n]) <= allowed, (name, error(got[n], exact[n]), allowed)


@pytest.mark.parametrize("n", range(len(CASES)), ids=lambda n: ", ".join(filter(None, CASES[n])))
def test_documented_functions_in_a_model(n):
    given, score, mask = made(CASES[n], n)
    dtype = given[0].dtype

    def layer(q, k, v):
        return tilefold.flex_attention(
            q, k, v, score, mask, enable_gqa=True, return_lse=True, kernel_options={"BLOCK_M": 32, "num_stages": 2}
        )

    got = trained(torch.compile(layer, backend="tilefold", fullgraph=True, options=OPTIONS), given, dtype)
    assert len(compilations) == 2
    assert not any(c.fallbacks for c in list(compilations)[-2:])
    exact, eager = (trained(by_definition(score, mask), given, x) for x in (torch.float64, dtype))
    agree(got, eager, exact, dtype)


def test_the_rule_can_fail():
    """Another mask's attention is not within it; nor are gradients of the wrong sign."""
    given, score, mask = made(("causal", "soft cap"), 0)
    other = made(("offset", "soft cap"), 0)[2]
    exact, eager = (trained(by_definition(score, mask), given, x) for x in (torch.float64, torch.float32))
    agree(eager, eager, exact, torch.float32)
    for wrong in (trained(by_definition(score, other), given, torch.float32), (*eager[:3], *(-x for x in eager[3:]))):
        with pytest.raises(AssertionError):
            agree(wrong, eager, exact, torch.float32)


def test_torchs_own_call_with_what_models_have():
    """A mask that is an argument, made for another length of queries and cut to the step (as gpt-fast decodes)."""
    whole = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    keys, values = rand(B, H // 2, 64, D), rand(B, H // 2, 64, D, seed=4)

    def step(q, at, mask):
        mask.mask_mod = lambda b, h, i, j: i + at >= j
        return torchs.flex_attention(q, keys, values, None, mask, enable_gqa=True)

    compiled = torch.compile(step, backend="tilefold", fullgraph=True, options=OPTIONS)
    for at in (3, 17, 40):
        mask = whole[:, :, at // 16]
        mask.seq_lengths = (1, 64)
        q = rand(B, H, 1, D, seed=at)
        got = compiled(q, torch.tensor(at), mask)
        k, v = (x[:, :, : at + 1].repeat_interleave(2, 1) for x in (keys, values))
        torch.testing.assert_close(got, torch.softmax(q @ k.mT * D**-0.5, -1) @ v, rtol=1e-5, atol=1e-5)
    assert len(compilations) == 1 and not compilations[-1].fallbacks


def test_pages_of_torchs_paged_attention():
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    table = paged.PagedAttention(12, 16, B, device="cpu")
    q, k, v = rand(B, H, 48, D), rand(B, H, 48, D, seed=1), rand(B, H, 48, D, seed=2)
    for n in range(B):
        table.reserve(torch.tensor(n), torch.tensor(48))
    keys, values = torch.zeros(1, H, 12 * 16, D), torch.zeros(1, H, 12 * 16, D)
    table.assign(torch.arange(B), torch.arange(48).expand(B, 48), k, v, keys, values)
    causal = create_block_mask(lambda b, h, q, k: q >= k, B, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    mask, score = table.convert_logical_block_mask(causal), table.get_score_mod(SCORES["distance"])

    def layer(q, keys, values):
        return torchs.flex_attention(q, keys, values, score, mask)

    got = torch.compile(layer, backend="tilefold", fullgraph=True, options=OPTIONS)(q, keys, values)
    want = by_definition(SCORES["distance"], causal)(q.double(), k.double(), v.double())[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not compilations[-1].fallbacks


def test_lengths_change_in_training():
    """What is summed in another order was compared by its size, which fixed the length."""

    def layer(q, k, v):
        return tilefold.flex_attention(q, k, v, SCORES["distance"], return_lse=True)

    compiled = torch.compile(layer, backend="tilefold", dynamic=True, options=OPTIONS)
    for n in (20, 33, 27):
        given = tuple(rand(B, H, n, D, seed=x) for x in range(3))
        mask = torchs._create_empty_block_mask(*given[:2])
        exact, eager = (
            trained(by_definition(SCORES["distance"], mask), given, x) for x in (torch.float64, torch.float32)
        )
        agree(trained(compiled, given, torch.float32), eager, exact, torch.float32)
    assert len(compilations) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_by_finite_differences(compiled):
    q, k, v = (rand(1, 2, 5, 4, seed=n).double().requires_grad_() for n in range(3))
    bias = rand(2).double().requires_grad_()

    def layer(q, k, v, bias):
        return tilefold.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * (i - j), return_lse=True)

    made = torch.compile(layer, backend="tilefold", fullgraph=True, options=OPTIONS) if compiled else layer
    assert torch.autograd.gradcheck(made, (q, k, v, bias), fast_mode=True)
