"""What lies two by two in memory moves in whole vectors."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta
from tilefold.algebra.expr import Index, call, lit
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.pairs import both_exist, pair_of
from tilefold.backends.triton.views import Like, merged
from tilefold.tensor.index_simplify import poly

B = torch.bfloat16
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))


def turned(x, c, s):
    """Rotary embedding of neighbours; c, s: an angle an element."""
    return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


def gated(x, c, s):
    return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2] * c[..., ::2] + s[..., 1::2]


@pytest.mark.parametrize("fn", [turned, gated])
@pytest.mark.parametrize("columns", [128, 688])
def test_vectors_of_sixteen_bytes(fn, columns):
    """Columns that are no power of two too: masks do not tear vectors apart."""
    (k,) = made(fn, *(meta(4096, columns, dtype=B) for _ in range(3)))
    sizes, b = k.sizes({}), k.block
    shapes = [tuple(int(e.value) for e in i.shape) for i in b.inputs]
    shapes += [tuple(sizes[d] for d in r.dims) for r in b.results]
    xs = [Like.packed(s, B, CUDA) for s in shapes]
    joined, merges = k.joined(xs, {})
    assert bool(merges) == (fn is turned)
    xs = merged(xs, k.tensors, merges)
    v = joined.variant((len(xs[0].shape) - 1,) * len(xs), joined.sizes({}), tf32=False, interpreted=False)
    ptx = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32)).assembly["ptx"]
    moved = Counter(re.findall(r"(ld|st)\.global\.(\S*)", ptx))
    assert {how for _, how in moved} == {"v4.b32"} and moved["ld", "v4.b32"] >= 3


def test_pairs_are_recognised_by_position():
    j, k = Index("j"), Index("k")
    sizes = {"j": lit(8), "k": lit(4)}

    def found(e, other=k, lanes=("k", "j")):
        return pair_of(poly(e, sizes), (other, e), 1, lanes)

    twice = call("mul", j, 2)
    assert found(twice).place == 0 and found(call("add", twice, 3)).place == 1
    assert found(call("add", twice, 3)).rest == lit(2)
    assert found(j) is None  # neighbours, one by one
    assert found(twice, lanes=("j", "k")) is None  # the pairs' number is not the last axis
    assert found(twice, other=j) is None  # a diagonal
    assert both_exist(poly(twice, sizes), 0, lit(16), sizes)
    assert not both_exist(poly(twice, sizes), 0, lit(15), sizes)  # the last element has no neighbour
