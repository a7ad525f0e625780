"""Block programs: types, listings, interpretation, the table of array operators."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, call
from tilefold.blockbuster.edit import canonical, prune
from tilefold.blockbuster.interp import run
from tilefold.blockbuster.ir import Array, Func, Graph, In, Map, Out, Param, Program, Reduce, Type, arg
from tilefold.blockbuster.listing import show
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram, block_program
from tilefold.blockbuster.parse import parse
from tilefold.blockbuster.verify import infer, verify
from tilefold.errors import ParseError, UnsupportedError, VerifyError
from tilefold.tensor.ir import Compute

M, MN = ("m",), ("m", "n")
SIZES = {d: Const(n, DType.I64) for d, n in {"m": 5, "n": 7, "k": 3}.items()}


def one_op(op: ArrayOp, outs: dict[str, tuple[str, ...]], **inputs: tuple[str, ...]) -> Program:
    """A program of one array operator on matrices."""
    arrays = {n: Array(d) for n, d in {**inputs, **outs}.items()}
    params = tuple(Param(n, Type(d, d)) for n, d in inputs.items())
    return block_program(ArrayProgram("one", params, (op,), tuple(outs), SIZES, arrays))


def value(p: Program, blocks: int, **x: torch.Tensor) -> list[torch.Tensor]:
    return list(run(p, x, blocks=dict.fromkeys(p.sizes, blocks)).values())


X, W, R, C = (
    torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for s in ((5, 7), (3, 7), (5,), (7,))
)
F = torch.nn.functional
TABLE = {
    "softmax": (ArrayOp(("y",), "softmax", ("x",)), {"x": MN}, lambda: torch.softmax(X, -1)),
    "safe_softmax": (ArrayOp(("y",), "safe_softmax", ("x",)), {"x": MN}, lambda: torch.softmax(X, -1)),
    "rmsnorm": (ArrayOp(("y",), "rmsnorm", ("x",), eps=1e-5), {"x": MN}, lambda: F.rms_norm(X, (7,), eps=1e-5)),
    "rmsnorm, weight": (
        ArrayOp(("y",), "rmsnorm", ("x", "c"), eps=1e-5), {"x": MN, "c": ("n",)},
        lambda: F.rms_norm(X, (7,), C, eps=1e-5),
    ),
    "layernorm": (ArrayOp(("y",), "layernorm", ("x",), eps=1e-5), {"x": MN}, lambda: F.layer_norm(X, (7,))),
    "layernorm, weight, bias": (
        ArrayOp(("y",), "layernorm", ("x", "c", "c"), eps=1e-5), {"x": MN, "c": ("n",)},
        lambda: F.layer_norm(X, (7,), C, C),
    ),
    "elementwise": (
        ArrayOp(("y",), "elementwise", ("x",), arg(0) * Index("n")), {"x": MN}, lambda: X * torch.arange(7),
    ),
    "row_scale": (ArrayOp(("y",), "row_scale", ("x", "r")), {"x": MN, "r": M}, lambda: X * R[:, None]),
    "row_shift": (ArrayOp(("y",), "row_shift", ("x", "r")), {"x": MN, "r": M}, lambda: X + R[:, None]),
    "col_scale": (ArrayOp(("y",), "col_scale", ("x", "c")), {"x": MN, "c": ("n",)}, lambda: X * C),
    "mul": (ArrayOp(("y",), "mul", ("x", "x")), {"x": MN}, lambda: X * X),
    "outer": (ArrayOp(("y",), "outer", ("r", "c")), {"r": M, "c": ("n",)}, lambda: R[:, None] * C),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_table(name, blocks):
    op, inputs, want = TABLE[name]
    p = one_op(op, {"y": MN}, **inputs)
    got = value(p, blocks, x=X, r=R, c=C)[0]
    torch.testing.assert_close(got, want(), rtol=1e-9, atol=1e-9)
    assert canonical(parse(show(p)).graph) == canonical(p.graph)


@pytest.mark.parametrize(
    ("reducer", "f"), [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin), ("prod", torch.prod)]
)
def test_reductions(reducer, f):
    p = one_op(ArrayOp(("y",), "reduce", ("x",), reducer=reducer), {"y": M}, x=MN)
    torch.testing.assert_close(value(p, 3, x=X)[0], f(X, -1), rtol=1e-9, atol=1e-9)


def test_matmul():
    p = one_op(ArrayOp(("y",), "matmul", ("x", "w")), {"y": ("m", "k")}, x=MN, w=("k", "n"))
    torch.testing.assert_close(value(p, 2, x=X, w=W)[0], X @ W.T)
    with pytest.raises(UnsupportedError, match="contracts their last axis"):
        one_op(ArrayOp(("y",), "matmul", ("x", "w")), {"y": ("m", "k")}, x=MN, w=("n", "k"))


def test_quantise():
    p = one_op(ArrayOp(("q", "s"), "quantise", ("x",)), {"q": MN, "s": M}, x=MN)
    x = torch.cat([X, torch.zeros(0, 7)]).clone()
    x[2] = 0.0
    q, s = value(p, 2, x=x)
    top = x.abs().amax(-1)
    torch.testing.assert_close(s, torch.where(top > 0, top / 448, 1.0))
    assert float((q * s[:, None] - x).abs().max()) < float(top.max()) / 14
    assert torch.equal(q[2], torch.zeros(7, dtype=q.dtype))


def test_topk_is_miscellaneous():
    t = Type(("m", "k"), ("m", "k"))
    op = ArrayOp(("v", "i"), "topk", ("x",), types=(t, t))
    arrays = {"x": Array(MN), "v": Array(("m", "k")), "i": Array(("m", "k"), DType.I64)}
    p = block_program(ArrayProgram("top", (Param("x", Type(MN, MN)),), (op,), ("v", "i"), SIZES, arrays))
    v, i = value(p, 2, x=X)
    want = torch.topk(X, 3)
    assert torch.equal(v, want.values) and torch.equal(i.long(), want.indices)
    assert canonical(parse(show(p)).graph) == canonical(p.graph) and "misc" in show(p)


def test_convolution_by_implicit_im2col():
    """The columns are a view: no node stores them."""
    sizes = {d: Const(n, DType.I64) for d, n in dict(b=2, o=4, p=5, q=4, c=3, r=2, s=3).items()}
    dims, cols = ("b", "o", "p", "q"), Type(("b", "p", "r", "s", "q", "c"), ("q", "c"))
    index = (Index("b"), Index("c"), Index("p") + Index("r"), Index("q") * 1 + Index("s"))
    op = ArrayOp(("y",), "conv2d", ("x", "w"), over=("r", "s", "c"), types=(cols,), index=index)
    shape = tuple(Const(n, DType.I64) for n in (2, 3, 6, 6))
    params = (Param("x", Type(raw=True)), Param("w", Type(("r", "s", "o", "c"), ("o", "c"))))
    arrays = {"x": Array((), DType.F32, shape), "w": Array(("o", "c", "r", "s")), "y": Array(dims)}
    p = block_program(ArrayProgram("conv", params, (op,), ("y",), sizes, arrays))
    x, w = torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.randn(4, 3, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(value(p, 2, x=x, w=w)[0], F.conv2d(x, w), rtol=1e-9, atol=1e-9)
    assert canonical(parse(show(p)).graph) == canonical(p.graph) and "view" in show(p)


def test_misc_statement():
    t = Type(("m",), ("m",))
    c = Compute("i", ("m",), DType.I64, call("abs", parse_load()), "argmax", ("n",))
    op = ArrayOp(("i",), "misc", ("x",), compute=c, names=("x",), types=(t,))
    p = one_op(op, {"i": M}, x=MN)
    assert torch.equal(value(p, 2, x=X)[0].long(), X.abs().argmax(-1))


def parse_load() -> Expr:
    return Load("x", (Index("m"), Index("n")))


def test_unknown_operator():
    with pytest.raises(UnsupportedError, match="not in the table"):
        one_op(ArrayOp(("y",), "sort", ("x",)), {"y": MN}, x=MN)


# -- types -------------------------------------------------------------------------------------


def program(g: Graph, **arrays: tuple[str, ...]) -> Program:
    return Program("p", g, SIZES, {n: Array(d) for n, d in arrays.items()})


ITEM, LIST = Type((), MN), Type(MN, MN)


@pytest.mark.parametrize(
    ("node", "match"),
    [
        (Func("y", "dot", ("a", "c")), "equal columns"),
        (Func("y", "row_scale", ("a", "a")), "one number a row"),
        (Func("y", "add", ("a", "l")), "l is a list"),
        (Func("y", "elementwise", ("a",)), "needs an expression"),
        (Func("y", "elementwise", ("a",), arg(0) + Index("k")), "index k is not in scope"),
        (Func("y", "sort", ("a",)), "unknown operator"),
        (Func("y", "row_sum", ("z",)), "z is used before"),
        (Func("a", "row_sum", ("a",)), "a is defined twice"),
        (Reduce("y", "sum", "l", "m"), "list of items"),
        (Map("m", (In("a", "x", True),), Graph((Param("x", ITEM),), (), ("x",)), (Out("y"),)), "no list over m"),
        (Map("m", (In("l", "x", True),), Graph((Param("x", ITEM),), (), ("x",)), (Out("y"),)), "inside, not"),
        (
            Map("k", (In("a", "x", False),), Graph((Param("x", ITEM),), (), ("x",)), (Out("y", "sum", "y"),)),
            "exponent",
        ),
    ],
)
def test_type_errors(node, match):
    g = Graph((Param("a", ITEM), Param("c", Type((), ("n", "m"))), Param("l", LIST)), (node,), ("y",))
    with pytest.raises(VerifyError, match=match):
        infer(g)


def test_nested_maps_over_one_dim():
    x = Param("x", Type((), ()))
    inner = Map("m", (In("x", "x", False),), Graph((x,), (), ("x",)), (Out("y"),))
    outer = Map("m", (In("x", "x", False),), Graph((x,), (inner,), ("y",)), (Out("z"),))
    with pytest.raises(VerifyError, match="two nested maps over m"):
        infer(Graph((x,), (outer,), ("z",)))


def test_output_needs_its_axes():
    p = parse(_LISTING)
    with pytest.raises(VerifyError, match="output y has axes"):
        verify(Program("p", p.graph, p.sizes, {**p.arrays, "y": Array(("n",))}))
    with pytest.raises(VerifyError, match="no array"):
        verify(Program("p", p.graph, p.sizes, {"y": Array(("m",))}))


# -- listings ----------------------------------------------------------------------------------

_LISTING = """program p()
dim m = 5
dim n = 7
dim k = 3
input x[m, n] of (m, n) in (m, n): f32
output y[m] in (m): f32
forall m in range(M):
    for n in range(N):
        t2 = load(x[m,n])
        t1 += row_sum(t2)
    t3 = sqrt(t1) + 1.0
    store(t3,y[m])
"""


def test_listing_is_read_back_exactly():
    assert show(parse(_LISTING)) == _LISTING


def test_composed_calls_become_operators():
    short = _LISTING.replace("t1 += row_sum(t2)", "t1 += row_sum(t2 ** 2)")
    long = _LISTING.replace("t1 += row_sum(t2)", "t9 = t2 ** 2\n        t1 += row_sum(t9)")
    assert canonical(parse(short).graph) == canonical(parse(long).graph) != canonical(parse(_LISTING).graph)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("range(N)", "range(M)", "n runs over N"),
        ("load(x[m,n])", "load(z[m,n])", "z is loaded before"),
        ("row_sum(t2)", "row_sum(t9)", "t9 is used before"),
        ("row_sum(t2)", "row_scale(t2)", "operands|arguments|Wrong|wrong number"),
        ("    store(t3,y[m])\n", "", "nothing comes out|never stored"),
        ("store(t3,y[m])", "write(t3)", "not a statement"),
        ("    t3 = sqrt", "        t3 = sqrt", "used before|nothing comes out|no valid|expected"),
        ("program p()", "p()", "starts with"),
        ("sqrt(t1) +", "sqrt(t1) + *", "not an expression"),
    ],
)
def test_unreadable(old, new, match):
    assert old in _LISTING
    with pytest.raises((ParseError, VerifyError), match=match):
        parse(_LISTING.replace(old, new))


def test_prune_drops_what_nothing_uses():
    p = parse(_LISTING.replace("    t3 =", "    t8 = exp(t1)\n    t3 ="))
    assert canonical(prune(p.graph)) == canonical(parse(_LISTING).graph) != canonical(p.graph)


def test_no_elements():
    """A dim without elements: sums of nothing."""
    p = parse(_LISTING)
    empty = Program(p.name, p.graph, {**p.sizes, "n": Const(0, DType.I64)}, p.arrays)
    assert torch.equal(value(empty, 2, x=torch.zeros(5, 0))[0], torch.ones(5, dtype=torch.float64))
