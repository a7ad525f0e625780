"""What one call of a region does, as data that C++ runs (`native/runner.cpp`): instructions over numbered tensors.

    slot         an argument, a constant, memory (in the call's arena, or of its own), a view, a result of the library
    instruction  a kernel, or a function of the library, that reads and writes slots

A tape holds for arguments of the types, extents and strides that it was recorded with (`runtime.recorder`). Its meaning
is that of the Python that was recorded: there is no second interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType

import torch

from tilefold.runtime.arena import Lifetime, aligned, packed, peak


class Kind(IntEnum):
    """What a slot is; the same numbers in `runner.cpp`."""

    ARGUMENT = 0
    CONSTANT = 1
    ARENA = 2
    OWN = 3
    VIEW = 4
    RESULT = 5


class Op(IntEnum):
    """What an instruction does; the same numbers in `runner.cpp`."""

    KERNEL = 0
    LAUNCH = 1
    CALL = 2
    MM = 3
    BMM = 4
    ADDMM = 5
    BADDBMM = 6
    COPY = 7
    CONVOLUTION = 8
    START = 9
    SCALED_MM = 10
    NAMED = 11


#: The stream's place among the arguments of a launch, and that of what is the same in every call.
CURRENT, FIXED = -2, -1
#: In place of a result's slot: None; the first of what is no tensor, and the same in every call (the n-th: GIVEN - n).
NOTHING, GIVEN = -1, -2
#: What an instruction releases when it is the last one that needs the arena.
ARENA = -1


class Is(IntEnum):
    """What a parameter of a kernel that the driver launches is; the same numbers in `driver.h`. An address and a tensor
    map have a place among the instruction's slots."""

    NUMBER = 0
    ADDRESS = 1
    MAP = 2
    COUNTER = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a call. source: an argument's position, or the slot that is viewed. offset: bytes into the arena, or
    elements from the start of `source`. like: what has its type and device; of a constant, itself."""

    kind: Kind
    source: int = -1
    offset: int = 0
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    like: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of memory without gaps before its first or after its last element."""
        assert self.like is not None
        if 0 in self.sizes:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * self.like.itemsize


@dataclass(frozen=True, slots=True)
class Instruction:
    """A step of a call. name: for profilers; where: for errors. slots: read and written tensors, results first.

    numbers, scalars, call and arguments are what the operation needs beside tensors (`runner.cpp`); release: slots that
    nobody needs afterwards.
    """

    op: Op
    name: str
    where: str
    slots: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    scalars: tuple[float, ...] = ()
    call: Callable[..., object] | None = None
    arguments: tuple[object, ...] = ()
    release: tuple[int, ...] = ()

    @property
    def touched(self) -> tuple[int, ...]:
        """Every slot that it needs or makes."""
        if self.op in (Op.LAUNCH, Op.CALL, Op.NAMED):
            return (*self.slots, *[n for n in self.numbers if n >= 0])
        return self.slots


@dataclass(frozen=True, slots=True)
class Tape:
    """A call. outputs: slots, NOTHING, or GIVEN - n for the n-th of `fixed`. arena: its bytes. like: what is on its
    device."""

    slots: tuple[Slot, ...]
    code: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    arena: int
    like: torch.Tensor
    fixed: tuple[object, ...] = ()

    def packed(self) -> tuple[object, ...]:
        """What `add` of the native module takes after the arguments."""
        slots = tuple((int(s.kind), s.source, s.offset, s.sizes, s.strides, s.like) for s in self.slots)
        code = tuple(
            (int(i.op), i.name, i.where, i.slots, i.numbers, i.scalars, i.call, i.arguments, i.release)
            for i in self.code
        )
        return slots, code, self.outputs, self.arena, self.like, self.fixed


def finished(
    slots: Sequence[Slot],
    code: Sequence[Instruction],
    outputs: Sequence[int],
    like: torch.Tensor,
    fixed: Sequence[object] = (),
    results: Mapping[int, int] = MappingProxyType({}),
) -> Tape:
    """The tape with memory given out. What is returned is allocated by itself, when it is first written; all else lies
    in an arena. Where that would take more memory at the worst moment, large values are allocated and freed as the call
    goes on. results: bytes of the slots that the library allocates.
    """
    roots = [_root(slots, n) for n in range(len(slots))]
    lives: dict[int, Lifetime] = {}
    for at, i in enumerate(code):
        for n in i.touched:
            root = roots[n]
            lives[root] = (lives.get(root, (at, at))[0], at)
    kept = {roots[n] for n in outputs if n >= 0}
    made = {n: s for n, s in enumerate(slots) if s.kind is Kind.OWN and n in lives}
    inner = {str(n): s.nbytes for n, s in made.items() if n not in kept and _device(s) == like.device}
    outer = {str(n): s.nbytes for n, s in made.items() if n in kept}
    outer |= {str(n): size for n, size in results.items() if n in lives}
    spans = {n: (lives[int(n)][0], len(code) if int(n) in kept else lives[int(n)][1]) for n in inner | outer}
    offsets, arena, end = _arena(inner, outer, spans)
    given = [
        replace(s, kind=Kind.ARENA, offset=offsets[str(n)]) if str(n) in offsets else s for n, s in enumerate(slots)
    ]
    ends_early = (Kind.OWN, Kind.RESULT, Kind.ARGUMENT, Kind.ARENA)
    freed = {n for n, s in enumerate(given) if s.kind in ends_early and n not in kept}
    release: list[list[int]] = [[] for _ in code]
    for n, root in enumerate(roots):
        if root in freed and root in lives:
            release[lives[root][1]].append(n)
    if offsets:
        release[end].append(ARENA)
    done = tuple(replace(i, release=tuple(r)) for i, r in zip(code, release, strict=True))
    return Tape(tuple(given), done, tuple(outputs), arena, like, tuple(fixed))


#: Bytes that an arena may always have: below it, one allocation instead of many is worth more than memory.
SMALL = 1 << 14


def _arena(
    inner: Mapping[str, int], outer: Mapping[str, int], spans: Mapping[str, Lifetime]
) -> tuple[dict[str, int], int, int]:
    """Offsets of the values that lie in an arena, its bytes and its last step: of all `inner` values, or without the
    largest, until the arena, which is there from its first value to its last, costs no memory at the worst moment.
    outer: what lies in none."""
    inner, outer = ({n: aligned(size) for n, size in x.items()} for x in (inner, outer))
    least = peak({**inner, **outer}, spans)
    most = max(inner.values(), default=0)
    while True:
        inside = {n: size for n, size in inner.items() if size <= most}
        offsets, arena = packed(inside, spans)
        rest = {n: size for n, size in {**inner, **outer}.items() if n not in inside}
        first, last = min((spans[n][0] for n in inside), default=0), max((spans[n][1] for n in inside), default=0)
        if arena <= SMALL or peak({**rest, "": arena}, {**spans, "": (first, last)}) <= least:
            return offsets, arena, last
        most = max(inside.values()) // 2


def _root(slots: Sequence[Slot], n: int) -> int:
    while slots[n].kind is Kind.VIEW:
        n = slots[n].source
    return n


def _device(s: Slot) -> torch.device | None:
    """Of memory: a number of the host does not lie in a GPU's arena."""
    return None if s.like is None else s.like.device
