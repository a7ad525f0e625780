"""Ragged products of the library are of copies with whole rows, which are kernels of their own."""

from __future__ import annotations

import inspect

import pytest
import torch

from tilefold.algebra.expr import Load
from tilefold.frontend.fuse import trace
from tilefold.plan.aligned import AT_CALL, Ragged, aligned
from tilefold.plan.hardware import H100, H200
from tilefold.plan.library import library_calls
from tilefold.plan.library_rates import Sizes
from tilefold.tensor.interp import run

B = torch.bfloat16


def made(fn, *shapes):
    """The program and its names of products, before and after; all products are the library's."""
    torch._dynamo.reset()
    p = trace(fn, *(torch.empty(s, dtype=B, device="meta") for s in shapes)).program
    return p, *aligned(p, frozenset(c.name for c in p.body if c.reducer == "sum"), H200)


def chain(x, w, v):
    return torch.relu(x @ w) @ v


def test_operands_are_copied_once_and_what_is_between_is_written_with_its_zeros():
    _, p, products = made(chain, (4096, 2048), (2048, 1001), (1001, 1024))
    maps = [c.name for c in p.body if c.reducer is None]
    assert len(products) == 2 and len(maps) == 3  # both weights, and relu of the first product
    assert {c.name for c in p.body if c.reducer == "sum"} == products
    assert p.outputs[0] in products  # whose columns are whole


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: x @ w, ((40, 33), (33, 17))),
        (lambda x, w: x @ w.mT, ((40, 33), (17, 33))),
        (lambda x, w, b: torch.nn.functional.gelu(x @ w + b), ((40, 33), (33, 17), (17,))),
        (chain, ((40, 33), (33, 17), (17, 24))),
        (lambda x, w: torch.bmm(x, w), ((3, 40, 33), (3, 33, 20))),
        (lambda x, w: x.mT @ w, ((33, 42), (33, 24))),  # rows lie side by side
        (lambda x, w: x @ w[1], ((40, 33), (2, 33, 17))),  # one place of an axis
        (lambda x, w: torch.einsum("bzc,bcpn->bzpn", x, w), ((2, 33, 33), (2, 33, 3, 8))),  # columns of two dims
        (lambda x, w: torch.einsum("bzpn,bcpn->bzc", x, w), ((2, 33, 3, 8), (2, 33, 3, 8))),  # two dims are summed
    ],
)
def test_results_are_those_of_the_operands(fn, shapes, monkeypatch):
    monkeypatch.setattr(Ragged, "worth", lambda *given: True)
    before, after, products = made(fn, *shapes)
    assert after != before and products
    gen = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=gen).to(B) for s in shapes]
    args[0][0, ..., 0] = torch.inf
    values = dict(zip(inspect.signature(fn).parameters, args, strict=True))
    found, want = (run(p, values)[before.outputs[0]] for p in (after, before))
    torch.testing.assert_close(found, want, equal_nan=True, rtol=0.02, atol=0.1)


def test_what_counts_is_the_axis_along_which_memory_lies():
    """Rows of a transposed operand, and not what is summed where no operand lies along it; a copy is made once."""
    _, p, products = made(lambda x, w: x.mT @ w.mT, (3000, 2050), (1700, 3000))
    (c,) = (c for c in p.body if c.name in products)
    assert [p.sizes[d].value for d in (*c.dims, *c.rdims)] == [2056, 1704, 3000]  # type: ignore[attr-defined]
    before, p, _ = made(lambda x, w: x.mT @ w, (3001, 2048), (3001, 1704))
    assert p is before
    _, p, products = made(lambda x, v, w: (x @ v, x @ w), (4096, 1001), (1001, 2048), (1001, 1024))
    assert len(products) == 2 and sum(c.reducer is None for c in p.body) == 3


@pytest.mark.parametrize(
    "depth, copies, wins",
    [
        (757, 1, True),  # elements one by one
        (756, 1, False),  # two by two: 65 us on an H100, and 28.6 between copies
        (757, 4 * AT_CALL, False),
    ],
)
def test_what_copies_cost_and_what_they_save(depth, copies, wins):
    assert Ragged(Sizes(32, 512, 512, depth)).worth(H100, copies) is wins


def test_a_bias_of_the_columns_alone_is_added_behind_the_wide_product():
    """The call of the library would want one of each column that is there."""
    _, p, products = made(lambda x, w, b: torch.relu(x @ w + b), (4096, 1024), (1024, 1001), (1001,))
    assert all(call.bias is None for call in library_calls(p, products)[1].values())
    _, p, products = made(lambda x, w, b: torch.relu(x @ w + b), (4096, 1024), (1024, 1024), (1024,))
    assert [call.bias is None for call in library_calls(p, products)[1].values()] == [False]


@pytest.mark.parametrize(
    "shapes",
    [((1000, 1024), (1024, 776)), ((8, 1023), (1023, 777))],
    ids=["whole rows", "not worth it"],
)
def test_other_products_stay(shapes):
    before, after, products = made(lambda x, w: x @ w, *shapes)
    assert after is before and products == {c.name for c in before.body}


def test_other_types_and_sizes_that_calls_bring_stay():
    torch._dynamo.reset()
    x, w = torch.empty(1000, 1023), torch.empty(1023, 777)
    p = trace(lambda x, w: x @ w, x, w).program
    assert aligned(p, frozenset(p.outputs), H200)[0] is p
    x, w = x.to(B), w.to(B)
    torch._dynamo.mark_dynamic(x, 0)
    p = trace(lambda x, w: x @ w, x, w, dynamic="auto").program
    assert p.syms and aligned(p, frozenset(p.outputs), H200)[0] is p


def test_the_part_of_a_wide_result_is_not_written_for_its_readers():
    _, p, _ = made(lambda x, w: ((x @ w).float().logsumexp(-1), (x @ w)[:, 0]), (1000, 1023), (1023, 777))
    assert not any(isinstance(c.body, Load) and c.dims == ("i", "j") for c in p.body)


def handed_back(s, x, w):
    """Gradients of a head: what the loss hands back is read by two products, and by a sum."""
    d = s.float().mul(0.3).to(s.dtype)
    return d.t() @ x, d @ w, d.float().sum(1)


def test_what_several_products_read_is_made_with_its_zeros_once():
    before, p, products = made(handed_back, (2048, 50257), (2048, 768), (50257, 768))
    sizes = {c.name: [p.sizes[d].value for d in c.dims] for c in p.body}
    assert [2048, 50264] in sizes.values() and [2048, 50257] not in sizes.values()
    assert len(products) == 3 and len(before.body) == 4


def of_sequences(s, x, w):
    d = s.float().mul(0.3).to(s.dtype)
    return torch.einsum("bsv,bsd->vd", d, x), d @ w, d.float().sum(2)


def test_so_it_is_where_sequences_of_a_batch_are_summed():
    """A tied head of 50257 tokens of bf16 in training: the weight's gradient was of ragged rows."""
    _, p, products = made(of_sequences, (4, 512, 50257), (4, 512, 768), (50257, 768))
    sizes = {c.name: [p.sizes[d].value for d in c.dims] for c in p.body}
    assert [4, 512, 50264] in sizes.values() and [4, 512, 50257] not in sizes.values()
    assert any(sizes[m] == [50264, 768] for m in products)


def test_gradients_of_a_ragged_head_are_the_same(monkeypatch):
    monkeypatch.setattr(Ragged, "worth", lambda *given: True)
    shapes = (96, 1001), (96, 512), (1001, 512)
    _, p, _ = made(handed_back, *shapes)
    torch.manual_seed(0)
    xs = [torch.randn(s, dtype=B) for s in shapes]
    found = run(p, dict(zip("sxw", xs, strict=True)))
    for name, want in zip(p.outputs, handed_back(*xs), strict=True):
        torch.testing.assert_close(found[name].to(want.dtype), want, rtol=2e-2, atol=2e-2)


def test_a_map_behind_a_sum_of_its_rows_is_not_made_with_zeros_for_nothing():
    """A kernel with the sum has rows that end where they do: the copy is one more pass, and has to pay."""
    from_sum = made(lambda x, w: torch.softmax(x.float(), -1).to(B) @ w, (16384, 129), (129, 136))
    plain = made(lambda x, w: torch.exp(x.float()).to(B) @ w, (16384, 129), (129, 136))
    assert [q is p for p, q, _ in (from_sum, plain)] == [True, False]


def test_batches_of_ragged_matrices_are_bound_by_what_memory_gives_single_elements():
    """33 chunks of a state by 33: little is multiplied, and a copy with whole rows is the cheaper for it."""
    states = [(32, 33, 33), (32, 33, 8192)]
    p, after, _ = made(lambda x, w: torch.exp(x) @ torch.exp(w), *states)
    assert after is not p
    many, one = (Ragged(Sizes(n, 33, 8192, 33), packed=False) for n in (32, 1))
    assert many.worth(H200) and not one.worth(H200)
