"""Compiled functions as operators: opcheck, other compilers' graphs, symbolic sizes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilefold
from tilefold import TilefoldError, UnsupportedError, custom_op
from tilefold.suites.gpu import operators as o


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(queries, keys):
    return tuple(randn(1, 2, n, 16, seed=k) for k, n in enumerate((queries, keys, keys)))


@pytest.fixture(scope="module")
def attention():
    """Attention with free numbers of queries and keys."""
    args = qkv(33, 70)
    for x in args:
        torch._dynamo.mark_dynamic(x, 2)
    return custom_op(o.attention, *args)


@pytest.mark.parametrize("queries, keys", [(33, 70), (1, 5), (64, 1)])
def test_right_and_checked_by_torch(attention, queries, keys):
    args = qkv(queries, keys)
    torch.testing.assert_close(attention(*args), o.attention(*args))
    found = torch.library.opcheck(attention.op, args)
    assert set(found.values()) == {"SUCCESS"} and len(found) >= 4


def test_batches_of_vmap_are_calls_of_their_own(attention):
    """Without a rule, kernels met tensors that have no memory."""
    q, k, v = qkv(9, 12)
    several = torch.stack([q, q * 2], 1)
    made = torch.vmap(attention, (1, None, None))(several, k, v)
    torch.testing.assert_close(made, torch.stack([attention(q, k, v), attention(q * 2, k, v)]))


def test_fake_results_have_symbolic_sizes(attention):
    seen = []

    def backend(gm, inputs):
        seen.extend(n.meta["example_value"] for n in gm.graph.find_nodes(op="call_function", target=attention.op))
        return gm.forward

    run = torch.compile(lambda q, k, v: attention(q, k, v), backend=backend, fullgraph=True, dynamic=True)
    run(*qkv(20, 30))
    (y,) = seen
    assert isinstance(y.shape[2], torch.SymInt) and y.shape[3] == 16
    with FakeTensorMode() as mode:
        y = attention(*(mode.from_tensor(x) for x in qkv(9, 8)))
    assert y.shape == (1, 2, 9, 16) and y.stride() == (288, 144, 16, 1)


def test_in_a_graph_of_inductor(attention):
    def fn(q, k, v):
        return attention(q * 2, k, v) + 1

    args = qkv(12, 9)
    run = torch.compile(fn, fullgraph=True)
    torch.testing.assert_close(run(*args), o.attention(args[0] * 2, *args[1:]) + 1)


def test_exported_with_a_dynamic_size(attention):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v) * 2

    n, m = (torch.export.Dim(d, min=2, max=999) for d in "nm")
    exported = torch.export.export(Model(), qkv(33, 70), dynamic_shapes={"q": {2: m}, "k": {2: n}, "v": {2: n}})
    assert attention.op in [x.target for x in exported.graph.nodes]
    args = qkv(5, 40)
    torch.testing.assert_close(exported.module()(*args), o.attention(*args) * 2)


def test_parameters_are_read_at_every_call():
    layer, x = torch.nn.Linear(8, 4), randn(3, 8)
    run = custom_op(layer, randn(3, 8, seed=1))
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
        layer.weight.mul_(2)
        torch.testing.assert_close(run(x), layer(x))
    with pytest.raises(TilefoldError, match="has no gradient"):
        run(x)


def test_results_are_those_of_the_function_in_its_order():
    def several(x, y):
        t = x.softmax(-1)
        return y.sum(0), t, x.softmax(-1), (x + y).T

    x, y = randn(4, 6), randn(4, 6, seed=1)
    run = custom_op(several, x, y)
    assert set(torch.library.opcheck(run.op, (x, y)).values()) == {"SUCCESS"}
    for got, want in zip(run(x, y), several(x, y), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    a, b = run.op(x, y)[1:3]
    assert a.data_ptr() != b.data_ptr()  # operators may not return one tensor twice


def test_one_example_for_two_arguments():
    x = randn(3, 5)
    run = custom_op(lambda a, b: (a - b) * 2, x, x)
    torch.testing.assert_close(run(x, x + 1), torch.full_like(x, -2))


def test_one_operator_a_program():
    torch._dynamo.reset()  # sizes that other tests made symbolic
    x = randn(5, 7)
    first, again, other = custom_op(o.softmax, x), custom_op(o.softmax, x.clone()), custom_op(o.l2_norm, x)
    assert first.op is again.op and first.op is not other.op and first.name.startswith("tilefold::softmax_")
    wider = custom_op(o.softmax, randn(5, 8), dynamic=False)
    assert wider.op is not first.op
    assert custom_op(o.softmax, x, name="my_softmax").name == "tilefold::my_softmax"
    with pytest.raises(TilefoldError, match="tilefold::my_softmax exists, for another program"):
        custom_op(o.l2_norm, x, name="my_softmax")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda q, k, v: (q.double(), k, v), "argument 0 .* is torch.float64"),
        (lambda q, k, v: (q[:, :1], k, v), r"argument 0 .* shape \(1, 1, 33, 16\), not \(1, 2, s\d+, 16\)"),
        (lambda q, k, v: (q, k, v[:, :, :50]), "argument 2 .* has shape"),
        (lambda q, k, v: (q[0], k, v), "argument 0 .* has shape"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "has no gradient"),
    ],
)
def test_arguments_that_it_was_not_made_for(attention, change, why):
    with pytest.raises(TilefoldError, match=why):
        attention(*change(*qkv(33, 70)))
    if "gradient" not in why:
        with pytest.raises(TilefoldError, match=why):
            attention.op(*change(*qkv(33, 70)))


def test_sizes_outside_of_the_branch_that_was_captured():
    def halves(x):
        return x.exp() if x.shape[0] % 2 == 0 else x.sin()

    x = randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0)
    run = custom_op(halves, x)
    torch.testing.assert_close(run(randn(6, 3)), randn(6, 3).exp())
    with pytest.raises(TilefoldError, match="was made for sizes with"):
        run(randn(5, 3))


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda x: x, "a result is one of the arguments|is an argument"),
        (lambda x: x.add_(1), "changes an argument"),
        (lambda x: torch.sort(x)[0], "aten.sort.default is not covered"),
        (lambda x: 3, "computes nothing"),
        (lambda x: {"y": x.exp()}, "returns other things"),
    ],
)
def test_functions_that_are_no_operators(fn, why):
    with pytest.raises(UnsupportedError, match=why):
        custom_op(fn, randn(3, 4))


def test_arguments_that_are_no_tensors():
    with pytest.raises(TilefoldError, match="an operator takes tensors"):
        tilefold.custom_op(lambda x, n: x * n, randn(3), 2)
