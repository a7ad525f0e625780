"""The functions before a kernel are those that it needs."""

from __future__ import annotations

import re

import pytest

from tilefold.backends.triton.prelude import functions, needed, prelude


def named(text: str) -> list[str]:
    return re.findall(r"^def (\w+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("x = 1", []),
        ("y = tf_square(tf_square(x))", ["tf_square"]),
        ("v = tl.reduce(x, 0, tf_max)", ["tf_max"]),
        ("tf_exist(e, True)", ["tf_exist"]),
        ("tf_squared(x)", []),
    ],
)
def test_no_more_than_a_kernel_calls(code, wanted):
    assert named(functions(code)) == wanted


def test_functions_that_functions_call_come_along():
    text = "@triton.jit\ndef tf_a(x):\n    return tf_b(x)\n\n\n@triton.jit\ndef tf_b(x):\n    return x\n"
    more = "\n@triton.jit\ndef tf_c(x):\n    return tf_a(x)\n"
    assert named(needed(text, more, code="tf_c(1)")) == ["tf_a", "tf_b", "tf_c"]
    assert named(needed(text, more, code="tf_b(1)")) == ["tf_b"]


def test_the_interpreter_has_its_own_with_what_they_call():
    code = "x.store(tf_in_e4m3(v)); tf_exist(e, True)"
    found = functions(code, interpreted=True)
    assert named(found) == ["tf_round", "tf_in_e4m3", "tf_exist"]
    assert "raise IndexError" in found and "tl.exp2" in found
    assert named(functions(code)) == ["tf_in_e4m3", "tf_exist"]


def test_text_that_runs():
    compile(prelude("tf_random(tf_rank(x), 1, 2)") + "\n\n@triton.jit\ndef f(x):\n    pass\n", "kernel", "exec")
