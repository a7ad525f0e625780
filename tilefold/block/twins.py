"""Groups of statements that differ in names only (the layers of a model): what is decided of one holds for the others.

What decides about a group is what its statements compute, which of their dims and tensors are the same, extents, what
is known of tensors from outside, and whom results are for. All of that is the group's key, with numbers in the place of
names; the names, in the order of those numbers, lead from what was found for one group to the same for its twin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load, Rewritten, Size, children, rebuild
from tilefold.block.group import Group
from tilefold.block.kept import kept_of
from tilefold.block.legal import is_folded
from tilefold.tensor.analysis import Graph
from tilefold.tensor.as_stored import as_stored
from tilefold.tensor.extremes import is_exact
from tilefold.tensor.ir import Compute

T = TypeVar("T")
_WORD = re.compile(r"\w+")
#: Groups that are remembered; a model has a few hundred.
MOST = 1 << 14


@dataclass(frozen=True, slots=True)
class Named:
    """A group: what it is without names, and its names in the order of their numbers."""

    key: Hashable
    dims: tuple[str, ...]
    tensors: tuple[str, ...]

    def to(self, twin: Named) -> Renaming:
        """From this group's names to those of one with the same key."""
        return Renaming(self, twin)


@dataclass(frozen=True)
class Renaming:
    """Names of a group, and the same of its twin."""

    old: Named
    new: Named

    @cached_property
    def _dims(self) -> Mapping[str, str]:
        return dict(zip(self.old.dims, self.new.dims, strict=True))

    @cached_property
    def _tensors(self) -> Mapping[str, str]:
        return dict(zip(self.old.tensors, self.new.tensors, strict=True))

    def dims(self, names: Iterable[str]) -> tuple[str, ...]:
        """Dims of the twin; one that is no dim of the group stays."""
        return tuple(self._dims.get(d, d) for d in names)

    def tensors(self, names: Iterable[str]) -> tuple[str, ...]:
        """Tensors of the twin."""
        return tuple(self._tensors[t] for t in names)

    def group(self, x: Group) -> Group:
        """A part of the group, of its twin."""
        return Group(self.tensors(x.members), self.dims(x.parallel))

    def text(self, reason: str) -> str:
        """A sentence about the group, of its twin."""
        return _WORD.sub(lambda w: self._tensors.get(w[0]) or self._dims.get(w[0]) or w[0], reason)


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A statement with numbers in the place of names."""

    dims: tuple[int, ...]
    rdims: tuple[int, ...]
    dtype: DType
    body: Expr
    reducer: str | None
    both: bool


@lru_cache(maxsize=MOST)
def skeleton(c: Compute) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """The number of what a statement is without names, its dims, and its tensors, what it makes first."""
    dims: dict[str, int] = {}
    tensors: dict[str, int] = {}

    def dim(d: str) -> int:
        return dims.setdefault(d, len(dims))

    done: Rewritten = {}

    def bare(e: Expr) -> Expr:
        match e:
            case Index(d):
                return Index(f"{dim(d)}")
            case Size(d):
                return Size(f"{dim(d)}")
            case Load(t, index):
                return Load(f"{tensors.setdefault(t, len(tensors))}", tuple(map(bare, index)))
        kids = children(e)
        if not kids:
            return e
        if id(e) not in done:
            done[id(e)] = e, rebuild(e, tuple(map(bare, kids)))
        return done[id(e)][1]

    for r in c.results:
        tensors[r] = len(tensors)
    own, over = tuple(map(dim, c.dims)), tuple(map(dim, c.rdims))
    found = _Skeleton(own, over, c.dtype, bare(c.body), c.reducer, c.index_name is not None)
    return _number(found), tuple(dims), tuple(tensors)


@lru_cache(maxsize=MOST)
def _number(x: Hashable) -> int:
    """Equal things have equal numbers, which are compared at once."""
    return next(_numbers)


_numbers = iter(range(1 << 62))


class Twins:
    """The groups of a program without their names."""

    def __init__(self, g: Graph):
        self.g = g
        self._facts: dict[str, tuple[object, ...]] = {}
        self._outside: dict[str, int] = {}
        self._extents: dict[str, int] = {}

    def named(self, members: tuple[str, ...]) -> Named:
        """A group of members in program order."""
        g, inside = self.g, set(members)
        dims: dict[str, int] = {}
        tensors: dict[str, int] = {}
        made: set[str] = set()
        rows: list[Hashable] = []
        for m in members:
            c = g.by_name[m]
            number, own, read = skeleton(c)
            made.update(c.results)
            used = tuple([dims.setdefault(d, len(dims)) for d in own])
            places = tuple([tensors.setdefault(t, len(tensors)) for t in read])
            outside = not inside.issuperset(g.consumers[m])
            rows.append((number, used, places, outside, *self._known(m, c)))
        key = (
            tuple(rows),
            tuple([self._extent(d) for d in dims]),
            tuple([self._given(t) for t in tensors if t not in made]),
        )
        return Named(key, tuple(dims), tuple(tensors))

    def keyed(self, x: Group) -> tuple[Named, tuple[int | str, ...]]:
        """A group, and its parallel dims without names."""
        named = self.named(x.members)
        number = {d: n for n, d in enumerate(named.dims)}
        return named, tuple([number.get(d, d) for d in x.parallel])

    def _known(self, m: str, c: Compute) -> tuple[object, ...]:
        """What decides of a statement beside itself: whether the caller reads it, sums over it, what they keep, and
        whether it is read rounded, or compared with its elements."""
        found = self._facts.get(m)
        if found is None:
            g = self.g
            returned = tuple(r in g.program.outputs for r in c.results)
            kept = kept_of(g, c), kept_of(g, c, delayed=True)
            found = returned, is_folded(g, m), as_stored(g, c), is_exact(g, c), *kept
            self._facts[m] = found
        return found

    def _given(self, t: str) -> int:
        """What is known of a tensor from outside."""
        found = self._outside.get(t)
        if found is None:
            p = self.g.program
            found = self._outside[t] = _number((p.dtype_of(t), p.shape_of(t), p.is_input(t)))
        return found

    def _extent(self, d: str) -> int:
        found = self._extents.get(d)
        if found is None:
            found = self._extents[d] = _number(self.g.program.sizes[d])
        return found


#: What was decided of groups without names, each with the names that it is in.
Known = dict[Hashable, tuple[Named, T]]


class Decided(Generic[T]):
    """What was decided of groups, each with the names that it is in. renamed: the same for a twin. known: what was
    decided before, for the same target, which takes what is decided now."""

    def __init__(self, renamed: Callable[[T, Renaming], T], known: Known[T] | None = None):
        self._renamed = renamed
        self._known: Known[T] = {} if known is None else known

    def of(self, x: Named, more: Hashable, decide: Callable[[], T]) -> T:
        """What is known of the group or its twin; else what `decide` finds. more: what else it depends on."""
        found = self._known.get((x.key, more))
        if found is not None:
            return self._renamed(found[1], found[0].to(x))
        if len(self._known) >= MOST:
            self._known.clear()
        made = decide()
        self._known[x.key, more] = x, made
        return made
