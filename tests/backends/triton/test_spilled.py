"""Kernels whose threads spill registers have fewer elements a thread, where that helps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from itertools import pairwise
from types import SimpleNamespace

from tests.backends.triton.kernels import made, meta
from tilefold.backends.triton.launch import TritonKernel, Variant
from tilefold.backends.triton.spilled import SPILLED, eased, spilled
from tilefold.backends.triton.views import Like

pytestmark = pytest.mark.usefixtures("own_cache")


def gelus(x):
    return torch.nn.functional.gelu(x) * torch.tanh(x)


def kernel() -> tuple[TritonKernel, list[Like]]:
    (k,) = made(gelus, meta(4096, 1000))
    return k, [Like.packed((4096, 1000), torch.float32, torch.device("cpu"))] * 2


def variant(k: TritonKernel, xs: list[Like]) -> Variant:
    return k.variant(k._units(xs), k.sizes({}), tf32=False)


def test_fewer_elements_by_more_warps_and_then_by_shorter_tiles() -> None:
    k, xs = kernel()
    c = variant(k, xs).config
    seen = []
    while c is not None:
        seen.append((sum(c.tiles.values()), c.warps))
        c = eased(c, k.block, k.sizes({}))
    assert seen == sorted(set(seen), key=seen.index) and len(seen) > 2
    assert all(a[1] <= b[1] and a[0] >= b[0] for a, b in pairwise(seen))


def test_what_spills_less_stays_and_what_does_not_is_taken_back() -> None:
    k, xs = kernel()
    first = variant(k, xs)
    assert not k._eases(xs, {}, SPILLED)  # a few bytes are none
    assert k._eases(xs, {}, 4 * SPILLED)
    second = variant(k, xs)
    assert second.config != first.config
    assert k._eases(xs, {}, 4 * SPILLED)  # no less: the first one runs, and that is the end of it
    assert variant(k, xs).config == first.config
    assert not k._eases(xs, {}, 4 * SPILLED)


def test_what_spills_less_and_still_much_is_eased_again() -> None:
    k, xs = kernel()
    first = variant(k, xs)
    assert k._eases(xs, {}, 4 * SPILLED)
    second = variant(k, xs)
    assert k._eases(xs, {}, 2 * SPILLED)
    assert variant(k, xs).config not in (first.config, second.config)
    assert not k._eases(xs, {}, 0)


def test_a_configuration_that_was_tuned_stays() -> None:
    k, xs = kernel()
    tuned = TritonKernel(k.block, lambda block, sizes: variant(k, xs).config)
    assert not tuned._eases(xs, {}, 4 * SPILLED)


def test_bytes_are_four_a_register_and_none_where_a_driver_does_not_say() -> None:
    assert spilled(SimpleNamespace(n_spills=21)) == 84
    assert spilled(SimpleNamespace(n_spills=None)) == spilled(SimpleNamespace()) == 0
