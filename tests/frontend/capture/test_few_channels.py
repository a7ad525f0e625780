"""Convolutions of few channels with a stride as convolutions of more without one: the same sums, and which stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.check import randn
from tilefold.frontend.capture import few_channels
from tilefold.frontend.capture.decompose import decompositions

aten = torch.ops.aten


def settings_of(stride, padding):
    return [list(stride), list(padding), [1, 1], False, [0, 0], 1]


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 2),
    channels=st.integers(1, 4),
    taps=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    more=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_values_are_those_of_the_convolution(batch, channels, taps, stride, padding, more):
    image = tuple(max(1, k - 2 * p) + n for k, p, n in zip(taps, padding, more, strict=True))
    made = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(image, padding, taps, stride, strict=True))
    x, w = randn(batch, channels, *image, dtype=torch.float64), randn(5, channels, *taps, dtype=torch.float64)
    by, b = few_channels.Steps(stride, padding, taps, image, made), randn(5, dtype=torch.float64)
    got, want = few_channels.convolution(x, w, b, by), aten.convolution.default(x, w, b, *settings_of(stride, padding))
    torch.testing.assert_close(got, want)


def convolutions(x, w, dtype=torch.bfloat16, device="cuda", backward=False, wanted=(False, True, False), **how):
    """Shapes of the weights of the convolutions that are traced for one of x and w (or for its gradients)."""
    how = {"stride": [2, 2], "padding": [3, 3], "dilation": [1, 1], "groups": 1, **how}
    rest = [how["stride"], how["padding"], how["dilation"], False, [0, 0], how["groups"]]
    with FakeTensorMode():
        image, weight = (torch.empty(s, device=device, dtype=dtype) for s in (x, w))

        def forward(image, weight):
            return aten.convolution.default(image, weight, None, *rest)

        def gradients(image, weight):
            dy = torch.empty_like(aten.convolution.default(image, weight, None, *rest))
            made = aten.convolution_backward.default(dy, image, weight, None, *rest, list(wanted))
            return [g for g in made if g is not None]

        graph = make_fx(gradients if backward else forward, decomposition_table=decompositions())(image, weight).graph
    target = aten.convolution_backward.default if backward else aten.convolution.default
    return [
        tuple(n.args[2 if backward else 1].meta["val"].shape)
        for n in graph.find_nodes(op="call_function", target=target)
    ]


IMAGE, SEVEN = (2, 3, 64, 64), (8, 3, 7, 7)


def test_an_images_channels_are_whole_vectors():
    assert convolutions(IMAGE, SEVEN) == [(8, 16, 4, 4)]
    assert convolutions(IMAGE, (8, 3, 3, 3), padding=[1, 1]) == [(8, 16, 2, 2)]
    assert convolutions(IMAGE, (8, 3, 11, 11), stride=[4, 4]) == [(8, 48, 3, 3)]
    assert convolutions((2, 1, 64, 64), (8, 1, 5, 6), stride=[1, 4]) == [(8, 8, 5, 2)]


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ((IMAGE, SEVEN), {"device": "cpu"}),
        ((IMAGE, SEVEN), {"dtype": torch.float32}),
        ((IMAGE, SEVEN), {"stride": [1, 1]}),
        ((IMAGE, SEVEN), {"dilation": [2, 2]}),
        ((IMAGE, (8, 3, 2, 2)), {}),  # windows that do not overlap: a product
        ((IMAGE, (9, 1, 7, 7)), {"groups": 3}),
        (((2, 8, 64, 64), (8, 8, 7, 7)), {}),  # whole vectors already
        (((2, 5, 64, 64), (8, 5, 3, 3)), {}),  # 24 channels of 2 x 2 taps: more than 8 of 3 x 3
        (((2, 3, 7, 7), SEVEN), {"padding": [0, 0]}),  # one place
    ],
)
def test_which_stay(given, how):
    x, w = given
    assert convolutions(x, w, **how) == [w]
    assert convolutions(x, w, backward=True, **how) == [w]


@pytest.mark.parametrize("wanted", [(False, True, False), (True, True, False)])
def test_gradients_stay(wanted):
    """A library shares the places of few channels out among thread blocks, which it does not of many taps' worth."""
    assert convolutions(IMAGE, SEVEN, backward=True, wanted=wanted) == [SEVEN]
