"""What products of attention multiply on a GPU: computed once and written, or in the kernel, whichever moves less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import USUAL, fuse_for_gpu
from tilefold.runtime.steps import refuser


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def attention(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def of_positions(q, k, v, cos, sin):
    return attention(rotated(q, cos[-q.shape[-2] :], sin[-q.shape[-2] :]), rotated(k, cos, sin), v)


def of_eight_bits(q, k, v, scale):
    return attention(q, k.to(q.dtype) * scale, v)


def kernels(fn, *args: torch.Tensor) -> list[tuple[str, ...]]:
    """Members of the kernels, each once: a fold in segments has two."""
    torch._dynamo.reset()
    return list(dict.fromkeys(k.plan.group.members for k in fuse_for_gpu(trace(fn, *args).program).kernels))


def arguments(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [like(2, 16, queries, 64), *(like(2, 16, keys, 64, dtype=dtype) for _ in range(2))]


def test_rotated_rows_of_many_blocks_are_computed_once():
    found = kernels(of_positions, *arguments(2048, 2048), like(2048, 64), like(2048, 64))
    assert len(found) in (2, 3) and [len(x) > 1 for x in found] == [False] * (len(found) - 1) + [True]


def test_rotated_keys_that_one_block_reads_stay_in_its_loop():
    assert len(kernels(of_positions, *arguments(1, 2048), like(2048, 64), like(2048, 64))) == 1


@pytest.mark.parametrize("queries", [1, 2048])
def test_keys_that_are_read_in_fewer_bytes_stay_in_the_loop(queries):
    q, k, v = arguments(queries, 2048)
    assert len(kernels(of_eight_bits, q, k.to(torch.int8), v, like(64))) == 1


def of_unit_length(q, k, v):
    return attention(torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v)


def test_normalised_rows_of_many_blocks_are_computed_once():
    """Their norms as well: of keys else in every block of rows, and no copy brings such queries to the matrix unit."""
    *maps, fold = kernels(of_unit_length, *arguments(1024, 1024))
    assert len(maps) == 2 and len(fold) == 6


@pytest.mark.parametrize("queries", [1, 16])
def test_normalised_keys_that_one_block_reads_stay_in_its_loop(queries):
    assert len(kernels(of_unit_length, *arguments(queries, 1024))) == 1


def packed(q, k, v, begins):
    """Values of sequences that lie one after the other in memory, 0 beyond an end."""
    at = begins[:-1, None] + torch.arange(k.shape[-2], device=q.device)
    there = torch.where((at < begins[1:, None])[..., None, None], v[at.clamp(max=v.shape[0] - 1)], 0.0)
    return attention(q, k, there.transpose(1, 2))


@pytest.mark.parametrize("queries, apart", [(2048, True), (1, False)])
def test_values_that_are_computed_once_leave_their_product_to_the_fold(queries, apart):
    """They have a kernel of their own and do not take the product along: scores would go through memory."""
    q, k, _ = arguments(queries, 2048)
    *maps, fold = kernels(packed, q, k, like(4096, 16, 64), like(3, dtype=torch.int32))
    assert len(maps) == apart and len(fold) == 6


def by_distance(x, at):
    """Sums of x [512, 512, 8] over the places of each of 32 numbers."""
    return (at.reshape(1, -1) == torch.arange(32, device=x.device)[:, None]).to(x.dtype) @ x.reshape(-1, x.shape[-1])


def test_where_indices_are_is_computed_in_a_product_that_contracts_two_dims_in_many_segments():
    """A tile of either dim is too large for a thread block; launched, the two are one."""
    torch._dynamo.reset()
    p = trace(by_distance, like(512, 512, 8), like(512, 512, dtype=torch.int64)).program
    refuse, _ = refuser(None, interpreted=False)
    first, last = fuse_for_gpu(p, replace(USUAL, refuse=refuse)).kernels
    assert first.plan.group.members == last.plan.group.members and len(first.plan.group.members) == 2
    assert max(int(n.value) for n in first.block.sizes.values() if n.value < 512) == 256
