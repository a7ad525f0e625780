"""Places that are read at places that are read: a chain is as long in code, and in time, as it is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant

STEPS = 24


def followed(back):
    """Of each row, where STEPS pointers lead, one read at the place that the one before says."""
    at = back[:, 0, :1]
    for step in range(1, STEPS):
        at = back[:, step].gather(1, at)
    return at


def test_each_pointer_is_read_once_and_asked_for_once():
    """Each had been asked for by all behind it, several times: 3^STEPS times in all."""
    (k,) = made(followed, meta(64, STEPS, 10, dtype=torch.int64))
    source = variant(k).rendered.source
    assert source.count("tl.load(") == STEPS
    assert source.count("tf_exist(exist") <= STEPS
