"""C++ of a loop nest: the shared loops of a group, then phase by phase its inner loops and reductions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Load, dims_used
from tilefold.backends.cpp.nests import Group, Step, best_strip, has_wide, heavy, phases
from tilefold.backends.cpp.pieces import WHOLE, Piece, pieces
from tilefold.backends.cpp.scope import MEMORY, CType, Facts, Scope, Value, literal
from tilefold.backends.cpp.turned import lay_down, reads_across
from tilefold.backends.cpp.values import Values

_COMBINE = {"sum": "({} + {})", "prod": "({} * {})", "max": "tf::maximum({}, {})", "min": "tf::minimum({}, {})"}
_COMBINE_BOOL = {"any": "({} | {})", "all": "({} & {})", "max": "({} | {})", "min": "({} & {})"}
_LANES = {"sum": "sum", "prod": "prod", "max": "max", "min": "min", "any": "any", "all": "all"}
#: Elements that are added up one after the other.
RUN = 64


@dataclass(slots=True)
class _Acc:
    """A running reduction: its variable and compute type."""

    step: Step
    var: str
    ctype: CType


class NestWriter:
    """Writes one group into `outer`, the scope of the statement list."""

    def __init__(self, facts: Facts, outer: Scope, group: Group):
        self.facts, self.group = facts, group
        self.values = Values(facts, [outer])
        self.piece = WHOLE

    # ------------------------------------------------------------ scopes
    def open(self, head: str, dim: str) -> None:
        self.values.scopes.append(Scope(self.values.scopes[-1].dims | {dim}, [head]))

    def close(self, tail: str = "}") -> None:
        done = self.values.scopes.pop()
        self.values.scopes[-1].lines += [done.lines[0], *("  " + x for x in done.lines[1:]), tail]

    def loop(self, dim: str, stop: str | None = None) -> None:
        lo, hi = self.facts.ranges[dim]
        self.open(f"for (int64_t {dim} = {lo}; {dim} < {stop or hi}; ++{dim}) {{", dim)

    def strip_loop(self, dim: str, steps: tuple[Step, ...], piece: Piece = WHOLE) -> None:
        lo, hi = piece.range(*self.facts.ranges[dim])
        self.values.strip, self.values.lanes = dim, self.lanes(dim, steps)
        self.open(f"tf::strips<{self.values.lanes}>({lo}, {hi}, [&](auto w, int64_t {dim}) TF_BODY {{", dim)

    def lanes(self, dim: str, steps: tuple[Step, ...]) -> str:
        """Lanes of a strip: several vectors to overlap latencies, no more than the tile has."""
        count = (2 if heavy(steps) else 4) // (2 if has_wide(steps, self.facts) else 1)
        bound = self.facts.static.get(dim)
        return f"tf::lanes({count}, {bound})" if bound is not None else f"tf::lanes({count})"

    # ------------------------------------------------------------ the nest
    def write(self) -> None:
        g, turned = self.group, reads_across(self.group, self.facts)
        order = [d for d in g.common if d != g.strip and (turned is None or d != turned[0])]
        for d in order:
            self.loop(d)
        if turned is not None:
            self.group = g = lay_down(self.values, g, *turned)
        if g.strip is None:
            for phase in phases(g):
                self.phase(phase)
        else:
            for piece in self.pieces(g.strip, g.steps):
                self.strip_loop(g.strip, g.steps, piece)
                for phase in phases(g):
                    self.phase(phase)
                self.close("});")
        for _ in range(len(order) + (2 if turned is not None else 0)):
            self.close()

    def pieces(self, dim: str, steps: tuple[Step, ...]) -> Iterator[Piece]:
        """The pieces of a strip along `dim`, each for as long as it is being written."""
        for piece in pieces([s.expr for s in steps], dim, self.facts):
            self.piece, self.facts.parts[dim] = piece, (piece.low, piece.high)
            yield piece
        self.piece = WHOLE
        del self.facts.parts[dim]

    def phase(self, steps: tuple[Step, ...]) -> None:
        g, v = self.group, self.values
        self.count(steps)
        rdims = next((s.rdims for s in steps if s.rdims), ())
        rest = [d for d in steps[0].all_dims if d not in g.common and d not in rdims]
        strip = g.strip or self.inner_strip(steps, [*rest, *rdims])
        own = strip if g.strip is None else None
        vertical = [d for d in rest if d != strip]
        for d in vertical:
            self.loop(d)
        if own in rest and rdims:
            self.strip_loop(own, steps)
        across = strip in rdims
        if across and strip is not None:
            v.lanes = self.lanes(strip, steps)
        accs = [self.start(s, across) for s in steps if s.rdims]
        inner = [d for d in rdims if d != strip]
        for d in inner[:-1]:
            self.loop(d)
        runs = self.in_runs(inner[-1], accs, across) if inner else {}
        v.written = frozenset(s.target for s in steps if not s.rdims) if rdims or rest else frozenset()
        if own is not None and (across or not rdims):
            for piece in self.pieces(own, steps):
                self.count(steps)
                self.strip_loop(own, steps, piece)
                self.elements(steps, accs, across)
                self.close("});")
        else:
            self.elements(steps, accs, across)
        v.written = frozenset()
        if inner:
            self.close()
            self.end_runs(runs, accs)
        for _ in inner[:-1]:
            self.close()
        if across:
            v.strip = None
        for a in accs:
            self.finish(a, across)
        if own in rest and rdims:
            self.close("});")
        for _ in vertical:
            self.close()
        if own is not None:
            v.strip = None

    def count(self, steps: tuple[Step, ...]) -> None:
        """Announce what the steps compute on the piece at hand."""
        self.values.uses.clear()
        self.values.count(self.piece.settled(s.expr) for s in steps)

    def inner_strip(self, steps: tuple[Step, ...], candidates: list[str]) -> str | None:
        votes = [b for s in steps if (b := best_strip(s, self.facts)) in candidates]
        return max(dict.fromkeys(votes), key=votes.count) if votes else (candidates[-1] if candidates else None)

    # ------------------------------------------------------------ elements
    def elements(self, steps: tuple[Step, ...], accs: list[_Acc], across: bool) -> None:
        by_target = {id(a.step): a for a in accs}
        for s in steps:
            if s.rdims:
                self.combine(by_target[id(s)], across)
            else:
                self.store(s)

    def store(self, s: Step) -> None:
        v = self.values
        value = v.value(self.piece.settled(s.expr))
        memory = self.facts.dtype(s.target)
        ctype = value.ctype
        if memory in (DType.F64, DType.I64):
            ctype = "double" if memory is DType.F64 else "int64_t"
        elif memory.is_float:
            ctype = "float"
        elif memory is not DType.BOOL:
            ctype = "int64_t" if value.ctype in ("float", "double") else value.ctype
        lanes = v.strip is not None and any(v.strip in dims_used(e) for e in s.index)
        named = Value(v.convert(value, ctype, lanes), ctype, lanes)
        exact = (memory is DType.F32 and ctype == "float") or (memory is DType.F64 and ctype == "double")
        if not named.text.isidentifier():
            named = v.keep(f"store {s.target}", len(v.scopes) - 1, named, f"{s.target}_new")
        self.write_to(s, named)
        for scope in v.scopes:
            scope.forget(s.target)
        if exact:  # what was stored need not be read back
            v.scopes[-1].known[Load(s.target, s.index)] = named

    def write_to(self, s: Step, value: Value) -> None:
        v = self.values
        moving = frozenset(n for n, e in enumerate(s.index) if v.moves(e))
        if moving:
            v.line(v.moving_access("store", s.target, s.index, moving, f"{value.text}, ") + ";")
        else:
            v.line(f"tf::store1({v.pointer(s.target, s.index, moving)}, {value.text});")

    # ------------------------------------------------------------ reductions
    def reduction_type(self, s: Step) -> CType:
        memory = self.facts.dtype(s.target)
        if memory is DType.BOOL or s.op in ("any", "all"):
            return "bool"
        if memory.is_float:
            return "double" if memory is DType.F64 else "float"
        return "int64_t"

    def start(self, s: Step, across: bool) -> _Acc:
        """Declare the accumulator: the identity, or the old value where that loses nothing.

        Sums of a tile are added up on their own first: the error grows with tile + tiles, not tile * tiles.
        """
        v, ctype = self.values, self.reduction_type(s)
        var = self.facts.name(f"{s.target}_acc")
        vec = across or v.strip is not None
        if s.accumulate and not _apart(s, across):
            text = v.convert(v.value(Load(s.target, s.index)), ctype, vec)
        else:
            text = self.nothing(s, ctype, vec)
        v.line(f"auto {var} = {text};")
        return _Acc(s, var, ctype)

    def nothing(self, s: Step, ctype: CType, vec: bool) -> str:
        """The reduction of no elements, in all lanes if in any."""
        start = identity_of(s.op, self.facts.dtype(s.target).compute.torch_dtype)
        return self.values.convert(Value(literal(start, ctype), ctype, False), ctype, vec)

    def combine(self, a: _Acc, across: bool) -> None:
        v = self.values
        text = v.typed(self.piece.settled(a.step.expr), a.ctype, across or v.strip is not None)
        form = (_COMBINE_BOOL if a.ctype == "bool" else _COMBINE)[a.step.op]
        new = form.format(a.var, text)
        v.line(f"{a.var} = tf::keep(w, {new}, {a.var});" if across else f"{a.var} = {new};")

    def in_runs(self, dim: str, accs: list[_Acc], across: bool) -> dict[str, str]:
        """Open the loop over `dim`; where it is long, in runs, each of which sums on its own: the error grows with a
        run + runs. What a run is added to, by the variable of a run."""
        extent = self.facts.static.get(dim)
        sums = [a for a in accs if a.ctype in ("float", "double") and a.step.op == "sum"]
        if not sums or (extent is not None and extent <= 2 * RUN):
            self.loop(dim)
            return {}
        v, (lo, hi) = self.values, self.facts.ranges[dim]
        at, stop = self.facts.name(f"{dim}_run"), self.facts.name(f"{dim}_stop")
        self.open(f"for (int64_t {at} = {lo}; {at} < {hi}; {at} += {RUN}) {{", at)
        v.line(f"const int64_t {stop} = tf::min64({at} + {RUN}, {hi});")
        found, vec = {a.var: self.facts.name(f"{a.step.target}_run") for a in sums}, across or v.strip is not None
        for a in sums:
            v.line(f"auto {found[a.var]} = {self.nothing(a.step, a.ctype, vec)};")
            a.var = found[a.var]
        self.open(f"for (int64_t {dim} = {at}; {dim} < {stop}; ++{dim}) {{", dim)
        return {run: whole for whole, run in found.items()}

    def end_runs(self, runs: dict[str, str], accs: list[_Acc]) -> None:
        """Add what the runs summed, and close their loop."""
        if not runs:
            return
        for a in accs:
            if a.var in runs:
                whole = runs[a.var]
                self.values.line(f"{whole} = {_COMBINE[a.step.op].format(whole, a.var)};")
                a.var = whole
        self.close()

    def finish(self, a: _Acc, across: bool) -> None:
        v, s = self.values, a.step
        vec = not across and v.strip is not None
        text = f"tf::{_LANES[s.op]}_lanes({a.var})" if across else a.var
        if s.accumulate and _apart(s, across):
            form = (_COMBINE_BOOL if a.ctype == "bool" else _COMBINE)[s.op]
            text = form.format(v.convert(v.value(Load(s.target, s.index)), a.ctype, vec), text)
        named = v.keep(f"result {a.var}", len(v.scopes) - 1, Value(text, a.ctype, vec), f"{s.target}_new")
        self.write_to(s, named)
        for scope in v.scopes:
            scope.forget(s.target)
        if MEMORY[self.facts.dtype(s.target)] == a.ctype:
            v.scopes[-1].known[Load(s.target, s.index)] = named


def _apart(s: Step, across: bool) -> bool:
    """Whether a tile's reduction is combined with the old value only at its end."""
    return across or s.op in ("sum", "prod")
