"""Where generated lines go: nested scopes, so that what does not vary in a loop stands before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilefold.algebra.expr import Expr
from tilefold.backends.triton.reads_first import reads_first
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


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that must hold, of that shape, in lanes of elements ("True": in all)."""

    name: str
    lanes: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Scope:
    """One nesting level. `names` caches what was computed here: code -> variable. `late`: lines for its end. `checks`:
    what must hold at its end. `branch`: what is needed in it is computed in it, whatever it varies with. `reads`: what
    inputs are loaded as, and its registers a thread."""

    depth: int
    branch: bool = False
    lines: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)

    def nested(self) -> Scope:
        """A scope whose lines are of this one, and that knows no names."""
        return Scope(0, False, self.lines, self.late, self.checks)

    def together(self) -> dict[tuple[int, ...], tuple[str, str]]:
        """The conditions of each shape as one, and lanes of elements."""
        found: dict[tuple[int, ...], tuple[str, str]] = {}
        for shape in dict.fromkeys(x.shape for x in self.checks):
            each = list(dict.fromkeys((x.name, x.lanes) for x in self.checks if x.shape == shape))
            lanes = {n for _, n in each}
            if len(lanes) == 1:
                found[shape] = " & ".join(n for n, _ in each), lanes.pop()
            else:
                found[shape] = " & ".join(n if some == "True" else f"({n} | ~({some}))" for n, some in each), "True"
        return found

    def ended(self) -> list[str]:
        """Its lines, and at the end what must hold: one assertion a shape. Each is a call, around which the assembler
        keeps what registers have, and a barrier."""
        lines = reads_first(self.lines, self.reads) if self.reads else self.lines
        return [*lines, *self.late, *(f"tf_exist({code}, {lanes})" for code, lanes in self.together().values())]


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
        name, scope = self._defined(code, stem, level)
        if scope is not None and late:
            scope.late.append(late.format(name))
        return name

    def read(self, code: str, stem: str, level: int, registers: float) -> str:
        """The same of what is loaded of an input, of so many registers a thread (`reads_first`)."""
        name, scope = self._defined(code, stem, level)
        if scope is not None:
            scope.reads[name] = registers
        return name

    def checked(self, code: str, stem: str, level: int, lanes: str, shape: tuple[int, ...]) -> str:
        """The same of a condition that must hold in these lanes: where it does not the device stops, behind what is
        read and computed meanwhile."""
        name, scope = self._defined(code, stem, level)
        if scope is not None:
            scope.checks.append(Check(name, lanes, shape))
        return name

    def _defined(self, code: str, stem: str, level: int) -> tuple[str, Scope | None]:
        """A variable that holds `code`, and the scope that it is defined in now."""
        level = max([level, *(n for n, s in enumerate(self.stack) if s.branch)])
        for s in self.stack[: level + 1]:
            if code in s.names:
                return s.names[code], None
        name = self.fresh(stem)
        self.stack[level].lines.append(f"{name} = {code}")
        self.stack[level].names[code] = name
        return name, self.stack[level]

    def forget(self, prefix: str) -> None:
        """Drop cached code that mentions a variable about to change."""
        for s in self.stack:
            for code in [c for c in s.names if prefix in c]:
                del s.names[code]

    def open(self, *, branch: bool = False) -> None:
        self.stack.append(Scope(self.here + 1, branch))

    def close(self, header: str | None, *, loop: bool = False) -> None:
        """End the innermost scope; its lines go under `header` in the enclosing one (None: inline). loop: what must
        hold is kept in a variable, and asserted behind the loop."""
        done = self.stack.pop()
        if header is None:
            self.stack[-1].lines += done.lines
            self.stack[-1].late += done.late
            self.stack[-1].checks += done.checks
            self.stack[-1].reads |= done.reads
            return
        if loop:
            for shape, (code, lanes) in done.together().items():
                name = self.fresh("exist")
                self.stack[-1].lines.append(f"{name} = tl.full([{', '.join(map(str, shape))}], True, tl.int1)")
                some = code if lanes == "True" else f"(({code}) | ~({lanes}))"
                done.lines.append(f"{name} = {name} & {some}")
                self.stack[-1].checks.append(Check(name, "True", shape))
            done.checks.clear()
        self.stack[-1].lines.append(header)
        self.stack[-1].lines += ["    " + line for line in done.ended() or ["pass"]]

    def finished(self) -> list[str]:
        """The outermost scope, all others having been closed."""
        return self.stack[0].ended()


@dataclass(slots=True)
class Known:
    """What holds here: buffers that are kept without a constant factor, conditions that are settled."""

    scales: dict[str, float] = field(default_factory=dict)
    facts: dict[Expr, bool] = field(default_factory=dict)
