"""The greedy grouping: where a program is too large to be planned, for comparison, and of what a GPU runs.

It grows groups along edges, nearest producer first, under the same test as the exact selection (`block.legal`); every
refusal is recorded with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from tilefold.algebra.expr import Call, Expr, Load, dims_used, loads, tensors_read, walk
from tilefold.block.fuse import Fused, fuse_group, prepare
from tilefold.block.group import ANY, Group, Grouping, Limits, Refusal
from tilefold.block.legal import legal
from tilefold.block.twins import Decided, Renaming, Twins
from tilefold.tensor.analysis import Graph, is_map, out_dims, renamed
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.streams import of_few

#: Tensors that a GPU's kernel reads at most after siblings with tensors of their own have joined it. The gradients of
#: all biases and norms of four layers, 26 sums of 27 tensors, were one kernel: 7 s of Triton's compilation (the time
#: grows with the square), tiles of 16 columns, and half of the memory's rate.
MOST_READ = 8


def fuse(
    p: Program,
    apart: frozenset[str] = frozenset(),
    limits: Limits = ANY,
    *,
    calls: Iterable[tuple[str, ...]] = (),
) -> Fused:
    """Fuse `p`. Members of `apart` become kernels of their own that the caller may replace, those of a
    call together."""
    p = prepare(p, apart)
    g = Graph.of(p)
    grouping = group(p, apart, limits, calls=calls)
    kernels = tuple(k for x in grouping.groups for k in fuse_group(g, x))
    return Fused(p, kernels, grouping)


def group(
    p: Program,
    apart: frozenset[str] = frozenset(),
    limits: Limits = ANY,
    *,
    calls: Iterable[tuple[str, ...]] = (),
) -> Grouping:
    """Partition the program. Computes in `apart` (library calls) stay alone, those of one of `calls` together."""
    g = Graph.of(p)
    of: dict[str, Group] = {c.name: Group((c.name,), out_dims(c)) for c in p.body}
    for call in calls:
        common = set(out_dims(g.by_name[call[-1]])).intersection(*(out_dims(g.by_name[m]) for m in call))
        parallel = tuple(d for d in out_dims(g.by_name[call[-1]]) if d in common)
        of |= dict.fromkeys(call, Group(call, parallel))
    grouping = _Greedy(g, of, apart, limits)
    refusals: dict[tuple[str, str], Refusal] = {}
    changed = True
    while changed:
        changed = False
        refusals.clear()
        for c in p.body:
            for r in reversed(g.producers[c.name]):
                a, b = of[r], of[c.name]
                if a is b:
                    continue
                merged = grouping.merge(a, b)
                if isinstance(merged, str):
                    refusals[(r, c.name)] = Refusal(r, c.name, merged, c.loc)
                    continue
                grouping.join(a, b, merged)
                changed = True
        changed = grouping.merge_siblings() or changed
    unique = dict.fromkeys(of[c.name] for c in p.body)
    return Grouping(ordered(g, list(unique), of), tuple(refusals.values()))


def _twins(g: Graph) -> dict[str, Compute]:
    """Products that the program has twice, and what is made of them twice, each with what is equal of both: copies of a
    stream for ends over different axes (`tensor.streams`), which a kernel of both would write to memory."""
    what: dict[str, Compute] = {}
    first: dict[Compute, str] = {}
    same: dict[str, str] = {}

    for c in g.program.body:
        made = what[c.name] = replace(c, name="", loc=None, body=renamed(c.body, same) if same else c.body)
        known = first.setdefault(made, c.name)
        if known != c.name:
            same[c.name] = known
    twice = {c for c, n in Counter(what.values()).items() if n > 1}
    found: dict[str, Compute] = {}
    for c in g.program.body:
        of_one = product_of(c) is not None or of_few(g, c) or any(ld.tensor in found for ld in loads(c.body))
        if of_one and what[c.name] in twice:
            found[c.name] = what[c.name]
    return found


@lru_cache(maxsize=8)
def _decided(limits: Limits) -> Decided[Group | str]:
    """Which groups are legal as one for a device: programs, and layers of a program, have the same ones."""
    return Decided(_renamed)


def _renamed(found: Group | str, names: Renaming) -> Group | str:
    return names.text(found) if isinstance(found, str) else names.group(found)


class _Greedy:
    """The groups as they grow: `of` each Compute, one object a group. What is found out of two groups, or of one, is
    remembered: most of them stay as they are from round to round."""

    def __init__(self, g: Graph, of: dict[str, Group], apart: frozenset[str], limits: Limits):
        self.g, self.of, self.apart, self.limits = g, of, apart, limits
        self._at = {c.name: n for n, c in enumerate(g.program.body)}
        self._external = _external_tensors(g, apart if limits.in_registers else frozenset())
        self._legal: dict[tuple[Group, Group], Group | str] = {}
        self._twins = _twins(g)
        self._names = Twins(g)
        self._reads: dict[Group, set[tuple[str, tuple[str, ...]] | Load]] = {}
        self._loads: dict[Group, frozenset[str]] = {}
        self._bits, self._below = _reachable(g, self._at, of)

    def join(self, a: Group, b: Group, merged: Group) -> None:
        """Put a group in the place of the two that it is made of."""
        self.of.update(dict.fromkeys(merged.members, merged))
        bits, below = self._bits, self._below
        own = bits.pop(a) | bits.pop(b)
        whole = below.pop(a) | below.pop(b)
        for x, n in below.items():
            if n & own:
                below[x] = n | whole
        bits[merged], below[merged] = own, whole

    def merge(self, a: Group, b: Group) -> Group | str:
        """The union of two groups, or the reason why it is not one kernel."""
        if not self.apart.isdisjoint(a.members) or not self.apart.isdisjoint(b.members):
            return "a library call computes it"
        if self._twins and self._of_copies(a, b):
            return "each computes a product again that the other has"
        if self._path_outside(a, b):
            return "another kernel stands between them"
        found = self._legal.get((a, b))
        if found is None:
            members = tuple(sorted({*a.members, *b.members}, key=self._at.__getitem__))
            found = self._legal[a, b] = self._one_kernel(members, a, b)
        return found

    def _of_copies(self, a: Group, b: Group) -> bool:
        """Whether two groups have, or read, several copies of one thing: one of them would be in memory."""
        first, second = ({n for m in x.members for n in (m, *self.g.producers[m]) if n in self._twins} for x in (a, b))
        return any(m != n and self._twins[m] == self._twins[n] for m in first for n in second)

    def _one_kernel(self, members: tuple[str, ...], a: Group, b: Group) -> Group | str:
        """Whether two groups are legal as one, as it was found for twins of theirs."""
        named, first = self._names.named(members), set(a.members)
        number = {d: n for n, d in enumerate(named.dims)}
        of_first = tuple([m in first for m in members])
        parallel = tuple(tuple([number.get(d, d) for d in x.parallel]) for x in (a, b))
        return _decided(self.limits).of(
            named, (of_first, parallel), lambda: legal(self.g, members, self.limits, (a, b))
        )

    def _path_outside(self, a: Group, b: Group) -> bool:
        """Whether a path from a to b (or back) runs through a third group."""
        of, consumers = self.of, self.g.consumers
        for start, goal in ((a, b), (b, a)):
            found = self._bits[goal]
            if self._below[start] & found:
                after = {of[u] for m in start.members for u in consumers[m]} - {start, goal}
                if any(self._below[x] & found for x in after):
                    return True
        return False

    def merge_siblings(self) -> bool:
        """Join groups that read the same, so that it is read once: reductions over the same dims; on a GPU, where a
        kernel waits for memory, also maps of the same elements, and numbers that nothing but a launch is spent on
        (steps of an optimiser's tensors)."""
        groups = [(x, self._read(x), self._is_number(x)) for x in dict.fromkeys(self.of.values())]
        alike: dict[frozenset[str], list[Group]] = {}  # of the same parallel dims, which read something
        for x, read, number in groups:
            if read or number:
                alike.setdefault(frozenset(x.parallel), []).append(x)
        known = {x: (read, number) for x, read, number in groups}
        for a, read, number in groups:
            others = alike.get(frozenset(a.parallel), []) if read or number else []
            for b in others[others.index(a) + 1 :] if others else ():
                its, too = known[b]
                if (read.isdisjoint(its) and not (number and too)) or self._reads_too_much(a, b):
                    continue
                merged = self.merge(a, b)
                if not isinstance(merged, str):
                    self.join(a, b, merged)
                    return True
        return False

    def _is_number(self, group: Group) -> bool:
        """Whether a group is maps of no dims, none of a library call's, on a device with registers."""
        if not self.limits.in_registers or group.parallel:
            return False
        computes = [self.g.by_name[m] for m in group.members]
        return self.apart.isdisjoint(group.members) and all(is_map(c) and not c.dims for c in computes)

    def _reads_too_much(self, a: Group, b: Group) -> bool:
        """Whether a kernel of both would read many tensors, and more than each of them."""
        if not self.limits.in_registers:
            return False
        first, second = self._loaded(a), self._loaded(b)
        return len(first | second) > max(MOST_READ, len(first), len(second))

    def _loaded(self, group: Group) -> frozenset[str]:
        """Tensors that others make, and the group's members read."""
        found = self._loads.get(group)
        if found is None:
            computes = [self.g.by_name[m] for m in group.members]
            made = {r for c in computes for r in c.results}
            found = self._loads[group] = frozenset(t for c in computes for t in tensors_read(c.body) if t not in made)
        return found

    def _read(self, group: Group) -> set[tuple[str, tuple[str, ...]] | Load]:
        """Tensors that the group reduces, and over what; of one that only maps (where maps are looked at), which
        elements it reads for each of its own."""
        if group in self._reads:
            return self._reads[group]
        computes = [self.g.by_name[m] for m in group.members]
        found = self._reads[group] = {
            (t, c.rdims) for c in computes if c.reducer is not None for t in self._external[c.name]
        }
        if not self.limits.in_registers or found or any(c.reducer is not None for c in computes):
            return found
        mine = {r for c in computes for r in c.results}
        found.update(
            ld
            for c in computes
            for ld in loads(c.body)
            if ld.tensor not in mine and dims_used(ld).issuperset(set(group.parallel) - _choosing(c.body))
        )
        return found


def _choosing(e: Expr) -> frozenset[str]:
    """Dims that choose between parts of what is loaded and are in no load's index: of what is stacked, say."""
    found = loads(e)
    asked = [n.args[0] for n in walk(e) if isinstance(n, Call) and n.op == "where" and not loads(n.args[0])]
    return frozenset[str]().union(*map(dims_used, asked)).difference(*map(dims_used, found))


def _reachable(g: Graph, at: Mapping[str, int], of: Mapping[str, Group]) -> tuple[dict[Group, int], dict[Group, int]]:
    """For each group a number whose bits are its members, and one whose bits are all that it leads to, itself too."""
    bits: dict[Group, int] = {}
    for m, n in at.items():
        bits[of[m]] = bits.get(of[m], 0) | 1 << n
    below, known = dict(bits), dict[Group, int]()
    while below != known:  # the statements of a call may lie apart
        known = dict(below)
        for c in reversed(g.program.body):
            for u in g.consumers[c.name]:
                below[of[c.name]] |= below[of[u]]
    return bits, below


def _external_tensors(g: Graph, apart: frozenset[str]) -> dict[str, frozenset[str]]:
    """What is in memory whatever the groups are, program inputs and results of `apart` (library calls), that each
    Compute reads, also through the maps it uses."""
    given = {i.name for i in g.program.inputs}.union(*(g.by_name[m].results for m in apart))
    found: dict[str, frozenset[str]] = {}
    for c in g.program.body:
        maps = (found[r] for r in g.producers[c.name] if g.by_name[r].reducer is None and r not in apart)
        found[c.name] = (tensors_read(c.body) & given).union(*maps)
    return found


def ordered(g: Graph, groups: list[Group], of: dict[str, Group]) -> tuple[Group, ...]:
    """Groups in an order in which producers come first; `of`: the group of each of their members."""
    done: dict[Group, None] = {}

    def visit(x: Group) -> None:
        if x in done:
            return
        for m in x.members:
            for r in g.producers[m]:
                if of.get(r, x) is not x:
                    visit(of[r])
        done[x] = None

    for x in groups:
        visit(x)
    return tuple(done)
