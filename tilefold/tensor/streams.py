"""Tensors that stream: products so much larger than their operands that they should never be in memory.

A product *streams* if its largest tensor is larger than the two others together and its third extent fits on chip: a
kernel makes that tensor block by block and uses each block where it is (Dao et al., "FlashAttention", 2022). So do maps
of it. A reduction of it ends the stream.

One stream often ends in several reductions over different axes, which no single kernel makes: the gradient of attention
sums p and ds over keys for the queries, and over queries for the keys and values. `apart` gives each its own copy:

    s, p, ds -> dq[i] = sum[j] ds k       becomes       s, p, ds          -> dq
             -> dk[j] = sum[i] ds q                     s', p', ds'       -> dk, dv
             -> dv[j] = sum[i] p do

So do sums of a few numbers for each pair of rows (squared distances in three coordinates), which cost less than a map.
Reductions that keep the same axes share a copy, for one kernel makes them all. Computing a stream again costs its
arithmetic; keeping it costs its bytes, written once and read by each, and memory that grows with the square. A product
over more axes than others, of which a first stage would leave as much as the stream itself, has it in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Call, Const, Index, Load, dims_used, loads, rename_dims, tensors_read
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph, is_static, out_dims, renamed
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import FEW, product_of
from tilefold.tensor.rewrite import drop_dead
from tilefold.tensor.sizes import estimate

#: Extents that fit on chip with a block of the streamed tensor (head sizes).
ON_CHIP = 256
#: How many times larger than the two others together the streamed tensor is: in a batch of products, and in one, where
#: each block reads all of the others (hidden layers of features are four times as wide as what they are made of).
LARGER_BATCHED, LARGER = 1, 4
#: How many times larger it is where it is never kept for speed alone: scores of that many keys would fill a memory.
LONG = 16
#: Share of a stream's elements that the first of two stages may leave.
PART = 0.5
#: Statements of all copies, over those of a stream, of a stream that is copied: of a recurrence whose steps each end in
#: a reduction, and wait for the one before, the copies grow with the square of its length (points picked one after the
#: other, each the farthest from those before: 64 kernels of 1 to 64 steps, planned for a minute).
MOST_AGAIN = 8


def streamed(elements: Sequence[int], lacks: Sequence[int], batch: int) -> int | None:
    """Which tensor of a product streams, None if none does. elements: of the operands and the result, in any order;
    lacks: the extent that each of them lacks; batch: how many products there are."""
    large = max(range(3), key=elements.__getitem__)
    others = sum(elements) - elements[large]
    enough = elements[large] >= (LARGER_BATCHED if batch > 1 else LARGER) * others
    return large if enough and lacks[large] <= ON_CHIP else None


@dataclass(frozen=True, slots=True)
class Stream:
    """Products and maps that stream, and the reductions of them, by name and in program order."""

    members: tuple[str, ...]
    ends: tuple[str, ...]


#: Whether a product that could stream takes less time so than with its result in memory.
Pays = Callable[[Graph, Compute], bool]


def streams(p: Program, pays: Pays | None = None) -> list[Stream]:
    """The streams of a program that end in reductions alone: no result of theirs is kept. pays: see `apart`."""
    g = Graph.of(p)
    wide = streaming(g, pays)
    left, found = list(wide), []
    while left:
        members = {left[0]}
        todo = [left[0]]
        while todo:
            n = todo.pop()
            near = {m for m in (*g.producers[n], *g.consumers[n]) if m in wide}
            near |= {m for e in g.consumers[n] if e not in wide for m in g.producers[e] if m in wide}
            todo += [m for m in wide if m in near and m not in members]
            members |= near
        left = [n for n in left if n not in members]
        ends = {u for n in members for u in g.consumers[n]} - members
        kept = any(r in p.outputs for n in members for r in g.by_name[n].results)
        kept = kept or any(_taken_at_places(g.by_name[e], members) for e in ends)
        if kept or not all(g.by_name[e].reducer is not None for e in ends):
            continue
        order = [c.name for c in p.body]
        s = Stream(tuple(filter(members.__contains__, order)), tuple(filter(ends.__contains__, order)))
        if not _staged_for_nothing(Graph.of(_aligned(p, s)), s.members, s.ends):
            found.append(s)
    return found


def _staged_for_nothing(g: Graph, members: Iterable[str], ends: Iterable[str]) -> bool:
    """Whether a product that ends a stream, in two stages (`_staged`), would leave about as much in memory as the
    stream itself: a last layer of all features of a sequence, [96, 42 x 128], of what layers for each of its 42 places
    made."""
    axes = {d for m in members for d in g.by_name[m].dims}
    keys = {e: frozenset(g.by_name[e].dims) & axes for e in ends}
    most = max(g.points(g.by_name[m].dims) for m in members)
    products = (e for e in keys if product_of(g.by_name[e]) is not None)
    inner = ((e, keys[e] | k) for e in products for k in keys.values() if keys[e] < k)
    return any(g.points({*g.by_name[e].dims, *dims}) > PART * most for e, dims in inner)


def _taken_at_places(c: Compute, members: set[str]) -> bool:
    """Whether a statement reads single elements of a stream, at places that data give or that follow from the row (the
    logit of a row's own number): they have to be in memory."""
    read = [ld for ld in loads(c.body) if ld.tensor in members]
    given = any(loads(ix) for ld in read for ix in ld.index)
    return given or any(len(dims_used(ld)) < sum(not isinstance(ix, Const) for ix in ld.index) for ld in read)


def streaming(g: Graph, pays: Pays | None = None) -> dict[str, None]:
    """Products whose result streams, maps over all of it, and maps of the same size that are made for them alone."""
    wide: dict[str, None] = {}
    for c in g.program.body:
        read = [r for r in g.producers[c.name] if r in wide]
        same = [r for r in read if set(g.by_name[r].dims) <= set(c.dims)]
        alike = same and not _shifted(c, read) and g.points(c.dims) == g.points(g.by_name[same[0]].dims)
        if (_streams(g, c) and (pays is None or pays(g, c))) or (c.reducer is None and alike):
            wide[c.name] = None
    for c in reversed(g.program.body):
        if c.name not in wide and _made_of_less(g, c, wide):
            wide[c.name] = None
    return wide


def _shifted(c: Compute, tensors: Sequence[str]) -> bool:
    """Whether a statement reads neighbours of its own place (a window that is written out): a block of the stream has
    not all of them."""
    places = (ix for ld in loads(c.body) if ld.tensor in tensors for ix in ld.index)
    return any(isinstance(ix, Call) and ix.op in ("add", "sub") for ix in places)


def _made_of_less(g: Graph, c: Compute, wide: Mapping[str, object]) -> bool:
    """Whether a map that a stream alone reads is made of nothing of its size (a mask of dropout, of positions)."""
    readers = g.consumers[c.name]
    if c.reducer is not None or not readers or not all(r in wide for r in readers):
        return False
    if c.name in g.program.outputs or g.points(c.dims) != g.points(g.by_name[readers[0]].dims):
        return False
    shapes = (g.program.shape_of(t) for t in tensors_read(c.body))
    return all(math.prod(map(estimate, shape)) < g.points(c.dims) for shape in shapes)


def of_few(g: Graph, c: Compute) -> bool:
    """Whether a statement sums a few numbers for each pair of rows (distances in three coordinates): what it reads is
    so much smaller than its result, and so little is computed for an element, that a map of it would be computed
    again."""
    if c.reducer != "sum" or c.index_name is not None or g.points(c.rdims) > FEW:
        return False
    x, read = product_of(c), {ld.tensor: ld for ld in loads(c.body)}
    if x is not None and x.loads is not None:  # of matrices as they are: `_streams` has its own question
        return False
    if not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)):
        return False
    elements = sum(g.points(dims_used(ld)) for ld in read.values())
    return bool(read) and g.points(c.dims) >= LARGER * elements


def _streams(g: Graph, c: Compute) -> bool:
    if "convolution" in c.origin:  # or a gradient of one: the library's, however few channels it has
        return False
    if of_few(g, c):
        return True
    x = product_of(c)
    if x is None or not x.is_matrix():
        return False
    sides = [g.points(d for d in (*c.dims, *c.rdims) if d in side) for side in (x.left, x.right)]
    lacks = [g.points(d) for d in (x.cols, x.rows, x.depth)]
    return streamed((*sides, g.points(out_dims(c))), lacks, g.points(x.batch)) == 2


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a block of a kernel may hold of a stream, and the least number of blocks."""

    nbytes: float
    blocks: int


def apart(p: Program, room: Room | None = None, pays: Pays | None = None) -> tuple[Program, tuple[frozenset[str], ...]]:
    """The program with a copy of each stream for the ends of other axes than the first's; and the copies, with their
    ends: a kernel of two of them would write one's stream to memory for the other. The program as it is, and nothing,
    where no stream has such ends. room: what a block may hold whole, of which all ends are made
    then: no copies. pays: which of the products that could stream do so (None: all)."""
    made: list[frozenset[str]] = []
    for s in streams(p, pays):
        p = _aligned(p, s)
        if room is not None and _held(p, s, room):
            continue
        p, s = _staged(p, s)
        p, copies = _copied(p, s)
        made += copies
    return p, tuple(made)


def _aligned(p: Program, s: Stream) -> Program:
    """The members and ends of a stream with the names that its first products have for its axes.

    Dims are bound names; what reads a member at a plain index ranges over the member's dim. Elsewhere names may have
    been given otherwise: where queries and keys are slices of one tensor, so are their gradients.
    """
    taken = {*p.sizes, *p.names, *(i.name for i in p.inputs), *p.syms}
    sizes, body = dict(p.sizes), {c.name: c for c in p.body}
    for n in (*s.members, *s.ends):
        c = body[n]
        names: dict[str, str] = {}
        for ld in loads(c.body):
            if ld.tensor in s.members:
                pairs = zip(ld.index, body[ld.tensor].dims, strict=True)
                for d, own in ((ix.dim, own) for ix, own in pairs if isinstance(ix, Index)):
                    names.setdefault(d, own)
        if len(set(names.values())) < len(names) or all(d == own for d, own in names.items()):
            continue
        for d in (*c.dims, *c.rdims):
            if d not in names and d in names.values():
                names[d] = fresh(d, taken)
                sizes[names[d]] = sizes[d]
        dims, rdims = (tuple(names.get(d, d) for d in own) for own in (c.dims, c.rdims))
        body[n] = replace(c, dims=dims, rdims=rdims, body=rename_dims(c.body, names))
    return replace(p, sizes=sizes, body=tuple(body[c.name] for c in p.body))


def belongs(p: Program) -> frozenset[str]:
    """All that streams, and the ends: no library call may compute one of them, which would have a stream in memory."""
    return frozenset(n for s in streams(p) for n in (*s.members, *s.ends))


def _held(p: Program, s: Stream, room: Room) -> bool:
    """Whether a block for each index of the axes that all ends keep has room for its part of a stream."""
    g = Graph.of(p)
    common = frozenset[str].intersection(*(_key(g, s, e) for e in s.ends))
    own = [frozenset(g.by_name[m].dims) - common for m in s.members]
    if not all(is_static(p.sizes[d]) for d in common.union(*own)) or g.points(common) < room.blocks:
        return False
    return (
        sum(g.points(dims) * g.by_name[m].dtype.nbytes for m, dims in zip(s.members, own, strict=True)) <= room.nbytes
    )


def _copied(p: Program, s: Stream) -> tuple[Program, list[frozenset[str]]]:
    g = Graph.of(p)
    groups = _groups(g, s)
    needed = [_needed(g, s, ends) for ends in groups]
    if len(groups) < 2 or sum(map(len, needed)) > MOST_AGAIN * len(s.members):
        return p, []
    taken = set(p.names)
    more: dict[str, list[Compute]] = {}
    new: dict[str, Compute] = {}
    made = [frozenset((*needed[0], *groups[0]))]
    for ends, own in zip(groups[1:], needed[1:], strict=True):
        names = {m: fresh(f"{m}_again", taken) for m in s.members if m in own}
        for m, name in names.items():
            more.setdefault(m, []).append(replace(g.by_name[m], name=name, body=renamed(g.by_name[m].body, names)))
        new.update((e, replace(g.by_name[e], body=renamed(g.by_name[e].body, names))) for e in ends)
        made.append(frozenset((*names.values(), *ends)))
    body = [x for c in p.body for x in (new.get(c.name, c), *more.get(c.name, ()))]
    return drop_dead(replace(p, body=tuple(body))), made


def _staged(p: Program, s: Stream) -> tuple[Program, Stream]:
    """Reductions that keep fewer axes than another end does, in two stages: first what the other keeps, so that both
    share a kernel and as many blocks as it has; then the rest, of a small tensor. Folds are associative."""
    g = Graph.of(p)
    taken = set(p.names)
    body: dict[str, tuple[Compute, ...]] = {c.name: (c,) for c in p.body}
    ends: list[str] = []
    keys = [_key(g, s, e) for e in s.ends]
    for e, key in zip(s.ends, keys, strict=True):
        c = g.by_name[e]
        more = [k for k in keys if key < k and not any(k < other for other in keys)]
        outer = tuple(d for d in c.rdims if more and d in more[0])
        if not outer or c.reducer not in _ASSOCIATIVE or c.index_name is not None:
            ends.append(e)
            continue
        part = fresh(f"{e}_part", taken)
        inner = tuple(d for d in c.rdims if d not in outer)
        dims = (*c.dims, *outer)
        first = replace(c, name=part, dims=dims, dtype=c.dtype.compute, rdims=inner)
        body[e] = (first, replace(c, body=Load(part, tuple(Index(d) for d in dims)), rdims=outer))
        ends.append(part)
    return replace(p, body=tuple(x for c in p.body for x in body[c.name])), replace(s, ends=tuple(ends))


_ASSOCIATIVE = ("sum", "prod", "max", "min")


def _key(g: Graph, s: Stream, end: str) -> frozenset[str]:
    """The axes of a stream that one of its ends keeps."""
    axes = frozenset(d for m in s.members for d in g.by_name[m].dims)
    return frozenset(g.by_name[end].dims) & axes


def _groups(g: Graph, s: Stream) -> list[tuple[str, ...]]:
    """The ends that keep the same axes of the stream, in program order. Of sums of a few numbers also those that wait
    for equally many others apart: a kernel of two such folds reads its rows twice, and would have the sums in memory
    in between."""
    few, waits = any(of_few(g, g.by_name[m]) for m in s.members), dict[str, int]()
    found: dict[tuple[frozenset[str], int], list[str]] = {}
    for e in s.ends:
        waits[e] = max((1 + waits[x] for x in g.above(e) if x in waits), default=0) if few else 0
        found.setdefault((_key(g, s, e), waits[e]), []).append(e)
    return [tuple(x) for x in found.values()]


def _needed(g: Graph, s: Stream, ends: Iterable[str]) -> set[str]:
    found: set[str] = set()
    todo = list(ends)
    while todo:
        more = [m for m in g.producers[todo.pop()] if m in s.members and m not in found]
        found.update(more)
        todo += more
    return found
