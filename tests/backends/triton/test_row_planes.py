"""Biases of rows and streamed indices where groups of warps own rows: brought by copies, right, and priced."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.kernels import assembled, made  # noqa: E402
from tests.backends.triton.test_compile import HOPPER, SHARED, built  # noqa: E402
from tests.backends.triton.test_row_groups import fold_of, in_loops  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.machine_code import disassembled  # noqa: E402
from tilefold.backends.triton.row_roles import RowRoles, row_roles_of, shared_bytes  # noqa: E402
from tilefold.plan.pace import Scores  # noqa: E402
from tilefold.tile.layout import usual_units  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

B, F = torch.bfloat16, torch.float32


def biased(length: int, dim: int, kind: torch.dtype, heads: int = 16, batch: int = 4) -> TritonKernel:
    """Attention with a bias that all batches share."""

    def fn(q, k, v, bias):
        return torch.softmax((q @ k.mT).float() * dim**-0.5 + bias, -1).to(v.dtype) @ v

    q, k, v = (torch.empty(batch, heads, length, dim, dtype=B, device="meta") for _ in range(3))
    (found,) = made(fn, q, k, v, torch.empty(1, heads, length, length, dtype=kind, device="meta"))
    return found


@pytest.mark.parametrize("name, planes", [("evoformer", 1), ("windows", 2), ("shifted", 1), ("bias", 1)])
@pytest.mark.parametrize("how", [(2, 64, 2), (3, 64, 2), (2, 32, 3)], ids=str)
def test_planes_come_with_what_lifts_read(name, planes, how):
    """Each group's rows of each tile, late copies too."""
    k = fold_of(name, groups=how[0], tile=how[1], stages=how[2])
    v = k.variant(usual_units(k.block), k.sizes({}), hopper=True)
    assert f"plane_{planes - 1} = " in v.rendered.source and f"plane_{planes} = " not in v.rendered.source
    same(*emulate(k, most=3, late=True))


@pytest.mark.parametrize(
    "change",
    [
        ("plane_0.index(s * 2 + 1))", "plane_0.index(s * 2 + 0))"),
        ("plane_0.index(ahead * 2 + GROUP", "plane_0.index(s * 2 + GROUP"),
        ("k0 + 64, at - 64], early_full", "k0 + 64, at], early_full"),
    ],
    ids=["another group's rows", "the tile before", "columns of the tile before"],
)
def test_faults_are_found(change):
    with pytest.raises(AssertionError):
        same(*emulate(fold_of("evoformer", tile=64), change, most=2, late=True))


@pytest.mark.parametrize(
    "length, dim, kind, groups, tile, most",
    [(2048, 64, B, 3, 128, 660), (2048, 128, B, 2, 128, 720), (2048, 128, F, 3, 64, 450), (2048, 96, B, 2, 128, 720)],
)
def test_no_loop_spills_and_no_product_waits(length, dim, kind, groups, tile, most, tmp_path):
    k = biased(length, dim, kind)
    v = k.variant(usual_units(k.block), k.sizes({}), hopper=True)
    roles = row_roles_of(v.kernel, v.config)
    assert v.rendered.groups == groups and tile in v.config.tiles.values()
    assert isinstance(roles, RowRoles) and len(roles.planes) == 1
    r = built(v, HOPPER)
    assert 0 <= shared_bytes(roles, v.config) - r.shared <= 1024 and r.shared <= SHARED[90]
    assert "C75" not in assembled(r.assembly["ptx"], "sm_90a", tmp_path)
    loops = in_loops(disassembled(r.assembly["cubin"]))
    hot = [s for n, s in loops if 0.8 * most < n < most]
    assert len(hot) == groups and not any(hot), loops


def test_what_no_copy_brings_has_its_usual_form():
    """By the strides that are known: columns that do not lie side by side. Such are tables, permuted."""
    k = biased(2048, 128, B)
    units = list(usual_units(k.block))
    assert k.variant(tuple(units), k.sizes({}), hopper=True).rendered.groups
    at = [i.name for i in k.block.inputs].index("bias")
    units[at] = 1
    assert not k.variant(tuple(units), k.sizes({}), hopper=True).rendered.groups


def test_short_streams_of_few_columns_keep_the_usual_form():
    k = biased(256, 64, B)
    assert not k.variant(usual_units(k.block), k.sizes({}), hopper=True).rendered.groups


def test_blocks_of_more_rows_read_the_stream_less_often():
    """A bias of 16 bits of 1,024 heads, 512 x 512: 0.54 GB, and keys and values once a block of rows."""
    x = Scores(1024, 512, 512.0, False, 32, planes=2)
    assert x.served(64, 1.0) == 1024 * 512 * 512 * 2 + 1024 * 8 * 512 * 32 * 4
    assert x.served(128, 1.0) == 1024 * 512 * 512 * 2 + 1024 * 4 * 512 * 32 * 4
