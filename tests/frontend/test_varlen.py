"""`tilefold.varlen_attention` against attention of one sequence after the other, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tilefold
from tests.frontend.flex_mods import rand
from tilefold.errors import TilefoldError
from tilefold.frontend.regions.assemble import compilations

#: Where sequences begin: one has no queries, one no keys, and the last rows belong to none.
CU_Q = torch.tensor([0, 5, 18, 18, 21, 31], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 20, 24, 24, 41], dtype=torch.int32)
MAX_Q, MAX_K, H, D = 13, 17, 4, 8


def packed(grad=False):
    made = (rand(33, H, D), rand(41, H // 2, D, seed=1), rand(41, H // 2, D + 3, seed=2))
    return tuple(x.requires_grad_(grad) for x in made)


def one_by_one(q, k, v, *, cu_k=CU_K, left=-1, right=-1, score=lambda s, *at: s):
    """Results [33, H, D + 3] and logarithms [33, H]."""
    out, lse = torch.zeros(33, H, D + 3, dtype=torch.float64), torch.zeros(33, H, dtype=torch.float64)
    for b in range(len(CU_Q) - 1):
        at, of = slice(CU_Q[b], CU_Q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        queries, keys, values = (x.double().transpose(0, 1) for x in (q[at], k[of], v[of]))
        keys, values = (x.repeat_interleave(2, 0) for x in (keys, values))
        n, m = queries.shape[1], keys.shape[1]
        if not n:
            continue
        h, i, j = (torch.arange(x) for x in (H, n, m))
        i, h = i[:, None], h[:, None, None]
        s = score(queries @ keys.mT * D**-0.5, torch.tensor(b), h, i, j)
        seen = torch.ones(n, m, dtype=torch.bool)
        seen &= (j <= i + m - n + right) | (right < 0)
        seen &= (j >= i + m - n - left) | (left < 0)
        s = s.masked_fill(~seen, -math.inf)
        p = torch.where(seen.any(-1)[:, None], torch.softmax(s, -1), 0.0)
        out[at], lse[at] = (p @ values).transpose(0, 1), torch.logsumexp(s, -1).transpose(0, 1)
    return out, lse


def close(got, want, tol=2e-5):
    torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (3, 2)])
def test_sequences_are_apart(left, right):
    q, k, v = packed()
    got, lse = tilefold.varlen_attention(
        q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, window_size=(left, right), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    want = one_by_one(q, k, v, left=left, right=right)
    close(got, want[0])
    close(lse, want[1])


def test_scores_and_gradients_without_scatters():
    def score(s, b, h, i, j):
        return s + torch.where(h % 2 == 0, (j - i) * 0.1, b * 0.2)

    q, k, v = packed(grad=True)
    got = tilefold.varlen_attention(q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, causal=True, enable_gqa=True, score_mod=score)
    by = rand(*got.shape, seed=5)
    found = torch.autograd.grad(got, (q, k, v), by)
    assert not any(c.fallbacks for c in list(compilations)[-2:])
    want = one_by_one(q, k, v, right=0, score=score)[0]
    close(got, want)
    for a, b in zip(found, torch.autograd.grad(want, (q, k, v), by.double()), strict=True):
        close(a.double(), b.double())


def test_pages():
    """A pool of pages of four keys; the lengths are those of CU_K."""
    q, k, v = packed()
    used = CU_K[1:] - CU_K[:-1]
    where = torch.randperm(30, generator=torch.Generator().manual_seed(1))[: 5 * 5].view(5, 5).to(torch.int32)
    pools = [rand(30, 4, H // 2, x.shape[-1], seed=7) for x in (k, v)]
    for b, n in enumerate(used.tolist()):
        for pool, x in zip(pools, (k, v), strict=True):
            for j in range(n):
                pool[where[b, j // 4], j % 4] = x[CU_K[b] + j]
    got = tilefold.varlen_attention(
        q, *pools, CU_Q, None, MAX_Q, MAX_K, causal=True, enable_gqa=True, seqused_k=used, block_table=where
    )
    close(got, one_by_one(q, k, v, right=0)[0])


def test_in_a_model():
    q, k, v = packed()
    w = rand(D, D).requires_grad_()

    def loss(q, k, v):
        return tilefold.varlen_attention(q @ w, k, v, CU_Q, CU_K, MAX_Q, MAX_K, enable_gqa=True).square().sum()

    torch.compile(loss, backend="tilefold", fullgraph=True)(q, k, v).backward()
    assert not any(c.fallbacks for c in list(compilations)[-2:])
    wide = w.detach().double().requires_grad_()
    want = one_by_one(q.double() @ wide, k, v)[0].square().sum()
    close(w.grad, torch.autograd.grad(want, wide)[0], 2e-4)


def test_transformations_and_float64():
    q, k, v = packed()

    def attend(q, k=k, v=v):
        return tilefold.varlen_attention(q, k, v, CU_Q, CU_K, MAX_Q, MAX_K, causal=True, enable_gqa=True)

    def wide(q):
        return one_by_one(q, k, v, right=0)[0]

    close(torch.vmap(attend)(q[None])[0], wide(q))
    leaf = q.double().requires_grad_()
    (want,) = torch.autograd.grad(wide(leaf).square().sum(), leaf)
    close(torch.func.grad(lambda q: attend(q).square().sum())(q), want, 2e-4)
    close(torch.func.jvp(attend, (q,), (q,))[0], wide(q))
    assert tilefold.verify(attend, q, k, v).ok


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"query": rand(2, 5, H, D)}, "takes queries"),
        ({"key": rand(41, 3, D), "value": rand(41, 3, D)}, "cannot share"),
        ({"enable_gqa": False}, "4 heads of queries, 2 of keys"),
        ({"cu_seq_k": CU_K[:-1]}, r"cu_seq_k is \(5,\) of torch.int32 for 5 sequences"),
        ({"cu_seq_q": CU_Q.float()}, "cu_seq_q is .* of torch.float32"),
        ({"cu_seq_k": None}, "where sequences of keys begin"),
        ({"block_table": torch.zeros(5, 3, dtype=torch.int32)}, "takes queries .* beside a block_table"),
        ({"value": rand(40, H // 2, D)}, "sizes do not fit"),
        ({"return_aux": AuxRequest(max_scores=True)}, "no maxima"),
    ],
)
def test_what_is_wrong_is_said(change, match):
    q, k, v = packed()
    given = {"query": q, "key": k, "value": v, "cu_seq_q": CU_Q, "cu_seq_k": CU_K, "enable_gqa": True, **change}
    with pytest.raises(TilefoldError, match=match):
        tilefold.varlen_attention(**given, max_q=MAX_Q, max_k=MAX_K)
