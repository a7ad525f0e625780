"""The functions before a kernel are those that it needs."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

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


class Bits(torch.Tensor):
    def to(self, dtype, bitcast):
        return self.view(dtype)


def test_powers_have_the_signs_of_eager():
    """Of zeros, infinities, and numbers that are whole, odd or neither; what a power of a positive number is, is not
    asked here."""
    tl = SimpleNamespace(floor=torch.floor, abs=torch.abs, int32=torch.int32)
    tl.where = lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b))
    space = {"tl": tl, "tf_pow_of_positive": torch.pow}
    (text,) = (t for t in functions("tf_pow(x, y)").split("@triton.jit") if "def tf_pow(" in t)
    exec(text, space)
    v = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        -2.0,
        3.0,
        -3.0,
        0.5,
        -2.5,
        math.inf,
        -math.inf,
        math.nan,
        -1e-40,
        16777217.0,
        -1e30,
    ]
    x, y = torch.meshgrid(torch.tensor(v), torch.tensor(v), indexing="ij")
    got, want = space["tf_pow"](x.contiguous().as_subclass(Bits), y).as_subclass(torch.Tensor), torch.pow(x, y)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got)[~want.isnan()], torch.signbit(want)[~want.isnan()])
