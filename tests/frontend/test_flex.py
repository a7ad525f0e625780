"""`tilefold.flex_attention`, and torch's own under the back end, against torch's definition in float64."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, or_masks

import tilefold
from tests.frontend.flex_mods import MASKS, SCORES, B, D, H, L, S, order, rand, which
from tilefold.errors import TilefoldError
from tilefold.frontend import flex
from tilefold.frontend.fuse import Fused
from tilefold.frontend.regions.assemble import compilations
from tilefold.runtime.steps import KernelStep

#: Each mask with a score function or two, one after the other: all of both.
CASES = list(itertools.zip_longest(MASKS, list(SCORES)[: len(MASKS)], list(SCORES)[len(MASKS) :]))


#: Biases that are learnt, those of the Attention Gym and of torch's tests: their shapes, and what a score is with them.
LEARNT = {
    "heads": ((H,), lambda s, x, b, h, q, k: s + x[h]),
    "gates of heads": ((H,), lambda s, x, b, h, q, k: s * torch.sigmoid(x[h])),
    "distances": ((H, L + S), lambda s, x, b, h, q, k: s + x[h, q - k + S]),
    "lengths of distances": ((S,), lambda s, x, b, h, q, k: s + x[torch.abs(q - k)]),
    "pairs": ((L, S), lambda s, x, b, h, q, k: s + x[q, k]),
    "pairs the other way": ((S, L), lambda s, x, b, h, q, k: s + x[k, q]),
    "pairs of heads": ((H, L, S), lambda s, x, b, h, q, k: s + x[h, q, k]),
    "all": ((B, H, L, S), lambda s, x, b, h, q, k: s + x[b, h, q, k]),
    "factors of queries": ((L,), lambda s, x, b, h, q, k: s * x[q]),
    "a window": ((9,), lambda s, x, b, h, q, k: s + x[torch.clamp(q - k + 4, 0, 8)]),
    "keys": ((S,), lambda s, x, b, h, q, k: s + x[k]),
    "one of four": ((B, H, 4, L), lambda s, x, b, h, q, k: s + x[b, h, which, q]),
    "somewhere else": ((S,), lambda s, x, b, h, q, k: s + x[order[q]]),
}


@pytest.fixture(autouse=True)
def _compiled_afresh():
    """Numbers in closures of the same function (sides of an image) would become sizes from one test to another."""
    torch._dynamo.reset()
    compilations.clear()  # the last are kept: their number stops growing


def chosen(mask, first, second):
    """The mask and the score function of a case."""
    f, g = SCORES[first], SCORES[second or "identity"]
    return block_mask(MASKS[mask], batch=B, heads=H), lambda s, *at: g(f(s, *at), *at)


def heads(q=L, k=S, *, heads=H, shared=None, batch=B, dtype=torch.float32, grad=False):
    """q, k, v."""
    shared = shared or heads // 2
    made = (rand(batch, heads, q, D), rand(batch, shared, k, D, seed=1), rand(batch, shared, k, D + 3, seed=2))
    return tuple(x.to(dtype).requires_grad_(grad) for x in made)


def block_mask(mask, q=L, k=S, batch=None, heads=None):
    return create_block_mask(mask, batch, heads, q, k, device="cpu", BLOCK_SIZE=16)


def exact(q, k, v, score=None, mask=None):
    """torch's definition in float64: out, natural logarithms of sums, maxima."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, v)]
    mask = mask or torchs._create_empty_block_mask(q, k)
    made = math_attention(*wide, score or torchs._identity, mask.as_tuple(), q.shape[-1] ** -0.5, {})
    return wide, (made[0], made[1] * math.log(2), made[2] * math.log(2))


def close(got, want, tol=2e-5):
    torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)


def kernels(graph=-1):
    """Kernels of a graph that was compiled, the last, which left nothing to others."""
    record = compilations[graph]
    assert not record.fallbacks
    return [s for r in record.regions for s in r.runner.steps]


def is_one_kernel(graph=-1):
    """Beside the one that finds where lists of blocks begin and end."""
    steps = [
        s for s in kernels(graph) if not isinstance(s, KernelStep) or any(t.is_floating_point for _, t, _ in s.results)
    ]
    return len(steps) == 1 and isinstance(steps[0], KernelStep)


@pytest.mark.parametrize("case", CASES, ids=lambda c: ", ".join(filter(None, c)))
def test_documented_functions_are_one_kernel(case):
    mask, score = chosen(*case)
    q, k, v = heads()
    got, aux = tilefold.flex_attention(q, k, v, score, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert is_one_kernel()
    _, (out, lse, _) = exact(q, k, v, score, mask)
    close(got, out)
    close(aux.lse, lse)


OWN_GRADIENT = next(c for c in CASES if "soft cap, a gradient of its own" in c)
#: Pairs whose gradients are compiled.
COMPILED = [*CASES[2::6], OWN_GRADIENT]


@pytest.mark.parametrize("case", COMPILED, ids=lambda c: ", ".join(filter(None, c)))
def test_documented_functions_have_gradients(case):
    mask, score = chosen(*case)
    q, k, v = heads(grad=True)
    got = tilefold.flex_attention(q, k, v, score, mask, enable_gqa=True)
    wide, (out, _, _) = exact(q, k, v, score, mask)
    by = rand(*got.shape, seed=9)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), by), torch.autograd.grad(out, wide, by.double()), strict=True):
        close(a, b)


@pytest.mark.parametrize("case", [c for c in CASES if c not in COMPILED], ids=lambda c: ", ".join(filter(None, c)))
def test_gradients_of_the_others_are_right_as_defined(case, monkeypatch):
    """Captured, differentiated and lowered as those above; what runs is the definition, which takes no C++."""
    monkeypatch.setattr(flex, "_compiled", lambda *_: Fused(flex._attention, runner="interpreter"))
    mask, score = chosen(*case)
    q, k, v = heads(grad=True)
    got = tilefold.flex_attention(q, k, v, score, mask, enable_gqa=True)
    wide, (out, _, _) = exact(q, k, v, score, mask)
    close(got, out)
    by = rand(*got.shape, seed=9)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), by), torch.autograd.grad(out, wide, by.double()), strict=True):
        close(a, b)
    assert not compilations[-1].fallbacks and not compilations[-2].fallbacks


def test_training_keeps_nothing_of_the_scores_size():
    q, k, v = heads(grad=True)
    mask = block_mask(MASKS["prefix"])
    tilefold.flex_attention(q, k, v, SCORES["relative bias"], mask, enable_gqa=True).sum().backward()
    forward = compilations[-2].regions[0].lowered
    kept = [o for o in forward.outputs if forward.program.dtype_of(o.name).is_float]
    assert kept and all(o.shape[-1].value in (1, D + 3) for o in kept)
    assert all(S not in [e.value for e in o.shape] for o in forward.outputs)
    assert is_one_kernel(-2)


@pytest.mark.parametrize("name", LEARNT)
def test_captured_tensors_have_gradients(name):
    shape, score = LEARNT[name]
    q, k, v = heads(grad=True)
    bias = rand(*shape, seed=4).requires_grad_()
    wide_bias = bias.detach().double().requires_grad_()
    mask = block_mask(MASKS["two-sided window"])
    got = tilefold.flex_attention(q, k, v, lambda s, *at: score(s, bias, *at), mask, enable_gqa=True)
    wide, (out, _, _) = exact(q, k, v, lambda s, *at: score(s, wide_bias, *at), mask)
    by = rand(*got.shape, seed=9)
    found = torch.autograd.grad(got, (q, bias), by)
    for a, b in zip(found, torch.autograd.grad(out, (wide[0], wide_bias), by.double()), strict=True):
        close(a, b)


def test_what_differs_is_found():
    """The comparison itself can fail: another mask's attention is not close."""
    q, k, v = heads()
    got = tilefold.flex_attention(q, k, v, None, block_mask(MASKS["causal"]), enable_gqa=True)
    with pytest.raises(AssertionError, match="not close"):
        close(got, exact(q, k, v, None, block_mask(MASKS["offset"]))[1][0])


def test_combined_masks_and_rows_that_attend_nothing():
    mask = and_masks(or_masks(MASKS["causal"], MASKS["documents"]), MASKS["empty rows"])
    q, k, v = heads(grad=True)
    got, aux = tilefold.flex_attention(
        q, k, v, None, block_mask(mask), 0.3, True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    wide, (out, lse, top) = exact(q * (0.3 * D**0.5), k, v, None, block_mask(mask))
    assert lse.isinf().any() and not got[:, :, 0].any()
    for a, b in ((got, out), (aux.lse, lse), (aux.max_scores, top)):
        close(a, b)
    finite = lse.isfinite()
    (gradient,) = torch.autograd.grad(got.sum() + aux.lse[finite].sum(), k)
    close(gradient, torch.autograd.grad(out.sum() + lse[finite].sum(), wide[1])[0])


@pytest.mark.parametrize("keys", [1, 77])
def test_one_query(keys):
    q, k, v = heads(1, keys, heads=10, shared=2)
    at = torch.tensor(30)
    mask = block_mask(lambda b, h, i, j: i + at >= j, 1, keys)
    close(tilefold.flex_attention(q, k, v, None, mask, enable_gqa=True), exact(q, k, v, None, mask)[1][0])
    assert keys == 1 or is_one_kernel()


def test_keys_of_one_batch_serve_all():
    q, (_, k, v) = heads()[0], heads(batch=1)
    mask = block_mask(MASKS["causal"], batch=B)
    close(tilefold.flex_attention(q, k, v, None, mask, enable_gqa=True), exact(q, k, v, None, mask)[1][0])


def test_strides_and_half_precision():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads(dtype=torch.bfloat16))
    got = tilefold.flex_attention(q, k[..., ::1], v, SCORES["soft cap"], enable_gqa=True)
    assert got.dtype is torch.bfloat16 and got.transpose(1, 2).is_contiguous()
    close(got, exact(q, k, v, SCORES["soft cap"])[1][0], 1e-2)


def test_lengths_change_and_functions_are_made_anew():
    def attend(n):
        q, k, v = heads(n, n + 3)
        score, mask = (lambda s, b, h, i, j: s + (j - i) * 0.25), block_mask(MASKS["causal"], n, n + 3)
        got = tilefold.flex_attention(q, k, v, score, mask, enable_gqa=True)
        close(got, exact(q, k, v, score, mask)[1][0])

    for n in (20, 33, 47, 18):
        attend(n)
    assert len(compilations) <= 2


def lists():
    """Rows of blocks of 16, and the blocks of keys that they attend, some of them whole."""
    count, which = torch.tensor([[[2, 1, 3]]]), torch.tensor([[[[0, 2, 0, 0], [1, 0, 0, 0], [3, 1, 0, 0]]]])
    count, which = count.to(torch.int32), which.to(torch.int32)
    more = torch.tensor([[[1, 0, 0]]], dtype=torch.int32), torch.full_like(which, 3)
    dense = torch.zeros(3, 4, dtype=torch.bool)
    for row, n in enumerate(count[0, 0].tolist()):
        dense[row, which[0, 0, row, :n]] = True
    dense[0, 3] = True
    return (count, which, *more), dense.repeat_interleave(16, 0).repeat_interleave(16, 1)


def test_lists_of_blocks_alone_are_a_mask():
    given, dense = lists()
    q, k, v = heads(48, 64, heads=2, batch=1)
    mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=16)
    got = tilefold.flex_attention(q, k[:, [0, 0]], v[:, [0, 0]], None, mask)
    scores = (q @ k.mT).double() * D**-0.5
    want = torch.softmax(scores.masked_fill(~dense, -math.inf), -1) @ v.double()
    close(got, want)


def test_torchs_own_in_a_model_is_one_kernel():
    """The higher-order operator that Dynamo makes of torch's function."""
    mask = block_mask(MASKS["causal documents"])

    def layer(q, k, v):
        return torchs.flex_attention(q * 2, k, v, SCORES["ALiBi"], mask, enable_gqa=True) + 1

    q, k, v = heads()
    got = torch.compile(layer, backend="tilefold", fullgraph=True)(q, k, v)
    assert is_one_kernel()
    close(got, exact(q * 2, k, v, SCORES["ALiBi"], mask)[1][0] + 1)


def test_training_in_a_model():
    mask = block_mask(MASKS["sliding window"])
    w = rand(D, D).requires_grad_()

    def layer(q, k, v):
        return tilefold.flex_attention(q @ w, k, v, SCORES["soft cap"], mask, enable_gqa=True).square().sum()

    q, k, v = heads()
    torch.compile(layer, backend="tilefold", fullgraph=True)(q, k, v).backward()
    assert not any(c.fallbacks for c in list(compilations)[-2:])
    wide = w.detach().double().requires_grad_()
    queries = q.double() @ wide
    out = math_attention(queries, k.double(), v.double(), SCORES["soft cap"], mask.as_tuple(), D**-0.5, {})[0]
    close(w.grad, torch.autograd.grad(out.square().sum(), wide)[0], 2e-4)


def test_in_another_compilers_graph_it_is_torchs():
    seen = []

    def keep(gm, inputs):
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    q, k, v = heads()
    got = torch.compile(functools.partial(tilefold.flex_attention, enable_gqa=True), backend=keep)(q, k, v)
    assert "flex_attention" in seen
    close(got, exact(q, k, v)[1][0])


def transforms(f, x):
    """What `vmap`, `grad` and `jvp` make of a function at x."""
    return torch.vmap(f)(x[None])[0], torch.func.grad(lambda x: f(x).square().sum())(x), *torch.func.jvp(f, (x,), (x,))


@pytest.mark.parametrize("of_lists", [False, True])
def test_transformations_of_functions(of_lists):
    """torch's operator has no rule for them (a KeyError)."""
    q, k, v = heads(48, 64)
    if of_lists:
        given, dense = lists()
        mask, score = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=16), None
    else:
        dense = torch.arange(64) <= torch.arange(48)[:, None]
        mask, score = block_mask(MASKS["causal"], 48, 64), SCORES["soft cap"]

    def plain(q):
        s = q @ k.repeat_interleave(2, 1).mT * D**-0.5
        s = s if score is None else score(s, 0, 0, 0, 0)
        return torch.softmax(s.masked_fill(~dense, -math.inf), -1) @ v.repeat_interleave(2, 1)

    got = transforms(lambda q: tilefold.flex_attention(q, k, v, score, mask, enable_gqa=True), q)
    for a, b in zip(got, transforms(plain, q), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [tilefold.flex_attention, torchs.flex_attention])
def test_it_is_verified(attention):
    """The float64 reference had no rule for the operator."""
    mask = block_mask(MASKS["causal"])
    report = tilefold.verify(lambda *x: attention(*x, SCORES["soft cap"], mask, enable_gqa=True), *heads())
    assert report.ok


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q, k, v: {"query": q[0]}, "takes tensors"),
        (lambda q, k, v: {"key": k[..., :-1]}, "sizes do not fit"),
        (lambda q, k, v: {"value": v[:, :, :-1]}, "sizes do not fit"),
        (lambda q, k, v: {"enable_gqa": False}, "4 heads of queries, 2 of keys"),
        (lambda q, k, v: {"query": q[:, :3]}, "cannot share"),
        (lambda q, k, v: {"key": k[:1], "value": v[:1]}, "batches do not fit"),
        (lambda q, k, v: {"value": v.half()}, "one floating type"),
        (lambda q, k, v: {"block_mask": block_mask(MASKS["causal"], L, S + 1)}, r"lengths \(45, 52\), not \(45, 51\)"),
        (lambda q, k, v: {"block_mask": block_mask(MASKS["causal"])[:, :, :1]}, "sliced"),
        (lambda q, k, v: {"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse and return_aux"),
        (lambda q, k, v: {"score_mod": lambda s, b, h, i, j: s + torch.gcd(i, j)}, "gcd"),
    ],
)
def test_what_is_wrong_is_said(change, match):
    q, k, v = heads()
    with pytest.raises(TilefoldError, match=match):
        tilefold.flex_attention(**{"query": q, "key": k, "value": v, "enable_gqa": True, **change(q, k, v)})


TABLE = torch.arange(64.0)


def _reads_a_number(kind: str, n: int):
    """Masks that need a number of their closure, and not a tensor of it."""
    if kind == "a bound":
        return lambda b, h, i, j: (i // n).clamp(1, n - 2) >= (j // n)
    if kind == "a place":
        return lambda b, h, i, j: (i >= j) & (i - j < TABLE[n])
    return lambda b, h, i, j: (i >= j) & (i - j < torch.full((), n))


@pytest.mark.parametrize("kind", ["a bound", "a place", "a fill"])
def test_numbers_of_closures_that_change_from_call_to_call(kind):
    q, k, v = heads()
    for n in (5, 7, 9):
        mask = block_mask(_reads_a_number(kind, n))
        _, (want, _, _) = exact(q, k, v, None, mask)
        close(tilefold.flex_attention(q, k, v, block_mask=mask, enable_gqa=True), want)
