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
from tilefold.backends.triton.warps import Forecast, forecast
from tilefold.plan.hardware import H100
from tilefold.tensor.index_simplify import poly

B = torch.bfloat16
CUDA = torch.device("cuda")


pytestmark = pytest.mark.usefixtures("own_cache")


def turned(x, c, s):
    """Rotary embedding of neighbours; c, s: an angle an element."""
    return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


def gated(x, c, s):
    return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2] * c[..., ::2] + s[..., 1::2]


def moved(fn, *shapes: tuple[int, ...]) -> tuple[Counter, bool, Forecast]:
    """How often the one kernel of a function loads and stores with which instruction, whether axes were joined for
    that, and what is forecast of it."""
    (k,) = made(fn, *(meta(*s, dtype=B) for s in shapes))
    sizes, b = k.sizes({}), k.block
    given = [tuple(int(e.value) for e in i.shape) for i in b.inputs]
    given += [tuple(sizes[d] for d in r.dims) for r in b.results]
    xs = [Like.packed(s, B, CUDA) for s in given]
    joined, merges = k.joined(xs, {})
    xs = merged(xs, k.tensors, merges)
    sizes = joined.sizes({})
    v = joined.variant(tuple(len(x.shape) - 1 for x in xs), sizes, tf32=False, interpreted=False)
    ptx = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32)).assembly["ptx"]
    return Counter(re.findall(r"(ld|st)\.global\.(\S*)", ptx)), bool(merges), forecast(v, xs, sizes, {}, H100)


@pytest.mark.parametrize("fn", [turned, gated])
@pytest.mark.parametrize("columns", [128, 688])
def test_vectors_of_sixteen_bytes(fn, columns):
    """Columns that are no power of two too: masks do not tear vectors apart."""
    found, joined, _ = moved(fn, *[(4096, columns)] * 3)
    assert joined == (fn is turned)
    assert {how for _, how in found} == {"v4.b32"} and found["ld", "v4.b32"] >= 3


def as_pixels(x):
    """Norms over channels of two columns of an image each, which are stored beside each other."""
    y = x.float()
    y = (y - y.mean(1, keepdim=True)) * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6)
    return torch.nn.functional.silu(y).to(x.dtype).movedim(2, -1).flatten(-2)


def shared(x, y, c, s):
    """Keys of several heads, each with the same turned columns behind its own."""
    y = turned(y, c, s)[:, :, None, None].expand(-1, -1, x.shape[2], -1, -1)
    return torch.cat((x, y), 3)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(as_pixels, [(8, 64, 2, 128, 64)]), (shared, [(2, 1024, 16, 2, 32), (2, 1024, 32), (1024, 32), (1024, 32)])],
)
def test_pairs_that_one_value_has_are_one_axis_of_lanes(fn, shapes):
    """Of an axis of two, Triton lays a warp's lanes along the first one: 4 bytes of each of 32 rows."""
    found, _, f = moved(fn, *shapes)
    assert ("st", "v4.b32") in found and ("ld", "v4.b32") in found
    assert all(t.wasted <= 2 for t in f.touches)


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
