"""Tensors that a call may be repeated for without looking any further."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tilefold.frontend.regions.alike import Alike


def pair(dtype=torch.float32):
    return [torch.zeros(3, 4, dtype=dtype), torch.zeros(4, 5, dtype=dtype)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: [x[:2], y],
        lambda x, y: [x, y.T.contiguous().T],
        lambda x, y: [x.double(), y],
        lambda x, y: [x.to("meta"), y],
        lambda x, y: [x.requires_grad_(), y],
        lambda x, y: [x[None], y],
        lambda x, y: [y, x],
    ],
)
def test_any_difference_is_seen(change):
    alike = Alike(pair())
    assert alike(pair()) and alike([x.clone() + 1 for x in pair()])
    assert not alike(change(*pair()))


def test_nothing_is_like_subclasses_or_nothing():
    class Own(torch.Tensor):
        pass

    own = [x.as_subclass(Own) for x in pair()]
    assert not Alike(own)(own) and not Alike(())(()) and not Alike(pair())(own)


def test_no_tensor_is_kept():
    xs = pair()
    refs, alike = [weakref.ref(x) for x in xs], Alike(xs)
    del xs
    gc.collect()
    assert [r() for r in refs] == [None, None] and alike(pair())
