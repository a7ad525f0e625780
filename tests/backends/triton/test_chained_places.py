"""Places that are read at places that are read: a chain is as long in code, and in time, as it is; tables."""

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


def test_a_table_is_read_as_its_places_lie():
    """Lanes had changed places for it, and again for what is made of it."""
    (k,) = made(lambda q, t, s: t[q.long()] * s[:, None], meta(64, 512, dtype=torch.uint8), meta(256), meta(64))
    assert "tl.reshape(" not in variant(k).rendered.source
    (k,) = made(lambda q, t: t.gather(1, q), meta(64, 512, dtype=torch.int64), meta(64, 4096))
    assert "tl.reshape(" in variant(k).rendered.source  # lines apart
