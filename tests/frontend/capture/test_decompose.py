"""Fused attention taken apart equals torch's, and its structure is the plain one."""

from __future__ import annotations

import functools
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.frontend.check import check, randn, same
from tilefold.frontend.capture import resize
from tilefold.frontend.capture.decompose import attention, decompositions
from tilefold.frontend.fuse import trace
from tilefold.frontend.operators.table import TABLE
from tilefold.frontend.regions.assemble import compilations

CASES = [
    dict(),
    dict(is_causal=True),
    dict(scale=0.3),
    dict(attn_mask=randn(6, 7) > 0),
    dict(attn_mask=randn(2, 1, 6, 7)),
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: ",".join(o))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_torch(options, dtype):
    q, k, v = randn(2, 3, 6, 8, dtype=dtype), randn(2, 3, 7, 8, dtype=dtype), randn(2, 3, 7, 5, dtype=dtype)
    options = {n: x.to(dtype) if n == "attn_mask" and x.dtype is not torch.bool else x for n, x in options.items()}
    got, want = attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
    assert got.dtype is want.dtype
    same(got, want, 2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_grouped_heads():
    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8, seed=1)
    same(attention(q, k, v, enable_gqa=True), F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 1e-5)


def test_a_fully_masked_row_is_zero():
    q = randn(1, 1, 3, 4)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    out = check(lambda a, m: attention(a, a, a, attn_mask=m), q, mask)
    assert out is not None
    assert attention(q, q, q, attn_mask=mask)[0, 0, 1].abs().sum() == 0


def test_a_call_in_a_model_is_replaced():
    low = trace(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), randn(1, 2, 5, 4))
    assert [c.reducer for c in low.program.body] == ["sum", None, "max", None, "sum", None, "sum"]


@pytest.mark.parametrize("training", [False, True])
def test_attention_of_modules_is_replaced_too(training):
    """Its gradients were wrong: torch takes the CPU's fused forward apart into what its backward does not expect."""
    torch.manual_seed(0)
    m, x = torch.nn.MultiheadAttention(8, 2), randn(5, 2, 8)
    torch._dynamo.reset()
    fast = torch.compile(m, backend="tilefold", options={"runner": "interpreter", "leftover": "eager"})
    gradients = []
    compilations.clear()
    for run in (m, fast):
        leaf = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            y = run(leaf, leaf, leaf, need_weights=False)[0]
        gradients.append([y, *torch.autograd.grad(y.cos().sum(), [leaf, *m.parameters()])] if training else [y])
    for got, want in zip(*reversed(gradients), strict=True):
        same(got, want, 1e-5)
    assert not any(record.fallbacks for record in compilations)


def test_the_fused_attention_of_the_cpu_stays_whole():
    q = randn(1, 2, 5, 4)
    table, fused = decompositions(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert fused not in table

    def f(q):
        return fused(q, q, q)[0]

    fast = torch.compile(f, backend="tilefold", options={"runner": "interpreter", "leftover": "eager"})
    same(fast(q), f(q), 1e-6)


def test_covered_operators_stay_whole():
    table = decompositions()
    convolutions = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
    # a bias and its gradient are taken off, few channels are made more; masks are selections
    assert set(table) & set(TABLE) == {*convolutions, torch.ops.aten.index_put.default}
    assert torch.ops.aten.hardswish.default in table


def _operators_of_convolution(transposed: bool, device: str, bias: bool = True) -> list[str]:
    with FakeTensorMode():
        x, w, b = (torch.empty(s, device=device) for s in ((2, 4, 5, 5), (4, 4, 3, 3), (4,)))
        run = F.conv_transpose2d if transposed else F.conv2d
        g = make_fx(
            lambda x, w, b: run(x, w, b if bias else None, stride=2, padding=1), decomposition_table=decompositions()
        )(x, w, b)
    return [n.target.name() for n in g.graph.nodes if n.op == "call_function"]


def test_a_transposed_convolution_of_a_gpu_leaves_its_bias_to_what_follows():
    assert _operators_of_convolution(True, "cuda") == ["aten::convolution", "aten::view", "aten::add.Tensor"]
    for whole in ((False, "cuda", True), (True, "cuda", False), (True, "cpu", True)):
        assert _operators_of_convolution(*whole) == ["aten::convolution"], whole


def _gradients(mask: list[bool], device: str, axes: int = 2) -> torch.fx.GraphModule:
    """Of a convolution of two groups, 4 channels to 6."""
    how = ([6], [1] * axes, [1] * axes, [1] * axes, False, [0] * axes, 2, mask)
    with FakeTensorMode():
        dy, x, w = (torch.empty(n, m, *[k] * axes, device=device) for n, m, k in ((2, 6, 5), (2, 4, 5), (6, 2, 3)))

        def f(dy, x, w):
            return [y for y in torch.ops.aten.convolution_backward.default(dy, x, w, *how) if y is not None]

        return make_fx(f, decomposition_table=decompositions())(dy, x, w)


def test_the_gradient_of_a_bias_on_a_gpu_is_a_sum():
    def operators(*asked):
        calls = (n.target for n in _gradients(*asked).graph.nodes if n.op == "call_function")
        return [t.name() for t in calls if t is not operator.getitem]

    both = ["aten::convolution_backward", "aten::sum.dim_IntList"]
    assert operators([True, True, True], "cuda") == operators([False, True, True], "cuda") == both
    assert operators([False, False, True], "cuda") == both[1:]
    assert operators([True, True, False], "cuda") == both[:1]
    assert operators([True, True, True], "cpu") == both[:1]  # its library sums while it is there


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_that_sum_is_the_gradient(axes):
    dy, x, w = randn(2, 6, *[5] * axes), randn(2, 4, *[5] * axes), randn(6, 2, *[3] * axes)
    got, want = (_gradients([True, True, True], device, axes)(dy, x, w) for device in ("cuda", "cpu"))
    assert len(got) == len(want) == 3
    for a, b in zip(got, want, strict=True):
        same(a, b, 1e-5)


def _line(device: str, dtype: torch.dtype, stride: int, groups: int = 1) -> torch.fx.GraphModule:
    """A transposed convolution of one axis of space, 4 channels to 6 by four taps, and its gradients."""
    how = ([stride], [1], [1], True, [0], groups)
    with FakeTensorMode():
        x, w, b = (torch.empty(s, device=device, dtype=dtype) for s in ((2, 4, 9), (4, 6 // groups, 4), (6,)))

        def f(x, w, b):
            y = torch.ops.aten.convolution.default(x, w, b, *how)
            return y, *torch.ops.aten.convolution_backward.default(y.sin(), x, w, [6], *how, [True, True, True])

        return make_fx(f, decomposition_table=decompositions())(x, w, b)


def test_a_transposed_line_of_16_bits_is_a_plane_on_a_gpu():
    def axes(*asked):
        library = (n for n in _line(*asked).graph.nodes if "convolution" in str(n.target))
        return [n.args[0].meta["val"].dim() for n in library]

    assert axes("cuda", torch.bfloat16, 2) == [4, 4]
    for lines in (("cuda", torch.float32, 2), ("cpu", torch.bfloat16, 2), ("cuda", torch.half, 2, 2)):
        assert axes(*lines) == [3, 3], lines
    assert axes("cuda", torch.bfloat16, 4) == [3, 3]  # windows that touch: a product


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_that_plane_gives_what_the_line_does(stride):
    given = randn(2, 4, 9), randn(4, 6, 4), randn(6)  # in float32: both are one sum
    got, want = (_line(device, torch.bfloat16, stride)(*given) for device in ("cuda", "cpu"))
    for a, b in zip(got, want, strict=True):
        same(a, b, 1e-5)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_bias_apart_is_the_same_sum(axes):
    x, w, b = randn(2, 3, *range(4, 4 + axes)), randn(3, 5, *[2] * axes), randn(5)
    settings = ([2] * axes, [1] * axes, [1] * axes, True, [1] * axes, 1)
    got = torch.ops.aten.convolution.default(x, w, None, *settings) + b.view(-1, *[1] * axes)
    same(got, torch.ops.aten.convolution.default(x, w, b, *settings), 1e-6)


def test_assignments_to_parts_and_by_masks_are_no_operators_of_others():
    def f(x, m, rows):
        y = x.clone()
        y[..., -1] += 1
        y[m] = 7
        y[:, rows] = 0.5
        y[1:3] = x[0].double()
        return y

    x, m, rows = randn(4, 5, 3), randn(4, 5, seed=1) > 0, randn(5, 3, seed=2) > 0
    check(f, x, m, rows)
    trace(f, x, m, rows)


def test_a_mask_after_integers_overwrites_what_they_wrote():
    def f(x, i, m):
        y = x.clone()
        y[i] = x[:2] * 2
        y[m] = 7
        return y

    x, i, m = randn(5, 5), torch.tensor([0, 3]), randn(5, 5, seed=1) > 1
    torch._dynamo.reset()
    assert torch.equal(torch.compile(f, backend="tilefold")(x, i, m), f(x, i, m))
    assert any("index_put" in left.reason for left in compilations[-1].fallbacks)  # the integers' stays whole


def test_a_number_that_is_assigned_to_a_part_of_a_tensor_on_another_device():
    """`x[a, b] = 2` copies a tensor of the host into a part of `x`; no region would take that."""
    into, two = torch.empty(3, 2, device="meta", dtype=torch.bfloat16), torch.tensor(2.5)
    made = decompositions()[torch.ops.aten.copy.default](into, two)
    assert (made.shape, made.dtype, made.device) == (into.shape, into.dtype, into.device)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda") if torch.cuda.is_available() else torch.empty(3, device="meta")
        graph = make_fx(lambda x, n: torch.ops.aten.copy.default(x, n), decompositions())(x, torch.tensor(2))
    assert torch.ops.aten.copy.default not in {n.target for n in graph.graph.nodes}


def test_sources_that_do_not_fit_are_not_broadcast():
    """As torch's own decomposition of `index_add` would."""
    add = decompositions()[torch.ops.aten.index_add.default]
    x, at = torch.zeros(3, 2), torch.tensor([0, 2])
    same(add(x, 0, at, torch.ones(2, 2), alpha=2), x.index_add(0, at, torch.ones(2, 2), alpha=2), 0.0)
    same(add(x[0, 0], 0, at[:1], torch.tensor(3.0)), torch.tensor(3.0), 0.0)
    with pytest.raises(RuntimeError, match=r"the source of index_add is \(2,\) for \(3, 2\) along axis 0"):
        add(x, 0, at, torch.ones(2))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_a_small_soft_margin_loss_keeps_its_digits(reduction):
    x, y = torch.tensor([15.0, -20.0, 30.0, -1.0, 200.0]).requires_grad_(), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])

    def gradient(x):
        loss = torch.compile(F.soft_margin_loss, backend="tilefold")(x, y.to(x.dtype), reduction=reduction)
        return torch.autograd.grad(loss.sum(), x)[0]

    exact = -y.double() * torch.sigmoid(-x.double() * y) / (5 if reduction == "mean" else 1)
    torch.testing.assert_close(gradient(x).double(), exact, rtol=1e-5, atol=0)


def test_a_diagonal_that_is_filled_and_sums_with_a_factor_are_covered():
    def step(x, m, v):
        scores = (x @ x.t()).fill_diagonal_(-math.inf)
        wide = torch.ones(2, 5).fill_diagonal_(3.0)
        v.mul_(0.9).addcmul_(m, m, value=0.1)
        return scores.softmax(-1), wide, m / v.sqrt()

    given = torch.randn(4, 3), torch.randn(6), torch.rand(6)
    torch._dynamo.reset()
    ours, theirs = [x.clone() for x in given], [x.clone() for x in given]
    made = torch.compile(step, backend="tilefold", options={"runner": "interpreter", "leftover": "eager"})(*ours)
    torch.testing.assert_close((made, ours), (step(*theirs), theirs))
    assert (compilations[-1].left, compilations[-1].fallbacks) == (0, [])


def resized(x, size=(9, 12)):
    y = F.interpolate(x.sin(), scale_factor=2, mode="bilinear")
    y = F.interpolate(y, scale_factor=1.5, mode="bicubic")
    return F.interpolate(F.interpolate(y, size=size), scale_factor=1.5, mode="bilinear", align_corners=True)


def gradient(fn, x, *rest):
    leaf = x.clone().requires_grad_()
    y = fn(leaf, *rest)
    return y, torch.autograd.grad(y.cos().sum(), leaf)[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_resized_images_stay_in_the_region(checkpointed):
    def f(x):
        return checkpoint(resized, x, use_reentrant=False) if checkpointed else resized(x)

    x = randn(2, 3, 6, 7)
    torch._dynamo.reset()
    compilations.clear()
    got = gradient(torch.compile(f, backend="tilefold", options={"runner": "interpreter"}), x)
    for a, b in zip(got, gradient(f, x.double()), strict=True):
        same(a, b.float(), 2e-5)
    assert [len(record.regions) for record in compilations] == [1, 1]
    assert not any(record.fallbacks for record in compilations)


def test_resizing_of_dynamic_sizes_and_under_transforms_is_torchs():
    x = randn(2, 3, 6, 7).requires_grad_()
    once = functools.partial(resize.interpolate, size=(9, 8))

    def slope(x):
        return torch.autograd.grad(once(x).sum(), x)[0]

    whole = torch.ops.aten.upsample_nearest2d_backward.default
    for how in ("fake", "symbolic"):
        targets = {n.target for n in make_fx(slope, tracing_mode=how)(x).graph.nodes}
        assert (whole in targets) == (how == "fake")
    same(torch.func.vmap(torch.func.grad(lambda x: once(x[None]).sum()))(x), slope(x), 1e-6)


def test_operators_over_lists_are_operators_of_their_tensors():
    def step(*xs):
        ps, gs = xs[:2], xs[2:]
        torch._foreach_mul_(ps, [0.5, 0.25])
        torch._foreach_addcdiv_(ps, gs, torch._foreach_sqrt(gs), value=-0.1)
        torch._foreach_addcmul_(ps, gs, gs, [0.5, 2.0])
        torch._foreach_add_(ps, torch._foreach_maximum(gs, 0.5), alpha=2)
        torch._foreach_lerp_(gs, ps, 0.1)

    given = [torch.rand(s, generator=torch.Generator().manual_seed(k)) for k, s in enumerate([(5,), (2, 3)] * 2)]
    ours = [x.clone() for x in given]
    step(*given)
    torch.compile(step, backend="tilefold")(*ours)
    torch.testing.assert_close(ours, given)
    (region,) = compilations[-1].regions
    assert not compilations[-1].left and len(region.runner.steps) == 2
