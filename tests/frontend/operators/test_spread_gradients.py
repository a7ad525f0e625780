"""Gradients of images under convolutions of single taps with strides: a product a place of the result, else zeros."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.regions.assemble import compilations

SHAPES = [
    (1, 2, (9, 8), (5, 7)),
    ((1, 1), (2, 1), (6, 7), (4, 3)),
    (1, 3, (7, 10), (16, 24)),
    (1, 2, (11,), (6, 4)),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("taps", "stride", "places", "channels"), SHAPES)
def test_places_without_a_tap_have_no_gradient(taps, stride, places, channels, last):
    if last and (len(places) == 1 or stride == (2, 1)):
        pytest.skip("no such format, or torch's own gradient of the weight ends the process (2.13, strides (2, 1))")
    torch.manual_seed(0)
    kind = torch.nn.Conv1d if len(places) == 1 else torch.nn.Conv2d
    conv = kind(*channels, taps, stride=stride)
    x = torch.randn(3, channels[0], *places)
    if last:
        conv, x = conv.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()

    def fn(x):
        return (torch.relu(conv(torch.sin(x))) ** 2).sum() + (x * 2).sum()

    wanted = torch.autograd.grad(fn(x), [x, conv.weight, conv.bias])
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(fn, backend="tilefold")(x), [x, conv.weight, conv.bias])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_product_has_the_places_of_the_result():
    """Of a stride of two along both axes a quarter of the image's."""
    conv = torch.nn.Conv2d(8, 16, 1, stride=2, bias=False)
    x = torch.randn(2, 8, 12, 12, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: conv(torch.sin(x)).square().sum(), backend="tilefold")(x).backward()
    programs = [r.lowered.program for r in compilations[-1].regions]
    sums = [(c, p.sizes) for p in programs for c in p.body if c.reducer == "sum" and "taps" in c.name]
    assert [len(c.dims) for c, _ in sums] == [4]
    ((taps, sizes),) = sums
    assert sorted(int(sizes[d].value) for d in taps.dims) == [2, 6, 6, 8]
