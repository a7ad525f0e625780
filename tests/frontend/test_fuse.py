"""`fuse`: whole or an error that names the line; `trace`: the lowering alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.frontend.check import randn
from tilefold.algebra.expr import Sym
from tilefold.errors import NotFusibleError, TilefoldError, UnsupportedError
from tilefold.frontend.fuse import Fused, fuse, own_copy, signature, trace
from tilefold.frontend.regions.assemble import Options


@fuse(runner="interpreter")
def attention(q, k, v):
    """softmax(q k^T) v."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(s, -1) @ v


def test_values_and_dynamic_sizes():
    for n in (3, 8, 17):
        q, k, v = (randn(2, n, 4, seed=s) for s in range(3))
        torch.testing.assert_close(attention(q, k, v), attention.fn(q, k, v))
    assert len(attention.graphs) <= 2  # static at first, then one for every size
    assert attention.__name__ == "attention" and attention.__doc__ == "softmax(q k^T) v."


def test_dynamic_sizes_never_recompile():
    f = fuse(lambda x: torch.softmax(x, -1), dynamic=True, runner="interpreter")
    f(randn(2, 8))
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (3, 9, 31):
            torch.testing.assert_close(f(randn(n, 8)), torch.softmax(randn(n, 8), -1))
    assert len(f.graphs) == 1


def test_each_combination_of_dtypes_and_ranks_has_its_own_graph():
    f = fuse(lambda x: torch.softmax(x, -1), runner="interpreter")
    shapes = [(3, 4), (5, 4), (2, 3, 4), (7,), (2, 2, 3, 4), (1, 2, 2, 3, 4)]
    for shape in shapes:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = randn(*shape, dtype=dtype)
            torch.testing.assert_close(f(x), torch.softmax(x, -1))
    assert len(f.graphs) >= 15


def test_static_sizes():
    f = fuse(dynamic=False, runner="interpreter")(lambda x: x.sum(0))
    f(randn(3, 4))
    assert f.graphs[0].regions[0].lowered.program.syms == ()


def test_modules_and_gradients():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    f = fuse(layer, runner="interpreter")
    x = randn(3, 4).requires_grad_()
    f(x).square().sum().backward()
    got, weight = x.grad.clone(), layer[0].weight.grad.clone()
    x.grad = None
    layer.zero_grad()
    layer(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight, layer[0].weight.grad, rtol=1e-4, atol=1e-5)


def test_containers_and_keywords():
    f = fuse(lambda d, *, scale: {"y": d["x"] * scale, "z": (d["x"].sum(),)}, runner="interpreter")
    x = randn(3)
    out = f({"x": x}, scale=2.0)
    torch.testing.assert_close(out["y"], x * 2)
    torch.testing.assert_close(out["z"][0], x.sum())


def test_an_uncovered_operator_is_an_error_at_the_users_line():
    f = fuse(lambda x: torch.cumsum(x, 0) * 2, runner="interpreter")
    with pytest.raises(UnsupportedError, match=r"(?s)cumsum.*test_fuse\.py:\d+.*hint: .*backend='tilefold'") as err:
        f(randn(3, 4))
    assert err.value.loc is not None and "cumsum" in err.value.loc.text


def test_a_graph_break_is_an_error_at_the_users_line():
    def f(x):
        if x.sum() > 0:
            return x
        return x * 2

    with pytest.raises(UnsupportedError, match=r"(?s)captured whole.*test_fuse\.py.*hint"):
        fuse(f, runner="interpreter")(randn(3))


def test_a_branch_on_an_item_is_an_error_at_the_users_line():
    def f(x):
        if x.sum().item() > 0:
            return x
        return x * 2

    with pytest.raises(UnsupportedError, match=r"(?s)captured whole: .* only the run knows.*test_fuse\.py.*hint"):
        fuse(f, runner="interpreter")(randn(3))


def test_a_softmax_of_integers_is_refused_as_in_eager_mode():
    for fn in (torch.softmax, torch.log_softmax):
        with pytest.raises(UnsupportedError, match=r"(?s)a softmax of i64.*test_fuse\.py"):
            fuse(lambda x, fn=fn: fn(x, -1), runner="interpreter")(torch.arange(4))


def test_a_region_that_does_not_compile_is_an_error():
    f = Fused(lambda x: x * 2)

    def refuses(program, *, device):
        raise NotFusibleError("no such fold", hint="write it differently")

    f._options = Options(refuses, strict=True)
    with pytest.raises(NotFusibleError, match=r"(?s)no such fold.*write it differently"):
        f(randn(3))


def test_unknown_runner_is_refused():
    with pytest.raises(TilefoldError, match=r"(?s)unknown runner 'gpu'.*pipeline"):
        fuse(lambda x: x, runner="gpu")


def test_unknown_goal_is_refused():
    with pytest.raises(TilefoldError, match=r"(?s)unknown goal 'quick'.*fast"):
        fuse(lambda x: x, goal="quick")


def test_trace_lowers_without_compiling():
    low = trace(attention, randn(2, 3, 4), randn(2, 5, 4), randn(2, 5, 4))
    assert [c.reducer for c in low.program.body] == ["sum", "max", None, "sum", None, "sum"]
    assert {i.name for i in low.program.inputs} == {"q", "k", "v"} and low.program.name == "attention"
    assert all(c.loc is not None and c.loc.file.endswith("test_fuse.py") for c in low.program.body)


def test_trace_can_keep_sizes_symbolic():
    low = trace(lambda x: x.softmax(-1), randn(3, 4), dynamic=True)
    assert len(low.program.syms) == 2 and all(isinstance(e, Sym) for e in low.program.sizes.values())


def test_trace_refuses_what_computes_nothing():
    with pytest.raises(UnsupportedError, match="computes nothing"):
        trace(lambda x: 3, randn(3))


def test_copies_of_functions_have_their_own_code():
    def f(x, *, y=2):
        return x + y

    g = own_copy(f)
    assert g(1) == 3 and g(1, y=5) == 6 and g.__code__ is not f.__code__


def test_attention_over_no_keys_is_zero_as_in_eager():
    def attention(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    q, none = torch.randn(2, 5, 16), torch.randn(2, 0, 16)
    assert torch.equal(fuse(attention)(q, none, none), torch.zeros(2, 5, 16))


@pytest.mark.parametrize(
    "args",
    [
        (torch.nn.Linear(2, 3), torch.zeros(4, 2)),
        (torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64), None, 1, 2.0, True, "x"),
        ([torch.zeros(2)], None),
        ((torch.zeros(2), {"a": torch.zeros(1, 2)}), 3),
    ],
)
def test_what_arguments_are_told_apart_by_is_that_of_their_leaves(args):
    leaves = tree_flatten((args, {}))[0]
    assert signature(args, {}) == tuple(
        (a.dtype, a.ndim, "cpu") if isinstance(a, torch.Tensor) else type(a) for a in leaves
    )
    assert signature((), {"args": args}) == signature(args, {})
