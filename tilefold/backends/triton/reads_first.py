"""What a stretch of code reads stands ahead of what its warps wait for one another in.

The assembler moves no load over a barrier, and a reduction across warps has some: what is read behind it waits for
memory once more, when all else has come. Distances of three rows of each other, by four warps, read the third row
behind the first sum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: Registers a thread of what is read ahead, with what is read before it.
ROOM = 96
#: Calls in which warps wait for one another. Not what branches (sines): a map of those waits for arithmetic, and the
#: fewer registers it keeps meanwhile, the more warps it has.
_WAITS = re.compile(r"\btl\.(sum|max|min|reduce|associative_scan|cumsum)\(")
_LEFT = re.compile(r"\w+(, \w+)*")
_NAMES = re.compile(r"[A-Za-z_]\w*")


def reads_first(lines: Sequence[str], reads: Mapping[str, float]) -> list[str]:
    """The lines of a scope: in each stretch without loops and branches, those of `reads` that stand behind a reduction
    and do not follow from one are ahead of it, with what they need. reads: names of what inputs are loaded as, and its
    registers a thread; nothing that is stored changes them."""
    found: list[str] = []
    stretch: list[str] = []
    for line in lines:
        if line.startswith(" ") or line.endswith(":"):
            found += [*_ordered(stretch, reads), line]
            stretch = []
        else:
            stretch.append(line)
    return found + _ordered(stretch, reads)


def _ordered(lines: list[str], reads: Mapping[str, float]) -> list[str]:
    first = next((n for n, line in enumerate(lines) if _WAITS.search(line)), len(lines))
    if not any(reads.keys() & _given(line) for line in lines[first + 1 :]):
        return lines
    stretch = _Stretch(lines, first)
    held = sum(reads.get(name, 0.0) for line in lines[: first + 1] for name in _given(line))
    moved: set[int] = set()
    for n, line in enumerate(lines[first + 1 :], first + 1):
        more = sum(reads.get(name, 0.0) for name in _given(line))
        needed = stretch.needed(n) if more and held + more <= ROOM else None
        if needed is not None:
            held += more
            moved |= needed
    return [
        *lines[:first],
        *(lines[n] for n in sorted(moved)),
        *(line for n, line in enumerate(lines[first:], first) if n not in moved),
    ]


class _Stretch:
    """Lines one after the other, of which the one at `first` is not to be waited for: where names are given, and where
    each is read first."""

    def __init__(self, lines: Sequence[str], first: int):
        self.lines, self.first = lines, first
        self.given: dict[str, list[int]] = {}
        self.read: dict[str, int] = {}
        for n, line in enumerate(lines):
            for name in _asked(line):
                self.read.setdefault(name, n)
            for name in _given(line):
                self.given.setdefault(name, []).append(n)

    def needed(self, n: int) -> set[int] | None:
        """A line and those that it needs, from `first` on; None where one of them cannot stand there: it waits itself,
        or gives another value to what has one."""
        found, left = set[int](), [n]
        while left:
            at = left.pop()
            if at in found:
                continue
            names = _given(self.lines[at])
            if _WAITS.search(self.lines[at]) or len(names) != 1 or not self._once(*names):
                return None
            found.add(at)
            for name in _asked(self.lines[at]):
                places = self.given.get(name, [])
                if any(k > at for k in places):
                    return None
                left += [k for k in places if k >= self.first]
        return found

    def _once(self, name: str) -> bool:
        """Whether a name is given in one place, and read behind it alone."""
        (at, *more) = self.given[name]
        return not more and self.read.get(name, at + 1) > at


def _given(line: str) -> set[str]:
    """Names that a line gives values to."""
    names, equals, _ = line.partition(" = ")
    return set(_NAMES.findall(names)) if equals and _LEFT.fullmatch(names) else set()


def _asked(line: str) -> set[str]:
    """Names that it reads."""
    return set(_NAMES.findall(line.partition(" = ")[2] if _given(line) else line))
