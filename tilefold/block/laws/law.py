"""What a law of schedules is: a rewrite of a named block program that keeps its meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilefold.block.laws.nests import NamedBlock
from tilefold.errors import ScheduleError

#: Arguments of one application: names of values and dims, and numbers.
Args = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Law:
    """`statement`: before = after. `condition`: when that holds; `apply` checks it.

    `apply(program, *args)` raises ScheduleError, which names the dependency that forbids it.
    `candidates(program)` gives arguments worth trying.
    """

    name: str
    statement: str
    condition: str
    apply: Callable[..., NamedBlock]
    candidates: Callable[[NamedBlock], Iterator[Args]]

    def matches(self, b: NamedBlock) -> Iterator[tuple[Args, NamedBlock]]:
        """The applications that are legal, with what comes of each."""
        for args in self.candidates(b):
            try:
                yield args, self.apply(b, *args)
            except ScheduleError:
                continue
