"""Convolutions as steps of a program: against eager, in every form, layout and dtype; whole small CNNs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.frontend.check import randn
from tilefold.frontend.regions.assemble import CompiledGraph, Options
from tilefold.frontend.torch_compile import compile_captured
from tilefold.pipeline import compile_program
from tilefold.runtime.calls import library_step
from tilefold.runtime.convolution import ConvolutionStep
from tilefold.runtime.convolution_gradient import GradientStep
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import KernelStep
from tilefold.tensor.analysis import Graph
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse


def compiled(module: nn.Module, found: list[CompiledGraph], dynamic: bool = False):
    options = Options(compile_program, leftover="eager", on_compiled=found.append)
    torch._dynamo.reset()
    return torch.compile(module, backend=lambda gm, xs: compile_captured(gm, xs, options), dynamic=dynamic)


def steps(found: list[CompiledGraph]):
    return [s for g in found for r in g.regions for s in r.runner.steps]  # type: ignore[attr-defined]


class Around(nn.Module):
    """A convolution with something to fuse on both sides."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return F.silu(self.conv(F.relu(x)))


def close(got: torch.Tensor, module: nn.Module, *xs: torch.Tensor) -> None:
    """As near to float64 as eager is, up to a factor."""
    exact = copy.deepcopy(module).double()(*(x.double() for x in xs))
    eager = module(*xs)
    assert got.dtype is eager.dtype and got.stride() == eager.stride()
    top = exact.abs().max()
    error, own = ((t.double() - exact).abs().max() / top for t in (got, eager))
    assert error <= 3 * own + 1e-6, (error, own)


FORMS = [
    (8, 16, 3, {"padding": 1}),
    (8, 16, 3, {"padding": 1, "stride": 2, "bias": False}),
    (8, 16, 3, {"groups": 4}),
    (8, 8, 3, {"groups": 8, "padding": 1}),
    (8, 32, 5, {"groups": 8, "padding": 2, "stride": 2}),
    (8, 16, 1, {}),
    (8, 16, 1, {"stride": 2}),
    (8, 16, (1, 5), {"padding": (0, 2)}),
    (8, 16, 3, {"padding": 2, "dilation": 2}),
    (8, 16, 13, {}),
]


@pytest.mark.parametrize("a, b, kernel, options", FORMS)
def test_the_library_convolves_and_kernels_do_the_rest(a, b, kernel, options):
    module = Around(nn.Conv2d(a, b, kernel, **options))
    for dtype, last in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        form = torch.channels_last if last else torch.contiguous_format
        m, x = module.to(dtype).to(memory_format=form), randn(2, a, 13, 15, dtype=dtype).contiguous(memory_format=form)
        found: list[CompiledGraph] = []
        with torch.no_grad():
            close(compiled(m, found)(x), m, x)
        kinds = [type(s) for s in steps(found)]
        if dtype is torch.bfloat16 and kernel == 1 and "stride" not in options:  # channels behind: a product, and small
            assert ConvolutionStep not in kinds, kinds
        else:
            assert kinds == [KernelStep, ConvolutionStep, KernelStep], kinds


@pytest.mark.parametrize("rank, shape", [(1, (2, 4, 17)), (3, (2, 4, 7, 8, 9)), (2, (1, 4, 7, 8)), (2, (3, 4, 2, 2))])
def test_any_number_of_axes_and_places(rank, shape):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    m, x = Around(kind(4, 6, 3, padding=1, stride=2)), randn(*shape)
    found: list[CompiledGraph] = []
    with torch.no_grad():
        close(compiled(m, found)(x), m, x)
    assert any(isinstance(s, ConvolutionStep) for s in steps(found))


class Called(TorchDispatchMode):
    """The operators that run, with their last argument."""

    def __init__(self):
        super().__init__()
        self.each: list[tuple[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.each.append((func.overloadpacket.__name__, args[-1] if args else None))
        return func(*args, **(kwargs or {}))


class Windows(nn.Module):
    """Windows of three places as a product of matrices; `Around` has the same sum as a convolution."""

    def forward(self, x, w):
        return F.silu(torch.einsum("bctk,ock->bot", x.unfold(2, 3, 1), w))


def called(module: nn.Module, *xs: torch.Tensor) -> list[tuple[str, object]]:
    found: list[CompiledGraph] = []
    with torch.no_grad():
        close(compiled(module, found)(*xs), module, *xs)
        (step,) = (s for s in steps(found) if isinstance(s, ConvolutionStep))
        names = (step.form.x.tensor, step.form.w.tensor)
        with Called() as ran:
            step.run(dict(zip(names, (*xs, *module.parameters()), strict=True)), {})
    return ran.each


def test_float32_is_rounded_as_torch_lets_products_and_convolutions_be(monkeypatch):
    """By default convolutions may take TF32 and products may not: windows of a product are no convolution there."""
    x, w = randn(4, 8, 17), randn(6, 8, 3)
    assert ("_convolution", False) in called(Windows(), x, w)
    monkeypatch.setattr("tilefold.runtime.convolution.matmul_precision", lambda: "tf32")
    assert ("_convolution", True) in called(Windows(), x, w)
    ran = [name for name, _ in called(Around(nn.Conv1d(8, 6, 3, bias=False)), x)]
    assert "convolution" in ran


def test_one_place_of_an_axis_is_a_product():
    """The first token's head is no convolution with a long stride: torch's settings for convolutions do not hold."""

    class First(nn.Module):
        def forward(self, x, w):
            return x[:, 0] @ w

    found: list[CompiledGraph] = []
    m, x, w = First(), randn(5, 7, 16), randn(16, 8)
    with torch.no_grad():
        close(compiled(m, found)(x, w), m, x, w)
    assert all(s.product for s in steps(found) if isinstance(s, ConvolutionStep))


def test_what_is_read_through_a_view_is_stored_first():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x):
            first, second = x.chunk(2, 1)
            shuffled = torch.cat([second, first], 1).view(2, 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
            return self.conv(F.interpolate(shuffled, scale_factor=2)) + self.conv(F.interpolate(x, scale_factor=2))

    m, x = Views(), randn(2, 8, 5, 6)
    found: list[CompiledGraph] = []
    with torch.no_grad():
        close(compiled(m, found)(x), m, x)
    assert sum(isinstance(s, ConvolutionStep) for s in steps(found)) == 2


@pytest.mark.parametrize("groups", [8, 4])
def test_groups_may_be_some_of_the_channels_that_a_tensor_has(groups):
    """The first half of a gated state space model's projection is convolved causally, its second half is a gate."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 4, padding=3, groups=groups)

        def forward(self, x):
            first, gate = torch.tanh(x).transpose(1, 2).chunk(2, 1)
            return self.conv(first)[..., : x.shape[1]] * gate

    m, x = Gated(), randn(2, 9, 16).requires_grad_()
    found: list[CompiledGraph] = []
    got = compiled(m, found)(x)
    close(got.detach(), m, x.detach())
    of, wanted = (torch.autograd.grad(y.square().sum(), [x, m.conv.weight]) for y in (got, m(x)))
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(of, wanted, strict=True))
    assert any(isinstance(s, ConvolutionStep) for s in steps(found))
    if groups == 8:  # the weight's gradient is that, not a convolution with as many taps as there are places
        kinds = [type(s) for s in steps(found[1:])]
        assert ConvolutionStep not in kinds and GradientStep in kinds


class Block(nn.Module):
    def __init__(self, a: int, b: int, kernel: int = 3, stride: int = 1, groups: int = 1, act=F.silu):
        super().__init__()
        self.conv = nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm, self.act = nn.BatchNorm2d(b), act

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Small(nn.Module):
    """The parts of ResNet, MobileNet and EfficientNet: stem, residual, depthwise, squeeze and excite, head."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = Block(3, 8, 7, 2, act=F.relu), Block(8, 8)
        self.wide, self.deep, self.thin = Block(8, 32, 1), Block(32, 32, 5, 2, groups=32), Block(32, 16, 1)
        self.squeeze, self.excite, self.head = nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        x = self.deep(self.wide(F.relu(x + self.body(x))))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(F.adaptive_avg_pool2d(self.thin(x * gate), 1).flatten(1))


@pytest.mark.parametrize("last", [False, True])
def test_a_cnn_is_one_region(last):
    torch.manual_seed(0)
    m, x = Small().eval(), randn(2, 3, 45, 37)
    if last:
        m, x = m.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    found: list[CompiledGraph] = []
    with torch.no_grad():
        close(compiled(m, found)(x), m, x)
    (graph,) = found
    assert not graph.fallbacks and len(graph.regions) == 1
    # images of one place (squeeze and excite) are plain products; of float32, single taps are convolutions
    assert sum(isinstance(s, ConvolutionStep) for s in steps(found)) == 5


def test_training_has_eagers_gradients_and_statistics():
    torch.manual_seed(0)
    m, x = (
        nn.Sequential(Block(3, 8, stride=2, act=F.relu), nn.MaxPool2d(3, 2, 1), Block(8, 8, groups=8)),
        randn(2, 3, 25, 17),
    )
    other = copy.deepcopy(m)
    compiled(m, [])(x).square().sum().backward()
    other(x).square().sum().backward()
    for (name, p), q in zip(m.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4 * float(q.grad.abs().max() + 1), msg=name)
    for (name, p), q in zip(m.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


BLOCK = """program block()
  input x: bf16[2, 52, 42, 8]
  input w: bf16[16, 3, 3, 8]
  input r: bf16[2, 50, 40, 16]
  input b: bf16[16]
  dim n = 2
  dim i = 50
  dim j = 40
  dim o = 16
  dim c = 8
  dim p = 3
  dim q = 3
  y[n, i, j, o]: bf16 = sum[p, q, c] x[n, i + p, j + q, c] * w[o, p, q, c]
  z[n, i, j, o]: bf16 = maximum(y[n, i, j, o] + b[o]{more}, 0)
  return z
"""


@pytest.mark.parametrize("more", ["", " + r[n, i, j, o]"])
def test_what_follows_a_convolution_of_a_gpu_is_in_its_call(more):
    """On tensors of a CPU the step does one thing after the other."""
    p = parse(BLOCK.format(more=more))
    (step,) = [s for s in compile_program(p, device="cuda").steps if isinstance(s, ConvolutionStep)]
    assert step.name == "z" and step.members == ("y", "z") and step.tail is not None
    x, w, *also = step.reads
    assert (x, w, also[1:]) == ("x", "w", ["r"] * bool(more))
    made = {t: torch.randn(s).bfloat16() for t, s in ((x, (2, 52, 42, 8)), ("r", (2, 50, 40, 16)), (also[0], (16,)))}
    made[w] = torch.randn(16, 3, 3, 8).bfloat16()
    y = F.conv2d(made[x].double().permute(0, 3, 1, 2), made[w].double().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    want = torch.relu(y + made[also[0]] + (made["r"] if more else 0))
    step.run(made, {})
    assert made["z"].is_contiguous() and (made["z"].double() - want).norm() < 6e-3 * want.norm()


def test_channels_of_such_a_call_may_be_groups_of_channels():
    """As the convolution of groups that reads them has it: 16 channels are 2 groups of 8."""
    text = BLOCK.format(more=" + r[n, i, j, o]").replace("dim o = 16", "dim o = 2\n  dim d = 8")
    text = text.replace("bf16[16, 3", "bf16[2, 8, 3").replace("40, 16]", "40, 2, 8]").replace("bf16[16]", "bf16[2, 8]")
    text = text.replace("j, o]", "j, o, d]").replace("w[o,", "w[o, d,").replace("b[o]", "b[o, d]")
    (step,) = [s for s in compile_program(parse(text), device="cuda").steps if isinstance(s, ConvolutionStep)]
    assert step.tail is not None and step.members == ("y", "z")
    x, w, b = (torch.randn(s).bfloat16() for s in ((2, 52, 42, 8), (2, 8, 3, 3, 8), (2, 8)))
    r = torch.randn(2, 50, 40, 2, 8).bfloat16()
    y = F.conv2d(x.double().permute(0, 3, 1, 2), w.double().flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    want = torch.relu(y.unflatten(-1, (2, 8)) + b + r)
    made = dict(zip(step.reads, (x, w, b, r), strict=True))
    step.run(made, {})
    assert made["z"].is_contiguous() and (made["z"].double() - want).norm() < 6e-3 * want.norm()


def test_tails_of_other_convolutions_are_kernels():
    """Float32, channels that are no multiple of 16 bytes, and a CPU."""
    texts = [
        BLOCK.format(more="").replace("bf16", "f32"),
        BLOCK.format(more="").replace("16]", "12]").replace("16,", "12,"),
    ]
    texts[1] = texts[1].replace("dim o = 16", "dim o = 12")
    for text, device in ((texts[0], "cuda"), (texts[1], "cuda"), (BLOCK.format(more=""), "cpu")):
        steps = compile_program(parse(text), device=device, load=False).steps
        assert [s.tail for s in steps if isinstance(s, ConvolutionStep)] == [None]


class OneOfSeveral(nn.Module):
    """Convolutions of single taps, by weights that lie in one tensor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(2, 3, 3, 1, 1))

    def forward(self, x, m):
        return sum(F.conv2d(x * m[:, k : k + 1], self.w[k]) for k in range(2))


def test_a_weight_that_is_one_of_several_is_read_alone():
    module, found = OneOfSeveral(), list[CompiledGraph]()
    xs = randn(2, 3, 5, 6), randn(2, 2, 5, 6)
    with torch.no_grad():
        close(compiled(module, found)(*xs), module, *xs)
    assert not [f for g in found for f in g.fallbacks]
    assert any(isinstance(s, ConvolutionStep) for s in steps(found))


@pytest.mark.parametrize(
    ("body", "origin", "kind"),
    [
        ("y[o, i, k, l]: f32 = sum[c] x[c, i, k, l] * w[o, c, 0, 0]", "", LibraryStep),
        ("y[i, o, k, l]: f32 = sum[c] t[i, c, k, l] * w[o, c, 0, 0]", "", ConvolutionStep),
        ("y[o, c]: f32 = sum[i, k, l] x[c, i, k, l] * g[o, i, k, l]", "aten.convolution_backward", LibraryStep),
        ("y[o, c]: f32 = sum[i, k, l] t[i, c, k, l] * h[i, o, k, l]", "aten.convolution_backward", GradientStep),
    ],
)
def test_single_taps_of_matrices_as_they_lie_are_a_product(body, origin, kind):
    """Images with channels in front of the batch are no library's for images, which would copy them both ways."""
    sizes = {"i": 3, "o": 6, "c": 4, "k": 5, "l": 7}
    shapes = {"x": "cikl", "t": "ickl", "w": "oc", "g": "oikl", "h": "iokl"}
    used = {t: of for t, of in shapes.items() if f"{t}[" in body.split("=")[1]}
    given = "\n".join(
        f"  input {t}: f32[{', '.join([str(sizes[d]) for d in of] + ['1, 1'] * (t == 'w'))}]" for t, of in used.items()
    )
    dims = "\n".join(f"  dim {d} = {n}" for d, n in sizes.items())
    p = parse(f"program p()\n{given}\n{dims}\n  {body}\n  return y\n")
    p = replace(p, body=(replace(p.body[0], origin=origin),))
    step = library_step(Graph.of(p), ("y",))
    assert type(step) is kind
    gen = torch.Generator().manual_seed(0)
    tensors = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen) for i in p.inputs}
    want = run(p, {t: x.double() for t, x in tensors.items()})["y"]
    step.run(tensors, {})
    torch.testing.assert_close(tensors["y"].double(), want.double(), rtol=1e-5, atol=1e-5)
