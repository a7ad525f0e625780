"""Orders of steps in which least memory is alive."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch

from tilefold.plan.sequence import (
    Run,
    _Alive,
    _last,
    _lifetimes,
    _moved,
    _moves,
    _Read,
    _written_over,
    alive_at,
    of_least_memory,
)
from tilefold.runtime.arena import peak


def step(text):
    """A step that makes the names behind "->" of those before."""
    reads, makes = text.split("->")
    return Run(text, tuple(reads.split()), tuple(makes.split()))


def ordered(*texts, outputs, **sizes):
    found = of_least_memory([step(t) for t in texts], sizes, outputs)
    assert sorted(s.of for s in found) == sorted(texts)
    there = {n for t in texts for n in t.split("->")[0].split()} - {n for t in texts for n in t.split("->")[1].split()}
    for s in found:
        assert set(s.reads) <= there, found
        there |= {*s.makes}
    return [s.of for s in found]


def test_the_gradient_of_a_weight_comes_before_that_of_its_input_which_is_wanted_later():
    steps = ["loss -> grad", "grad w -> dx", "grad h -> dw", "dx -> dh"]
    found = ordered(*steps, outputs=("dw", "dh"), loss=1, grad=1000, w=5, dx=100, h=100, dw=700, dh=100)
    assert found.index("grad h -> dw") < found.index("grad w -> dx")


def test_what_changes_nothing_stays_as_it_is():
    steps = ["a -> b", "b -> c", "a -> d", "c d -> e"]
    assert ordered(*steps, outputs=("e",), a=8, b=8, c=8, d=8, e=8) == steps


def test_a_few_bytes_are_no_reason():
    steps = ["loss -> grad", "grad w -> dx", "grad h -> dw", "dx -> dh"]
    assert ordered(*steps, outputs=("dw", "dh"), loss=9, grad=10**6, w=5, dx=100, h=100, dw=700, dh=100) == steps


def test_no_move_is_taken_that_takes_more_where_arguments_stay():
    # first "b -> small" would let go of b, if it were the program's, and keep what it makes
    steps = ["a -> big", "big -> c", "b -> small", "small c -> d"]
    assert ordered(*steps, outputs=("d",), a=1, b=60, big=100, c=1, small=50, d=1) == steps


def test_what_may_be_written_over_an_argument_stays_its_last_reader():
    steps = ["p -> double", "p g -> next"]
    assert ordered(*steps, outputs=("double", "next"), p=8, g=8, double=8, next=8) == steps
    assert ordered(*steps, outputs=("double", "next"), p=8, g=8, double=4, next=4) != steps


def test_checks_stay_where_they_stand():
    steps = ["a ->", "a -> b", "b -> c", "a c -> d"]
    assert ordered(*steps, outputs=("d",), a=90, b=9, c=9, d=1)[0] == "a ->"


@pytest.mark.parametrize("seed", range(20))
def test_it_is_near_the_best_order_of_a_few_steps(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(high):
        return int(torch.randint(1, high, (), generator=draw))

    names, texts = ["x0", "x1"], []
    for n in range(6):
        reads = {names[number(len(names) + 1) - 1] for _ in range(2)}
        texts.append(f"{' '.join(sorted(reads))} -> y{n}")
        names.append(f"y{n}")
    sizes = {n: number(100) for n in names}

    def worst(order):
        lives = _lifetimes([step(t) for t in order], ("y5",))
        return peak({n: sizes[n] for n in lives}, lives)

    def runs(order):
        there = {"x0", "x1"}
        for t in order:
            if not set(t.split("->")[0].split()) <= there:
                return False
            there.add(t.split("-> ")[1])
        return True

    assert worst(ordered(*texts, outputs=("y5",), **sizes)) <= worst(texts)
    least = min(worst(o) for o in permutations(texts) if runs(o))
    assert worst(ordered(*texts, outputs=("y5",), **sizes)) <= 1.5 * least


@pytest.mark.parametrize("seed", range(60))
def test_what_a_move_makes_of_the_peak_is_what_the_moved_order_has(seed):
    """Of random programs: values read many times, read never, kept, of unknown size, read and checked."""
    rng = random.Random(seed)
    arguments, texts, there = ["p", "q", "r"], [], ["p", "q", "r"]
    for k in range(rng.randrange(3, 14)):
        reads = rng.sample(there, min(len(there), rng.randrange(4)))
        results = [f"v{k}_{m}" for m in range(rng.choice((0, 1, 1, 1, 2)))]
        texts.append(f"{' '.join(reads)} -> {' '.join(results)}")
        there += results
    sizes = {n: rng.choice((0, 1, 7, 50, 64)) for n in there if rng.random() < 0.9}
    steps, outputs = [step(t) for t in texts], [n for n in there if n not in arguments and rng.random() < 0.2]
    made = {n for n in there if n not in arguments}
    over = _written_over(steps, sizes)
    read = _Read.of(steps, outputs)
    for known in (sizes, {n: b for n, b in sizes.items() if n in made}):
        alive = _Alive.of(read, known)
        assert alive.most == most(steps, known, outputs) == max(alive_at(steps, known, outputs))
        for move in _moves(read, alive):
            order = _moved(steps, move)
            assert alive.after(move) == most(order, known, outputs), (texts, move)
            assert read.last_after(move, over) == all(_last(order)[n] is _last(steps)[n] for n in over), (texts, move)


def most(steps, sizes, outputs):
    lives = _lifetimes(steps, outputs)
    return peak({n: b for n, b in sizes.items() if n in lives}, lives)
