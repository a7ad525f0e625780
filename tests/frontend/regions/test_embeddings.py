"""Gradients of embeddings by additions at indices, against eager's operator."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilefold.frontend.regions.embeddings import added_up
from tilefold.frontend.regions.extract import extract
from tilefold.frontend.regions.guard import Guarded, Part
from tilefold.frontend.regions.leftover import compile_leftover
from tilefold.frontend.regions.partition import Group
from tilefold.runtime.recorder import Recorder

aten = torch.ops.aten
ROWS, COLUMNS = (7, 50), 6


def graph(*, dtype=torch.float32, padding=-1, scaled=False, device="cuda", rows=ROWS, other=False):
    """Gradients of two embeddings for the same gradient [3, 5, COLUMNS]; `other`: and an operator besides."""
    g = torch.fx.Graph()
    dy, first, second = (g.placeholder(name) for name in ("dy", "first", "second"))
    made = [
        g.call_function(aten.embedding_dense_backward.default, (dy, at, n, padding, scaled))
        for at, n in zip((first, second), rows, strict=True)
    ]
    if other:
        made.append(g.call_function(aten.sin.default, (dy,)))
    g.output(tuple(made))
    with FakeTensorMode():
        dy.meta["val"] = torch.empty(3, 5, COLUMNS, dtype=dtype, device=device)
        for n, m in zip(made, rows, strict=False):
            n.meta["val"] = torch.empty(m, COLUMNS, dtype=dtype, device=device)
        for n in (first, second):
            n.meta["val"] = torch.empty(3, 5, dtype=torch.int64, device=device)
        made[-1].meta.setdefault("val", torch.empty(3, 5, COLUMNS, device=device))
    gm, group = torch.fx.GraphModule({}, g), Group(0, False, tuple(made), tuple(made))
    return group, extract(gm, group)


def arguments(dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    dy = torch.randn(5, 3, COLUMNS, generator=gen).to(dtype).transpose(0, 1)
    return (dy, *(torch.randint(n, (3, 5), generator=gen) for n in ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [-1, 0, 4])
def test_gradients_are_those_of_float64(dtype, padding):
    run = added_up(*graph(dtype=dtype, padding=padding))
    args = arguments(dtype)
    for got, at, n in zip(run(*args), args[1:], ROWS, strict=True):
        want = aten.embedding_dense_backward(args[0].double(), at, n, padding, False)
        assert got.dtype is dtype and got.is_contiguous()
        torch.testing.assert_close(got, want.to(dtype))
        assert padding < 0 or not got[padding].any()


def test_a_group_is_left_neither_to_inductor_nor_to_a_sort(monkeypatch):
    group, part = graph()
    run = compile_leftover(group, part, Part("left", []), {})
    assert isinstance(run, Guarded) and "index_add_" in run.run.code
    assert "embedding_dense_backward" in part.module.code  # what runs where that fails


def test_it_is_recorded_operator_by_operator():
    args = arguments(torch.bfloat16)
    run = added_up(*graph(dtype=torch.bfloat16, padding=0))
    recorder = Recorder(args, ())
    with recorder:
        made = run(*args)
    assert recorder.tape(made) is not None and not recorder.refused


@pytest.mark.parametrize("how", [{"scaled": True}, {"dtype": torch.float64}, {"device": "cpu"}, {"other": True}])
def test_others_are_not(how):
    assert added_up(*graph(**how)) is None


def test_nor_where_torch_is_to_be_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert added_up(*graph()) is None
    finally:
        torch.use_deterministic_algorithms(False)
