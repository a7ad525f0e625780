"""Whether machine code of groups of warps is what was asked for: no group reads a register that another one wrote.

Groups branch off at one indirect jump (BRX) and share no values in registers. CUDA 12.8's assembler breaks that: of a
value that stood before the jump, and a sum that two groups make of it, it computed the sum in the first group alone,
and the second multiplied whatever lay in that uniform register (half of the columns wrong, or an illegal address).
`gluon.py` keeps such values out of the way; `strays` looks whether that was enough.

What is followed is uniform registers: definitions that reach a reading, through the jumps of the disassembly. Where
all of them compute the same from constants (the start of shared memory), it does not matter whose they are. Other
registers are not followed, for what is kept and restored around warp-wide loops reads them before they are written.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold.errors import BackendError

try:
    from triton import knobs
except ImportError:  # Triton is optional
    knobs = None

#: Seconds that a disassembly may take.
PATIENCE = 60.0

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
#: Names of places in an instruction that jumps, and in the comment that lists where an indirect jump goes.
_PLACES = re.compile(r"\.L_\w+")
_GUARD = re.compile(r"^@!?U?P[T0-9]+\s+")
_REGISTER = re.compile(r"\bUR(\d+)\b")
#: Instructions whose first operand is a uniform register that they write, beside those of the uniform datapath.
_WRITE = frozenset({"R2UR", "S2UR", "VOTEU"})
#: Instructions of that name that write none.
_WRITE_NOTHING = re.compile(r"UTMA|UBLKCP|UCGABAR|USETMAXREG")
#: Instructions whose result follows from their operands, and what they may read that is the same for a thread block.
_PURE = frozenset({"UMOV", "ULEA", "UIADD3", "USHF", "ULOP3", "UIMAD", "ULDC", "S2UR"})
_OF_BLOCK = re.compile(r"SR_(CTAID|CgaCtaId)\b")
#: A uniform register kept in another, to be restored: no use.
_KEPT = re.compile(r"(?:MOV|IMAD\.U32|IMAD\.MOV\.U32) R(\d+), (?:RZ, RZ, )?UR(\d+)$")
#: One that is restored, and the number that stands for a register that keeps one.
_RESTORED, _KEEPER = re.compile(r"R2UR UR(\d+), R(\d+)$"), 1000
#: A product whose left operand is in registers.
_IN_REGISTERS = re.compile(r"HGMMA\S* R\d+, R\d+, gdesc")
#: Most instructions that a value is followed through.
DEEP = 6
#: No instruction wrote it.
_NOTHING = -1

_Reaching = dict[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Instruction:
    """writes, reads: uniform registers. targets: labels that it may jump to; falls: whether the next one may follow."""

    address: int
    text: str
    labels: tuple[str, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    targets: tuple[str, ...]
    falls: bool
    dispatch: bool


@dataclass(frozen=True, slots=True)
class Stray:
    """A reading of a register that, on some way, another group wrote last, or nobody."""

    address: int
    text: str
    register: int
    written: int | None

    def __str__(self) -> str:
        by = "is never written" if self.written is None else f"is written by another group at {self.written:#x}"
        return f"{self.address:#x} {self.text}: UR{self.register} {by}"


def disassembled(cubin: bytes) -> str:
    """The text of machine code. BackendError: there is no disassembler, or it fails."""
    if knobs is None:
        raise BackendError("Triton is not installed", hint="pip install triton")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        try:
            command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
        except (OSError, RuntimeError, subprocess.SubprocessError) as err:
            raise BackendError(f"machine code cannot be disassembled: {err}") from err


def strays(sass: str) -> tuple[Stray, ...]:
    """Readings of what a group did not write; none in code without an indirect jump.

    sass: what `nvdisasm -c` prints of one kernel.
    """
    code = _parsed(sass)
    return tuple(_Flow(code).strays()) if any(i.dispatch for i in code) else ()


def _parsed(sass: str) -> list[Instruction]:
    found: list[Instruction] = []
    labels: list[str] = []
    for line in sass.splitlines():
        label, code = _LABEL.match(line), _LINE.search(line)
        if label is not None:
            labels.append(label[1])
        elif code is not None:
            # where an indirect jump goes stands in a comment after the operands
            found.append(_instruction(int(code[1], 16), code[2].split("(*")[0].strip(), line, tuple(labels)))
            labels = []
    return found


def _instruction(address: int, text: str, line: str, labels: tuple[str, ...]) -> Instruction:
    guard = _GUARD.match(text)
    body = text[guard.end() :] if guard is not None else text
    op, _, rest = body.partition(" ")
    name, *kinds = op.split(".")
    operands = [o.strip() for o in rest.split(",")]
    pairs = not {"64", "WIDE"}.isdisjoint(kinds)
    writes: set[int] = set()
    beside = re.fullmatch(r"PT|P\d", operands[0]) is not None and len(operands) > 1  # a predicate is written first
    kept = re.fullmatch(r"R(\d+)", operands[1 if beside else 0])
    if kept is not None:
        writes = set(range(_KEEPER + int(kept[1]), _KEEPER + int(kept[1]) + _width(name, kinds)))
    if (name in _WRITE or name.startswith("U")) and not _WRITE_NOTHING.match(name):
        into = re.fullmatch(r"UR(\d+)", operands[0])
        if into is not None:
            first = int(into[1])
            writes = {first, first + 1} if pairs else {first}
            operands = operands[1:]
    reads: set[int] = set()
    for operand in operands if _KEPT.match(body) is None else ():
        for r in map(int, _REGISTER.findall(operand)):
            count = 4 if f"gdesc[UR{r}]" in operand else 2 if f"desc[UR{r}]" in operand or op == "UIADD3.64" else 1
            # descriptors of the left and the right operand; a left one in registers has none
            reads |= set(range(r + 2 if count == 4 and _IN_REGISTERS.match(body) else r, r + count))
    jumps = name in ("BRA", "BRX")
    always = guard is None and (name in ("BRX", "EXIT", "RET") or (name == "BRA" and rest.startswith("`")))
    targets = tuple(_PLACES.findall(line)) if jumps else ()
    return Instruction(address, text, labels, frozenset(writes), frozenset(reads), targets, not always, name == "BRX")


def _width(name: str, kinds: Sequence[str]) -> int:
    """Registers of a thread that an instruction writes from its first operand on, at most."""
    columns = next((int(n[1]) for k in kinds if (n := re.fullmatch(r"64x(\d+)x\d+", k))), 0)
    if name == "HGMMA" or columns:
        return max(columns // 2, 1)
    if name in ("LDSM", "LDTM") or "128" in kinds:
        return 4
    return 2 if not {"64", "WIDE", "F64"}.isdisjoint(kinds) or name in ("CS2R", "DADD", "DMUL", "DFMA") else 1


class _Flow:
    """Blocks of instructions, named by the position of their first, and the ways between them; one indirect jump."""

    def __init__(self, code: Sequence[Instruction]):
        self.code = code
        at = {label: n for n, i in enumerate(code) for label in i.labels}
        starts = {0, *at.values()} | {n + 1 for n, i in enumerate(code[:-1]) if i.targets or not i.falls}
        order = sorted(starts)
        self.stop = dict(zip(order, [*order[1:], len(code)], strict=True))
        self.next: dict[int, list[int]] = {}
        groups: list[int] = []
        for b, stop in self.stop.items():
            last = code[stop - 1]
            follows = [at[t] for t in last.targets if t in at]
            self.next[b] = follows + ([stop] if last.falls and stop < len(code) else [])
            if last.dispatch:
                groups, self.next[b] = follows, []
                dispatch = b
        self.owner: dict[int, frozenset[int]] = {}
        common = self._reached([0])
        for g in groups:
            for b in self._reached([g], common):
                self.owner[b] = self.owner.get(b, frozenset()) | {g}
        if not groups:
            raise BackendError("the disassembly does not say where an indirect jump goes")
        self.next[dispatch] = groups

    def _reached(self, starts: Sequence[int], without: set[int] | frozenset[int] = frozenset()) -> set[int]:
        seen: set[int] = set()
        todo = [*starts]
        while todo:
            b = todo.pop()
            if b not in seen and b not in without:
                seen.add(b)
                todo += self.next[b]
        return seen

    def _after(self, b: int, before: Mapping[int, frozenset[int]]) -> _Reaching:
        state = dict(before)
        for n in range(b, self.stop[b]):
            state |= dict.fromkeys(self.code[n].writes, frozenset({n}))
        return state

    def _reaching(self) -> dict[int, _Reaching]:
        """At the start of each block, for each register, the instructions that may have written it last."""
        nobody = frozenset({_NOTHING})
        found: dict[int, _Reaching] = {0: {}}
        todo = [0]
        while todo:
            b = todo.pop()
            after = self._after(b, found[b])
            for s in self.next[b]:
                had = found.get(s)
                if had is None:
                    joined = after
                else:
                    joined = {r: had.get(r, nobody) | after.get(r, nobody) for r in had.keys() | after.keys()}
                if joined != had:
                    found[s] = joined
                    todo.append(s)
        return found

    def _before(self, n: int) -> _Reaching:
        """What reaches an instruction."""
        b = self.block[n]
        state = dict(self.reaching.get(b, {}))
        for k in range(b, n):
            state |= dict.fromkeys(self.code[k].writes, frozenset({k}))
        return state

    def _value(self, n: int, register: int, above: tuple[int, ...]) -> str | None:
        """What an instruction writes to a register, as an expression of constants; None where it is made of more.

        above: instructions whose values are made of this one's.
        """
        i = self.code[n]
        restored = _RESTORED.match(i.text)
        if restored is not None:
            return self._kept(self._before(n).get(_KEEPER + int(restored[2]), frozenset()), (*above, n))
        op, _, rest = i.text.partition(" ")
        name, special = op.split(".")[0], op.startswith("S2UR")
        both = op == "ULDC.64"  # of constants next to each other
        if name not in _PURE or (len(i.writes) != 1 and not both) or "UP" in rest:
            return None
        if special and _OF_BLOCK.search(rest) is None:
            return None
        state, (_, *operands) = self._before(n), rest.split(",")
        found = ",".join(operands)
        for r in sorted(i.reads):
            value = self._same(state.get(r, frozenset()), r, (*above, n))
            if value is None:
                return None
            found = re.sub(rf"\bUR{r}\b", f"({value})", found)
        return f"{op} {found}" + (f" {register - min(i.writes)}" if both else "")

    def _kept(self, by: frozenset[int], above: tuple[int, ...]) -> str | None:
        """The value of a uniform register that all of these instructions keep."""
        values: set[str | None] = set()
        for n in by:
            kept = None if n == _NOTHING else _KEPT.match(self.code[n].text)
            if kept is None:
                return None
            values.add(self._same(self._before(n).get(int(kept[2]), frozenset()), int(kept[2]), above))
        return values.pop() if len(values) == 1 else None

    def _same(self, by: frozenset[int], register: int, above: tuple[int, ...] = ()) -> str | None:
        """The value that all of these instructions write to a register; None where it is not one.

        One that restores what it kept, a turn of a loop before, adds no value to those of the others.
        """
        if len(above) > DEEP or _NOTHING in by:
            return None
        values = {
            self._value(n, register, above) for n in by if n not in above or _RESTORED.match(self.code[n].text) is None
        }
        return values.pop() if len(values) == 1 else None

    def strays(self) -> Iterator[Stray]:
        blocks = self.block = {n: b for b, stop in self.stop.items() for n in range(b, stop)}
        self.reaching = self._reaching()
        for b, state in sorted(self.reaching.items()):
            if b not in self.owner:
                continue
            for n in range(b, self.stop[b]):
                i = self.code[n]
                for r in sorted(i.reads):
                    if self._crossed(b, state.get(r, frozenset())) and self._same(state[r], r) is not None:
                        continue
                    for by in sorted(state.get(r, frozenset({_NOTHING}))):
                        if by == _NOTHING:
                            yield Stray(i.address, i.text, r, None)
                        elif not self.owner.get(blocks[by], self.owner[b]) & self.owner[b]:
                            yield Stray(i.address, i.text, r, self.code[by].address)
                state = {**state, **dict.fromkeys(i.writes, frozenset({n}))}

    def _crossed(self, b: int, by: frozenset[int]) -> bool:
        """Whether a definition is another group's than that of block b."""
        mine = self.owner[b]
        return any(n != _NOTHING and not self.owner.get(self.block[n], mine) & mine for n in by)
