"""Registers and shared memory of groups of warps that own rows (`row_roles`), and the shapes that fit them.

One arithmetic for two questions: whether the roles of a kernel fit, and which groups, tiles and stages of the ring a
kernel of such columns should have (`row_tiles`). Numbers are of Hopper: a multiprocessor has 65,536 registers, of which
`setmaxnreg` deals multiples of 8 a thread, and a thread block 227 KB of shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilefold.backends.triton.config import SHARED
from tilefold.backends.triton.gluon_text import INSTRUCTION
from tilefold.backends.triton.parts import BARRIERS, ROWS, STREAMED
from tilefold.tile.pieces import MATRIX_UNIT, lengths, power_of_two

#: Columns of a part: a matrix instruction's fewest here, and what fits the registers of four warps.
LEAST_COLUMNS, MOST_COLUMNS = MATRIX_UNIT, 256
#: Registers of a thread of a group, by the number of groups: what `setmaxnreg` leaves them.
REGISTERS = {2: 240, 3: 160}
#: Of these, what is not there for states and scores: addresses, row values, exponents on their way.
OTHER = 24
#: Of two elements that draw random numbers: the numbers, and counters on their way. Results of several products are in
#: registers beside them; with one, they are drawn while little else is.
DRAWN = 3
#: Bytes of an operand's element.
NARROW = 2
#: Threads of a group.
THREADS = 128
#: Bytes of the ring beyond which nothing was gained, and stages that it has at least and at most.
RING, LEAST_STAGES, MOST_STAGES = 128 << 10, 2, 6


@dataclass(frozen=True, slots=True)
class Room:
    """What a thread block holds: columns of each group's rows, of the streamed parts, of the states and of the results
    that leave by tensor map; numbers of results of the lift, of operands of merges. early: of the parts' columns, those
    that lifts alone read. draws: a tile draws a random number for each element. planes: bytes
    of an element of what copies bring for each row and streamed index."""

    rows: Sequence[int]
    parts: Sequence[int]
    states: Sequence[int]
    stored: Sequence[int]
    lifted: int = 1
    made: int = 1
    early: int = 0
    draws: bool = False
    planes: Sequence[int] = ()

    def registers(self, tile: int, *, behind: bool = True) -> int:
        """Of a thread: states, results of the lifts, operands of the merges, and the rest. behind: as of `RowRoles`;
        else the last operand takes the place of what it is made of."""
        each = tile * ROWS // THREADS
        made = self.made * each // 2 - (0 if behind else each // 2)
        drawn = DRAWN * each // 2 if self.draws and self.lifted > 1 else 0
        return sum(self.states) * ROWS // THREADS + self.lifted * each + made + drawn + OTHER

    def shared(self, tile: int, groups: int, stages: int, *, single: bool = False) -> int:
        """Bytes of a thread block. single: of `RowRoles`."""
        own = (sum(self.rows) + sum(self.stored)) * ROWS * groups
        fewer = self.early * tile * (stages - 1) if single else 0
        beside = sum(self.planes) * ROWS * tile * groups * stages
        return (own + self.stage(tile) * stages - fewer) * NARROW + beside + BARRIERS

    def stage(self, tile: int) -> int:
        """Elements of a tile of all streamed parts."""
        return sum(self.parts) * tile


@dataclass(frozen=True, slots=True)
class Form:
    """Groups, streamed indices a tile, stages of the ring."""

    groups: int
    tile: int
    stages: int


def one_of_each(width: int, columns: int) -> Room:
    """Of one lift that contracts `width` columns and one state of `columns`."""
    lanes = tuple(max(LEAST_COLUMNS, power_of_two(n)) for n in lengths(width))
    states = _state(columns)
    return Room(lanes, (*lanes, *states), states, states)


def of_several(lifts: Sequence[tuple[int, bool]], columns: int, *, draws: bool = False) -> Room:
    """Of lifts that contract so many columns and one state of `columns`; whether a merge reads what the lift does.
    draws: as of `Room`."""
    lanes = [_state(n) if merged else lengths(n) for n, merged in lifts]
    rows = [max(LEAST_COLUMNS, power_of_two(n)) for x in lanes for n in x]
    early = sum(n for x, (_, merged) in zip(lanes, lifts, strict=True) for n in x if not merged)
    return Room(rows, rows, _state(columns), (), len(lifts), 1, early, draws)


def _state(columns: int) -> tuple[int, ...]:
    """Columns of a state as registers hold it: padded, or in pieces where it has several instructions anyway."""
    pieces = lengths(columns) if columns > INSTRUCTION else (columns,)
    return pieces if len(pieces) > 1 and pieces[-1] >= LEAST_COLUMNS else (power_of_two(columns),)


def longest(room: Room) -> Form | None:
    """The form of two groups of several lifts and one state: the longest tile, then the most stages.

    A lift's operands are both in shared memory, which brings the rows again for every tile: of 32 streamed indices the
    matrix unit waits for them a third of the time, of 64 it does not.
    """
    for tile in (64, 32):
        if room.registers(tile, behind=False) > REGISTERS[2]:
            continue
        most = min(MOST_STAGES, max(LEAST_STAGES, RING // (room.stage(tile) * NARROW)))
        ways = [(n, single) for single in (False, True) for n in range(most, LEAST_STAGES - 1, -1)]
        for stages, single in ways:
            if room.shared(tile, 2, stages, single=single) <= SHARED:
                return Form(2, tile, stages)
    return None


def widest(room: Room, tiles: Sequence[int] = STREAMED, groups: Sequence[int] = tuple(REGISTERS)) -> Form | None:
    """The form of the longest tile that fits, then of the most groups, then of the most stages; None: there is none.

    Long tiles have few barriers and reductions of a row for each score. A result for whose way through shared memory
    there is no room leaves by pointers, once for all of the stream.
    """
    for tile in sorted(tiles, reverse=True):
        for count in sorted(groups, reverse=True):
            if room.registers(tile) > REGISTERS[count]:
                continue
            for r in (room, replace(room, stored=())):
                stages = min(MOST_STAGES, max(LEAST_STAGES, RING // (r.stage(tile) * NARROW)))
                found = next(
                    (n for n in range(stages, LEAST_STAGES - 1, -1) if r.shared(tile, count, n) <= SHARED), None
                )
                if found is not None:
                    return Form(count, tile, found)
    return None
