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
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Moves at most, each of which is looked for among all steps.
MOST = 16
#: Of the bytes alive at the worst moment, what a move must save: neighbours in the program's order find in a cache what
#: the one before them read.
WORTH = 1 / 256
#: First and last step that has a value.
Lifetime = tuple[int, int]
#: A step's place, and the place before which it is put.
Move = tuple[int, int]
#: Most bytes alive at once: where arguments go after their last step, and where they stay.
Most = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """A step: what it is, and names of what it reads and makes."""

    of: T
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def of_least_memory(steps: Sequence[Run[T]], sizes: Mapping[str, int], outputs: Collection[str]) -> list[Run[T]]:
    """The steps in such an order. sizes: bytes of values, by name; of those without, nothing is known. outputs: values
    that are kept to the end."""
    found, over = list(steps), _written_over(steps, sizes)
    made = {n for s in steps for n in s.makes}
    kept = {n: b for n, b in sizes.items() if n in made}
    for _ in range(MOST):
        read = _Read.of(found, outputs)
        both = (_Alive.of(read, sizes), _Alive.of(read, kept))
        if not found or not both[0].at:
            break
        least = (both[0].most, both[1].most)
        worth = least[0] * (1 - WORTH)
        best: tuple[Most, Move] | None = None
        for move in _moves(read, both[0]):
            if not read.last_after(move, over):
                continue
            alive = (both[0].after(move), both[1].after(move))
            if alive[0] <= worth and alive[1] <= least[1] and (best is None or alive < best[0]):
                best = alive, move
        if best is None:
            break
        found = _moved(found, best[1])
    return found


def alive_at(steps: Sequence[Run[Any]], sizes: Mapping[str, int], outputs: Collection[str]) -> list[int]:
    """Bytes alive at each step of an order, of values whose sizes are given."""
    return _Alive.of(_Read.of(steps, outputs), sizes).at


def _moved(steps: list[Run[T]], move: Move) -> list[Run[T]]:
    """The steps in the order after a move."""
    at, to = move
    if to > at:
        return [*steps[:at], *steps[at + 1 : to], steps[at], *steps[to:]]
    return [*steps[:to], steps[at], *steps[to:at], *steps[at + 1 :]]


@dataclass(frozen=True, slots=True)
class _Read:
    """Where an order makes and reads values: its steps, those that read each value, in order, lifetimes, and the step
    that makes each."""

    steps: Sequence[Run[Any]]
    readers: dict[str, list[int]]
    lives: dict[str, Lifetime]
    made: dict[str, int]

    @staticmethod
    def of(steps: Sequence[Run[Any]], outputs: Collection[str]) -> _Read:
        readers: dict[str, list[int]] = {}
        for at, s in enumerate(steps):
            for n in dict.fromkeys(s.reads):
                readers.setdefault(n, []).append(at)
        made = {n: at for at, s in enumerate(steps) for n in s.makes}
        return _Read(steps, readers, _lifetimes(steps, outputs), made)

    def last_after(self, move: Move, over: Collection[str]) -> bool:
        """Whether these steps are still the last that read these values."""
        at, to = move
        for n in self.steps[at].reads:
            if n in over:
                rest = [r for r in self.readers[n] if r != at]
                if any(at < r < to for r in rest[-1:]) or (self.readers[n][-1] == at and any(r >= to for r in rest)):
                    return False
        return True


def _moves(read: _Read, alive: _Alive) -> Iterator[Move]:
    """Moves of one step that has to do with the worst moment."""
    steps, worst = read.steps, alive.at.index(alive.most)
    for at, s in enumerate(steps):
        if not s.makes:  # a check: it stays where it stands
            continue
        if at <= worst:
            first = (read.readers[n][0] if n in read.readers else len(steps) for n in s.makes)
            if (later := min(first, default=len(steps))) > max(worst, at + 1):
                yield at, later
            continue
        lives = [read.lives[n] for n in alive.known(s.reads)]
        if any(last == at and first <= worst for first, last in lives) and all(
            read.made[n] < worst for n in s.reads if n in read.made
        ):
            yield at, worst


@dataclass(frozen=True, slots=True)
class _Alive:
    """Bytes alive at each step of an order, and between a step and the one before it (`between`, arguments too), of the
    values whose sizes are given: what a move makes of them follows from the values that the step reads and makes."""

    read: _Read
    sizes: Mapping[str, int]
    at: list[int]
    between: list[int]
    #: the most up to a step, and from a step on
    before: list[int]
    behind: list[int]

    @staticmethod
    def of(read: _Read, sizes: Mapping[str, int]) -> _Alive:
        count = len(read.steps)
        here, across = [0] * (count + 2), [0] * (count + 2)
        for n, (first, last) in read.lives.items():
            size = sizes.get(n, 0)
            here[first] += size
            here[last + 1] -= size
            across[first + 1 if n in read.made else 0] += size
            across[last + 1] -= size
        at, between = list(accumulate(here[:count])), list(accumulate(across[: count + 1]))
        behind = list(accumulate(reversed(at), max))[::-1]
        return _Alive(read, sizes, at, between, list(accumulate(at, max)), behind)

    @property
    def most(self) -> int:
        """Most bytes alive at once."""
        return self.before[-1]

    def known(self, names: Collection[str]) -> list[str]:
        """Names of values whose size is known, each once."""
        return [n for n in dict.fromkeys(names) if n in self.sizes]

    def after(self, move: Move) -> int:
        """Most bytes alive at once after a move."""
        at, to = move
        step, lives = self.read.steps[at], self.read.lives
        results = self.known(step.makes)
        low, high = (at + 1, to) if to > at else (to, at)  # the steps that it passes
        more = [0] * (high - low + 1)
        own = self.between[to]
        if to > at:  # its results are made later, what it reads last waits for it
            more[0] -= sum(self.sizes[n] for n in results if lives[n][1] > at)
            own += sum(self.sizes[n] for n in results if lives[n][1] == at)
            for n in self.known(step.reads):
                if at <= (last := lives[n][1]) < to:
                    more[last + 1 - low] += self.sizes[n]
                    own += self.sizes[n]
        else:  # its results wait, what it reads last goes with those that read it before
            more[0] += sum(self.sizes[n] for n in results if lives[n][1] > at)
            own += sum(self.sizes[n] for n in results)
            for n in self.known(step.reads):
                if lives[n][1] == at:
                    rest = [r for r in self.read.readers[n] if to <= r < at]
                    more[rest[-1] + 1 - low if rest else 0] -= self.sizes[n]
        most = max((a + b for a, b in zip(self.at[low:high], accumulate(more), strict=False)), default=0)
        ends = [self.before[min(at, to) - 1]] if min(at, to) else []
        beyond = to if to > at else at + 1
        return max(most, own, *ends, *self.behind[beyond : beyond + 1])


def _last(steps: Sequence[Run[Any]]) -> dict[str, Run[Any]]:
    """The step that reads each value last."""
    return {n: s for s in steps for n in s.reads}


def _written_over(steps: Sequence[Run[Any]], sizes: Mapping[str, int]) -> set[str]:
    """Arguments that the step which reads them last may write over."""
    made = {n for s in steps for n in s.makes}
    return {
        n
        for n, s in _last(steps).items()
        if n not in made and n in sizes and any(sizes.get(r) == sizes[n] for r in s.makes)
    }


def _lifetimes(steps: Sequence[Run[Any]], outputs: Collection[str]) -> dict[str, Lifetime]:
    """First and last step that has each value; arguments are there from the first on."""
    found: dict[str, Lifetime] = {}
    for at, s in enumerate(steps):
        for n in s.reads:
            found[n] = (found.get(n, (0, 0))[0], at)
        for n in s.makes:
            found[n] = (at, at)
    return {n: (first, len(steps) if n in outputs else last) for n, (first, last) in found.items()}
