"""Sums of products are one product of what they contract, one behind the other, where that takes less time."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.plan.hardware import H200
from tilefold.plan.one_contraction import contracted_together
from tilefold.tensor.interp import run
from tilefold.tensor.product import product_of
from tilefold.tensor.text import parse

STEPS = 6


def draw(*shapes, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen).to(dtype) for s in shapes]


def steps(rows, width, columns, dtype=torch.float32):
    """Operands of each step: gradients of its gates, its state."""
    return draw(*[s for _ in range(STEPS) for s in ((rows, columns), (rows, width))], dtype=dtype)


def gradients(*xs):
    """Of a matrix and its bias that every step has."""
    gates, states = xs[::2], xs[1::2]
    weight = sum(g.mT @ h for g, h in zip(gates[1:], states[1:], strict=True)) + gates[0].mT @ states[0]
    bias = gates[0].sum(0)
    for g in gates[1:]:
        bias = bias + g.sum(0)
    return weight, bias


def both(fn, xs):
    p = trace(fn, *xs).program
    return p, contracted_together(p, H200)


def products(p):
    return [c for c in p.body if product_of(c) is not None]


def results(p, xs):
    made = run(p, {i.name: xs[int(i.name.removeprefix("xs_"))] for i in p.inputs})
    return [made[n] for n in p.outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_what_each_step_multiplies_by_are_one_product(dtype):
    xs = steps(5, 40, 72, dtype)
    before, after = both(gradients, xs)
    assert [len(products(p)) for p in (before, after)] == [STEPS, 1]
    assert sum(c.reducer == "sum" for c in after.body) == 2  # and one sum for the bias, of what is there
    exact = gradients(*(x.double() for x in xs))
    for was, now, want in zip(results(before, xs), results(after, xs), exact, strict=True):
        errors = [(y.double() - want).abs().max() for y in (was, now)]
        assert now.dtype is dtype and errors[1] <= errors[0] * 1.01 + 1e-6


def test_what_is_no_product_is_added():
    def f(*xs):
        return gradients(*xs[:-1])[0] + xs[-1]

    xs = [*steps(5, 40, 72), *draw((72, 40))]
    before, after = both(f, xs)
    assert len(products(after)) == 1
    torch.testing.assert_close(results(after, xs), results(before, xs), rtol=1e-4, atol=1e-4)


def test_families_are_joined_apart():
    def f(*xs):
        short, long = xs[: 2 * STEPS], xs[2 * STEPS :]
        return gradients(*short)[0] + gradients(*long)[0]

    xs = [*steps(5, 40, 72), *steps(7, 40, 72)]
    before, after = both(f, xs)
    assert [len(products(p)) for p in (before, after)] == [2 * STEPS, 2]
    torch.testing.assert_close(results(after, xs), results(before, xs), rtol=1e-4, atol=1e-4)


def turned(*xs):
    """Columns of operands behind rows, as autograd has it for others."""
    return sum((h.mT @ g for g, h in zip(xs[2::2], xs[3::2], strict=True)), xs[1].mT @ xs[0])


def read_twice(*xs):
    first = xs[0].mT @ xs[1]
    return first + gradients(*xs[2:])[0], first


def read_beside(*xs):
    first = xs[0].mT @ xs[1]
    return first + gradients(*xs[2:])[0], first * 2


def of_states(*xs):
    """The sum of the other operands."""
    return gradients(*xs)[0], sum((h.sum(0) for h in xs[3::2]), xs[1].sum(0))


def normalised(*xs):
    return torch.softmax(gradients(*xs)[0], -1)


def products_alone(*xs):
    return gradients(*xs)[0] * 2


def test_operands_lie_as_they_did():
    xs = steps(5, 40, 72)
    before, after = both(turned, xs)
    assert len(products(after)) == 1
    torch.testing.assert_close(results(after, xs), results(before, xs), rtol=1e-4, atol=1e-4)


def test_a_product_that_others_read_stays():
    xs = steps(5, 40, 72)
    _, after = both(read_twice, xs)
    assert len(products(after)) == 2
    torch.testing.assert_close(results(after, xs), list(read_twice(*xs)), rtol=1e-4, atol=1e-4)


def test_a_product_that_another_map_reads_is_no_part_of_it():
    xs = steps(5, 40, 72)
    _, after = both(read_beside, xs)
    contracted = sorted(int(after.sizes[c.rdims[0]].value) for c in products(after))
    assert contracted == [5, 5 * (STEPS - 1)]
    torch.testing.assert_close(results(after, xs), list(read_beside(*xs)), rtol=1e-4, atol=1e-4)


def test_sums_are_of_the_side_that_they_add():
    xs = steps(5, 40, 40)
    before, after = both(of_states, xs)
    assert len(products(after)) == 1
    assert sum(c.reducer == "sum" for c in after.body) == 2
    torch.testing.assert_close(results(after, xs), results(before, xs), rtol=1e-4, atol=1e-4)


def test_sums_have_dims_of_their_own():
    """Those of the bias are called otherwise than the product's columns."""
    names = [f"{x}{n}" for n in range(STEPS) for x in "gh"]
    lines = ["program f()"]
    lines += [f"  input {x}: f32[5, {72 if x[0] == 'g' else 40}]" for x in names]
    lines += [f"  dim {d} = {n}" for d, n in (("r", 5), ("i", 72), ("j", 40), ("b", 72))]
    for n in range(STEPS):
        lines.append(f"  w{n}[i, j]: f32 = sum[r] g{n}[r, i] * h{n}[r, j]")
        lines.append(f"  s{n}[b]: f32 = sum[r] g{n}[r, b]")
    terms = [" + ".join(f"{x}{n}[{at}]" for n in range(STEPS)) for x, at in (("w", "i, j"), ("s", "b"))]
    lines += [f"  weight[i, j]: f32 = {terms[0]}", f"  bias[b]: f32 = {terms[1]}", "  return weight, bias", ""]
    before = parse("\n".join(lines))
    after = contracted_together(before, H200)
    assert sum(c.reducer == "sum" for c in after.body) == 2
    xs = dict(zip(names, steps(5, 40, 72), strict=True))
    was, now = (run(p, xs) for p in (before, after))
    for name in before.outputs:
        torch.testing.assert_close(now[name], was[name], rtol=1e-4, atol=1e-4)


def test_scores_that_a_fold_goes_on_with_stay():
    before, after = both(normalised, steps(5, 40, 72))
    assert after is before


def test_operands_that_are_more_than_the_results_stay_apart():
    before, after = both(products_alone, steps(5000, 40, 72))
    assert after is before
