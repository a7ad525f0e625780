"""Lines that end inside a vector are read and written in whole vectors, but for the last tile."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.views import Like, merged

CUDA = torch.device("cuda")


pytestmark = pytest.mark.usefixtures("own_cache")


def signs(x, y):
    return x / (x.abs() + 1) - y


def launched(fn, *args):
    """The one kernel of a function of tensors without gaps, as it is launched."""
    (k,) = made(fn, *args)
    dtypes = [x.dtype for x in args] + [args[0].dtype]
    shapes = [tuple(int(e.value) for e in i.shape) for i in k.block.inputs]
    shapes += [tuple(k.sizes({})[d] for d in r.dims) for r in k.block.results]
    xs = [Like.packed(s, t, CUDA) for s, t in zip(shapes, dtypes, strict=True)]
    joined, merges = k.joined(xs, {})
    xs = merged(xs, k.tensors, merges)
    return joined.variant((len(xs[0].shape) - 1,) * len(xs), joined.sizes({}), tf32=False, interpreted=False)


@pytest.mark.parametrize(("shape", "dtype", "twice"), [
    ((999, 177), torch.bfloat16, True),
    ((999, 177), torch.float32, True),
    ((999, 178), torch.float32, False),  # half a vector: two elements
    ((999, 1776), torch.bfloat16, False),
    ((1001, 1001, 2), torch.bfloat16, True),
])  # fmt: skip
def test_a_line_that_ends_inside_a_vector_has_two_bodies(shape, dtype, twice):
    """Triton takes from the mask how many neighbours a thread may load at once."""
    v = launched(signs, meta(*shape, dtype=dtype), meta(*shape, dtype=dtype))
    assert ("else:" in v.rendered.source) == twice
    ptx = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32)).assembly["ptx"]
    moved = Counter(re.findall(r"(?:ld|st)\.global\.(\S*)", ptx))
    assert moved["v4.b32"] >= 3 or moved["v2.b32"] >= 3


def test_rows_that_begin_between_two_vectors_have_one():
    v = launched(lambda x, y: x.mT.contiguous() + y, meta(1001, 999), meta(999, 1001))
    assert len(v.kernel.grid) == 2 and "else:" not in v.rendered.source


def test_rows_that_a_block_reduces_have_one():
    """Of 67 rows a block has 64: their vectors lie along them, and Triton refused the products of two bodies."""
    v = launched(lambda x, y: torch.softmax(x, -1) + y, meta(67, 96), meta(67, 96))
    assert "else:" not in v.rendered.source


@pytest.mark.parametrize(
    ("fn", "chosen"),
    [
        (lambda x: torch.nn.functional.pad(torch.relu(x), (1, 1, 1, 1)), False),
        (lambda x: torch.nn.functional.pad(x * 2, (1, 1, 1, 1)), False),
        (lambda x: torch.nn.functional.pad(torch.exp(x), (1, 1, 1, 1)), True),
        (lambda x: torch.nn.functional.pad(x + 1, (1, 1, 1, 1)), True),
        (lambda x: torch.nn.functional.pad(torch.relu(x), (1, 1, 1, 1), value=1.0), True),
    ],
)
def test_padding_is_what_a_load_gives_outside(fn, chosen):
    """What is computed of an element and is 0 of 0 needs no choice beside the load's own."""
    (k,) = made(fn, meta(32, 64, 112, 112, dtype=torch.bfloat16))
    assert ("tl.where(" in variant(k).rendered.source.split("def constant_pad")[-1]) is chosen
