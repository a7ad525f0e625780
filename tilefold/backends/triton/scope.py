"""Where generated lines go: nested scopes, so that what does not vary in a loop stands before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilefold.algebra.expr import Expr
from tilefold.names import fresh


@dataclass(slots=True)
class Dim:
    """The range of a dim that is current: vector `r + base` of `lanes` indices, or the scalar base.

    `tile` indices belong to the range (fewer than lanes where a tensor core wants more rows);
    `stop`: code that bounds the valid indices, None where all lanes are valid. `even`: the base is a multiple of the
    tile (a segment's first tile begins anywhere).
    """

    name: str
    base: str
    lanes: int
    tile: int
    level: int
    stop: str | None = None
    even: bool = True

    @property
    def vector(self) -> bool:
        return self.lanes > 1


@dataclass(slots=True)
class Scope:
    """One nesting level. `names` caches what was computed here: code -> variable. `late`: lines for its end. `branch`:
    what is needed in it is computed in it, whatever it varies with."""

    depth: int
    branch: bool = False
    lines: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def nested(self) -> Scope:
        """A scope whose lines are of this one, and that knows no names."""
        return Scope(0, False, self.lines, self.late)


class Scopes:
    """The stack of open scopes."""

    def __init__(self) -> None:
        self.stack = [Scope(0)]
        self.used: set[str] = set()

    @property
    def here(self) -> int:
        return len(self.stack) - 1

    def emit(self, line: str, level: int | None = None) -> None:
        self.stack[self.here if level is None else level].lines.append(line)

    def fresh(self, stem: str) -> str:
        """A name not given before: the second `x_a` must not be the first `x_a_1`."""
        return fresh(stem, self.used)

    def once(self, code: str, stem: str, level: int, late: str = "") -> str:
        """A variable that holds `code`, defined at `level` unless it is already known there or further out.

        late: a line about the variable, {}, for the end of that level: what must not stand between loads."""
        level = max([level, *(n for n, s in enumerate(self.stack) if s.branch)])
        for s in self.stack[: level + 1]:
            if code in s.names:
                return s.names[code]
        name = self.fresh(stem)
        self.stack[level].lines.append(f"{name} = {code}")
        self.stack[level].names[code] = name
        if late:
            self.stack[level].late.append(late.format(name))
        return name

    def forget(self, prefix: str) -> None:
        """Drop cached code that mentions a variable about to change."""
        for s in self.stack:
            for code in [c for c in s.names if prefix in c]:
                del s.names[code]

    def open(self, *, branch: bool = False) -> None:
        self.stack.append(Scope(self.here + 1, branch))

    def close(self, header: str | None) -> None:
        """End the innermost scope; its lines go under `header` in the enclosing one (None: inline)."""
        done = self.stack.pop()
        if header is None:
            self.stack[-1].lines += done.lines
            self.stack[-1].late += done.late
            return
        self.stack[-1].lines.append(header)
        self.stack[-1].lines += ["    " + line for line in [*done.lines, *done.late] or ["pass"]]

    def finished(self) -> list[str]:
        """The outermost scope, all others having been closed."""
        return [*self.stack[0].lines, *self.stack[0].late]


@dataclass(slots=True)
class Known:
    """What holds here: buffers that are kept without a constant factor, conditions that are settled."""

    scales: dict[str, float] = field(default_factory=dict)
    facts: dict[Expr, bool] = field(default_factory=dict)
