"""What is added at places that data give, on GPUs: sums by keys, which give what eager does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.algebra.expr import loads
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.frontend.regions.partition import partition
from tilefold.plan.keyed import CROWDED
from tilefold.tensor.interp import run
from tilefold.tensor.keyed import keyed
from tilefold.tensor.passes import normalise
from tilefold.tensor.product import product_of

aten = torch.ops.aten


def whole(*shape, least=0, most=4):
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(0))


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def traced(fn, xs, device="cuda"):
    with FakeTensorMode():
        return make_fx(fn)(*[torch.empty(x.shape, dtype=x.dtype, device=device) for x in xs])


CASES = {
    "second axis": (
        lambda x, at, y: aten.index_put(x, [None, at], y, True),
        (randn(3, 5, 2), whole(7, least=-5, most=5), randn(3, 7, 2)),
    ),
    "two axes of three": (
        lambda x, at, y: aten.index_put(x, [None, at, at - 4], y, True),
        (randn(3, 5, 6), whole(7), randn(3, 7)),
    ),
    "axes that are apart": (
        lambda x, at, y: aten.index_put(x, [at, None, at], y, True),
        (randn(5, 3, 6), whole(7), randn(7, 3)),
    ),
    "indices of two axes, values broadcast": (
        lambda x, at, y: aten.index_put(x, [at], y, True),
        (randn(5, 2), whole(3, 4), randn(4, 1)),
    ),
    "zeros of 16 bits": (
        lambda x, at, y: aten.index_put(torch.zeros_like(x), [None, at], y, True),
        (randn(3, 5).bfloat16(), whole(7), randn(3, 7).bfloat16()),
    ),
    "scatter_add": (
        lambda x, at, y: aten.scatter_add(x, 1, at, y),
        (randn(3, 5, 2), whole(3, 7, 2), randn(3, 7, 2)),
    ),
}


def reduced(reduce, own):
    return lambda x, at, y: aten.scatter_reduce(x, 1, at, y, reduce, include_self=own)


def of_shared_index(reduce, own):
    return lambda x, at, y: aten.index_reduce(x, 1, at, y, reduce, include_self=own)


#: A mean counts elements by the same keys, and so does what is without what is there.
REDUCED = {
    f"{reduce}, {'with' if own else 'without'} what is there": (reduced(reduce, own), CASES["scatter_add"][1])
    for reduce in ("sum", "mean", "amax", "amin")
    for own in (True, False)
} | {
    f"{reduce}, {'with' if own else 'without'} what is there, of one index": (
        of_shared_index(reduce, own),
        (randn(3, 5, 2), whole(7), randn(3, 7, 2)),
    )
    for reduce in ("mean", "amax", "amin")
    for own in (True, False)
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_is_reduced_by_keys_is_eagers(name):
    """No element is put to the last place."""
    fn, xs = REDUCED[name]
    gm = traced(fn, xs)
    assert not partition(gm).fallbacks
    low = lower(gm)
    sums = sum(keyed(c, low.program.sizes) is not None for c in low.program.body)
    assert sums == (1 if " with " in name and not name.startswith("mean") else 2)
    given = {i.name: xs[b.position] for i, b in zip(low.program.inputs, low.inputs, strict=True)}
    torch.testing.assert_close(run(low.program, given)[low.program.outputs[0]], fn(*xs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("own", [True, False])
def test_extremes_of_nan_infinities_and_nothing_are_eagers(reduce, own):
    fn, (x, at, y) = reduced(reduce, own), CASES["scatter_add"][1]
    y = y.clone()
    y[0, 0], y[1], x[2, 4] = torch.nan, torch.inf, -torch.inf
    y[2] = -torch.inf
    low = lower(traced(fn, (x, at, y)))
    given = {i.name: (x, at, y)[b.position] for i, b in zip(low.program.inputs, low.inputs, strict=True)}
    torch.testing.assert_close(run(low.program, given)[low.program.outputs[0]], fn(x, at, y), equal_nan=True)


def test_elements_of_all_channels_are_counted_once():
    def fn(x, at, y):
        return aten.scatter_reduce(x, 1, aten.expand(aten.unsqueeze(at, 2), [3, 7, 2]), y, "mean")

    low = lower(traced(fn, (randn(3, 5, 2), whole(3, 7), randn(3, 7, 2))))
    program, _ = normalise(low.program)
    assert sorted(len(c.dims) for c in program.body if keyed(c, program.sizes) is not None) == [2, 3]


@pytest.mark.parametrize("name", CASES)
def test_what_is_added_is_eagers(name):
    fn, xs = CASES[name]
    gm = traced(fn, xs)
    assert not partition(gm).fallbacks
    low = lower(gm)
    assert sum(keyed(c, low.program.sizes) is not None for c in low.program.body) == 1
    given = {i.name: xs[b.position] for i, b in zip(low.program.inputs, low.inputs, strict=True)}
    got = run(low.program, given)[low.program.outputs[0]]
    want = fn(*xs)
    torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-2 if want.dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def put(x, at, y):
    return aten.index_put(x, [None, at], y, True)


@pytest.mark.parametrize(
    ("fn", "xs", "device"),
    [
        (put, CASES["second axis"][1], "cpu"),
        (put, (randn(3, 5), whole(5 * CROWDED + 1), randn(3, 5 * CROWDED + 1)), "cuda"),
        (put, (randn(3, 5).double(), whole(7), randn(3, 7).double()), "cuda"),
        (lambda x, at, y: aten.index_put(x, [None, at], y, False), CASES["second axis"][1], "cuda"),
        (lambda x, at, y: aten.scatter_add(x, 1, at, y), (randn(4, 5), whole(3, 7), randn(3, 7)), "cuda"),
        (lambda x, at, y: aten.scatter_reduce(x, 1, at, y, "prod"), (randn(3, 5), whole(3, 7), randn(3, 7)), "cuda"),
        (lambda x, at, y: aten.scatter_reduce(x, 1, at, y, "mean"), (randn(3, 5), whole(3, 7), randn(3, 7)), "cpu"),
    ],
)
def test_others_are_left(fn, xs, device):
    assert len(partition(traced(fn, xs, device)).fallbacks) == 1


def test_nor_where_torch_is_to_be_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert len(partition(traced(put, CASES["second axis"][1])).fallbacks) == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_but_extremes_which_are_the_same_in_any_order():
    torch.use_deterministic_algorithms(True)
    try:
        assert not partition(traced(*REDUCED["amax, with what is there"])).fallbacks
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_extremes_are_sums_by_keys():
    """Shared by all elements that are the extreme."""

    def fn(x, at, y, dz):
        for t in (x, y):
            t.requires_grad_()
        z = torch.scatter_reduce(x, 1, at, y, "amax")
        return torch.autograd.grad(z, (x, y), dz)

    xs = (*CASES["scatter_add"][1], randn(3, 5, 2))
    gm = traced(fn, xs, "cpu")
    with FakeTensorMode():  # a device for gradients is not needed
        for n in gm.graph.nodes:
            if (val := n.meta.get("val")) is not None:
                n.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cuda")
    assert not partition(gm).fallbacks
    low = lower(gm)
    given = {i.name: xs[b.position].detach() for i, b in zip(low.program.inputs, low.inputs, strict=True)}
    made, want = run(low.program, given), fn(*xs)
    for name, grad in zip(low.program.outputs, want, strict=True):
        torch.testing.assert_close(made[name], grad, rtol=1e-5, atol=1e-5)


def test_one_element_a_row_is_a_comparison_anywhere():
    gm = traced(lambda x, at, y: aten.scatter_add(x, 1, at, y), (randn(3, 5), whole(3, 1), randn(3, 1)), "cpu")
    assert not partition(gm).fallbacks


def test_a_product_reads_the_sum_as_the_program_rounds_it():
    """In float32 beside an operand of 16 bits, a library would multiply both in float32."""

    def fn(x, at, y, w):
        return aten.mm(aten.index_put(torch.zeros_like(x), [None, at], y, True), w)

    gm = traced(fn, (randn(3, 5).bfloat16(), whole(7), randn(3, 7).bfloat16(), randn(5, 4).bfloat16()))
    program, _ = normalise(lower(gm).program)
    product = next(c for c in program.body if product_of(c) is not None)
    assert {program.dtype_of(ld.tensor).value for ld in loads(product.body)} == {"bf16"}
