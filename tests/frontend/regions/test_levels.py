"""Levels of random graphs: legal, and between two levels no choice moves fewer bytes (all are tried)."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from tilefold.frontend.regions.levels import Unit, earliest, settled


def random_units(rng: random.Random, n: int, uncovered: float) -> tuple[list[Unit], dict[str, int]]:
    """Units named by numbers, and the bytes of the arguments that they read."""
    weights = {f"a{k}": rng.randint(1, 9) for k in range(3)}
    units: list[Unit] = []
    for k in range(n):
        reads = tuple(u.node for u in units if rng.random() < 1.5 / n)
        given = tuple(a for a in weights if rng.random() < 0.3)
        covered = rng.random() >= uncovered
        fixed, returned = rng.random() < 0.1, rng.random() < 0.1
        units.append(Unit(f"u{k}", covered, reads, given, -1, 1 - covered, rng.randint(1, 9), fixed, returned))
    return units, weights


def first_levels(units):
    levels = {}
    for u in units:
        levels[u.node] = earliest(u, levels)
    return levels


def moved(units, levels, level, early, weights):
    """Bytes between a level and the next of its kind, if the units `early` stay in it; inf where that cannot be."""
    here = {u.node: u for u in units if levels[u.node] == level}
    users = {u.node: [v for v in units if u.node in v.reads] for u in units}
    for name, u in here.items():
        late = name not in early
        if late and (u.fixed or any(levels[v.node] == level + 1 or v.node in early for v in users[name])):
            return float("inf")
    total = 0
    for name in early:
        if any(v.node not in early for v in users[name] if levels[v.node] == level or levels[v.node] >= level + 2):
            written = here[name].returned or any(levels[v.node] == level + 1 for v in users[name])
            total += here[name].nbytes * (1 if written else 2)
    sizes = {**weights, **{u.node: u.nbytes for u in units}}
    for given in {g for u in here.values() for g in (*u.reads, *u.arguments)} - set(here):
        readers = [v for v in units if given in (*v.reads, *v.arguments)]
        first = any(v.node in early for v in readers)
        if first and any((v.node in here and v.node not in early) or levels[v.node] == level + 2 for v in readers):
            total += sizes[given]
    return total


@pytest.mark.parametrize("seed", range(100))
def test_no_choice_moves_fewer_bytes(seed):
    units, weights = random_units(random.Random(seed), 9, 0.25)
    levels = first_levels(units)
    here = [u.node for u in units if levels[u.node] == 0]
    early = {n for n, level in settled(units, levels, weights).items() if level == 0}
    if max(levels.values()) > 1:
        tried = chain.from_iterable(combinations(here, k) for k in range(len(here) + 1))
        best = min(moved(units, levels, 0, set(t), weights) for t in tried)
        assert moved(units, levels, 0, early, weights) == best < float("inf")
    else:
        assert early == set(here)


@pytest.mark.parametrize("seed", range(60))
def test_levels_stay_legal(seed):
    units, weights = random_units(random.Random(1000 + seed), 30, 0.3)
    first = first_levels(units)
    found = settled(units, first, weights)
    for u in units:
        assert found[u.node] % 2 == (0 if u.covered else 1) and found[u.node] >= first[u.node]
        assert found[u.node] == first[u.node] or not u.fixed
        assert all(found[r] <= found[u.node] for r in u.reads)
    assert len(set(found.values())) <= len(set(first.values()))


def test_the_latest_of_equal_choices_is_taken():
    """Nothing is gained by an early region that only hands arguments' values on."""
    units = [
        Unit("sort", False, (), ("a",), -1, 1, 8, False, False),
        Unit("exp", True, (), ("b",), -1, 0, 8, False, False),
        Unit("mul", True, ("sort", "exp"), (), -1, 0, 8, False, True),
    ]
    assert settled(units, first_levels(units), {"a": 8, "b": 8}) == {"sort": 1, "exp": 2, "mul": 2}


def test_what_a_size_is_read_off_stays():
    units = [
        Unit("sort", False, (), ("a",), -1, 1, 8, False, False),
        Unit("exp", True, (), ("b",), -1, 0, 8, True, False),
        Unit("mul", True, ("sort", "exp"), (), -1, 0, 8, False, True),
    ]
    assert settled(units, first_levels(units), {"a": 8, "b": 8})["exp"] == 0


def test_what_waits_for_no_region_comes_before_all():
    units = [
        Unit("rand", False, (), (), -1, -3, 8, False, False),
        Unit("sort", False, ("rand",), ("a",), -1, -1, 8, False, False),
        Unit("mul", True, ("sort",), (), -1, 0, 8, False, True),
        Unit("late", False, ("mul",), (), -1, -1, 8, False, True),
        Unit("sized", True, (), (), 3, 0, 8, False, True),
    ]
    assert first_levels(units) == {"rand": -3, "sort": -1, "mul": 0, "late": 1, "sized": 4}
