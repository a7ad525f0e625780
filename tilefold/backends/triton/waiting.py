"""Stores that wait until what stands behind them has been read.

No compiler moves a load over a store to memory that may be the same, and a store waits for what it writes: a recurrence
that is written out and stores each state waits for memory once a step. Its states, as values, are stored behind the
loads of all steps, or of as many as fit registers, so that these wait together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilefold.algebra.expr import loads
from tilefold.tile.ir import For, Gemm, Kernel, Map, Reduce, Select, Stmt, Store

#: Elements a thread of values that wait; of one value, where the kernel reduces, and so holds rows.
ROOM, BESIDE_ROWS = 64, 1


@dataclass(slots=True)
class Waiting:
    """The stores of a kernel that may wait, and lines of those that do. emit: where a line goes. fresh: a new name.
    threads: of a thread block."""

    emit: Callable[[str], None]
    fresh: Callable[[str], str]
    threads: int
    stores: frozenset[Store] = frozenset()
    most: int = ROOM
    lines: list[str] = field(default_factory=list)
    held: float = 0.0

    def begin(self, kernel: Kernel) -> None:
        """Of this kernel."""
        self.stores = early(kernel)
        self.most = BESIDE_ROWS if any(isinstance(s, Reduce) for s in kernel.body) else ROOM

    def put(self, s: Store, code: str, elements: int, line: Callable[[str], str], *, now: bool = False) -> None:
        """A store of `code`, of so many elements: now, or later what is computed now. line: it, of a value."""
        each = elements / self.threads
        if now or s not in self.stores or each > self.most:
            self.emit(line(code))
            return
        if self.held + each > ROOM:
            self.end()
        value = self.fresh(f"y_{len(self.lines)}")
        self.emit(f"{value} = {code}")
        self.lines.append(line(value))
        self.held += each

    def end(self) -> None:
        """The stores that wait, here."""
        for line in self.lines:
            self.emit(line)
        self.lines.clear()
        self.held = 0.0


def early(kernel: Kernel) -> frozenset[Store]:
    """Stores of a kernel without loops behind which it reads what it did not before, and nothing that it writes."""
    body = kernel.body
    written = {s.tensor for s in body if isinstance(s, Store)}
    if any(isinstance(s, For | Gemm | Select) for s in body) or any(written & _tensors(s) for s in body):
        return frozenset()
    found, behind = set[Store](), False
    first = _first_reads(body)
    for n in range(len(body) - 1, -1, -1):
        s = body[n]
        if isinstance(s, Store) and behind and not s.added:
            found.add(s)
        behind = behind or n in first
    return frozenset(found)


def _first_reads(body: Sequence[Stmt]) -> set[int]:
    """Statements that read an element of memory that none before them does."""
    local = {s.buf for s in body if isinstance(s, Map | Reduce)}
    seen, found = set[object](), set[int]()
    for n, s in enumerate(body):
        if isinstance(s, Map | Reduce | Store):
            new = {ld for ld in loads(s.expr) if ld.tensor not in local} - seen
            found |= {n} if new else set()
            seen |= new
    return found


def _tensors(s: Stmt) -> set[str]:
    return {ld.tensor for ld in loads(s.expr)} if isinstance(s, Map | Reduce | Store) else set()
