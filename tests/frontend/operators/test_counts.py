"""Histograms of whole numbers and running sums of few integers against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.check import check, lowered, randn
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.frontend.torch_compile import backend
from tilefold.tensor.interp import run


def numbers(*shape: int, high: int = 9, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(-3, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("shape", [(40,), (5, 7), (1,), (0,)])
def test_each_whole_number_has_a_bin_and_others_have_none(shape):
    x = numbers(*shape)
    check(lambda x: torch.histc(x.float(), bins=6, min=0, max=5), x)
    check(lambda x: torch.histc(x.float(), bins=3, min=-2, max=0), x)


def test_offsets_of_experts():
    def offsets(ids):
        counted = torch.histc(ids.float(), bins=8, min=0, max=7)
        return counted, torch.cumsum(counted, 0, dtype=torch.int32), counted.int().cumsum(0)

    check(offsets, numbers(64, high=8).abs())


def test_places_in_the_queues_of_experts_are_sums_of_computed_integers():
    """A token's place in its expert's queue, as routers with a capacity count it: no float is among what is summed."""

    def places(ids):
        chosen = F.one_hot(ids, 4)
        return ((chosen.cumsum(0) - 1) * chosen).sum(-1)

    ids = numbers(14, high=4).abs()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(places, backend=backend)(ids), places(ids))


@pytest.mark.parametrize(
    "bins,most,x", [(6, 5, randn(8)), (5, 5, numbers(8)), (257, 256, numbers(8)), (6, 5.5, numbers(8))]
)
def test_histograms_whose_bins_are_no_whole_numbers_are_left_to_others(bins, most, x):
    with pytest.raises(UnsupportedError, match="whole numbers"):
        lowered(lambda x: torch.histc(x.float(), bins=bins, min=0, max=most), x)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.bool])
def test_running_sums_of_integers(dim, dtype):
    check(lambda x: x.cumsum(dim), numbers(3, 5, 4, dtype=dtype), modes=(False,))


@pytest.mark.parametrize("shape", [(1,), (4, 1), (0, 3), (64,)])
def test_running_sums_of_one_no_and_the_most_places(shape):
    check(lambda x: x.cumsum(-1), numbers(*shape), modes=(False,))


@pytest.mark.parametrize("dim", [0, -1])
def test_running_products_of_integers(dim):
    check(lambda x: x.cumprod(dim), numbers(3, 5, 4, dtype=torch.int32), modes=(False,))
    check(lambda x: (x > 0).long().cumprod(dim).sum(dim), numbers(3, 5), modes=(False,))


def test_a_running_sum_overflows_as_its_type_does():
    check(lambda x: torch.cumsum(x, 0, dtype=torch.int8), torch.full((5,), 100), modes=(False,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_running_sums_of_few_floats_are_covered_on_a_gpu(dtype):
    """Added for each place in an order of its own, against float64; infinities stay behind where they are."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(lambda x: torch.cumsum(x, 1))(torch.empty(3, 33, 5, dtype=dtype))
        for n in gm.graph.nodes:
            if "val" in n.meta:
                n.meta["val"] = torch.empty((3, 33, 5), dtype=dtype, device="cuda")
    p = lower(gm).program
    x = randn(3, 33, 5).to(dtype)
    x[0, 7, 2] = torch.inf
    found = run(p, {p.inputs[0].name: x})[p.outputs[0]]
    assert found.dtype is dtype
    rtol = 0.01 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), x.double().cumsum(1), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("x", [randn(5), numbers(65)])
def test_running_sums_of_floats_and_of_many_places_are_left_to_others(x):
    with pytest.raises(UnsupportedError, match="cumsum"):
        lowered(lambda x: x.cumsum(0), x)


def test_a_running_sum_over_a_length_that_changes_is_left_to_others():
    with pytest.raises(UnsupportedError, match="number that is not known"):
        lowered(lambda x: x.cumsum(0), numbers(5), symbolic=True)
