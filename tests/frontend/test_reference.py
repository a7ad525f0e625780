"""The float64 reference: what is widened, what is kept, and that nothing leaks."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.reference import double_precision, own, reference


def test_precision_casts_are_dropped():
    x = torch.randn(4, 33).bfloat16()

    def fn(x):
        y = torch.softmax(x.float(), -1, dtype=torch.float32)
        return (y.half() @ y.half().mT).to(x.dtype) + torch.full((4,), 1 / 3, dtype=torch.bfloat16)

    y = torch.softmax(x.double(), -1)
    torch.testing.assert_close(reference(fn, (x,)).result, y @ y.mT + 1 / 3, rtol=1e-14, atol=0)


def test_quantising_casts_are_kept():
    x = torch.randn(50)
    got = reference(lambda x: (x / 3).to(torch.float8_e4m3fn).float() + x.to(torch.int64), (x,)).result
    exact = (x.double() / 3).to(torch.float8_e4m3fn).double() + x.to(torch.int64)
    assert got.dtype == torch.float64 and torch.equal(got, exact)
    assert not torch.equal(got, x.double() / 3 + x.to(torch.int64))


def test_captured_tensors_and_modules_are_widened():
    layer, bias, x = torch.nn.Linear(8, 5), torch.randn(5), torch.randn(3, 8)
    got = reference(lambda x: layer(x) * bias, (x,)).result
    exact = (x.double() @ layer.weight.double().mT + layer.bias.double()) * bias.double()
    torch.testing.assert_close(got, exact, rtol=1e-13, atol=1e-14)
    assert layer.weight.dtype == torch.float32


def test_nothing_leaks():
    x = torch.randn(3)
    before = x.clone()
    try:
        with double_precision():
            assert torch.zeros(1).dtype == torch.float64
            raise KeyError
    except KeyError:
        pass
    assert torch.zeros(1).dtype == torch.float32
    reference(lambda x: x * 2, (x,))
    assert x.dtype == torch.float32 and torch.equal(x, before)


def test_selections_are_recorded_with_what_they_chose_from():
    x = torch.randn(4, 9)
    exact = reference(lambda x: (x.topk(3).indices, (x * 2).argmax(0, keepdim=True), x.argmin(), x.sum(-1)), (x,))
    topk, argmax, argmin = (next(s for s in exact.selections if s.of(r)) for r in exact.result[:3])
    assert (topk.dim, topk.first, argmax.dim, argmax.first, argmin.dim) == (1, False, 0, True, 0)
    torch.testing.assert_close(argmax.values, 2 * x.double())
    assert argmin.values.shape == (36,) and argmin.index.shape == (1,)
    assert not any(s.of(exact.result[3]) for s in exact.selections)


def test_scaled_products_of_fp8_are_computed_in_float64():
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    sa, sb = torch.rand(16, 1) + 0.5, torch.rand(1, 48) + 0.5

    def product(a, b, sa, sb):
        return torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16)

    exact = reference(product, (a, b, sa, sb)).result
    assert exact.dtype is torch.float64
    torch.testing.assert_close(exact, a.double() @ b.double() * sa * sb, rtol=1e-14, atol=0)
    assert not torch.equal(exact.float(), product(a, b, sa, sb).float())  # bf16 rounds, the reference does not


def test_a_selection_from_one_number():
    x = torch.tensor(2.0)
    exact = reference(lambda x: (x.max(0).indices, x.topk(1).indices, x.sort().indices), (x,))
    assert [(s.index.tolist(), s.values.tolist(), s.dim) for s in exact.selections] == [([0], [2.0], 0)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_what_a_function_does_to_its_arguments_is_told_and_not_done(dtype):
    x = torch.arange(6, dtype=dtype)
    found = reference(lambda x, y: (x.add_(1), y * 2)[1], (x, x[1:]))
    assert torch.equal(x, torch.arange(6, dtype=dtype))
    assert torch.equal(found.arguments[0], torch.arange(1, 7).to(found.arguments[0].dtype))
    if dtype is not torch.float32:  # what shares memory still does
        assert torch.equal(found.result, 2 * torch.arange(2, 7, dtype=dtype))


def test_arguments_of_ones_own_lie_as_they_did():
    x = torch.randn(4, 6)[:, 1::2].requires_grad_()
    same, again, part, word = own((x, x, x.detach()[1:], "a"))
    assert same is again and same.stride() == x.stride() and same.storage_offset() == 1 and same.requires_grad
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr() and word == "a"
    part.zero_()
    assert not same[1:].any() and x.any()


def test_arguments_of_ones_own_keep_their_marks():
    x = torch.randn(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    (same,) = own((x,))
    assert same is not x and same._dynamo_dynamic_indices == {0}
