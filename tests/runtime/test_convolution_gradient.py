"""Gradients of convolutions as steps of a region: against float64, in every form, layout and dtype."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.frontend.check import randn
from tests.runtime.test_convolution import FORMS, compiled
from tilefold.frontend.regions.assemble import CompiledGraph
from tilefold.plan.hardware import H100
from tilefold.plan.library import GradientCall
from tilefold.runtime.convolution_gradient import GradientStep, long_product
from tilefold.tensor import interp
from tilefold.tensor.convolution_gradients import gradient
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse


class Net(nn.Module):
    """A convolution with something to fuse on both sides."""

    def __init__(self, a: int, b: int, kernel: object, options: dict[str, object]):
        super().__init__()
        self.conv = nn.Conv2d(a, b, kernel, **options)  # type: ignore[arg-type]

    def forward(self, x):
        return self.conv(x.relu()).sin()


def gradients(module: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    return list(torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]))


def steps(found: list[CompiledGraph], kind: type) -> list[object]:
    return [s for g in found for r in g.regions for s in r.runner.steps if isinstance(s, kind)]  # type: ignore


@pytest.mark.parametrize("a, b, kernel, options", [*FORMS, (3, 8, 7, {"stride": 2, "padding": 3})])
def test_a_step_is_one_region_a_pass_and_its_gradients_are_right(a, b, kernel, options):
    groups = int(options.get("groups", 1))
    torch.manual_seed(0)
    for dtype, last in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        form = torch.channels_last if last else torch.contiguous_format
        module = Net(a, b, kernel, options).to(dtype).to(memory_format=form)
        x = randn(2, a, 13, 15, dtype=dtype).contiguous(memory_format=form)
        found: list[CompiledGraph] = []
        got = gradients(module, compiled(module, found), x)
        exact = copy.deepcopy(module).double()
        for g, e, w in zip(
            got, gradients(module, module, x), gradients(exact, exact, x.double()), strict=True
        ):  # of 16 bits, kernels keep what eager rounds in between
            error, own = ((t.double() - w).abs().max() / w.abs().max() for t in (g, e))
            assert g.stride() == e.stride() and error <= 2 * own + 1e-6, (error, own)
        if groups in (1, a) and (groups == 1 or a == b) and kernel != 13:
            assert [len(g.regions) for g in found] == [1, 1] and not any(g.left for g in found)
            assert steps(found, GradientStep)
        else:
            # channels of a group, a window of one place: the library's
            assert (found[1].called, found[1].left) == (1, 0)


def test_a_statement_means_what_the_library_computes():
    """The interpreter defines the program; strides, dilations and rows that no window reaches."""
    for kernel, options in (((3, 2), {"stride": 2, "padding": 1}), (3, {"dilation": 2, "stride": 3, "padding": 2})):
        module = Net(3, 4, kernel, options)
        found: list[CompiledGraph] = []
        x = randn(2, 3, 8, 9)
        gradients(module, compiled(module, found), x)
        (region,) = found[1].regions
        p = region.runner.program  # type: ignore[attr-defined]
        given = {i.name: torch.randn([int(n.value) for n in i.shape]) for i in p.inputs}  # type: ignore[attr-defined]
        want = interp.run(p, given, exact=True)
        tensors = dict(given)
        for s in region.runner.steps:  # type: ignore[attr-defined]
            s.run(tensors, {})
        for name in p.outputs:
            torch.testing.assert_close(tensors[name].double(), want[name].double(), rtol=1e-4, atol=1e-4)


def test_a_network_with_norms_is_one_region_a_pass():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(12, 5),
    )  # fmt: skip
    exact, x = copy.deepcopy(module).double(), randn(4, 3, 16, 16)
    found: list[CompiledGraph] = []
    got = gradients(module, compiled(module, found), x)
    for g, w in zip(got, gradients(exact, exact, x.double()), strict=True):
        assert (g.double() - w).abs().max() <= 1e-4 * w.abs().max() + 1e-5
    assert [len(g.regions) for g in found] == [1, 1] and not any(g.left for g in found)


GROUPED = """program f()
  input dy: f32[2, 5, 7, 2, 3]
  input x: f32[2, 4, 2, 5, 7]
  input w: f32[2, 3, 3, 3, 4, 2]
  dim n = 2
  dim o = 2
  dim p = 3
  dim h = 5
  dim v = 7
  dim b = 4
  dim c = 2
  dim k = 3
  dim l = 3
  image[n, c, h, v, b]: f32 = sum[o, p, k, l] {image} * w[o, p, k, l, b, c]
  weight[k, l, o, b, c, p]: f32 = sum[n, h, v] {weight} * dy[n, h, v, o, p]
  return image, weight
"""


def test_channels_may_be_several_dims_in_any_order():
    """As the norm of groups of channels behind a convolution leaves them."""

    def guarded(x: str, h: str, v: str) -> str:
        return f"where(({h} >= 0) & ({h} < 5), where(({v} >= 0) & ({v} < 7), {x}, 0.0), 0.0)"

    image = guarded("dy[n, h + 1 - k, v + 1 - l, o, p]", "h + 1 - k", "v + 1 - l")
    weight = guarded("x[n, b, c, h + k - 1, v + l - 1]", "h + k - 1", "v + l - 1")
    p = parse(GROUPED.format(image=image, weight=weight))
    p = replace(p, body=tuple(replace(c, origin="aten.convolution_backward.default") for c in p.body))
    given = {i.name: torch.randn([int(n.value) for n in i.shape]) for i in p.inputs}  # type: ignore[attr-defined]
    want, tensors = interp.run(p, given, exact=True), dict(given)
    for c in p.body:
        form = gradient(c, p)
        assert form is not None and form.of == c.name
        GradientStep(GradientCall(c, form), p).run(tensors, {})
        torch.testing.assert_close(tensors[c.name].double(), want[c.name].double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kernel, options",
    [(3, {"stride": 2, "padding": 1}), ((3, 2), {"dilation": 2, "stride": 3}), (5, {"groups": 8, "padding": 2})],
)
def test_an_images_gradient_is_a_transposed_convolution_on_a_gpu(kernel, options):
    """Rows that no window reaches included."""
    module = Net(8, 8, kernel, options)
    found: list[CompiledGraph] = []
    gradients(module, compiled(module, found), randn(2, 8, 13, 16))
    (step,) = (s for s in steps(found, GradientStep) if s.form.of == "image")  # type: ignore[attr-defined]
    x, w = (torch.randn(shape({})) for shape in step._shapes)  # type: ignore[attr-defined]
    groups = int(options.get("groups", 1))
    got, want = step._transposed(x, w, groups), step._called(x, w, {})  # type: ignore[attr-defined]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


SINGLE = """program single()
  input x: f32[{n}, 16, 20, {c}]
  input dy: f32[{n}, 16, 20, {o}]
  dim n = {n}
  dim o = {o}
  dim c = {c}
  dim h = 16
  dim v = 20
  weight[o, c]: f32 = sum[n, h, v] x[n, h, v, c] * dy[n, h, v, o]
  return weight
"""


def of_single_taps(n: int, o: int, c: int) -> tuple[Program, GradientCall]:
    p = parse(SINGLE.format(n=n, o=o, c=c))
    p = replace(p, body=(replace(p.body[0], origin="aten.convolution_backward.default"),))
    form = gradient(p.body[0], p)
    assert form is not None
    return p, GradientCall(p.body[0], form)


@pytest.mark.parametrize(
    "n, o, c, product", [(512, 64, 128, True), (512, 64, 6, True), (8, 64, 128, False), (512, 512, 512, False)]
)
def test_a_weights_gradient_of_single_taps_over_many_places_is_a_product(n, o, c, product):
    """The library of convolutions leaves few outputs and channels of many places to one thread block."""
    p, call = of_single_taps(n, o, c)
    assert long_product(call.form, p, H100) is product


def test_the_product_is_the_gradient():
    p, call = of_single_taps(2, 8, 6)
    step = GradientStep(call, p)
    x, dy = torch.randn(2, 16, 20, 6).permute(0, 3, 1, 2), torch.randn(2, 16, 20, 8).permute(0, 3, 1, 2)
    torch.testing.assert_close(step._multiplied(x, dy), step._called(x, dy, {})[:, :, 0, 0], rtol=1e-4, atol=1e-4)
