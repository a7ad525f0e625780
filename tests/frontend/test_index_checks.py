"""Indices that do not exist are errors where eager raises one; those that wrap or are ignored are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilefold.frontend.fuse import fuse
from tilefold.frontend.torch_compile import backend

W, X, IDS = torch.randn(10, 33), torch.randn(37, 10), torch.arange(37) % 10
#: With the last index as it is: 37 of them, so that it stands in the ragged end of a vector.
FUNCTIONS = {
    "embedding": lambda i: F.embedding(i, W) * 2,
    "rows": lambda i: W[i] * 2,
    "index_select": lambda i: W.index_select(0, i) * 2,
    "gather": lambda i: X.gather(1, i[:, None]) * 2,
    "cross_entropy": lambda i: F.cross_entropy(X, i),
    "moved": lambda i: W[i + 5 - 5] * 2,
}


def at_the_end(value: int) -> torch.Tensor:
    return torch.cat([IDS[:-1], torch.tensor([value])])


@pytest.mark.parametrize("value", [10, -11, 1 << 40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_index_that_does_not_exist_is_an_error(name, value, monkeypatch):
    monkeypatch.setenv("TILEFOLD_STRICT", "1")
    fn = FUNCTIONS[name]
    run = fuse(fn)
    torch.testing.assert_close(run(IDS), fn(IDS))
    with pytest.raises((IndexError, RuntimeError)):
        fn(at_the_end(value))
    with pytest.raises(IndexError, match="index out of range"):
        run(at_the_end(value))
    torch.testing.assert_close(run(IDS), fn(IDS))  # and the next call is none


def test_automatic_use_raises_eagers_own_error_and_stays_compiled(monkeypatch):
    monkeypatch.setenv("TILEFOLD_STRICT", "0")
    torch._dynamo.reset()
    fn = FUNCTIONS["gather"]
    run = torch.compile(fn, backend=backend)
    with pytest.raises(RuntimeError, match="out of bounds for dimension 1 with size 10"):
        run(at_the_end(10))
    torch.testing.assert_close(run(IDS), fn(IDS))


@pytest.mark.parametrize(
    ("name", "value"), [("rows", -1), ("rows", -10), ("moved", -1), ("cross_entropy", -100), ("embedding", 9)]
)
def test_indices_that_wrap_or_are_ignored_are_none(name, value):
    fn = FUNCTIONS[name]
    torch.testing.assert_close(fuse(fn)(at_the_end(value)), fn(at_the_end(value)))


def test_arithmetic_on_indices_is_checked_where_there_are_elements():
    """Lanes past the end hold 0, and 0 + 12 does not exist."""
    rows = torch.full((3,), -5)
    fn = lambda i: W[i + 12] * 2  # noqa: E731
    torch.testing.assert_close(fuse(fn)(rows), fn(rows))


@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_asks_for_no_element_that_is_not_there(dynamic):
    """Of what is padded, rows 6 to 10 do not exist: that W has no row 10 to 14 matters not. Row 6 is checked."""

    def padded(x):
        return F.pad(W[torch.arange(x.shape[0]) + 4], (0, 0, 0, 5))

    run = fuse(padded, dynamic=dynamic)
    torch.testing.assert_close(run(X[:6]), padded(X[:6]))
    with pytest.raises(IndexError, match="index out of range"):
        run(X[:7])


def test_checks_can_be_left_out(monkeypatch):
    monkeypatch.setenv("TILEFOLD_INDEX_CHECKS", "0")
    fn = FUNCTIONS["embedding"]
    assert fuse(fn)(at_the_end(10)).shape == (37, 33)


@pytest.mark.parametrize("rows", [5, 64, 75, 200])
def test_elements_that_labels_choose_in_rows_of_several_tiles(rows):
    """The row of a product that a block keeps is read at the label's place in it, whichever block of rows it is."""

    def losses(x, w, y):
        return F.cross_entropy(x @ w.t(), y, reduction="none")

    g = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 32, generator=g), torch.randn(700, 32, generator=g)
    y = torch.where(torch.arange(rows) % 5 == 0, -100, torch.randint(700, (rows,), generator=g))
    with torch.no_grad():
        found = torch.compile(losses, backend="tilefold")(x, w, y)
    torch.testing.assert_close(found, losses(x.double(), w.double(), y).float(), rtol=1e-5, atol=1e-4)
