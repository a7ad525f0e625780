"""C++ of a Select statement: the best elements of a reduction with their payload.

A single best element is kept in every lane of a strip, along an output dim (each lane has its own) or along the
reduced one (the lanes are compared at the end). Several sorted slots are filled element by element.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used
from tilefold.backends.cpp.affine import split
from tilefold.backends.cpp.loops import NestWriter
from tilefold.backends.cpp.nests import Group, Step, best_strip
from tilefold.backends.cpp.scope import MEMORY, CType, Facts, Scope, Value, literal
from tilefold.tile.ir import Select

_CTYPES: dict[DType, CType] = {DType.F32: "float", DType.F64: "double", DType.BOOL: "bool"}


def write_select(facts: Facts, scope: Scope, s: Select) -> None:
    """Write `s` in lanes where it has one slot and its candidates' order is that of lanes, else element by element."""
    writer = _Writer(facts, NestWriter(facts, Scope(frozenset(), scope.lines), Group((), (), None)), s)
    strip = writer.strip()
    if strip is None:
        writer.slots()
    elif strip in s.rdims:
        writer.across(strip)
    else:
        writer.down(strip)


@dataclass(frozen=True, slots=True)
class _Writer:
    """One statement, written by a nest's writer."""

    facts: Facts
    nest: NestWriter
    s: Select

    @property
    def place(self) -> tuple[Expr, ...]:
        return tuple(map(Index, self.facts.tiles[self.s.buf].buffer.dims))

    @property
    def dims(self) -> tuple[str, ...]:
        """The output dims, without the slots'."""
        dims = self.facts.tiles[self.s.buf].buffer.dims
        return dims[:-1] if self.s.op == "topk" else dims

    @property
    def memory(self) -> DType:
        return self.facts.dtype(self.s.buf)

    @property
    def ctype(self) -> CType:
        return _CTYPES.get(self.memory.compute, "int64_t")

    @property
    def start(self) -> str:
        return literal(identity_of(self.s.op, self.memory.compute.torch_dtype), self.ctype)

    @property
    def down_flag(self) -> str:
        return "true" if self.s.op == "argmin" else "false"

    # ------------------------------------------------------------ lanes
    def step(self) -> Step:
        """The statement as a reduction, for what asks about its accesses."""
        return Step(self.s.buf, self.place, self.dims, self.s.expr, self.s.rdims, "max")

    def strip(self) -> str | None:
        """The dim to be cut into vectors; None: neither its lanes nor the payload's order allow it."""
        s = self.s
        if s.op == "topk" or self.ctype == "bool":
            return None
        strip = best_strip(self.step(), self.facts)
        if strip is None or strip in self.dims:
            return strip
        # lanes of the reduced dim: the first of equals is the one with the least payload
        parts = split(s.payload, strip, self.facts.kernel.sizes)
        ordered = parts is not None and parts[0] > 0 and not dims_used(s.payload) - {strip, *self.dims}
        return strip if s.rdims == (strip,) and ordered else None

    def integer(self) -> CType:
        """The narrowest type that holds every payload and -1."""
        return self.facts.int_type(self.s.payload, Const(-1, DType.I64))

    def open(self, strip: str) -> None:
        v = self.nest.values
        v.count((self.s.expr, self.s.payload))
        for d in self.dims:
            if d != strip:
                self.nest.loop(d)
        if strip in self.dims:
            self.nest.strip_loop(strip, (self.step(),))
        else:
            v.lanes = self.nest.lanes(strip, (self.step(),))

    def close(self, strip: str) -> None:
        if strip in self.dims:
            self.nest.close("});")
        for _ in range(len(self.dims) - (strip in self.dims)):
            self.nest.close()

    def taken(self) -> str:
        """A candidate: its value and its payload in lanes."""
        v = self.nest.values
        return f"{v.typed(self.s.expr, self.ctype, True)}, {v.typed(self.s.payload, self.integer(), True)}"

    def held(self, vec: bool) -> str:
        """The value and the payload that the buffers hold."""
        v, s = self.nest.values, self.s
        parts = ((s.buf, self.ctype), (s.index_buf, self.integer()))
        return ", ".join(v.convert(v.value(Load(name, self.place)), ctype, vec) for name, ctype in parts)

    def begin(self, held: bool) -> str:
        """Declare the lanes, with what the buffers hold or with nothing; their name."""
        v, integer = self.nest.values, self.integer()
        nothing = f"tf::splat<{v.lanes}>({self.start}), tf::splat<{v.lanes}>({integer}(-1))"
        best = self.facts.name(f"{self.s.buf}_best")
        v.line(f"tf::Best<{self.kinds}, {v.lanes}> {best}{{{self.held(True) if held else nothing}}};")
        return best

    @property
    def kinds(self) -> str:
        return f"{self.down_flag}, {self.ctype}, {self.integer()}"

    def down(self, strip: str) -> None:
        """Every lane is an output of its own."""
        self.open(strip)
        best = self.begin(self.s.accumulate)
        for d in self.s.rdims:
            self.nest.loop(d)
        self.nest.values.line(f"{best}.take({self.taken()}, {'true' if self.s.may_lack else 'false'});")
        for _ in self.s.rdims:
            self.nest.close()
        self.write(best, True)
        self.close(strip)

    def across(self, strip: str) -> None:
        """The lanes are elements of one output, and compared at the end."""
        v = self.nest.values
        self.open(strip)
        best = self.begin(False)
        self.nest.strip_loop(strip, (self.step(),))
        v.line(f"{best}.take_some({self.taken()}, w);")
        self.nest.close("});")
        v.strip = None
        one = self.facts.name(f"{self.s.buf}_one")
        v.line(f"auto {one} = {best}.first();")
        if self.s.accumulate:
            v.line(f"{one} = tf::earlier<{self.kinds}>({{{self.held(False)}}}, {one});")
        self.write(one, False)
        self.close(strip)

    def write(self, best: str, vec: bool) -> None:
        for name, part, ctype in ((self.s.buf, "value", self.ctype), (self.s.index_buf, "at", self.integer())):
            whole = Step(name, self.place, self.dims, Load(name, self.place))
            self.nest.write_to(whole, Value(f"{best}.{part}", ctype, vec))

    # ------------------------------------------------------------ slots
    def slots(self) -> None:
        """Scalar loops that insert each candidate into the sorted slots."""
        facts, s, v = self.facts, self.s, self.nest.values
        topk = s.op == "topk"
        v.count((s.expr, s.payload))
        for d in self.dims:
            self.nest.loop(d)
        slot_dim = facts.tiles[s.buf].buffer.dims[-1] if topk else None
        slots = "1" if slot_dim is None else f"{facts.ranges[slot_dim][1]} - {facts.ranges[slot_dim][0]}"
        skip = frozenset({len(self.dims)}) if topk else frozenset()
        values, indices = (v.pointer(b, self.place, skip) for b in (s.buf, s.index_buf))
        best = facts.name(f"{s.buf}_best")
        again = "true" if s.accumulate else "false"
        kinds = f"{self.down_flag}, {self.ctype}, {MEMORY[self.memory]}, {MEMORY[facts.dtype(s.index_buf)]}"
        v.line(f"tf::Slots<{kinds}> {best}({values}, {indices}, {slots}, {self.start}, {again});")
        for d in s.rdims:
            self.nest.loop(d)
        candidate = v.convert(v.value(s.expr), self.ctype, False)
        named = v.keep("candidate", len(v.scopes) - 1, Value(candidate, self.ctype, False), "candidate")
        at = v.typed(s.payload, "int64_t")
        there = f"{at} >= 0 && " if s.may_lack else ""
        v.line(f"if ({there}{best}.beats({named.text})) {best}.insert({named.text}, {at});")
        for _ in (*s.rdims, *self.dims):
            self.nest.close()
