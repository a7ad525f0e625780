"""The order of a program's steps in which least memory is alive at the worst moment.

A program's order is one of many: of a layer's two gradients, that of its input is wanted next and that of its weight at
the end. Whichever is last frees what both read. Here a step moves if that is less at the worst moment: one whose
results wait there to be read goes to where they are first read, one that reads something there for the last time
comes before it.

What is known of sizes is their estimates. Arguments may be the caller's to keep or, as a backward's are, the
program's to let go: a move is taken only if it is less where they go and no more where they stay. The step that reads
an argument last, and makes as large a value, may write over it (`runtime.reuse`): it stays the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tilefold.runtime.arena import Lifetime, peak
from tilefold.runtime.step import Step

#: Moves at most, each of which is looked for among all steps.
MOST = 16
#: Of the bytes alive at the worst moment, what a move must save: neighbours in the program's order find in a cache what
#: the one before them read.
WORTH = 1 / 256


def of_least_memory(steps: Sequence[Step], sizes: Mapping[str, int], outputs: Collection[str]) -> list[Step]:
    """The steps in such an order. sizes: bytes of values, by name; of those without, nothing is known. outputs: values
    that are kept to the end."""
    found, least, over = list(steps), _alive(steps, sizes, outputs), _written_over(steps, sizes)
    for _ in range(MOST):
        orders = (order for order in _moved(found, sizes, outputs) if over.items() <= _last(order).items())
        tried = ((_alive(order, sizes, outputs), order) for order in orders)
        worth = least[0] * (1 - WORTH)
        better = [(alive, order) for alive, order in tried if alive[0] <= worth and alive[1] <= least[1]]
        if not better:
            break
        least, found = min(better, key=lambda b: b[0])
    return found


def _moved(steps: list[Step], sizes: Mapping[str, int], outputs: Collection[str]) -> Iterator[list[Step]]:
    """Orders in which one step has moved that has to do with the worst moment."""
    lives = _lifetimes(steps, outputs)
    alive = [n for n in lives if n in sizes]
    worst = max(range(len(steps)), key=lambda at: sum(sizes[n] for n in alive if lives[n][0] <= at <= lives[n][1]))
    made = {n: at for at, s in enumerate(steps) for n, _, _ in s.results}
    read = dict[str, int]()  # the first that reads a value
    for at, s in enumerate(steps):
        for n in s.reads:
            read.setdefault(n, at)
    for at, s in enumerate(steps):
        if not s.results:  # a check: it stays where it stands
            continue
        if at <= worst:
            later = min((read.get(n, len(steps)) for n, _, _ in s.results), default=len(steps))
            if later > max(worst, at + 1):
                yield [*steps[:at], *steps[at + 1 : later], s, *steps[later:]]
        elif any(lives[n] == (lives[n][0], at) and lives[n][0] <= worst for n in s.reads if n in sizes):
            first = max((made[n] + 1 for n in s.reads if n in made), default=0)
            if first <= worst:
                yield [*steps[:worst], s, *steps[worst:at], *steps[at + 1 :]]


def _last(steps: Sequence[Step]) -> dict[str, Step]:
    """The step that reads each value last."""
    return {n: s for s in steps for n in s.reads}


def _written_over(steps: Sequence[Step], sizes: Mapping[str, int]) -> dict[str, Step]:
    """Arguments that the step which reads them last may write over."""
    made = {n for s in steps for n, _, _ in s.results}
    return {
        n: s
        for n, s in _last(steps).items()
        if n not in made and n in sizes and any(sizes.get(r) == sizes[n] for r, _, _ in s.results)
    }


def _alive(steps: Sequence[Step], sizes: Mapping[str, int], outputs: Collection[str]) -> tuple[int, int]:
    """Most bytes alive at once: where arguments go after their last step, and where they stay."""
    lives = _lifetimes(steps, outputs)
    known = {n: sizes[n] for n in lives if n in sizes}
    made = {n for s in steps for n, _, _ in s.results}
    return peak(known, lives), peak({n: b for n, b in known.items() if n in made}, lives)


def _lifetimes(steps: Sequence[Step], outputs: Collection[str]) -> dict[str, Lifetime]:
    """First and last step that has each value; arguments are there from the first on."""
    found: dict[str, Lifetime] = {}
    for at, s in enumerate(steps):
        for n in s.reads:
            found[n] = (found.get(n, (0, 0))[0], at)
        for n, _, _ in s.results:
            found[n] = (at, at)
    return {n: (first, len(steps) if n in outputs else last) for n, (first, last) in found.items()}
