"""Values that are reduced lie as those that are kept or stored do: what both read is read once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))


def over_channels(x):
    return x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5).to(x.dtype)


def of_columns(x, w):
    """Gradients of a norm's scale and shift: two sums over a batch, the first of what the second sums too."""
    y = x * torch.tanh(w)
    return (y * x).sum(0), y.sum(0)


@pytest.mark.parametrize(("fn", "args", "reads"), [
    (over_channels, (meta(48, 96, 6400, dtype=torch.bfloat16),), 1),
    (of_columns, (meta(16, 4096, dtype=torch.float32), meta(4096, dtype=torch.float32)), 2),
    (lambda x: torch.softmax(x, 1), (meta(48, 96, 6400, dtype=torch.bfloat16),), 1),
    (lambda x: torch.softmax(x, -1), (meta(4096, 1024, dtype=torch.bfloat16),), 1),
])  # fmt: skip
def test_each_element_is_loaded_once(fn, args, reads):
    (k,) = made(fn, *args)
    source = variant(k).rendered.source
    assert source.count("tl.load(") == reads, source


def test_rows_that_are_stored_turned_are_read_once():
    (k,) = made(lambda x: (x / x.abs().sum(1, keepdim=True)).mT.contiguous(), meta(4096, 256, dtype=torch.float32))
    assert variant(k).rendered.source.count("tl.load(") == 1


def test_folds_of_turns_of_whole_tiles_have_no_masks():
    """Segments of an odd axis are of different lengths: turns over whole tiles are inside of it all the same."""
    first = variant(made(lambda x: x.float().square().sum(-1), meta(64, 401_111, dtype=torch.bfloat16))[0])
    body = first.rendered.source.split("_turn0 in ")[1].split("for ")[0]
    assert body.count("tl.load(") >= 1 and "mask=" not in body
