"""One kernel for two folds over the same pairs, interpreted before and after."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.gradients import alibi, causal, of_one_program, plain, softcap, window
from tilefold.block.both_ways import BothWays, both_ways
from tilefold.block.interp import run
from tilefold.block.text import parse, show
from tilefold.block.verify import verify


@pytest.mark.parametrize(
    "score, rows, columns, dim",
    [
        (causal, 140, 140, 16),
        (plain, 70, 150, 16),
        (window, 150, 150, 16),
        (softcap, 130, 130, 16),
        (alibi, 130, 130, 24),
    ],
)
def test_one_kernel_computes_what_two_compute(score, rows, columns, dim):
    own, other = of_one_program(score, rows, columns, dim)
    found = both_ways(own, other)
    assert isinstance(found, BothWays) and found.before is not None
    for b in (found.before, found.kernel, found.after):
        assert parse(show(verify(b))) == b
    gen = torch.Generator().manual_seed(0)
    given = {}
    for i in (*own.inputs, *other.inputs):
        given[i.name] = torch.randn([int(e.value) for e in i.shape], generator=gen, dtype=torch.float64)
    given["lse"] += 10.0
    sizes = dict.fromkeys({*own.sizes, *other.sizes}, 64)
    wanted = run(other, given, {}, block_sizes=sizes, exact=True)
    torch.testing.assert_close(run(found.before, given, {}, exact=True)["delta"], wanted["delta"])
    given["delta"] = wanted["delta"]
    mine = run(own, given, {}, block_sizes=sizes, exact=True)
    made = run(found.kernel, given, {}, block_sizes=sizes, exact=True)
    for r in own.results:
        assert torch.equal(made[r.name], mine[r.name]) and bool(mine[r.name].any())
    last = run(found.after, {found.added: made[found.added]}, {}, exact=True)
    torch.testing.assert_close(last["dq"], wanted["dq"], rtol=1e-2, atol=1e-6)


def test_folds_over_other_pairs_stay_two_kernels():
    own, _ = of_one_program(causal, 140, 140, 16)
    _, other = of_one_program(plain, 140, 140, 16)
    assert both_ways(own, other) == "the two compute no value of a pair that is the same"
    own, other = of_one_program(causal, 140, 140, 16)
    assert isinstance(both_ways(other, own), str)
    assert both_ways(own, own) == "more than a sum of products across"
