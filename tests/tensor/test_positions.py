"""Positions computed in floating point become integers where they are known, and stay where they are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as f

from tilefold.algebra.expr import Call, Cast, Index, loads, walk
from tilefold.frontend.fuse import trace
from tilefold.tensor.interp import run
from tilefold.tensor.positions import settled_positions
from tilefold.tensor.text import parse, show


def resized(mode: str, size: tuple[int, int]):
    return lambda x: f.interpolate(x, size=size, mode=mode)


def positions(p):
    return [ix for c in p.body for ld in loads(c.body) for ix in ld.index]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
@pytest.mark.parametrize("size", [(16, 24), (13, 7), (5, 30), (1, 12)])
def test_images_are_resized_as_eager_does(mode, size):
    x = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    p = trace(resized(mode, size), x).program
    made = run(p, {p.inputs[0].name: x})[p.outputs[0]]
    torch.testing.assert_close(made.reshape(2, 3, *size), resized(mode, size)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mode", "form"), [("nearest", "// 2"), ("bilinear", "// 4")])
def test_no_position_is_rounded_or_checked(mode, form):
    torch._dynamo.reset()
    p = trace(resized(mode, (16, 24)), torch.empty(2, 3, 8, 12)).program
    assert not any(isinstance(x, Cast) for ix in positions(p) for x in walk(ix))
    assert "within" not in show(p) and form in show(p)


STEPS = """
program steps()
  input x: f32[{n}]
  dim i = 8
  y[i]: f32 = x[within(i64(f32(i) * 1.6), {n})]
  return y
"""


def test_positions_that_do_not_exist_keep_their_check():
    assert settled_positions(p := parse(STEPS.format(n=8))) == p  # the last is 11
    assert "within" not in show(settled_positions(parse(STEPS.format(n=12))))


def test_positions_of_data_keep_their_check():
    torch._dynamo.reset()
    given = trace(lambda x, i: x[(i * 0.5).long()], torch.empty(8), torch.zeros(4)).program
    assert "within" in show(given)


def test_reflected_positions_are_not_checked_and_are_eagers():
    x = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    p = trace(lambda x: f.pad(x, (3, 5, 2, 7), "reflect"), x).program
    assert "within" not in show(p) and "where" not in show(p)
    assert torch.equal(
        run(p, {p.inputs[0].name: x})[p.outputs[0]].reshape(2, 3, 17, 20), f.pad(x, (3, 5, 2, 7), "reflect")
    )


CHOSEN = """
program chosen()
  input x: f32[8, 8]
  dim i = {n}
  dim j = 8
  y[i, j]: f32 = x[within(where(i - 4 < 0, 3 - i, i - 4), 8), where(i - j >= -11, j, 0)]
  return y
"""


def test_checks_that_some_index_fails_and_choices_by_two_dims_stay():
    assert show(settled_positions(parse(CHOSEN.format(n=12)))).count("within") == 0
    assert show(settled_positions(parse(CHOSEN.format(n=13)))).count("within") == 1
    assert show(settled_positions(parse(CHOSEN.format(n=12)))).count("where") == 2
    assert show(settled_positions(parse(CHOSEN.format(n=4)))).count("where") == 1
    failing = parse(CHOSEN.format(n=12).replace("i - j >= -11", "within(i, 11) >= 0"))
    assert show(settled_positions(failing)).count("within") == 1


def test_windows_in_a_row_are_read_where_they_are():
    """Rows of patches (`unfold`): digits of one number, behind checks and choices."""
    torch._dynamo.reset()
    p = trace(lambda x: f.unfold(x, 3, padding=1), torch.empty(2, 3, 8, 12)).program
    assert not any(isinstance(x, Call) and x.op in ("floordiv", "mod") for ix in positions(p) for x in walk(ix))


def looked_up(x, at):
    n, c, h, w = x.shape
    place = (at.floor() * w).long()
    return x.flatten(2).gather(2, place.view(n, 1, -1).expand(-1, c, -1)).view(n, c, h, w)


def test_places_that_give_positions_are_read_at_their_own_dims():
    """at[(w j + k) // w, (w j + k) % w] is at[j, k]: what makes the places had been a kernel of its own."""
    torch._dynamo.reset()
    x, at = torch.randn(2, 3, 8, 12), 8 * torch.rand(2, 8, 12)
    p = trace(looked_up, x, at).program
    inner = {i for e in positions(p) for ld in loads(e) for i in ld.index}
    assert inner and all(isinstance(i, Index) for i in inner)
    made = run(p, dict(zip([i.name for i in p.inputs], (x, at), strict=True)))[p.outputs[0]]
    assert torch.equal(made.reshape(2, 3, 8, 12), looked_up(x, at))
