"""A drawn sample of torch's own test inputs, and that the driver tells what is wrong."""

from __future__ import annotations

import logging
import random
import time
import warnings

import pytest
import torch

from tests.fuzz import operators as driver
from tests.fuzz.operators import Case, cases, errors, found

#: Seconds for cases in a drawn order, and how many there must be at least.
SECONDS, LEAST = 25.0, 10
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float16)
X = torch.arange(1.0, 13.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def of(name: str):
    return next(o for o in driver.operators() if o.formatted_name == name)


def case(name: str, *args, dtype=torch.float32, **named) -> Case:
    return Case(
        of(name), dtype, ((X.to(dtype).requires_grad_(dtype.is_floating_point), args, named),), (0,), backward=True
    )


def test_a_drawn_sample_is_right():
    drawn, wrong, done, began = random.Random(7), [], 0, time.monotonic()
    order = drawn.sample(driver.operators(), len(driver.operators()))
    for op in order:
        if time.monotonic() - began > SECONDS:
            break
        dtype = drawn.choice(DTYPES)
        if dtype in op.dtypes:
            one = drawn.choice(list(cases(op, dtype)) or [None])
            told = None if one is None else found(one, dynamic=drawn.choice((None, None, True)))
            wrong += [] if told is None or told.kind.startswith("torch") else [str(told)]
            done += 1
    assert not wrong and done >= LEAST


def test_kernels_for_cpus_are_right():
    assert [
        str(f) for n in ("softmax", "cat") for c in cases(of(n), torch.float32, 2) if (f := found(c, "pipeline"))
    ] == []


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        (lambda y, x: y * (1 + 1e-5), "wrong", "result 0 less right than eager"),
        (lambda y, x: y.double(), "wrong", "result 0 is torch.float64"),
        (lambda y, x: y + (x - x.detach()), "wrong", "gradient 0 less right than eager"),
        (lambda y, x: y.t().contiguous().t(), "strides", "result 0 (3, 4) has (1, 3), not (4, 1)"),
        (lambda y, x: (x.data.add_(1), y)[1], "wrong", "argument 0"),
        (lambda y, x: 1 / 0, "raises", "ZeroDivisionError"),
        (lambda y, x: y, None, ""),
    ],
)
def test_what_is_wrong_is_told(change, kind, why, monkeypatch):
    def changed(c, backend, dynamic):
        eager = driver.function(c)
        if backend == "aot_eager":
            return eager
        return lambda calls: [change(y, x) for y, (x, _, _) in zip(eager(calls), calls, strict=True)]

    monkeypatch.setattr(driver, "_compiled", changed)
    told = found(case("sigmoid"))
    assert (told.kind if told else None) == kind and (told is None or why in told.why)


def instead(run):
    """What compiles, replaced but for torch's own."""
    return lambda case, backend, dynamic: driver.function(case) if backend == "aot_eager" else run


def test_results_that_share_memory_are_told(monkeypatch):
    monkeypatch.setattr(driver, "_compiled", instead(lambda calls: [calls[0][0].view(3, 4)]))
    told = found(case("clone"))
    assert told is not None and told.kind == "alias"


def test_the_first_of_equals_is_right():
    x = torch.ones(2, 5)
    assert found(Case(of("argmax"), torch.float32, ((x, (1,), {}),), (0,))) is None


def test_errors_of_eager_are_wanted(monkeypatch):
    assert list(errors(of("gather"), "pipeline")) == []
    monkeypatch.setattr(driver, "_compiled", instead(lambda calls: []))
    assert {f.kind for f in errors(of("gather"))} == {"silent"}
