"""The interpreter against torch, on hostile inputs too."""

from __future__ import annotations

import pytest
import torch

from tests.tile.kernels import ATTENTION, GATHER, SOFTMAX, TOPK
from tilefold.tile.interp import run_kernel
from tilefold.tile.text import parse
from tilefold.tile.verify import verify


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(text, tensors, syms, **kw):
    kernel = parse(text)
    verify(kernel)
    run_kernel(kernel, tensors, syms, **kw)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (7, 9), (4, 0), (0, 5)])
def test_softmax(shape):
    x, y = torch.randn(shape) * 5, torch.full(shape, 9.0)
    run(SOFTMAX, {"x": x, "y": y}, {"R": shape[0], "C": shape[1]})
    torch.testing.assert_close(y, x.softmax(-1))


def test_softmax_of_hostile_rows():
    x = torch.randn(6, 9)
    x[0], x[1, 3], x[2, 2], x[3] = -torch.inf, torch.inf, torch.nan, 1e4
    x[4, ::2] = -torch.inf
    y = torch.empty_like(x)
    run(SOFTMAX, {"x": x, "y": y}, {"R": 6, "C": 9})
    torch.testing.assert_close(y, x.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 4, 13])
def test_causal_attention(n):
    q, k, v = (torch.randn(2, 3, n, 8) for _ in range(3))
    o = torch.empty_like(q)
    run(ATTENTION, {"q": q, "k": k, "v": v, "o": o}, {"S": n})
    ref = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    torch.testing.assert_close(o, ref)


def test_strides_are_free():
    q, k, v = (torch.randn(8, 13, 2, 3).permute(2, 3, 1, 0) for _ in range(3))
    o = torch.empty(13, 3, 8, 2).permute(3, 1, 0, 2)
    run(ATTENTION, {"q": q, "k": k, "v": v, "o": o}, {"S": 13})
    ref = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    torch.testing.assert_close(o, ref)


def test_exact_is_float64():
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    o = torch.empty(2, 3, 9, 8, dtype=torch.float64)
    run(ATTENTION, {"q": q, "k": k, "v": v, "o": o}, {"S": 9}, exact=True)
    ref = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=0.125
    )
    torch.testing.assert_close(o, ref, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", ["random", "ties", "minus-inf", "nan"])
def test_routing(kind):
    x, w = torch.randn(5, 6), torch.randn(6, 10)
    if kind == "ties":
        w[:, 1:] = w[:, :1]
    if kind == "nan":
        w[0, 7] = torch.nan
    if kind == "minus-inf":
        x = x.abs() + 0.1
        w[:, 2:] = -torch.inf
    y, at = torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int64)
    run(TOPK, {"x": x, "w": w, "y": y, "at": at}, {"N": 5})
    s = x @ w
    order = torch.argsort(torch.where(s.isnan(), torch.inf, s), dim=-1, descending=True, stable=True)[:, :3]
    torch.testing.assert_close(y, s.gather(-1, order), equal_nan=True)
    if kind in ("minus-inf", "ties"):  # ties go to the lowest index, -inf elements are elements
        assert at.tolist() == order.tolist()
    if kind == "ties":
        assert at.tolist() == [[0, 1, 2]] * 5


def test_unfilled_slots():
    text = TOPK.replace("dim j = 10", "dim j = 2").replace("w: f32[6, 10]", "w: f32[6, 2]")
    x, w = torch.randn(3, 6), torch.full((6, 2), -torch.inf)
    y, at = torch.empty(3, 3), torch.empty(3, 3, dtype=torch.int64)
    run(text, {"x": x.abs(), "w": w, "y": y, "at": at}, {"N": 3})
    assert at.tolist() == [[0, 1, -1]] * 3


@pytest.mark.parametrize("n", [1, 4, 10])
def test_panel_gather_and_quantising_store(n):
    ids, table = torch.randint(0, 7, (n,)), torch.randn(7, 5).bfloat16()
    y, top = torch.empty(n, 5, dtype=torch.float8_e4m3fn), torch.empty(())
    run(GATHER, {"ids": ids, "table": table, "y": y, "top": top}, {"N": n})
    picked = table[ids].float()
    assert torch.equal(y.float(), (picked * 0.5).to(torch.float8_e4m3fn).float())
    assert top.item() == picked.max().item()


def test_undefined_elements_are_nan():
    text = """
kernel undefined()
  dim i = 4
  out y: f32[4]
  grid
    alloc p: f32[i:4] tile
    for i:4 in 0 .. 2
      p = 1.0
    store y[i] over i = p[i]
"""
    y = torch.zeros(4)
    run(text, {"y": y}, {})
    assert y[:2].tolist() == [1, 1] and y[2:].isnan().all()


def test_discarded_loads_may_leave_the_tensor():
    text = """
kernel shift(N)
  dim i = N
  in x: f32[N]
  out y: f32[N]
  grid i:4
    store y[i] over i = where(i >= 2, x[i - 2], 0.0)
"""
    x, y = torch.randn(7), torch.empty(7)
    run(text, {"x": x, "y": y}, {"N": 7})
    assert torch.equal(y, torch.cat([torch.zeros(2), x[:5]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 5)}, "x has shape"),
        ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "x is torch.float64"),
        ({"x": None}, "no tensor x"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    tensors = {"x": torch.zeros(3, 4), "y": torch.zeros(3, 4), **change}
    with pytest.raises(ValueError, match=message):
        run_kernel(parse(SOFTMAX), {n: t for n, t in tensors.items() if t is not None}, {"R": 3, "C": 4})


def test_store_out_of_range():
    text = SOFTMAX.replace("store y[i, j]", "store y[i, j + 1]")
    with pytest.raises(IndexError, match="store to y: axis 1"):
        run_kernel(parse(text), {"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)}, {"R": 3, "C": 4})


def test_buffer_too_small_for_its_range():
    text = SOFTMAX.replace("alloc m: f32[i:3]", "alloc m: f32[i:R - 5]")
    with pytest.raises(ValueError, match="buffer m: the range of i has 3 elements, its extent is 1"):
        run_kernel(parse(text), {"x": torch.zeros(6, 4), "y": torch.zeros(6, 4)}, {"R": 6, "C": 4})
