"""Places that data of few values give have no checks, and a choice between two is one place."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.expr import loads, walk
from tilefold.algebra.text import show as shown
from tilefold.frontend.fuse import trace
from tilefold.tensor.bounded_places import bounded_places, ends
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse, show

TABLE = """
program table()
  input t: f32[{n}]
  input q: {kind}[9]
  dim i = 9
  y[i]: f32 = t[within(where({at} < 0, {at} + {n}, {at}), {n})]
  return y
"""


@pytest.mark.parametrize(("kind", "n", "at", "plain"), [
    ("u8", 256, "q[i]", True),
    ("u8", 255, "q[i]", False),
    ("u8", 16, "q[i] // 16", True),
    ("u8", 16, "q[i] % 16", True),
    ("u8", 15, "q[i] % 16", False),
    ("u8", 16, "q[i] // 16 - 1", False),
    ("u8", 17, "q[i] // 16 + 1", True),
    ("i64", 16, "q[i] % 16", False),  # as far as types say
    ("bool", 2, "i64(q[i])", True),
    ("u8", 256, "i64(i16(q[i]))", True),
    ("u8", 256, "i64(i8(q[i]))", False),  # from 128 on it wraps
    ("u8", 16, "i64(i8(q[i] // 16))", True),
])  # fmt: skip
def test_a_check_goes_where_types_say_that_all_places_exist(kind, n, at, plain):
    found = show(bounded_places(parse(TABLE.format(kind=kind, n=n, at=at))))
    assert ("within" not in found) == plain


CHOICE = """
program choice()
  input t: f32[256]
  input q: {kind}[9]
  input r: {kind}[9]
  dim i = 9
  y[i]: f32 = where(i % 2 < 1, t[{first}], t[{second}])
  return y
"""


def elements(p) -> int:
    return len({ld for ld in loads(p.body[0].body) if ld.tensor == "t"})


@pytest.mark.parametrize(("first", "second", "left"), [
    ("q[i]", "r[i]", 1),
    ("within(q[i], 256)", "r[i]", 1),  # exists
    ("within(q[i] * 2, 256)", "r[i]", 2),  # may not: both are checked
    ("i", "i + 1", 2),  # neighbours, not looked up
    ("q[i]", "i", 2),
])  # fmt: skip
def test_a_choice_between_places_of_data_is_one_place(first, second, left):
    p = parse(CHOICE.format(kind="u8", first=first, second=second))
    found = bounded_places(p)
    assert elements(found) == left and elements(p) == 2
    g = torch.Generator().manual_seed(0)
    given = {"t": torch.randn(256, generator=g), **{n: torch.arange(9, dtype=torch.uint8) * 13 for n in ("q", "r")}}
    given["r"] += 5
    torch.testing.assert_close(run(found, given)["y"], run(p, given)["y"], rtol=0, atol=0)


def of_four_bits(q, code):
    return torch.stack((code[(q >> 4).long()], code[(q & 15).long()]), -1).flatten(-2)


def test_weights_of_four_bits_are_looked_up_once():
    torch._dynamo.reset()
    q = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    code = torch.randn(16, generator=torch.Generator().manual_seed(0))
    p = trace(of_four_bits, q, code).program
    assert "within" not in show(p)
    assert len({ld for c in p.body for ld in loads(c.body) if ld.tensor == "code"}) == 1
    made = run(p, {"q": q, "code": code})[p.outputs[0]]
    assert torch.equal(made.reshape(8, 64).to(code.dtype), of_four_bits(q, code))


def test_ends_follow_from_types_and_indices():
    p = parse(TABLE.format(kind="u8", n=16, at="q[i] * 3 - i"))
    (place,) = {x for x in walk(p.body[0].body) if shown(x) == "q[i] * 3 - i"}
    assert ends(p, place) == (-8, 765)
