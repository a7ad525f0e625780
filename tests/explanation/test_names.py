"""Signatures, short symbols and repeated sequences."""

from __future__ import annotations

import pytest

from tests.block.programs import SOFTMAX
from tilefold.explanation.dataflow import choose
from tilefold.explanation.names import repeat, short_symbols, signature
from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse


def block(text: str):
    return fuse(parse(text)).kernels[0].block


def test_kernels_that_differ_in_names_only_have_one_signature():
    renamed = SOFTMAX.replace("m[i]", "top[i]").replace("x", "z").replace("ezp", "exp").replace("maz", "max")
    assert "top[i]" in renamed
    a, b = signature(block(SOFTMAX)), signature(block(renamed))
    assert a[0] == b[0]
    assert {v: k for k, v in b[1].items()}[a[1]["m"]] == "top"


@pytest.mark.parametrize(
    ("old", "new"), [("f32[5, n]", "bf16[5, n]"), ("dim i = 5", "dim i = 6"), ("max[j]", "min[j]")]
)
def test_kernels_that_differ_in_more_do_not(old, new):
    changed = SOFTMAX.replace(old, new)
    if old.startswith("dim"):
        changed = changed.replace("f32[5, n]", "f32[6, n]")
    assert signature(block(SOFTMAX))[0] != signature(block(changed))[0]


def test_repeat_finds_the_longest_repetition():
    assert repeat(list("xabcabcabcy")) == (1, 3, 3)
    assert repeat(list("aaaa")) == (0, 1, 4)
    assert repeat(list("abcd")) is None
    assert repeat([]) is None


def test_only_long_programs_are_shortened():
    assert choose(["a"] * 4, [{}] * 4).kernels == (0, 1, 2, 3)
    names = [{f"t{k}": "#0"} for k in range(14)]
    shown = choose([*"pq", *"ab" * 5, *"rs"], names)
    assert shown.kernels == (0, 1, 2, 3, 12, 13)
    assert shown.alias["t4"] == "t2" and shown.alias["t11"] == "t3" and "t2" not in shown.alias
    assert "×5" in shown.omitted


def test_symbols_are_short_distinct_and_leave_short_names_alone():
    found = short_symbols([("softmax_max", "max"), ("t", "sum"), ("softmax_sum", "sum"), ("o_sum", "sum")], {"m"})
    assert found == {"softmax_max": "M", "softmax_sum": "u", "o_sum": "w"}
