"""What crosses into a later region is computed there again where fewer bytes are moved: legal, and no choice is better
(all are tried)."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.regions.test_apart import on_gpu
from tests.frontend.regions.test_levels import first_levels, random_units
from tilefold.frontend.regions.extract import extract
from tilefold.frontend.regions.levels import settled
from tilefold.frontend.regions.partition import partition
from tilefold.frontend.regions.remade import MAPS_A_BYTE, remade, unneeded


def cost(units, levels, level, made, weights, again):
    """Of a level's reads, in maps; inf where something that it needs is not there."""
    by_node = {u.node: u for u in units}
    own = [u for u in units if levels[u.node] == level]
    read = {n for u in (*own, *(by_node[m] for m in made)) for n in (*u.reads, *u.arguments)}
    read -= {u.node for u in own} | made
    total = sum(max(again[m], 1) for m in made)
    for n in read:
        elsewhere = {levels[u.node] for u in units if n in u.reads} - {levels.get(n), level}
        alone = n in again and not elsewhere and not by_node[n].returned
        total += MAPS_A_BYTE * weights[n] * (2 if alone else 1)
    return total


@pytest.mark.parametrize("seed", range(80))
def test_no_choice_moves_fewer_bytes(seed):
    rng = random.Random(seed)
    units, weights = random_units(rng, 10, 0.3)
    levels = settled(units, first_levels(units), weights)
    again = {u.node: rng.randint(1, 40) for u in units if u.covered and rng.random() < 0.8}
    sizes = {**weights, **{u.node: u.nbytes for u in units}}
    covered = sorted({levels[u.node] for u in units if u.covered})
    if len(covered) < 2:
        return
    level = covered[1]
    before = [u.node for u in units if levels[u.node] < level and u.node in again]
    tried = chain.from_iterable(combinations(before, k) for k in range(len(before) + 1))
    best = min(cost(units, levels, level, set(t), sizes, again) for t in tried)
    made = remade(units, levels, weights, again).get(level, set())
    assert made <= set(before) and cost(units, levels, level, made, sizes, again) == best


@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_is_read_is_missing(seed):
    rng = random.Random(1000 + seed)
    units, weights = random_units(rng, 30, 0.3)
    levels = settled(units, first_levels(units), weights)
    copies = remade(units, levels, weights, {u.node: rng.randint(1, 20) for u in units if u.covered})
    gone = unneeded(units, levels, copies)
    made = {(u.node, levels[u.node]) for u in units if u.node not in gone}
    made |= {(n, at) for at, nodes in copies.items() for n in nodes}
    by_node = {u.node: u for u in units}
    for n, at in made:
        for i in by_node[n].reads:
            assert (i, at) in made or (levels[i] < at and i not in gone)
    assert not any(by_node[n].returned or by_node[n].fixed for n in gone)


def outer(x, y):
    z = (x[:, None] - y).exp() * 2
    low, _ = z.sort(-1)
    return (low * z).sum(-1)


def graph(device: str) -> torch.fx.GraphModule:
    if device == "cpu":
        return make_fx(outer, tracing_mode="fake")(torch.empty(64), torch.empty(128))
    return on_gpu(outer, (64,), (128,), dtype=torch.float32)


def test_what_is_made_of_vectors_does_not_cross():
    """On a GPU, where a wide tensor in memory costs more than its maps."""
    gm = graph("cuda")
    first, _, last = partition(gm).groups
    assert {n.name for n in extract(gm, last).inputs} & {n.name for n in first.nodes} == set()
    cpu = graph("cpu")
    first, _, last = partition(cpu).groups
    assert {n.name for n in extract(cpu, last).inputs} & {n.name for n in first.nodes} == {"mul"}


def test_the_copies_compute_the_same():
    gm = graph("cuda")
    x, y = torch.randn(64), torch.randn(128)
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), (x, y), strict=True))
    for g in partition(gm).groups:
        part = extract(gm, g)
        values.update(zip(part.results, part.module(*(values[n] for n in part.inputs)), strict=True))
    (result,) = gm.graph.output_node().all_input_nodes
    torch.testing.assert_close(values[result], outer(x, y), rtol=0, atol=0)
