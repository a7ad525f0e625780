"""Tensor expressions: the programs they build, what they compute, and the mistakes they name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tilefold
from tilefold import te
from tilefold.errors import TilefoldError
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse, show


def softmax() -> Program:
    n = te.size("n")
    i, j = te.dims(i=5, j=n)
    x = te.tensor("x", (i, j))
    m = te.compute("m", (i,), te.max(x[i, j], over=j))
    e = te.compute("e", (i, j), lambda i, j: te.exp(x[i, j] - m[i]))
    t = te.compute("t", (i,), te.sum(e[i, j], over=j))
    return te.program("softmax", te.compute("y", (i, j), e[i, j] / t[i]))


def test_a_program_is_index_notation() -> None:
    assert softmax() == parse("""
program softmax(n)
  input x: f32[5, n]
  dim i = 5
  dim j = n
  m[i]: f32 = max[j] x[i, j]
  e[i, j]: f32 = exp(x[i, j] - m[i])
  t[i]: f32 = sum[j] e[i, j]
  y[i, j]: f32 = e[i, j] / t[i]
  return y
""")


def test_definitions_know_their_lines() -> None:
    lines = [c.loc.text for c in softmax().body if c.loc is not None]
    assert lines[0].startswith("m = te.compute") and len(lines) == 4


@pytest.mark.parametrize("n", [1, 7, 300])
def test_a_program_runs_on_the_automatic_road_and_by_schedule(n: int) -> None:
    p = softmax()
    sch = te.schedule(p).fuse("m", "e", "t", "y").rolling_update("t", "j").tile("m", j=64).tile("y", j=32)
    x = torch.randn(5, n)
    want = torch.softmax(x.double(), 1)
    for run in (te.compile(p), te.compile(sch), te.compile(te.schedule(p))):
        torch.testing.assert_close(run(x).double(), want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(te.reference(p)(x), want)


def test_expressions() -> None:
    i, j = te.dims(i=3, j=4)
    x, y = te.tensor("x", (i, j)), te.tensor("y", (3, 4))

    def chosen(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where((x < 0) & (y <= 0.5), -x, y**2)

    forms: dict[str, tuple[te.Value, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
        "a": (2 * x[i, j] + 1 - y[i, j] / 3, lambda x, y: 2 * x + 1 - y / 3),
        "b": (te.where((x[i, j] < 0) & ~(y[i, j] > 0.5), -x[i, j], y[i, j] ** 2), chosen),
        "c": (te.maximum(x[i, j], 0.25) * te.tanh(y[i, j]), lambda x, y: x.clamp(min=0.25) * y.tanh()),
        "d": (te.abs(1 / (1 + te.exp(x[i, j]))), lambda x, y: 1 / (1 + x.exp())),
        "e": (x[(i + 1) % 3, j // 2], lambda x, y: x.roll(-1, 0)[:, [0, 0, 1, 1]]),
        "f": (te.cast(x[i, j], "e4m3") + te.extent(j), lambda x, y: x.to(torch.float8_e4m3fn).to(x.dtype) + 4),
        "g": (te.where(True, x[i, j], y[i, j]), lambda x, y: x),
    }  # fmt: skip
    p = te.program("forms", *(te.compute(name, (i, j), e) for name, (e, _) in forms.items()))
    assert parse(show(p)) == p
    args = torch.randn(3, 4), torch.rand(3, 4)
    for got, (_, torch_form) in zip(te.compile(p)(*args), forms.values(), strict=True):
        torch.testing.assert_close(got, torch_form(*args), rtol=1e-5, atol=1e-6)


def test_reductions() -> None:
    i, j, r = te.dims(i=3, j=40, r=4)
    x = te.tensor("x", (i, j))
    reduced = [
        te.compute("a", (i,), te.sum(x[i, j], over=j)),
        te.compute("b", (i,), te.prod(x[i, j], over=(j,))),
        te.compute("c", (i,), te.min(x[i, j], over=j)),
        te.compute("d", (i,), te.argmax(x[i, j], over=j)),
        te.compute("e", (), te.max(x[i, j], over=(i, j))),
        *te.topk(("v", "at"), (i,), r, x[i, j], j),
    ]
    got = te.compile(te.program("reduced", *reduced))(x_ := torch.randn(3, 40))
    best = x_.topk(4, dim=1)
    want = (x_.sum(1), x_.prod(1), x_.amin(1), x_.argmax(1), x_.max(), best.values, best.indices)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


def test_narrow_types_are_stored_and_computed_wide() -> None:
    i, j = te.dims(i=4, j=64)
    x = te.tensor("x", (i, j), "bf16")
    p = te.program("norm", te.compute("s", (i,), te.sum(x[i, j] * x[i, j], over=j), "bf16"))
    assert p.body[0].dtype.value == "bf16"
    x_ = torch.randn(4, 64).bfloat16()
    got = te.compile(p)(x_)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), x_.float().pow(2).sum(1), rtol=1e-2, atol=0)


def test_arguments_come_in_the_order_they_were_made() -> None:
    (i,) = te.dims(i=2)
    first, second = te.tensor("b", (i,)), te.tensor("a", (i,))
    p = te.program("p", te.compute("y", (i,), second[i] - first[i]))
    assert [x.name for x in p.inputs] == ["b", "a"]
    assert te.compile(p)(torch.ones(2), torch.zeros(2)).tolist() == [-1.0, -1.0]


def _dims() -> tuple[te.Dim, te.Dim, te.Tensor]:
    i, j = te.dims(i=3, j=4)
    return i, j, te.tensor("x", (i, j))


def _free_dim() -> object:
    i, j, x = _dims()
    return te.compute("y", (i,), x[i, j])


def _rank() -> object:
    i, _, x = _dims()
    return x[i]


def _nested() -> object:
    i, j, x = _dims()
    return te.compute("y", (i,), 1.0 + te.sum(x[i, j], over=j))  # type: ignore[operator]


def _truth() -> object:
    i, j, x = _dims()
    return te.where(x[i, j] > 0 and x[i, j] < 1, 1.0, 0.0)


def _dtype() -> object:
    return te.tensor("x", (3,), "float32")


def _two_names() -> object:
    i, j, x = _dims()
    other = te.tensor("x", (i, j))
    return te.compute("y", (i, j), x[i, j] + other[i, j])


def _two_names_apart() -> object:
    i, j, x = _dims()
    a = te.compute("a", (i, j), x[i, j] + 1)
    b = te.compute("b", (i, j), te.tensor("x", (i, j))[i, j] + 1)
    return te.program("p", a, b)


def _two_extents() -> object:
    i, j, x = _dims()
    (other,) = te.dims(i=7)
    return te.compute("y", (other, j), x[i, j])


def _two_extents_inside() -> object:
    i, j, x = _dims()
    (other,) = te.dims(i=2)
    return x[i, j] + x[other, j]


def _too_far() -> object:
    _, j, x = _dims()
    return x[j, j]


def _twice() -> object:
    i, _, x = _dims()
    return te.compute("y", (i, i), x[i, i])


def _one_name_for_two_things() -> object:
    (n,) = te.dims(n=te.size("x"))
    x = te.tensor("x", (n,))
    return te.program("p", te.compute("y", (n,), x[n]))


def _no_value() -> object:
    i, _, x = _dims()
    return te.compute("y", (i,), te.exp(x))  # type: ignore[arg-type]


MISTAKES = {
    _free_dim: "y depends on j",
    _rank: "x has 2 axes, not 1",
    _nested: "a sum inside an expression has no name",
    _truth: "known only when the program runs",
    _dtype: "no dtype is called 'float32'",
    _two_names: "two tensors are called x",
    _two_names_apart: "two tensors are called x",
    _two_extents: "two dims called i, of different extents",
    _two_extents_inside: "two dims are called i",
    _too_far: "j runs beyond an axis of x, which has 3 elements",
    _twice: "a dim twice: i, i",
    _one_name_for_two_things: "uses x for two things",
    _no_value: "is no value",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_mistake_is_named(mistake: Callable[[], object]) -> None:
    with pytest.raises(TilefoldError, match=MISTAKES[mistake]) as caught:
        mistake()
    if caught.value.loc is not None:
        assert caught.value.loc.file == __file__


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), r"takes 1 arguments \(x\), not 0"),
        ((torch.zeros(5, 3, dtype=torch.float64),), "x is torch.float64 on cpu, softmax takes f32"),
        ((torch.zeros(4, 3),), "extent 4 where 5 is required"),
        ((torch.zeros(5),), "expected 2 axes"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(TilefoldError, match=message):
        te.compile(softmax())(*args)


def test_a_refused_step_names_the_line_of_the_definition() -> None:
    with pytest.raises(
        tilefold.ScheduleError, match=r"t reads m.*defined at .*test_te.py:\d+: t = te.compute"
    ) as caught:
        te.schedule(softmax()).fuse("m", "e", "t").fuse("m", "t", at="j")
    assert "te.schedule(softmax())" in str(caught.value.loc)
