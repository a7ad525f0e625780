"""Every law of schedules, on random programs: what it makes means what the program meant."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.block.programs import ALL, inputs, program
from tests.fuzz.programs import programs
from tilefold.block import interp, text
from tilefold.block.laws.follow import steps_of
from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, block, kernels, unfused
from tilefold.block.laws.table import LAWS
from tilefold.plan.greedy import fuse as automatic
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.ir import Program

BY_NAME = {law.name: law for law in LAWS}


def check(b: NamedBlock, p: Program, x: dict[str, torch.Tensor], want: dict[str, torch.Tensor], n: int) -> None:
    """The whole block program, in blocks of 4, in float64, against the tensor program."""
    whole = block(b)
    got = interp.run(whole, x, {"n": n}, block_sizes=dict.fromkeys(whole.sizes, 4), exact=True)
    for name in p.outputs:
        torch.testing.assert_close(got[name], want[name], rtol=1e-7, atol=1e-7, equal_nan=True)


def shuffled(law: Law, b: NamedBlock, rng: random.Random) -> Iterator[tuple[Args, NamedBlock]]:
    candidates = list(law.candidates(b))
    rng.shuffle(candidates)
    one = Law(law.name, law.statement, law.condition, law.apply, lambda _: iter(candidates))
    return one.matches(b)


@pytest.mark.parametrize("name", ALL)
def test_unfused_is_one_kernel_a_definition_and_means_the_program(name: str) -> None:
    p = program(name)
    b = unfused(p)
    assert len(kernels(b)) == len(b.program.body)
    for n in (1, 9):
        x = inputs(p, n)
        check(b, p, x, tensor_interp.run(p, x, exact=True), n)


@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
)
@given(programs(), st.integers(0, 1 << 16), st.sampled_from([1, 6, 9]))
def test_random_laws_keep_the_meaning_of_random_programs(p: Program, seed: int, n: int) -> None:
    rng = random.Random(seed)
    x = inputs(p, n, seed=seed)
    want = tensor_interp.run(p, x, exact=True)
    b, used = unfused(p), []
    for _ in range(5):
        for law in rng.sample(LAWS, len(LAWS)):
            found = next(shuffled(law, b, rng), None)
            if found is not None:
                used.append((law.name, *found[0]))
                b = found[1]
                break
        try:
            check(b, p, x, want, n)
        except AssertionError as wrong:
            raise AssertionError(f"after {used}\n{text.show(block(b))}") from wrong


@pytest.mark.parametrize("name", ALL)
def test_every_law_alone_on_programs(name: str) -> None:
    """Each law applied wherever it is legal, from the unfused and from the fused program."""
    p = program(name)
    x = inputs(p, 9)
    want = tensor_interp.run(p, x, exact=True)
    fused = unfused(p)
    for s in steps_of(automatic(p)):
        fused = BY_NAME[s.law].apply(fused, *s.args, **({"at": s.at} if s.at else {}))
    for start in (unfused(p), fused):
        for law in LAWS:
            for _, b in law.matches(start):
                check(b, p, x, want, 9)
