"""C++ of a Select statement: the best elements of a reduction with their payload."""

from __future__ import annotations

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Index
from tilefold.backends.cpp.scope import MEMORY, CType, Facts, Scope, Value, literal
from tilefold.backends.cpp.values import Values
from tilefold.tile.ir import Select


def write_select(facts: Facts, scope: Scope, s: Select) -> None:
    """Write `s` as scalar loops that insert each candidate into the sorted slots."""
    tile = facts.tiles[s.buf]
    topk = s.op == "topk"
    dims = tile.buffer.dims[:-1] if topk else tile.buffer.dims
    memory = tile.buffer.dtype
    ctypes: dict[DType, CType] = {DType.F32: "float", DType.F64: "double", DType.BOOL: "bool"}
    ctype = ctypes.get(memory.compute, "int64_t")
    outer = Scope(frozenset(), scope.lines)
    v = Values(facts, [outer])
    v.count((s.expr, s.payload))
    depth = 0

    def open_loop(d: str) -> None:
        lo, hi = facts.ranges[d]
        v.scopes.append(Scope(v.scopes[-1].dims | {d}, [f"for (int64_t {d} = {lo}; {d} < {hi}; ++{d}) {{"]))

    def close_loop() -> None:
        done = v.scopes.pop()
        v.scopes[-1].lines += [done.lines[0], *("  " + x for x in done.lines[1:]), "}"]

    for d in dims:
        open_loop(d)
        depth += 1
    slot_dim = tile.buffer.dims[-1] if topk else None
    slots = "1" if slot_dim is None else f"{facts.ranges[slot_dim][1]} - {facts.ranges[slot_dim][0]}"
    skip = frozenset({len(dims)}) if topk else frozenset()
    place = tuple(Index(d) for d in tile.buffer.dims)
    values = v.pointer(s.buf, place, skip)
    indices = v.pointer(s.index_buf, place, skip)
    best = facts.name(f"{s.buf}_best")
    start = literal(identity_of(s.op, memory.compute.torch_dtype), ctype)
    down, again = ("true" if flag else "false" for flag in (s.op == "argmin", s.accumulate))
    kinds = f"{down}, {ctype}, {MEMORY[memory]}, {MEMORY[facts.dtype(s.index_buf)]}"
    v.line(f"tf::Slots<{kinds}> {best}({values}, {indices}, {slots}, {start}, {again});")
    for d in s.rdims:
        open_loop(d)
    candidate = v.convert(v.value(s.expr), ctype, False)
    named = v.keep("candidate", len(v.scopes) - 1, Value(candidate, ctype, False), "candidate")
    at = v.typed(s.payload, "int64_t")
    there = f"{at} >= 0 && " if s.may_lack else ""
    v.line(f"if ({there}{best}.beats({named.text})) {best}.insert({named.text}, {at});")
    for _ in s.rdims:
        close_loop()
    for _ in range(depth):
        close_loop()
