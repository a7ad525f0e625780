"""Significand-exponent pairs: nothing overflows, the numbers stay, and they are the Folds of the algebra."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.blockbuster.rules.generate import outputs, random_program, sample
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Const, Expr, Index, Load, call, transform
from tilefold.block.ir import Accumulate, Init, Let, Update, walk
from tilefold.blockbuster.interp import run
from tilefold.blockbuster.ir import Array, Param, Program, Type, arg
from tilefold.blockbuster.listing import lines_of, show
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram, block_program
from tilefold.blockbuster.pairs import nonpositive, pair_of, plain
from tilefold.blockbuster.parse import parse
from tilefold.blockbuster.rules.algorithm import fuse
from tilefold.blockbuster.safe import choose
from tilefold.blockbuster.safety import make_safe, unsafe
from tilefold.blockbuster.to_loops import to_loops
from tilefold.runtime.graphs import compile_graph
from tilefold.suites.blocks.examples import attention, examples
from tilefold.tensor.formula import derive

EXAMPLES = {ex.name: ex for ex in examples()}


@pytest.mark.parametrize("granularity", [None, "element", "row", "block"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_snapshots_made_safe(name, granularity):
    ex = EXAMPLES[name]
    f = fuse(ex.program)
    x = sample(f.start)
    for p in (f.start, *f.programs):
        safe = make_safe(p, granularity)
        assert unsafe(safe) == () and show(parse(show(safe))).count("range(") == show(safe).count("range(")
        for blocks in (1, 3):
            assert float((outputs(safe, x, blocks)[0] - ex.reference(x)).abs().max()) < 1e-9


def test_unsafe_programs_are_seen():
    assert unsafe(attention().program) and unsafe(EXAMPLES["rmsnorm_swiglu"].program)
    assert not unsafe(EXAMPLES["layernorm_matmul"].program)


@pytest.mark.parametrize("granularity", [None, "element", "row"])
def test_scores_far_apart(granularity):
    """Scores of +-1e4, different in every row: float32 would overflow, and a shared exponent underflow."""
    p = fuse(attention().program).result
    x = {k: v.float() for k, v in sample(p).items()}
    x["Q"] *= torch.tensor([1.0, 1e4, -1e4, 0.0, 1e-3, 3e3])[:, None] / 4
    reference = attention().reference({k: v.double() for k, v in x.items()})
    raw = run(p, x, blocks={"n": 3}, exact=False)["O"]
    got = run(make_safe(p, granularity), x, blocks={"n": 3, "m": 2}, exact=False)["O"]
    assert not torch.isfinite(raw).all()
    assert float((got - reference).abs().max()) < 1e-5
    if granularity is None:  # one exponent a block is safe from overflow, but loses the rows far below
        shared = run(make_safe(p, "block"), x, blocks={"n": 3}, exact=False)["O"]
        assert not torch.isfinite(shared).all()


def test_masked_rows():
    """A row of -inf is 0 / 0 in the original; the other rows are untouched."""
    p = fuse(one(call("exp", arg(0)), "softmax_like")).result
    x = {"x": torch.tensor([[1.0, 2.0, 3.0, -math.inf], [-math.inf] * 4, [1e4, 1e4, -1e4, 0.0]])}
    got = run(make_safe(p), x, blocks={"n": 2}, exact=False)["y"]
    want = torch.softmax(x["x"].double(), -1)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_masked_exponentials():
    """Masked after the exponential: what is masked does not hide what is not."""
    f = call("where", call("gt", Index("n"), 1), call("exp", arg(0)), 0.0)
    p = fuse(one(f, "softmax_like")).result
    rows = torch.tensor([[9e3, 5.0, -1e4, -1e4 + 1.0], [0.0, 0.0, 1e4, 1e4], [0.0, 1.0, 2.0, 3.0]])
    got = run(make_safe(p), {"x": rows}, blocks={"n": 2}, exact=False)["y"]
    want = torch.cat([torch.zeros(3, 2), torch.softmax(rows[:, 2:], -1)], -1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def one(f: Expr, kind: str) -> Program:
    """f of a matrix; "softmax_like": divided by its row sums."""
    dims = ("m", "n")
    ops = [ArrayOp(("e",), "elementwise", ("x",), f)]
    if kind == "softmax_like":
        ops += [
            ArrayOp(("t",), "reduce", ("e",)),
            ArrayOp(("i",), "elementwise", ("t",), call("div", 1, arg(0))),
            ArrayOp(("y",), "row_scale", ("e", "i")),
        ]
    else:
        ops.append(ArrayOp(("y",), "elementwise", ("e",), arg(0) * 1.0))
    sizes = {"m": Const(3, DType.I64), "n": Const(4, DType.I64)}
    arrays = {"x": Array(dims), "y": Array(dims)}
    return block_program(ArrayProgram("one", (Param("x", Type(dims, dims)),), tuple(ops), ("y",), sizes, arrays))


x = arg(0)
SCALARS = {
    "swish": (x / (1 + call("exp", -x)), torch.nn.functional.silu),
    "sigmoid": (call("div", 1, 1 + call("exp", -x)), torch.sigmoid),
    "tanh": (
        (call("exp", x) - call("exp", -x)) / (call("exp", x) + call("exp", -x)), torch.tanh,
    ),
    "softplus": (call("log", 1 + call("exp", x)), torch.nn.functional.softplus),
    "gaussian": (call("exp", -(x * x)), lambda v: torch.exp(-(v * v))),
    "elu": (call("where", call("gt", x, 0.0), x, call("expm1", x)), torch.nn.functional.elu),
    "exp": (call("exp", x), torch.exp),
    "root": (call("sqrt", call("exp", x * 2.0)), torch.exp),
    "power": (call("exp", x * 0.5) ** 2, torch.exp),
    "exp2": (call("exp2", x), torch.exp2),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_scalar_functions(name):
    """Of values up to 1e4: infinite only where the function is, never NaN."""
    f, want = SCALARS[name]
    p = make_safe(one(f, "plain"))
    assert not unsafe(p)
    values = torch.tensor([[0.0, 1.0, -1.0, 80.0], [-80.0, 1e4, -1e4, 200.0], [1e-3, -1e-3, 5.0, -5.0]])
    got = run(p, {"x": values}, blocks={"m": 2}, exact=False)["y"]
    torch.testing.assert_close(got.double(), want(values).double(), rtol=2e-5, atol=1e-6)


def test_bounded_arguments_stay_plain():
    """A softmax that subtracts its maximum is safe as it is."""
    dims = ("m", "n")
    op = ArrayOp(("y",), "safe_softmax", ("x",))
    sizes = {"m": Const(3, DType.I64), "n": Const(4, DType.I64)}
    arrays = {"x": Array(dims), "y": Array(dims)}
    p = block_program(ArrayProgram("one", (Param("x", Type(dims, dims)),), (op,), ("y",), sizes, arrays))
    for q in (p, fuse(p).result):
        assert not unsafe(q) and lines_of(make_safe(q)) == lines_of(q)


def test_a_maximum_of_something_else_bounds_nothing():
    dims = ("m", "n")
    ops = (
        ArrayOp(("t",), "reduce", ("w",), reducer="max"),
        ArrayOp(("c",), "elementwise", ("t",), -arg(0)),
        ArrayOp(("s",), "row_shift", ("x", "c")),
        ArrayOp(("y",), "elementwise", ("s",), call("exp", arg(0))),
    )
    sizes = {"m": Const(3, DType.I64), "n": Const(4, DType.I64)}
    params = tuple(Param(n, Type(dims, dims)) for n in "xw")
    p = block_program(ArrayProgram("one", params, ops, ("y",), sizes, {n: Array(dims) for n in "xwy"}))
    assert unsafe(p) and unsafe(fuse(p).result)


def test_random_programs():
    for seed in range(12):
        p = fuse(random_program(seed)).result
        data = sample(p, seed)
        safe = make_safe(p)
        assert not unsafe(safe)
        want = outputs(p, data, 2)[0]
        assert float((outputs(safe, data, 3)[0] - want).abs().max()) < 1e-8 * max(1.0, float(want.abs().max()))


def test_choice_of_granularity():
    assert choose(2, along_rows=True).granularity == "row"
    assert choose(2, along_rows=False).granularity == "element"
    assert choose(1, along_rows=True).granularity == "block"
    costs = choose(2, along_rows=True, r=8, c=32).costs
    assert (costs["row"].numbers, costs["element"].numbers, costs["block"].loses) == (8, 256, True)


def test_pairs():
    """Exponents cancel symbolically, and what is applied is at most exp(0)."""
    y = Load("y", ())
    p = pair_of(call("exp", y) * 3.0 / call("exp", y), lambda _: None, lambda _: False)
    assert p.exponent == {} and plain(p) == Const(3.0, DType.F32)
    q = pair_of(call("exp", y) + 1.0, lambda _: None, lambda _: False)
    assert list(q.exponent.values()) == [1.0]
    assert nonpositive(-(y * y)) and not nonpositive(y * y) and nonpositive(y - call("maximum", 0.0, y))


# -- the Fold ----------------------------------------------------------------------------------


def test_agrees_with_the_derived_fold():
    """The loop of the safe attention keeps the states of the Fold over (max, sum, output), moved alike."""
    fold = derive(
        """
        m = max[n] p[n]
        t = sum[n] exp(p[n] - m)
        o[l] = sum[n] exp(p[n] - m) / t * v[l, n]
        """
    ).fold
    (block,) = to_loops(make_safe(fuse(attention().program).result), ("d", "l"))
    nodes = list(walk(block.body))
    inits = {n.name: n for n in nodes if isinstance(n, Init)}
    assert [float(n.value.value) for n in inits.values()] == [float(v.identity.value) for v in fold.state]
    m, t, o = inits
    lets = {n.name: n.expr for n in nodes if isinstance(n, Let)}
    names = {m: "m@new", f"{m}_old": "m@old", t: "t", o: "o"}
    repairs = {n.name: scalar(n.expr, lets, names) for n in nodes if isinstance(n, Update) and n.name != m}
    elements = {n.name: scalar(n.expr, lets, names) for n in nodes if isinstance(n, Accumulate)}
    for name, v in ((t, fold.var("t")), (o, fold.var("o"))):
        assert v.repair is not None
        assert same(repairs[name], scalar(v.repair, {}, {})), name
        assert same(elements[name], scalar(v.element, {}, {})), name
    assert next(n.name for n in nodes if isinstance(n, Update)) == m


def scalar(e: Expr, lets: dict[str, Expr], names: dict[str, str]) -> Expr:
    """An expression over scalars: lets unfolded, states by the Fold's names, indices dropped."""

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Load):
            return None
        if n.tensor in names:
            return Load(names[n.tensor], ())
        if n.tensor in lets and "exponent" not in n.tensor:
            return scalar(lets[n.tensor], lets, names)
        known = {"VT": "v"}
        return Load("p" if "exponent" in n.tensor else known.get(n.tensor, n.tensor), ())

    return transform(e, one)


def same(a: Expr, b: Expr) -> bool:
    """Equal values for some numbers."""
    values = {"p": 0.7, "m@old": 0.4, "m@new": 1.1, "t": 1.9, "o": -0.3, "v": 2.5}
    env = Env(lambda t, _: torch.tensor(values[t], dtype=torch.float64), {}, {}, True)
    return bool(torch.isclose(evaluate(a, Grid({}), env), evaluate(b, Grid({}), env), rtol=1e-12))


def test_sizes_do_not_matter():
    p = make_safe(fuse(attention().program).result)
    wide = replace(p, sizes={**p.sizes, "n": Const(50, DType.I64)})
    data = sample(wide)
    assert float((outputs(wide, data, 7)[0] - attention().reference(data)).abs().max()) < 1e-12


@pytest.mark.parametrize("name", EXAMPLES)
def test_safe_stays_safe(name):
    """Making a safe program safe changes nothing, and code is only made of safe programs."""
    p = make_safe(fuse(EXAMPLES[name].program).result)
    assert lines_of(make_safe(p)) == lines_of(p)
    assert not unsafe(compile_graph(fuse(EXAMPLES[name].program).result).program)
