"""What a user may get wrong in Python: an error of Tilefold that says what is wanted, before time is spent."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilefold
from tilefold.errors import ParseError, TilefoldError, UnsupportedError
from tilefold.frontend.packages import package as package_module

X = torch.ones(2, 2, 8, 16)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


async def later(x: torch.Tensor) -> torch.Tensor:
    return x


def each(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x


async def each_later(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield x


def nothing(x: torch.Tensor) -> None:
    return None


def words(x: torch.Tensor) -> str:
    return "hello"


def unfinished(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def endless(x: torch.Tensor) -> torch.Tensor:
    return endless(x)


@pytest.mark.parametrize("taker", [tilefold.fuse, tilefold.explain, tilefold.schedule, tilefold.verify])
@pytest.mark.parametrize(("fn", "kind"), [(later, "asynchronous"), (each, "a generator"), (each_later, "asynchronous")])
def test_functions_that_return_no_tensors_yet(taker: Callable[..., Any], fn: Callable[..., Any], kind: str) -> None:
    with pytest.raises(TilefoldError, match=f"takes a function that returns tensors, and {fn.__name__} is {kind}"):
        taker(fn, X) if taker is not tilefold.fuse else taker(fn)


@pytest.mark.parametrize("fn", [nothing, words])
def test_nothing_to_compare_is_not_right(fn: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{fn.__name__} returns no tensors: there is nothing to compare"):
        tilefold.verify(fn, X)


def test_numbers_are_compared() -> None:
    assert tilefold.verify(lambda x: x.dim(), X).ok


@pytest.mark.parametrize(
    ("fn", "x", "why"),
    [
        (lambda x: x / (1 // 0), X, "it raises ZeroDivisionError"),
        (softmax, "a", "it raises AttributeError: softmax"),
        (unfinished, X, r"it raises NotImplementedError\n"),
        (lambda x: [x][len(x.absent)], X, "it raises AttributeError: 'Tensor' object has no attribute 'absent'\n"),
        (lambda x: int("a b"), X, r"it raises ValueError: invalid literal for int\(\) with base 10: 'a b'\n"),
    ],
)
def test_what_a_function_raises_is_said(fn: Callable[..., Any], x: object, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot be captured whole: {why}"):
        tilefold.fuse(fn)(x)


def printing(x: torch.Tensor) -> torch.Tensor:
    y = x.softmax(-1)
    print("now", y)
    return y + 1


def warning(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("now", stacklevel=1)
    return x.exp()


@pytest.mark.parametrize(
    ("fn", "x", "why", "hint"),
    [
        (printing, X, "trace builtin operator `print` with argument types", "take print out of the function, or use"),
        (warning, X, "Python builtin `_warnings.warn`", "take _warnings.warn out of the function, or use"),
        (softmax, [1.0, 2.0], "trace method `softmax` of class `list`", "use torch.compile"),
    ],
)
def test_what_breaks_a_graph_has_its_name(fn: Callable[..., Any], x: object, why: str, hint: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot be captured whole: .*{why}.*\n.*\n  hint: {hint}"):
        tilefold.fuse(fn)(x)


@pytest.mark.parametrize("dynamic", ["yes", 3, [], "auto"])
def test_dynamic_is_yes_no_or_nothing(dynamic: Any) -> None:
    for call in (
        lambda: tilefold.fuse(dynamic=dynamic),
        lambda: tilefold.fuse(softmax, dynamic=dynamic),
        lambda: tilefold.fuse(torch.nn.ReLU(), dynamic=dynamic),
        lambda: tilefold.explain(softmax, X, dynamic=dynamic),
    ):
        with pytest.raises(TilefoldError, match=r"dynamic is .*\n.*None"):
            call()


def test_goals_are_those_that_there_are() -> None:
    for call in (lambda: tilefold.fuse(goal="x"), lambda: tilefold.explain(softmax, X, goal="x")):  # type: ignore[call-overload, arg-type]
        with pytest.raises(TilefoldError, match=r"unknown goal 'x'\n.*fused, fast, greedy"):
            call()


def test_a_function_without_an_end_is_no_defect() -> None:
    with pytest.raises(UnsupportedError, match="PyTorch cannot capture the function: RecursionError"):
        tilefold.fuse(endless)(X)


def test_the_users_own_error_is_said_in_its_words() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on Sundays")

    with pytest.raises(UnsupportedError, match="whole: it raises RuntimeError: not on Sundays\n"):
        tilefold.fuse(broken)(X)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3, 4, 5), "query, key and value are int, int and int.*\n.*three tensors"),
        ((X, X, None), "Tensor, Tensor and NoneType"),
        ((X, X, X, 3), "score_mod is int.*\n.*a function of the score"),
        ((X, X, X, None, 3), "the block mask is int.*\n.*create_block_mask"),
        ((X, X, X, None, None, "a"), "scale is str.*\n.*a number"),
    ],
)
def test_attention_of_what_is_none(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TilefoldError, match=message):
        tilefold.flex_attention(*given)


def test_what_goes_wrong_in_attention_is_told_at_the_users_line() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(UnsupportedError, match=r"at .*test_mistakes.py:\d+: tilefold.flex_attention\(x, x, x, lambda"):
        tilefold.flex_attention(x, x, x, lambda score: score)  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [lambda x: torch.softmax(x, 7), functools.partial(torch.softmax, dim=7)])
def test_an_axis_that_there_is_not(fn: Callable[..., Any]) -> None:
    """PyTorch's fake softmax takes any."""
    with pytest.raises(UnsupportedError, match=r"^a tensor of 2 axes has no axis 7\n") as error:
        tilefold.fuse(fn)(torch.randn(4, 8))
    assert "fuse.py" not in str(error.value)


@pytest.mark.parametrize("name", ["a b", "", "1st", "größe", 3])
def test_names_that_no_operator_has(name: Any) -> None:
    with pytest.raises(TilefoldError, match=r"^an operator cannot be called .*\n  hint: letters, digits and _"):
        tilefold.custom_op(lambda x: torch.softmax(x, -1), torch.randn(4, 8), name=name)


def test_packed_attention_of_what_is_none() -> None:
    at = torch.tensor([0, 8])
    with pytest.raises(TilefoldError, match="query, key and value are int, Tensor and Tensor"):
        tilefold.varlen_attention(3, X[0], X[0], at, at, 8, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        ("m = max[l x[l]", "a reduction names its dims first: `max[l] x[l]`"),
        ("m = foo[l] x[l]", "a reduction is one of sum, prod, max"),
    ],
)
def test_formulas_that_nearly_are(formula: str, hint: str) -> None:
    with pytest.raises(ParseError, match=f"hint: {re.escape(hint)}"):
        tilefold.derive(formula)


@pytest.mark.parametrize(("place", "why"), [("absent/p.tf", "there is no folder"), (".", "it is a folder")])
def test_packages_that_cannot_be_written_are_not_made(
    place: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_module, "_exported", lambda *_: pytest.fail("exported in vain"))
    with pytest.raises(TilefoldError, match=f"cannot be written: {why}"):
        tilefold.package(softmax, (X,), tmp_path / place)
