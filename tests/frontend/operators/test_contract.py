"""Contractions in every layout, and convolution, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, lowered, randn
from tilefold.algebra.expr import Call, Load
from tilefold.errors import UnsupportedError
from tilefold.tensor.product import library_product


def test_matrix_products_of_every_rank():
    check(lambda a, b: a @ b, randn(3, 4), randn(4, 5))
    check(lambda a, b: a @ b, randn(2, 3, 4), randn(2, 4, 5))
    check(lambda a, b: a @ b, randn(2, 1, 3, 4), randn(6, 4, 5))
    check(lambda a, b: a @ b, randn(3, 4), randn(4))
    check(lambda a, b: a @ b, randn(4), randn(4))
    check(lambda a, b: a @ b, randn(2, 3, 4), randn(4))
    check(lambda a, b: torch.bmm(a, b), randn(2, 3, 4), randn(2, 4, 5))


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_transposed_operands_are_read_in_place(ta, tb):
    a, b = randn(4, 3) if ta else randn(3, 4), randn(5, 4) if tb else randn(4, 5)
    low = check(lambda x, y: (x.t() if ta else x) @ (y.t() if tb else y), a, b)
    (c,) = low.program.body
    assert c.reducer == "sum"
    assert isinstance(c.body, Call) and c.body.op == "mul" and all(isinstance(x, Load) for x in c.body.args)


def test_affine_products():
    check(lambda b, x, y: torch.addmm(b, x, y), randn(5), randn(3, 4), randn(4, 5))
    check(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), randn(3, 5), randn(3, 4), randn(4, 5))
    check(lambda b, x, y: torch.baddbmm(b, x, y), randn(2, 1, 5), randn(2, 3, 4), randn(2, 4, 5))
    check(lambda x, w, b: F.linear(x, w, b), randn(2, 3, 4), randn(5, 4), randn(5))
    check(lambda x, w: F.linear(x, w), randn(2, 3, 4), randn(5, 4))


def test_beta_zero_ignores_the_bias():
    bias = torch.full((3, 5), float("nan"))
    check(lambda b, x, y: torch.addmm(b, x, y, beta=0), bias, randn(3, 4), randn(4, 5), modes=(False,))


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
        ("bhqk,bkhd->bqhd", [(2, 3, 4, 6), (2, 6, 3, 5)]),
        ("ij,ij->i", [(3, 4), (3, 4)]),
        ("i,j->ij", [(3,), (4,)]),
        ("ij->ji", [(3, 4)]),
        ("abc,cd,de->abe", [(2, 3, 4), (4, 5), (5, 6)]),
    ],
)
def test_einsum(equation, shapes):
    check(lambda *xs: torch.einsum(equation, *xs), *(randn(*s, seed=n) for n, s in enumerate(shapes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_accumulate_in_arithmetic_type(dtype):
    check(
        lambda a, b: a @ b,
        randn(3, 64, dtype=dtype),
        randn(64, 5, dtype=dtype),
        tol=3e-2 if dtype is not torch.float64 else 1e-12,
    )


CONVOLUTIONS = [
    dict(),
    dict(stride=2),
    dict(padding=1),
    dict(padding=(2, 1), stride=(1, 2)),
    dict(dilation=2, padding=2),
    dict(groups=2),
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options):
    groups = options.get("groups", 1)
    x, w, b = randn(2, 4, 7, 6), randn(6, 4 // groups, 3, 3), randn(6)
    check(lambda a, c, d: F.conv2d(a, c, d, **options), x, w, b, modes=(False,))


def test_pointwise_and_one_dimensional_convolutions():
    check(lambda a, c: F.conv2d(a, c), randn(2, 4, 5, 6), randn(3, 4, 1, 1), modes=(False,))
    check(lambda a, c: F.conv1d(a, c, padding=1), randn(2, 4, 9), randn(3, 4, 3), modes=(False,))
    check(lambda a, c: F.conv2d(a, c, groups=4), randn(2, 4, 5, 6), randn(4, 1, 2, 2), modes=(False,))


def test_transposed_convolutions_whose_windows_touch_are_products():
    def upsampled(a, c, b):
        return F.conv_transpose2d(a, c, b, stride=(2, 3)).relu()

    a, c, b = randn(2, 4, 5, 6), randn(4, 3, 2, 3), randn(3)
    check(upsampled, a, c, b, modes=(False,))
    check(upsampled, a.contiguous(memory_format=torch.channels_last), c, b, modes=(False,))
    check(lambda a, c: F.conv_transpose1d(a, c, stride=3), randn(2, 4, 5), randn(4, 2, 3), modes=(False,))
    product = lowered(upsampled, a, c, b).program.body[0]
    assert library_product(product, lowered(upsampled, a, c, b).program.sizes) is not None


@pytest.mark.parametrize("how", [{}, {"stride": 3}, {"stride": 2, "padding": 1}, {"stride": 2, "output_padding": 1}])
def test_transposed_convolutions_with_overlap_or_gaps_are_refused(how):
    with pytest.raises(UnsupportedError, match="transposed convolution"):
        lowered(lambda a, c: F.conv_transpose2d(a, c, **how), randn(2, 4, 5, 5), randn(4, 3, 2, 2))


def _fp8(*shape, seed):
    return randn(*shape, seed=seed).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("per_row", [True, False])
def test_scaled_products_of_fp8(per_row):
    a, b = _fp8(16, 32, seed=1), _fp8(48, 32, seed=2).t()
    scales = (torch.rand(16, 1) + 0.5, torch.rand(1, 48) + 0.5) if per_row else (torch.tensor(0.3), torch.tensor(2.0))
    low = check(
        lambda a, b, sa, sb: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.float32),
        a,
        b,
        *scales,
        tol=1e-4,
        modes=(False,),
    )
    product = low.program.body[0]
    assert product.reducer == "sum" and isinstance(product.body, Call)
    assert all(isinstance(x, Load) for x in product.body.args)  # operands stay fp8: a tensor core takes them


def test_scaled_products_with_a_scale_for_the_result_are_refused():
    def wrong(a, b, scale):
        return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, scale_result=scale, out_dtype=torch.bfloat16)

    with pytest.raises(UnsupportedError, match="scale for its result"):
        lowered(wrong, _fp8(16, 32, seed=1), _fp8(16, 32, seed=2).t(), torch.tensor(1.0))


def test_factors_of_products_of_integers_are_integers():
    x, a, b = (torch.arange(n).reshape(2, -1, k) for n, k in ((24, 4), (30, 5), (40, 4)))
    check(lambda x, a, b: torch.baddbmm(x, a, b, alpha=1.7, beta=2.9), x, a, b)
    check(lambda x, a, b: torch.addmm(x[0], a[0], b[0], alpha=0.6, beta=0.2), x, a, b)
