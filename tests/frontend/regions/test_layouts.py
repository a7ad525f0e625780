"""Graphs given channels-last strides compute what they did, in one region, and return what was traced."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.check import randn
from tilefold.frontend import torch_compile
from tilefold.frontend.regions.assemble import CompiledGraph, Options
from tilefold.frontend.regions.layouts import channels_last
from tilefold.frontend.training import saving
from tilefold.pipeline import compile_program
from tilefold.runtime.convolution import ConvolutionStep
from tilefold.runtime.convolution_gradient import GradientStep


class Net(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.end = end

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.end(self.second(y) + y[..., 1:-1, 1:-1])


@pytest.mark.parametrize(
    "end", [lambda y: y, lambda y: y.flatten(1), lambda y: (y, y.mean((2, 3))), lambda y: y.view(2, -1, 4) + 1]
)
def test_results_are_as_traced(end, monkeypatch):
    done: list[bool] = []
    monkeypatch.setattr(torch_compile, "channels_last", lambda gm: done.append(channels_last(gm, "cpu")))
    module, x = Net(end).eval(), randn(2, 3, 12, 16)
    found: list[CompiledGraph] = []
    options = Options(compile_program, leftover="eager", on_compiled=found.append)
    torch._dynamo.reset()
    run = torch.compile(module, backend=lambda gm, xs: torch_compile.compile_captured(gm, xs, options), dynamic=False)
    with torch.no_grad():
        got, want = run(x), module(x)
    assert done == [True] and not found[0].fallbacks
    for g, w in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
        assert g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    calls = [s for r in found[0].regions for s in r.runner.steps if isinstance(s, ConvolutionStep)]  # type: ignore
    assert len(calls) == 2 and all(s.last for s in calls)


def test_a_transposed_convolution_left_to_others_gets_converted_operands(monkeypatch):
    clones: list[int] = []

    def counted(gm):
        assert channels_last(gm, "cpu")
        forms = [n.kwargs for n in gm.graph.nodes if n.target is torch.ops.aten.clone.default]
        clones.append(forms.count({"memory_format": torch.channels_last}))

    monkeypatch.setattr(torch_compile, "channels_last", counted)
    module = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 4, 4, 2, 1)).eval()
    x = randn(2, 8, 5, 7)
    torch._dynamo.reset()
    options = Options(compile_program, leftover="eager")
    run = torch.compile(module, backend=lambda gm, xs: torch_compile.compile_captured(gm, xs, options), dynamic=False)
    with torch.no_grad():
        got, want = run(x), module(x)
    assert clones == [3] and got.stride() == want.stride()  # the image, and two weights
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("conv", "dtype", "wanted"),
    [
        (nn.Conv2d(3, 8, 3), torch.float32, True),
        (nn.Conv2d(8, 8, 3, groups=8), torch.bfloat16, False),  # written out, in either order
        (nn.Conv2d(8, 8, 5, groups=8), torch.bfloat16, True),  # a large window, of vectors of channels
        (nn.Conv2d(8, 8, 5, groups=8), torch.float32, True),
        (nn.Conv2d(3, 3, 5, groups=3), torch.float32, False),  # no whole vector of channels
        (nn.Conv2d(8, 16, 3, groups=4), torch.bfloat16, False),  # two channels a group
        (nn.Conv2d(16, 16, 3, groups=2), torch.bfloat16, True),
        (nn.Conv2d(16, 32, 3, groups=2), torch.bfloat16, False),  # more outputs than channels a group
        (nn.Conv2d(48, 48, 3, groups=2), torch.bfloat16, False),  # 24 channels a group
        (nn.Conv2d(96, 96, 3, groups=2), torch.bfloat16, False),  # 48: no tile of the library's
        (nn.Conv2d(128, 128, 3, groups=2), torch.bfloat16, True),
        (nn.Conv2d(16, 16, 3, groups=2), torch.float32, False),  # the library turns each group around
        (nn.Conv2d(3, 3, 5, groups=3), torch.float32, False),  # three colours are less than a vector
        (nn.Conv2d(8, 8, 5, groups=8), torch.float32, True),
        (nn.Conv2d(8, 8, 1), torch.bfloat16, False),
        (nn.ConvTranspose2d(8, 8, 3, 2), torch.float32, True),
        (nn.ConvTranspose2d(8, 8, 2, 2), torch.bfloat16, False),  # blocks: a product
        (nn.ConvTranspose2d(8, 8, 3, groups=2), torch.bfloat16, False),
        (nn.Conv1d(8, 8, 3), torch.bfloat16, True),  # one axis of space or three
        (nn.Conv3d(8, 8, 3), torch.bfloat16, True),
        (nn.Conv3d(8, 8, (1, 3, 3)), torch.bfloat16, True),  # images along the first axis
        (nn.Conv1d(4, 8, 3), torch.bfloat16, False),  # no whole vector
        (nn.Conv1d(8, 8, 3), torch.float32, False),
        (nn.Conv1d(8, 8, 1), torch.bfloat16, False),
    ],
)
def test_which_convolutions_want_it(conv, dtype, wanted, monkeypatch):
    done: list[bool] = []
    monkeypatch.setattr(torch_compile, "channels_last", lambda gm: done.append(channels_last(gm, "cpu")))
    options = Options(compile_program, leftover="eager")
    torch._dynamo.reset()
    conv = conv.to(dtype)
    x = randn(2, conv.in_channels, *(8,) * (conv.weight.dim() - 2)).to(dtype)
    with torch.no_grad():
        got = torch.compile(conv, backend=lambda gm, xs: torch_compile.compile_captured(gm, xs, options))(x)
        want = conv(x)
    assert done == [wanted] and got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-2)


class Grouped(nn.Module):
    """A stem, and a convolution of groups of so many channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels)
        self.grouped = nn.Conv2d(2 * channels, 2 * channels, 3, groups=2, padding=1)
        self.last = nn.Conv2d(2 * channels, 8, 3)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.grouped(F.relu(self.norm(self.stem(x)))))))


@pytest.mark.parametrize(("channels", "last"), [(24, False), (48, False), (16, True), (4, True)])
def test_groups_of_channels_that_are_no_tile_of_the_library_s_are_convolved_in_planes(channels, last, monkeypatch):
    done: list[bool] = []
    monkeypatch.setattr(torch_compile, "channels_last", lambda gm: done.append(channels_last(gm, "cpu")))
    found: list[CompiledGraph] = []
    options = Options(compile_program, leftover="eager", on_compiled=found.append)
    module, x = Grouped(channels).eval().bfloat16(), randn(2, 3, 9, 7).bfloat16()
    torch._dynamo.reset()
    run = torch.compile(module, backend=lambda gm, xs: torch_compile.compile_captured(gm, xs, options), dynamic=False)
    with torch.no_grad():
        got, want = run(x), module.double()(x.double())
    assert done == [True] and got.is_contiguous() and not found[0].fallbacks
    torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=5e-2)
    calls = [s for r in found[0].regions for s in r.runner.steps if isinstance(s, ConvolutionStep)]  # type: ignore
    assert [s.last for s in calls] == [True, last, True]


@pytest.mark.parametrize(("channels", "planes"), [(24, True), (48, True), (16, False), (4, True)])
def test_gradients_of_such_groups_are_taken_in_planes(channels, planes, monkeypatch):
    """Of few channels a group, too, which are convolved as they come."""
    torch.manual_seed(0)
    done: list[tuple[bool, torch.fx.GraphModule]] = []
    module, x = Grouped(channels).bfloat16(), randn(2, 3, 9, 7).bfloat16().requires_grad_()
    twin, given = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    _, gradients, _ = compiled_step(module, x, monkeypatch, done)
    want = torch.autograd.grad(twin(given).square().sum(), [given, *twin.parameters()])
    weights = [n for n, (name, _) in enumerate(module.named_parameters(), 1) if name.endswith("weight")]
    for n in (0, *weights):
        error = (gradients[n].double() - want[n]).norm() / want[n].norm()
        assert gradients[n].stride() == want[n].stride() and error < 0.1
    ((converted, joint),) = done
    backward = [n for n in joint.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    (of_groups,) = [n for n in backward if n.args[9] == 2]
    read = [a.meta["val"] for a in of_groups.args[:2]]
    assert converted and all(v.is_contiguous() is planes for v in read)


def compiled_step(module, x, monkeypatch, done):
    """The gradients of a module's parameters and of x, compiled, and the graphs' records."""
    monkeypatch.setattr(saving, "channels_last", lambda gm: done.append((channels_last(gm, "cpu"), gm)))
    found: list[CompiledGraph] = []
    options = Options(compile_program, leftover="eager", on_compiled=found.append)
    torch._dynamo.reset()
    run = torch.compile(module, backend=lambda gm, xs: torch_compile.compile_captured(gm, xs, options), dynamic=False)
    y = run(x)
    return y, torch.autograd.grad(y.square().sum(), [x, *module.parameters()]), found


def test_a_training_step_is_channels_last_in_both_passes(monkeypatch):
    done: list[tuple[bool, torch.fx.GraphModule]] = []
    module, x = Net(lambda y: y), randn(2, 3, 12, 16).requires_grad_()
    twin = copy.deepcopy(module)
    y, gradients, found = compiled_step(module, x, monkeypatch, done)
    want = twin(x)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for g, w in zip(gradients, torch.autograd.grad(want.square().sum(), [x, *twin.parameters()]), strict=True):
        assert g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)  # a bias in front of a norm has none: sums of rounding
    for mine, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    ((converted, joint),) = done
    assert converted
    backward = [n for n in joint.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    made = [v for n in backward for v in n.meta["val"] if v is not None and v.dim() == 4]
    assert len(backward) == 2 and all(v.is_contiguous(memory_format=torch.channels_last) for v in made)
    steps = [s for g in found for r in g.regions for s in r.runner.steps if isinstance(s, GradientStep)]  # type: ignore
    assert len(steps) >= 3 and all(s.format is torch.channels_last for s in steps)
    calls = [s for g in found for r in g.regions for s in r.runner.steps if isinstance(s, ConvolutionStep)]  # type: ignore
    assert calls and all(s.last for s in calls)


class Along(nn.Module):
    """Convolutions along one axis of space or three, with what follows them."""

    def __init__(self, kind, norm):
        super().__init__()
        self.first, self.second = kind(8, 16, 3, padding=1, stride=2), kind(16, 8, 3, dilation=2)
        self.norm = norm(16)

    def forward(self, x):
        return self.second(F.gelu(self.norm(self.first(x)))).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "norm", "shape"),
    [(nn.Conv1d, nn.BatchNorm1d, (2, 8, 21)), (nn.Conv3d, nn.BatchNorm3d, (2, 8, 13, 13, 15))],
)
def test_sound_and_video_are_channels_last_in_both_passes(kind, norm, shape, monkeypatch):
    """Torch has no name for such memory of one axis of space; what the graph returns is as it was traced."""
    torch.manual_seed(0)
    done: list[tuple[bool, torch.fx.GraphModule]] = []
    module, x = Along(kind, norm).bfloat16(), randn(*shape).bfloat16().requires_grad_()
    twin, given = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    y, gradients, found = compiled_step(module, x, monkeypatch, done)
    want = twin(given)
    assert y.stride() == want.stride()
    torch.testing.assert_close(y.double(), want, rtol=5e-2, atol=5e-2)
    exact = torch.autograd.grad(want.square().sum(), [given, *twin.parameters()])
    for (name, _), g, w in zip([("x", x), *module.named_parameters()], gradients, exact, strict=True):
        assert g.stride() == w.stride()
        if name != "first.bias":  # in front of a norm: sums of rounding
            assert (g.double() - w).norm() / w.norm() < 0.05, name
    assert [converted for converted, _ in done] == [True] and not any(g.left for g in found)
    steps = [s for g in found for r in g.regions for s in r.runner.steps]  # type: ignore[attr-defined]
    assert all(s.last for s in steps if isinstance(s, ConvolutionStep))
    of_gradients = [s for s in steps if isinstance(s, GradientStep)]
    assert len(of_gradients) == 4 and all(s.format is not None for s in of_gradients)


def test_a_small_window_of_one_channel_is_channels_last_where_its_weight_has_a_gradient(monkeypatch):
    """The library sums the gradient in planes at a third of the rate."""
    done: list[tuple[bool, torch.fx.GraphModule]] = []
    module, x = nn.Conv2d(8, 8, 3, groups=8).bfloat16(), randn(1, 8, 9, 7).bfloat16().requires_grad_()
    compiled_step(module, x, monkeypatch, done)
    for channels in (12, 10, 3):  # vectors and half a one; neither; less than one
        single = nn.Conv2d(channels, channels, 3, groups=channels).bfloat16()
        compiled_step(single, randn(1, channels, 9, 7).bfloat16().requires_grad_(), monkeypatch, done)
    assert [converted for converted, _ in done] == [True, True, False, False]


@pytest.mark.parametrize(
    ("turned", "taps", "groups", "wanted"),
    [(True, 4, 8, True), (False, 4, 8, False), (True, 31, 8, False), (True, 4, 2, False)],
)
def test_a_short_line_of_one_channel_is_channels_last_where_it_comes_so(turned, taps, groups, wanted, monkeypatch):
    """Kernels of ours take it in both passes; the library's for that memory are slow."""

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 8, taps, padding=taps - 1, groups=groups)

        def forward(self, x):
            return F.silu(self.conv(x.mT if turned else x)[..., : x.shape[1]])

    done: list[tuple[bool, torch.fx.GraphModule]] = []
    x = randn(2, 40, 8).bfloat16() if turned else randn(2, 8, 40).bfloat16()
    module = Causal().bfloat16()
    _, gradients, _ = compiled_step(module, x.requires_grad_(), monkeypatch, done)
    assert [converted for converted, _ in done] == [wanted]
    exact = copy.deepcopy(module).float()
    y = x.detach().float().requires_grad_()
    made = torch.autograd.grad(exact(y).square().sum(), [y, *exact.parameters()])
    for g, w in zip(gradients, made, strict=True):
        torch.testing.assert_close(g.float(), w, rtol=0.1, atol=0.1 * float(w.abs().max()))


@pytest.mark.parametrize(
    ("narrow", "window", "dtype", "wanted"),
    [
        (8, 3, torch.bfloat16, True),
        (16, 3, torch.bfloat16, False),  # what would be converted is as wide
        (8, 1, torch.bfloat16, False),  # no window
        (8, 3, torch.float32, False),
    ],
)
def test_a_small_window_behind_a_product_of_fewer_channels_is_channels_last(narrow, window, dtype, wanted):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.grow, self.norm = nn.Conv2d(narrow, 16, 1), nn.BatchNorm2d(16)
            self.deep = nn.Conv2d(16, 16, window, groups=16)

        def forward(self, x):
            return self.deep(F.silu(self.norm(self.grow(x)))).mean((2, 3))

    module, x = Block().eval().to(dtype), randn(1, narrow, 9, 7).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        gm = make_fx(module)(mode.from_tensor(x))
    assert channels_last(gm, "cpu") is wanted


def test_a_step_of_pointwise_convolutions_stays_as_it_is(monkeypatch):
    done: list[tuple[bool, torch.fx.GraphModule]] = []
    module, x = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), randn(2, 4, 6, 6).requires_grad_()
    _, gradients, _ = compiled_step(module, x, monkeypatch, done)
    assert [converted for converted, _ in done] == [False]
    wanted = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    for g, w in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-4)


def test_weights_and_padded_images_are_turned_once_for_both_passes(monkeypatch):
    """What convolutions alone read: a weight that the image's gradient reads too, and what is computed for them."""
    done: list[tuple[bool, torch.fx.GraphModule]] = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Conv2d(8, 8, 3, bias=False) for _ in "ab")

        def forward(self, x):
            return self.second(F.relu(self.first(F.pad(x, (1, 1, 1, 1)))))

    module, x = Two(), randn(2, 8, 12, 16).requires_grad_()
    _, gradients, _ = compiled_step(module, x, monkeypatch, done)
    for g, w in zip(gradients, torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)
    ((_, joint),) = done
    copies = [n for n in joint.graph.nodes if n.kwargs == {"memory_format": torch.channels_last}]
    assert sorted(n.args[0].op for n in copies) == ["call_function", "placeholder", "placeholder"]
    assert all(len(n.users) == 2 and n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in copies)


def test_what_others_read_is_turned_where_it_is_read():
    def fn(x, w):
        return F.conv2d(x, w).sum() + w.sum() + x.sum()

    with FakeTensorMode():
        x, w = torch.empty(2, 8, 12, 16), torch.empty(8, 8, 3, 3)
        gm = make_fx(fn)(x, w)
    assert channels_last(gm, "cpu")
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_weight_is_copied_where_several_convolutions_read_it(readers):
    """One copy in channels-last memory for all of them; one convolution alone reads it as it lies."""

    def fn(x, w):
        for _ in range(readers):
            x = F.conv2d(torch.relu(x), w, padding=1)
        return x

    with FakeTensorMode():
        gm = make_fx(fn)(torch.randn(2, 8, 9, 7), torch.randn(8, 8, 3, 3))
    weight = gm.graph.find_nodes(op="placeholder")[1]
    assert channels_last(gm, "cpu")
    copies = [n for n in weight.users if n.target is torch.ops.aten.clone.default]
    assert len(copies) == (readers > 1)
    assert len(weight.users) == 1 and all(len(c.users) == readers for c in copies)
