"""Classes as one-hot rows: eager's, in one region, an error where there is no such class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilefold.frontend.regions.assemble import compilations


def made(fn, *args, **settings):
    torch._dynamo.reset()
    compilations.clear()
    return torch.compile(fn, backend="tilefold", **settings)(*args)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (0,)])
def test_they_are_eagers_in_one_region(shape):
    at = torch.randint(5, shape)
    assert torch.equal(made(lambda at: F.one_hot(at, 5) * 2, at), F.one_hot(at, 5) * 2)
    assert [f for c in compilations for f in c.fallbacks] == []
    assert sum(c.left for c in compilations) == 0 and sum(len(c.regions) for c in compilations) <= 1


def test_numbers_of_classes_may_be_symbolic():
    def f(at, w):
        return F.one_hot(at, w.shape[0]).to(w.dtype) @ w

    for n in (5, 8, 11):
        at, w = torch.randint(n, (9,)), torch.randn(n, 3)
        torch.testing.assert_close(made(f, at, w, dynamic=True), f(at, w))


def test_what_was_chosen_of_a_row_has_a_class():
    x = torch.randn(6, 4)
    f = lambda x: F.one_hot(x.argmax(-1), 4).float().mean(0)  # noqa: E731
    torch.testing.assert_close(made(f, x), f(x))


@pytest.mark.parametrize("wrong", [5, -1, 1 << 40])
@pytest.mark.parametrize("how", ["rows", "sum", "product"])
def test_a_class_that_is_none_is_an_error(wrong, how):
    w = torch.randn(5, 3)
    f = {
        "rows": lambda at: F.one_hot(at, 5),
        "sum": lambda at: F.one_hot(at, 5).sum(0),
        "product": lambda at: F.one_hot(at, 5).float() @ w,
    }[how]
    at = torch.tensor([1, 2, wrong, 4])
    with pytest.raises((IndexError, RuntimeError)):
        made(f, at)


def test_data_that_say_how_many_there_are_and_transforms_are_torchs():
    at = torch.tensor([[0, 2, 1], [1, 1, 0]])
    assert torch.equal(made(lambda at: F.one_hot(at), at), F.one_hot(at))
    rows = lambda at: torch.func.vmap(lambda a: F.one_hot(a, 3))(at)  # noqa: E731
    assert torch.equal(made(rows, at), F.one_hot(at, 3))


def test_by_itself_the_operator_checks_too():
    existing = torch.ops.tilefold.existing.default
    at = torch.tensor([0, 2])
    assert torch.equal(existing(at, 3), at)
    with pytest.raises(RuntimeError, match="none of 2"):
        existing(at, 2)
