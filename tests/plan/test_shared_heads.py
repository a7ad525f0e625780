"""Keys that are given back with a place that is new, read by the product of all heads that share them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tilefold import pipeline
from tilefold.algebra.expr import loads
from tilefold.backends.triton.tiles import Shape
from tilefold.frontend.fuse import trace
from tilefold.tensor.product import divided


def decode(q, k_new, v_new, k_cache, v_cache, pos):
    at = torch.arange(k_cache.shape[2], device=q.device)
    here = (at[None] == pos[:, None])[:, None, :, None]
    k, v = torch.where(here, k_new, k_cache), torch.where(here, v_new, v_cache)
    seen = (at[None] <= pos[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True), k, v


def arguments(b=4, heads=16, groups=4, t=2048, d=64, dtype=torch.bfloat16):
    shapes = [(b, heads, 1, d), *[(b, groups, 1, d)] * 2, *[(b, groups, t, d)] * 2]
    return (*(torch.randn(s, dtype=dtype) for s in shapes), torch.randint(t, (b,)))


def test_keys_that_are_written_are_read_by_packed_heads():
    made = pipeline.compile_program(trace(decode, *arguments()).program, device="cuda")
    (attention,) = (s for s in made.steps if {"where_out", "where_1_out"} <= {*s.reads})
    assert 4 in Shape.of(attention.canonical.block).shared.values()
    assert sum("k_cache" in s.reads for s in made.steps) == sum("v_cache" in s.reads for s in made.steps) == 1


def test_what_nobody_else_reads_stays_in_the_kernel():
    made = pipeline.compile_program(trace(lambda *a: decode(*a)[0], *arguments()).program, device="cuda")
    written = [math.prod(shape({})) for s in made.steps for _, _, shape in s.results]
    assert max(written) < 4 * 4 * 2048 * 64  # elements of a cache


def test_operands_of_a_batch_that_lies_along_one_axis_stay_loads():
    """As torch hands them over: batch and heads in one dim, d // 16 and d % 16 // 4."""
    p = trace(decode, *arguments()).program
    products = [c for c in p.body if c.reducer == "sum" and any(divided(ld) for ld in loads(c.body))]
    assert len(products) == 2


def test_results_are_eager_s():
    args = arguments(b=2, heads=4, groups=2, t=37, d=16, dtype=torch.float32)
    p = trace(decode, *args).program
    given = dict(zip(("q", "k_new", "v_new", "k_cache", "v_cache", "pos"), args, strict=True))
    found = pipeline.compile_program(p)({i.name: given[i.name] for i in p.inputs}, {})
    want = decode(*args)
    for name, w in zip([n for n in p.outputs if n not in ("where_out", "where_1_out")], want[:1], strict=True):
        torch.testing.assert_close(found[name].reshape(w.shape), w)
    assert torch.equal(found["where_out"], want[1]) and torch.equal(found["where_1_out"], want[2])
