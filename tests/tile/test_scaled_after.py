"""Factors behind loops: which are taken there, and that kernels mean the same."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.gradients import arguments, causal, keys, queries, softcap
from tests.backends.triton.kernels import made
from tilefold.tile import ir
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.rows_first import rows_first
from tilefold.tile.scaled_after import scaled_after


def kernel_of(fn, dtype):
    shapes = arguments(600, 600, 16, 2 if fn.__qualname__.startswith("keys") else 1, dtype=dtype)
    if fn.__qualname__.startswith("queries"):
        shapes = arguments(600, 600, 16, 1, saved=True, dtype=dtype)
    (k,) = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in shapes), units=4)
    return rows_first(lower(k.block, LowerOptions(tiles={d: 16 for d in k.block.sizes}, arranged=False)))


def factors(k: ir.Kernel) -> int:
    """Maps that multiply by a number, behind the last loop and not in one."""
    last = max(n for n, s in enumerate(k.body) if isinstance(s, ir.For))
    return sum(isinstance(s, ir.Map) and "0.25" in str(s.expr) for s in k.body[last + 1 :])


@pytest.mark.parametrize("fn", [keys(causal), queries(softcap)])
def test_the_gradients_scale_is_applied_once_a_feature(fn):
    k = kernel_of(fn, torch.bfloat16)
    assert factors(k) == 0 and factors(scaled_after(k)) == 1


def test_float16_keeps_its_factors():
    k = kernel_of(keys(causal), torch.float16)
    assert scaled_after(k) == k
