"""Products over rows of groups of warps that own rows: what is added to memory beside states of their own."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton import emulated  # noqa: E402
from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.gradients import alibi, causal, of_one_program, plain, window  # noqa: E402
from tests.backends.triton.rows import by_rows  # noqa: E402
from tests.backends.triton.test_compile import HOPPER, SHARED, built, own_cache, spilled  # noqa: E402, F401
from tests.backends.triton.test_row_gradients import variant_of  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.machine_code import disassembled, strays  # noqa: E402
from tilefold.backends.triton.row_roles import RowRoles, row_roles_of, shared_bytes  # noqa: E402
from tilefold.block.both_ways import BothWays, both_ways  # noqa: E402
from tilefold.runtime.tuner.compiler import usual_units  # noqa: E402


def kernel_of(score, rows: int, columns: int, dim: int, heads: int = 2, **how) -> TritonKernel:
    found = both_ways(*of_one_program(score, rows, columns, dim, heads, turned="turned" in how))
    assert isinstance(found, BothWays)
    return TritonKernel(found.kernel, by_rows(**{"tile": 64, **how}))


@pytest.mark.parametrize(
    "score, rows, columns, dim, how",
    [
        (causal, 200, 200, 128, {}),
        (plain, 130, 200, 64, {"stages": 3}),
        (window, 200, 200, 64, {"draws": True}),
        (alibi, 130, 130, 96, {}),
        (causal, 256, 256, 64, {}),
        (causal, 192, 192, 128, {"turned": False, "stages": 3}),
        (plain, 128, 256, 64, {}),
    ],
)
def test_groups_together_compute_the_kernel(score, rows, columns, dim, how):
    k = kernel_of(score, rows, columns, dim, **how)
    assert "across_0" in variant_of(k).rendered.source
    same(*emulate(k, most=1 if how.get("draws") else 3))


@pytest.mark.parametrize(
    "change",
    [("across_full.index(0), count=2", "across_full.index(0), count=3"), ("crossed = crossed ^ 1", "pass")],
    ids=["a writer too many", "a phase twice"],
)
def test_what_would_hang_a_device_is_found(change, monkeypatch):
    monkeypatch.setattr(emulated, "PATIENCE", 0.5)
    with pytest.raises(AssertionError):
        same(*emulate(kernel_of(plain, 130, 130, 64), change, most=2))


@pytest.mark.parametrize(
    "change",
    [
        ("slice(GROUP * 32, 32, dim=1)", "slice(0, 32, dim=1)"),
        ("across_0.index(GROUP).store", "across_0.index(1 - GROUP).store"),
        ("n_own = GROUP * 32", "n_own = 0"),
    ],
    ids=["columns of another group", "rows of another group", "columns where others are"],
)
def test_what_would_be_wrong_is_found(change):
    k = kernel_of(plain, 130, 130, 64)
    if change[0] not in variant_of(k).rendered.source:
        change = ("GROUP * 32\n", "0\n")
    with pytest.raises(AssertionError):
        same(*emulate(k, change, most=2))


@pytest.mark.parametrize("dim, stages", [(64, 4), (128, 2)])
def test_they_have_the_form_by_default_on_hopper_alone(dim, stages):
    found = both_ways(*of_one_program(causal, 2048, 2048, dim, 32))
    assert isinstance(found, BothWays)
    k = TritonKernel(found.kernel)
    v = variant_of(k)
    assert v.rendered.groups == 2 and v.rendered.draws and v.config.stages == stages
    usual = k.variant(usual_units(k.block), k.sizes({}), hopper=False)
    assert not usual.rendered.groups and "tl.atomic_add(" in usual.rendered.source


def test_hot_loops_do_not_spill(tmp_path):
    v = variant_of(kernel_of(causal, 2048, 2048, 128, 16))
    r, roles = built(v, HOPPER), row_roles_of(v.kernel, v.config)
    assert isinstance(roles, RowRoles) and 0 <= shared_bytes(roles, v.config) - r.shared <= 1024
    assert spilled(r.assembly["ptx"], "sm_90a", tmp_path) <= 64 and r.shared <= SHARED[90]
    assert not strays(disassembled((tmp_path / "kernel.cubin").read_bytes()))
