"""Scores that nothing else in the tests has, from plain PyTorch: groups of warps own their rows at first try."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.kernels import assembled, made  # noqa: E402
from tests.backends.triton.rows import attention, by_rows  # noqa: E402
from tests.backends.triton.test_compile import HOPPER, built  # noqa: E402
from tests.backends.triton.test_row_groups import in_loops  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.machine_code import disassembled  # noqa: E402
from tilefold.block.text import show  # noqa: E402
from tilefold.tile.layout import usual_units  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

B, F = torch.bfloat16, torch.float32


def cauchy(q, k, v):
    """Weights that fall off with the square of a score, divided by their sum: no exponential."""
    w = 1.0 / (1.0 + ((q @ k.mT).float() * q.shape[-1] ** -0.5).square())
    return (w / w.sum(-1, keepdim=True)).to(v.dtype) @ v


def near(q, k, v, width):
    """A bell around each query, of a width a head, causal."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    far = (i - j).float() * width.view(-1, 1, 1) * 0.05
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5 - far * far
    return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1).to(v.dtype) @ v


def aged(q, k, v, asked, told):
    """Softplus of a score, less what has passed between two times; what is told later is not seen."""
    scores = torch.nn.functional.softplus((q @ k.mT).float() * q.shape[-1] ** -0.5)
    passed = asked.unsqueeze(-1) - told.unsqueeze(-2)
    return torch.softmax(torch.where(passed >= -1.0, scores - 0.1 * passed, float("-inf")), -1).to(v.dtype) @ v


#: Name -> function, its arguments beside q, k and v, by numbers of queries and keys.
SCORES = {
    "cauchy": (cauchy, lambda n, m, heads: []),
    "near": (near, lambda n, m, heads: [((heads,), F)]),
    "aged": (aged, lambda n, m, heads: [((n,), F), ((m,), F)]),
}


@pytest.mark.parametrize(
    "weight", [lambda x: 1.0 / (1.0 + x.square()), torch.sigmoid, lambda x: torch.relu(x) ** 2 + 1e-3]
)
def test_weights_over_their_sum_are_one_pass(weight):
    """A map that both sums read may be anything by itself; what it is made of says that its sum is not 0."""

    def fn(q, k, v):
        w = weight((q @ k.mT).float() * 0.1)
        return (w / w.sum(-1, keepdim=True)).to(v.dtype) @ v

    (k,) = made(fn, *(torch.empty(4, 16, 333, 64, dtype=B, device="meta") for _ in range(3)))
    assert show(k.block).count("for m") == 1


@pytest.mark.parametrize("name, dim", [("cauchy", 80), ("near", 64), ("aged", 128)])
def test_right_at_odd_lengths(name, dim):
    fn, more = SCORES[name]
    shapes = [*attention(203, 333, dim), *more(203, 333, 2)]
    (k,) = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in shapes))
    same(*emulate(TritonKernel(k.block, by_rows(tile=64)), most=2))


@pytest.mark.parametrize("name, dim, most", [("cauchy", 128, 400), ("near", 64, 400), ("aged", 128, 400)])
def test_groups_own_rows_and_no_loop_spills(name, dim, most, tmp_path):
    """Instructions of the shortest loop, for 64 x 128 scores."""
    fn, more = SCORES[name]
    shapes = [*(((4, 16, 4096, dim), B) for _ in range(3)), *more(4096, 4096, 16)]
    (k,) = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in shapes))
    v = k.variant(usual_units(k.block), k.sizes({}), hopper=True)
    assert v.rendered.groups and v.config.own == "rows"
    r = built(v, HOPPER)
    assert "C75" not in assembled(r.assembly["ptx"], "sm_90a", tmp_path)
    loops = sorted(in_loops(disassembled(r.assembly["cubin"])))
    assert loops[0][0] < most and not any(s for _, s in loops)
