"""Selection against trying everything, on random DAGs with random costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.plan.graphs import brute_force, random_dag, random_problem
from tilefold.errors import PlanError
from tilefold.plan import select as module
from tilefold.plan.dag import Dag, bits, connected
from tilefold.plan.lattice import Lattice
from tilefold.plan.problem import Problem, Variant
from tilefold.plan.select import is_chain, select


@pytest.mark.parametrize("seed", range(60))
def test_the_best_partition_is_found(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, rng.randint(1, 7))
    found = select(p)
    assert found.seconds == pytest.approx(brute_force(p))
    assert is_chain(p.dag, [k.members for k in found.kernels])


@pytest.mark.parametrize("n", [8, 9])
def test_larger_graphs(n: int) -> None:
    for seed in range(2):
        p = random_problem(random.Random(100 * n + seed), n)
        assert select(p).seconds == pytest.approx(brute_force(p))


def test_ten_operators() -> None:
    p = random_problem(random.Random(7), 10)
    assert select(p).seconds == pytest.approx(brute_force(p))


def looked_at(names: list[str], producers: dict[str, list[str]], links: dict[str, list[str]]) -> int:
    """Sets that the search asks about, of a graph whose kernels all cost the same."""
    dag, asked = Dag.of(names, producers), set()
    joined = [0] * len(names)
    for a, others in links.items():
        for b in others:
            joined[names.index(a)] |= 1 << names.index(b)
            joined[names.index(b)] |= 1 << names.index(a)

    def hopeless(s: int) -> bool:
        asked.add(s)
        return False

    select(Problem(dag, tuple(joined), lambda s: 1.0, lambda s: [Variant(1.0)], hopeless=hopeless))
    return len(asked)


def test_parts_that_do_not_meet_are_looked_at_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{c}{k}" for c in "abc" for k in range(4)]
    before = {n: [f"{n[0]}{int(n[1]) - 1}"] for n in names if n[1] != "0"}
    searched = []
    sets = Lattice._sets
    monkeypatch.setattr(Lattice, "_sets", lambda self, part: searched.append(part) or sets(self, part))
    # a stretch of each chain that begins anywhere; the last operator of a chain alone can only be a kernel by itself
    assert looked_at(names, before, before) == 3 * (4 + 3 + 2)
    assert len(searched) == len(set(searched)) == 3 * 3  # what is left of a chain, not each of the 5 ** 3 ideals


@pytest.mark.parametrize("seed", range(25))
def test_with_shapes_of_cut_tensors(seed: int) -> None:
    rng = random.Random(1000 + seed)
    p = random_problem(rng, rng.randint(2, 5), shapes=True)
    assert select(p).seconds == pytest.approx(brute_force(p))


def test_only_candidates_of_optimistic_plans_are_priced() -> None:
    p = random_problem(random.Random(3), 9, legal=1.0)
    found = select(p)
    assert 0 < found.priced < found.candidates


def chain(n: int, **more: object) -> Problem:
    """A chain in which a kernel costs 1 and every operator beyond the third in it 2."""
    names = [f"c{k}" for k in range(n)]
    dag = Dag.of(names, {names[k]: [names[k - 1]] for k in range(1, n)})
    links = tuple(a | b for a, b in zip(dag.preds, dag.succs, strict=True))

    def cost(s: int) -> float:
        return 1.0 + 2.0 * max(0, s.bit_count() - 3)

    return Problem(dag, links, cost, lambda s: [Variant(cost(s))], **more)  # type: ignore[arg-type]


def test_a_chain_is_cut_into_threes() -> None:
    found = select(chain(9))
    assert [k.members.bit_count() for k in found.kernels] == [3, 3, 3]
    assert found.seconds == 3.0


def test_the_runner_up_is_the_best_plan_without_the_kernel() -> None:
    p = chain(5)
    found = select(p)
    for k in found.kernels:
        without = Problem(p.dag, p.partners, lambda s, k=k: None if s == k.members else p.bound(s), p.variants)
        assert k.runner_up is not None and k.runner_up & k.members
        assert k.behind == pytest.approx(select(without).seconds - found.seconds)


def test_the_largest_kernel_is_respected() -> None:
    assert [k.members.bit_count() for k in select(chain(6, largest=2)).kernels] == [2, 2, 2]


def test_hopeless_sets_are_not_grown() -> None:
    asked: list[int] = []
    p = chain(6)
    bound = p.bound

    def noted(s: int) -> float | None:
        asked.append(s.bit_count())
        return bound(s)

    select(Problem(p.dag, p.partners, noted, p.variants, hopeless=lambda s: s.bit_count() >= 2))
    assert max(asked) == 2


def test_no_plan_is_an_error() -> None:
    p = chain(3)
    with pytest.raises(PlanError, match="no partition"):
        select(Problem(p.dag, p.partners, lambda s: None if s & 1 else 1.0, p.variants))


def test_too_many_ideals_are_an_error() -> None:
    names = [f"i{k}" for k in range(12)]
    dag = Dag.of(names, {})
    everyone = tuple(dag.everything & ~(1 << k) for k in range(12))
    with pytest.raises(PlanError, match="more than 50 ideals"):
        select(Problem(dag, everyone, lambda s: 1.0, lambda s: [Variant(1.0)], most_ideals=50))
    assert select(Problem(dag, everyone, lambda s: 1.0, lambda s: [Variant(1.0)], most_ideals=5000)).seconds == 1.0


def test_a_node_with_many_readers_is_not_looked_at_with_all_sets_of_them() -> None:
    """2^40 sets hold the node: they are not grown first and counted then."""
    names = ["x", *(f"r{k}" for k in range(40))]
    dag = Dag.of(names, {f"r{k}": ["x"] for k in range(40)})
    links = tuple(a | b for a, b in zip(dag.preds, dag.succs, strict=True))
    found = select(Problem(dag, links, lambda s: 1.0, lambda s: [Variant(1.0)], largest=30, most_sets=2000))
    assert not found.exact and found.seconds == 40.0  # one of them with x: of two there are 2^40 ideals
    few = Dag.of(names[:7], {f"r{k}": ["x"] for k in range(6)})
    links = tuple(a | b for a, b in zip(few.preds, few.succs, strict=True))
    assert select(Problem(few, links, lambda s: 1.0, lambda s: [Variant(1.0)], most_sets=2000)).seconds == 1.0


def test_pairs_of_sinks_do_not_multiply_the_ideals() -> None:
    """A chain; each of its nodes feeds two sinks that may share a kernel with each other and with the node: gradients
    of biases. What links them to the chain is done when they wait: 3^12 ideals, of which a line remains."""
    n = 12
    names = [f"{kind}{k}" for k in range(n) for kind in "cab"]
    producers = {f"c{k}": [f"c{k - 1}"] for k in range(1, n)} | {
        f"{kind}{k}": [f"c{k}"] for k in range(n) for kind in "ab"
    }
    dag = Dag.of(names, producers)
    links = [a | b for a, b in zip(dag.preds, dag.succs, strict=True)]
    for k in range(n):
        links[3 * k + 1] |= 1 << 3 * k + 2
        links[3 * k + 2] |= 1 << 3 * k + 1

    def bound(s: int) -> float | None:
        return {1: 1.0, 2: 1.0, 3: 1.5}.get(s.bit_count())

    found = select(Problem(dag, tuple(links), bound, lambda s: [Variant(bound(s) or 0.0)], largest=10))
    assert found.ideals < 20 * n and found.exact and found.seconds == 1.5 * n


def test_forced_kernels_do_not_multiply_the_ideals() -> None:
    """Twenty sinks without partners beside a chain: 2^20 ideals, of which a line remains."""
    names = [f"c{k}" for k in range(20)] + [f"w{k}" for k in range(20)]
    producers = {f"c{k}": [f"c{k - 1}"] for k in range(1, 20)} | {f"w{k}": [f"c{k}"] for k in range(20)}
    dag = Dag.of(names, producers)
    links = [0] * 40
    for k in range(1, 20):
        links[k] |= 1 << (k - 1)
        links[k - 1] |= 1 << k
    p = Problem(dag, tuple(links), lambda s: 1.0, lambda s: [Variant(1.0)], largest=4)
    found = select(p)
    assert found.ideals < 100 and found.seconds == 25.0


@pytest.mark.parametrize("seed", range(10))
def test_masks(seed: int) -> None:
    rng = random.Random(seed)
    dag = random_dag(rng, 6)
    below = dag.descendants()
    for s in range(1, 64):
        inside = set(bits(s))
        paths = any(
            below[a] >> m & 1 and below[m] >> b & 1 for a in inside for b in inside for m in set(range(6)) - inside
        )
        assert dag.convex(s) == (not paths)
    links = tuple(a | b for a, b in zip(dag.preds, dag.succs, strict=True))
    assert connected(1, links) and not connected(0, links)


def test_a_producer_after_its_consumer_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not come before"):
        Dag.of(["a", "b"], {"a": ["b"]})


def test_too_many_sets_make_the_kernels_smaller() -> None:
    full, poor = select(chain(9)), select(chain(9, most_sets=20))
    forced = replace(chain(9), partners=(0,) * 9, most_sets=3)  # kernels that need no search are not counted
    assert len(select(forced).kernels) == 9
    assert full.exact and not poor.exact
    assert poor.seconds >= full.seconds
    assert is_chain(chain(9).dag, [k.members for k in poor.kernels])


def test_independent_work_is_tried_in_one_order() -> None:
    """Two long chains that meet at the end: a line of ideals for each, not every pair of places in them."""
    names = [f"{c}{k}" for c in "ab" for k in range(20)] + ["end"]
    producers = {f"{c}{k}": [f"{c}{k - 1}"] for c in "ab" for k in range(1, 20)} | {"end": ["a19", "b19"]}
    dag = Dag.of(names, producers)
    links = tuple(a | b for a, b in zip(dag.preds, dag.succs, strict=True))
    p = Problem(dag, links, lambda s: 1.0, lambda s: [Variant(1.0)], largest=3)
    found = select(p)
    assert found.ideals < 100 and found.seconds == 14.0 and found.exact


@pytest.mark.parametrize("seed", range(40))
def test_the_best_partition_into_small_kernels(seed: int) -> None:
    """Small kernels wait for few others: most orders are left out."""
    rng = random.Random(500 + seed)
    p = random_problem(rng, rng.randint(5, 8))
    most = rng.randint(1, 3)
    small = replace(p, bound=lambda s: p.bound(s) if s.bit_count() <= most else None)
    assert select(replace(p, largest=most)).seconds == pytest.approx(brute_force(small))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ready_after_a_step(seed: int) -> None:
    rng = random.Random(seed)
    dag = random_dag(rng, 8)
    done, ready = 0, dag.ready(0)
    while done != dag.everything:
        step, count = 0, rng.randint(1, 3)
        while count and (free := list(bits(dag.ready(done | step)))):
            step, count = step | 1 << rng.choice(free), count - 1
        done |= step
        ready = dag.ready_after(ready, step, done)
        assert ready == dag.ready(done)


def test_only_the_cheapest_variant_without_shapes_is_kept() -> None:
    a, b, c = Variant(3.0), Variant(1.0), Variant(1.0)
    gives, wants = Variant(5.0, gives={0: "x"}), Variant(9.0, wants={1: "y"})
    kept = module._undominated((a, gives, b, wants, c))
    assert [id(v) for v in kept] == [id(gives), id(b), id(wants)]
    assert module._undominated((gives,)) == (gives,)
    assert module._undominated(()) == ()
