"""Which operators can share a kernel: a group over common parallel dims, or the reason against it.

A set of operators is legal when every value that crosses an internal edge is computed in the same block of the
parallel dims as it is used (plain indices), when what stays local to a block is bounded, and when enough independent
blocks are left. Dims that only cheap members lack are kept parallel, and those members repeated per block
(recomputation). That no path leaves the set and returns (it is convex) is the caller's to see to.

What is enough, and what a block holds, are the `Limits` of the device. The exact selection asks about whole sets, the
greedy grouping (`plan.greedy`) about two groups made one: it is the same test, which then also looks at what the two
had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, dims_used, loads, tensors_read, walk
from tilefold.errors import SourceLoc
from tilefold.tensor.analysis import Graph, is_static, out_dims, plain_axes
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import product_of


@dataclass(frozen=True, slots=True)
class Group:
    """Members in program order and the dims their kernel is parallel over (order of the last member)."""

    members: tuple[str, ...]
    parallel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a producer and its consumer do not share a kernel."""

    producer: str
    consumer: str
    reason: str
    loc: SourceLoc | None = None


@dataclass(frozen=True, slots=True)
class Grouping:
    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Operands:
    """What it costs to compute an operand of a product that a fold streams, in each of the blocks of rows that read it.

    rows: of a product that share a block. As bytes of memory: cached, a byte out of the last cache; flop, arithmetic of
    a product; vector, arithmetic of a map; kernel, one more of them.
    """

    rows: int
    cached: float
    flop: float
    kernel: float
    vector: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernels of a device keep to. Extents and blocks are counted, sizes are of elements.

    workers: independent blocks that a kernel must have, if one of its parts had them. both: blocks that must be left
    where each of its parts has so many (sums over rows and sums over columns have none in common). in_registers: what
    a kernel computes is read where it was computed, as values in registers are.
    local: elements, over one index of the parallel dims, that a block may keep of one value. lost: extent that may
    change from parallel to local because another member lacks the dim. held: elements that a block may keep for all of
    its life beside its tiles (None: any).
    repeat_share: repeated work that is accepted, as a share of the work that it sits beside. repeat_block: length of a
    block along a parallel dim that repeated members are charged for. little: bytes between parts that are not worth
    fewer blocks, as a share of what the first part reads.
    operands: of streamed products; None: computing them again costs nothing.
    readers: blocks that together read at the memory's rate, where fewer read at less; segment: elements of an axis that
    is summed over that are worth a block of their own.
    few_blocks, long_axis: fewer blocks than that are worth cutting along a reduced axis of at least so many elements.
    """

    workers: int = 2
    both: int = 1
    in_registers: bool = False
    local: int = 2048
    lost: int = 512
    held: int | None = None
    repeat_share: float = 1 / 16
    repeat_block: int = 128
    little: float = 1 / 16
    operands: Operands | None = None
    readers: int = 1
    segment: int = 256
    few_blocks: int = 4
    long_axis: int = 1 << 16


#: Of a device that nothing is known of.
ANY = Limits()


def legal(
    g: Graph, members: tuple[str, ...], limits: Limits = ANY, parts: Sequence[Group] | None = None
) -> Group | str:
    """The group of a convex set of members, or the reason why it is not one kernel. parts: groups that are made one,
    where that is asked; else every member is a part."""
    whole = one_kernel(g, members, limits)
    if isinstance(whole, str):
        return whole
    if parts is None:
        parts = [Group((m,), out_dims(g.by_name[m])) for m in members]
    return _less_parallel(g, whole, limits, parts) or _too_few(g, whole, limits, parts) or whole


def one_kernel(g: Graph, members: tuple[str, ...], limits: Limits = ANY) -> Group | str:
    """The group of members whose values do not cross from block to block, or the one that does; whatever it costs."""
    parallel = parallel_dims(g, members, limits)
    if isinstance(parallel, str):
        return parallel
    crossing = _crossing(g, members, parallel) or (_moved if limits.in_registers else _looked_up)(g, members)
    if crossing is None and limits.in_registers:
        crossing = _one_of_parts(g, members) or _beside_a_sum(g, members, limits.operands)
    if crossing is None and limits.operands is not None:
        crossing = _computed_again(g, members, parallel, limits.operands)
    return Group(members, parallel) if crossing is None else crossing


def _less_parallel(g: Graph, whole: Group, limits: Limits, parts: Sequence[Group]) -> str | None:
    """The reason, if a part loses dims that it is parallel over and should not."""
    reduced = {d for m in whole.members for d in g.by_name[m].rdims}
    lost = [{d for d in x.parallel if d not in whole.parallel and d not in reduced} for x in parts]
    if limits.in_registers:
        kept = [m for m in whole.members if g.by_name[m].reducer is None and g.escapes(m, whole.members)]
        kept = [m for m in kept if not _is_state(g, m, whole)]
        gone = frozenset().union(*lost)
        for m in kept if gone else ():
            if any(gone & set(x.parallel) - set(out_dims(g.by_name[m])) for x in parts if m not in x.members):
                return f"{m} goes to memory, and its kernel would not be parallel over {', '.join(sorted(gone))}"
        for m in (m for m in whole.members if ends_a_chain(g, m, whole.members)):
            along = _summed_later(g, m, whole)
            if any(along & set(x.parallel) for x in parts if m in x.members):
                return f"{m} goes to memory, and a thread block would run along {', '.join(sorted(along))}"
    for x, dims in zip(parts, lost, strict=True):
        if g.points(dims) > limits.lost or not all(is_static(g.program.sizes[d]) for d in dims):
            return f"the parallel dim {', '.join(sorted(dims))} of {x.members[-1]} would be lost"
    return None


def _is_state(g: Graph, m: str, whole: Group) -> bool:
    """Whether a map is one value a block and made of what the kernel reduces: it costs its kernel no dim."""
    before = g.reached(m, g.producers, lambda c: c.name in whole.members)
    return set(out_dims(g.by_name[m])) <= set(whole.parallel) and any(
        c.reducer is not None and c.name in whole.members for c in before
    )


def ends_a_chain(g: Graph, m: str, members: Sequence[str]) -> bool:
    """Whether m is a product that sums over what another product of the kernel makes, and so in a loop."""
    found = product_of(g.by_name[m])
    if found is None or not found.is_matrix():
        return False
    before = g.reached(m, g.producers, lambda c: c.name in members and c.reducer is None)
    return any(c.name in members and product_of(c) is not None for c in before)


def _summed_later(g: Graph, m: str, whole: Group) -> set[str]:
    """Dims of a product that the kernel sums over afterwards, although it writes something that has them: a sum over
    those can read that."""
    after = [c for c in g.reached(m, g.consumers, lambda c: c.name in whole.members) if c.name in whole.members]
    summed = {d for c in after for d in c.rdims} & set(out_dims(g.by_name[m])) - set(whole.parallel)
    written = [g.by_name[m], *after]
    return {d for d in summed if any(d in out_dims(c) and g.escapes(c.name, whole.members) for c in written)}


def _too_few(g: Graph, whole: Group, limits: Limits, parts: Sequence[Group]) -> str | None:
    """The reason, if too few independent blocks are left."""
    left, had = g.points(whole.parallel), [g.points(x.parallel) for x in parts]
    blocks = f"{left} independent block{'s' * (left != 1)}"
    if left < limits.both and any(
        left * limits.both <= n and _little_between(g, a, b, limits.little)
        for n, a in zip(had, parts, strict=True)
        for b in parts
        if a is not b
    ):
        return f"only {blocks} would be left, to save little"
    if any(_starved(g, a, b, whole, limits) for a in parts for b in parts if a is not b):
        return f"{blocks} would read what more could"
    if any(_uncut(g, a, b, whole, limits) for a in parts for b in parts if a is not b):
        return f"{blocks} would read what segments could"
    few = left < min(limits.workers, max(had)) and not splittable(g, whole, limits)
    if few or left < min(limits.both, *had):
        return f"only {blocks} would be left"
    return None


def _starved(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a reads all it reads in so few blocks, because b sums over dims that a is parallel over, that a kernel of
    its own costs less (maxima over channels of means of images)."""
    if limits.operands is None or not _little_between(g, a, b, 1.0):
        return False
    summed = {d for m in b.members for d in g.by_name[m].rdims} & {*a.parallel} - {*whole.parallel}
    left = g.points(whole.parallel) * max(1, g.points(summed) // limits.segment)
    slower = max(1.0, limits.readers / left) - max(1.0, limits.readers / g.points(a.parallel))
    between = {r for m in b.members for r in g.producers[m] if r in a.members}
    read = {ld for m in a.members for ld in loads(g.by_name[m].body) if ld.tensor not in a.members}
    nbytes = sum(g.points(dims_used(ld)) * g.program.dtype_of(ld.tensor).nbytes for ld in read)
    return bool(summed) and slower * nbytes > limits.operands.kernel + 2 * g.nbytes(between)


def _uncut(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a, cut into segments, costs less with a kernel of its own and one that combines them than in a kernel
    that has b's sums over other axes as well (two terms of a loss): such a kernel is not cut."""
    if limits.operands is None or not splittable(g, a, limits):
        return False
    axes, others = (_summed_last(g, x, whole) for x in (a, b))
    if len(axes) != 1 or others <= axes or _sums_read(g, a, b) or _sums_read(g, b, a):
        return False
    left, (summed,) = g.points(whole.parallel), axes
    cut = left * max(1, g.points(summed) // limits.segment)
    slower = max(1.0, limits.readers / left) - max(1.0, limits.readers / cut)
    read = {ld for m in a.members for ld in loads(g.by_name[m].body) if ld.tensor not in a.members}
    nbytes = sum(g.points(dims_used(ld)) * g.program.dtype_of(ld.tensor).nbytes for ld in read)
    return slower * nbytes > 2 * limits.operands.kernel


def _summed_last(g: Graph, x: Group, whole: Group) -> set[frozenset[str]]:
    """The axes of sums that no other sum is made of (a mean over rows, not the softmax of each)."""
    sums = {m for m in whole.members if g.by_name[m].reducer is not None}
    last = (
        m
        for m in sums.intersection(x.members)
        if not any(c.name in sums for c in g.reached(m, g.consumers, lambda _: True))
    )
    return {frozenset(g.by_name[m].rdims) for m in last}


def _sums_read(g: Graph, a: Group, b: Group) -> bool:
    """Whether a sum of a is made of what b computes."""
    sums = (m for m in a.members if g.by_name[m].reducer is not None)
    return any(c.name in b.members for m in sums for c in g.reached(m, g.producers, lambda _: True))


def _little_between(g: Graph, a: Group, b: Group, little: float) -> bool:
    """Whether what goes from one group to the other is little beside what the first reads: a row's log-sum-exp, which
    a sum over rows takes. Such a sum is a kernel of its own, so that rows have thread blocks of their own. (Products of
    vectors, the scores of decoding, are folded in the loop that reads their operands.)"""
    if not any(g.by_name[m].reducer and not _of_vectors(g, m) for m in a.members):
        return False
    between = {r for m in b.members for r in g.producers[m] if r in a.members}
    if not between:
        return False
    read = {t for m in a.members for t in tensors_read(g.by_name[m].body)} - set(a.members)
    return g.nbytes(between) <= little * g.nbytes(read)


def _of_vectors(g: Graph, m: str) -> bool:
    product = product_of(g.by_name[m])
    return product is not None and bool(product.of_one_side)


def _crossing(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...]) -> str | None:
    """The reason, if a value crosses an internal edge from one block of the parallel dims to another."""
    for name in members:
        c = g.by_name[name]
        for r in g.producers[name]:
            if r not in members:
                continue
            producer = g.by_name[r]
            crossing = [d for d in producer.dims if d in parallel and d not in plain_axes(c, producer)]
            if crossing:
                return f"{name} reads {r} across blocks of {', '.join(crossing)}"
    return None


def _moved(g: Graph, members: tuple[str, ...]) -> str | None:
    """The reason, if a value is read at another position than it is computed for (x[i + 1], the halves of a rotation).
    Maps of tensors in memory are computed again there, unless they are results or operands of a reduction."""
    kept: set[str] = set()
    for name in members:
        c = g.by_name[name]
        for r in (r for r in g.producers[name] if r in kept or (c.reducer and r in members)):
            producer = g.by_name[r]
            if any(g.extent(d) > 1 for d in set(producer.dims) - plain_axes(c, producer)):
                return f"{name} reads {r} at a computed position"
        if c.reducer is not None or kept & set(g.producers[name]) or g.escapes(name, members):
            kept.add(name)
    return None


def _one_of_parts(g: Graph, members: tuple[str, ...]) -> str | None:
    """The reason, if a result is put together of parts (gradients of queries, keys and values) and a fold over products
    makes one: its registers would have to hold as many elements as there are of all parts."""
    for name in members:
        c = g.by_name[name]
        conditions = [
            n.args[0] for n in walk(c.body) if isinstance(n, Call) and n.op == "where" and not loads(n.args[0])
        ]
        chosen = {d for e in conditions for d in dims_used(e) if g.extent(d) > 1}
        if c.reducer is not None or not chosen or not g.escapes(name, members):
            continue
        for r in g.reached(name, g.producers, lambda c: c.name in members and c.reducer is None):
            if r.name in members and chosen - set(r.dims) and ends_a_chain(g, r.name, members):
                return f"{r.name} is one of the parts of {name}"
    return None


def _beside_a_sum(g: Graph, members: tuple[str, ...], cost: Operands | None) -> str | None:
    """The reason, if a large map that goes to memory is summed down its columns: blocks of columns with a stretch of
    rows write it slower than blocks that have all of it in parallel, by more than reading it again costs. Where sums
    run down another tensor's columns beside it, and nothing along its rows (batch norms), they may as well."""
    for name in members:
        c = g.by_name[name]
        p = product_of(c)
        if c.reducer is None or not c.dims or (p is not None and p.is_matrix()) or cost is None:
            continue
        for m in g.reached(name, g.producers, lambda m: m.name in members and m.reducer is None):
            own = out_dims(m)
            along = m.reducer is None and bool(own) and bool({*own} & {*c.rdims}) and own[-1] in c.dims
            large = m.name in members and g.escapes(m.name, members) and g.nbytes([m.name]) > cost.kernel
            if along and large and not _follows_a_product(g, m, members) and not _among_columns(g, m, members):
                return f"{m.name} goes to memory, where {name} sums its columns"
    return None


def _among_columns(g: Graph, m: Compute, members: tuple[str, ...]) -> bool:
    """Whether sums of a kernel read tensors of a map's extent that the map is not of, and none runs along its rows."""
    if any(_along_rows(m, c) for c in g.reached(m.name, g.consumers, lambda c: c.reducer is None)):
        return False
    own = _in_memory(g, m, members)
    sums = [c for c in map(g.by_name.__getitem__, members) if c.reducer is not None and m in _maps_of(g, c, members)]
    return any(
        ld.tensor not in own and set(out_dims(m)) <= set(dims_used(ld))
        for c in sums
        for x in (c, *_maps_of(g, c, members))
        for ld in loads(x.body)
        if ld.tensor not in members
    )


def _along_rows(m: Compute, c: Compute) -> bool:
    """Whether a reduction that is no product of matrices runs over a map's last dim."""
    p = product_of(c)
    return c.reducer is not None and (p is None or not p.is_matrix()) and out_dims(m)[-1] in c.rdims


def _maps_of(g: Graph, c: Compute, members: tuple[str, ...]) -> list[Compute]:
    """Maps of a kernel that a member of it is made of."""
    before = g.reached(c.name, g.producers, lambda x: x.name in members and x.reducer is None)
    return [x for x in before if x.name in members and x.reducer is None and x.name != c.name]


def _in_memory(g: Graph, m: Compute, members: tuple[str, ...]) -> set[str]:
    """Tensors in memory that a map of a kernel is made of."""
    return {t for x in (m, *_maps_of(g, m, members)) for t in tensors_read(x.body)} - {*members}


def _follows_a_product(g: Graph, m: Compute, members: tuple[str, ...]) -> bool:
    """Whether a map is of products that its kernel makes: without it, they are read from memory as well."""
    within = g.reached(m.name, g.producers, lambda c: c.name in members)
    return any(c.name in members and product_of(c) is not None for c in within)


def _looked_up(g: Graph, members: tuple[str, ...]) -> str | None:
    """The reason, if integers that a member reduces are read at a computed position: a table, which bounds loops where
    it is in memory, and of which a block uses an element or two."""
    for name in members:
        for r in g.producers[name]:
            c = g.by_name[r]
            if r not in members or c.reducer is None or c.dtype not in (DType.I64, DType.I32):
                continue
            if any(g.extent(d) > 1 for d in set(c.dims) - plain_axes(g.by_name[name], c)):
                return f"{name} looks up {r} at a computed position"
    return None


def _computed_again(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...], cost: Operands) -> str | None:
    """The reason, if blocks of rows would each compute what a product reads (rotated or normalised keys), or would
    compute it of several elements of a tensor, or of a sum over them (rotated or normalised queries), so that no copy
    brings it to the matrix unit; and writing it once costs less. Of products that a fold streams, or that are its
    scores."""
    for name in members:
        p = product_of(g.by_name[name])
        if p is None or not p.is_matrix(lambda d: g.extent(d) > 1):
            continue
        for r in sorted((tensors_read(p.a) | tensors_read(p.b)) & set(members)):
            c = g.by_name[r]
            own = set(out_dims(c))
            streamed = own - set(parallel) - set(p.rdims) or is_folded(g, name) or _weighed(g, name, r)
            if c.reducer is not None or not streamed:
                continue
            again = -(-g.points(d for d in parallel if d not in own) // cost.rows)
            read, written = _read_for(g, c, parallel), g.nbytes([r])
            apart = 2 * written + cost.kernel
            made = _made_of(g, r, members, own)
            work = sum(map(g.flops, made)) * cost.vector
            if again > 1 and again * ((read - written) * cost.cached + work) > apart:
                return f"{again} blocks of rows would each compute {r}, which {name} multiplies"
            elements = set(loads(c.body))
            moves = len({ld.tensor for ld in elements}) < len(elements) or any(g.by_name[m].reducer for m in made)
            if moves and g.flops(name) * cost.flop > apart:
                return f"{name} would multiply {r}, which moves between the threads that compute it"
    return None


def _made_of(g: Graph, r: str, members: tuple[str, ...], own: set[str]) -> set[str]:
    """A map, and what the kernel computes of one index of it (norms of keys): again wherever the map is."""
    before = g.reached(r, g.producers, lambda c: c.name in members)
    return {r, *(c.name for c in before if c.name in members and set(out_dims(c)) <= own)}


def _weighed(g: Graph, name: str, r: str) -> bool:
    """Whether a product weighs r by what maps make of another product (values by probabilities): a fold may stream it,
    whatever its own kernel is so far."""
    product = product_of(g.by_name[name])
    assert product is not None
    before = {t for t in tensors_read(product.a) | tensors_read(product.b) if t != r and t in g.by_name}
    above = (x for t in before for x in (g.by_name[t], *g.reached(t, g.producers, lambda c: c.reducer is None)))
    return any((found := product_of(c)) is not None and found.is_matrix(lambda d: g.extent(d) > 1) for c in above)


def is_folded(g: Graph, name: str) -> bool:
    """Whether a reduction is over a dim of a result, or of a map of it: scores."""
    own = set(out_dims(g.by_name[name]))
    return any(own & set(c.rdims) for c in g.reached(name, g.consumers, lambda c: c.reducer is None))


def _read_for(g: Graph, c: Compute, parallel: tuple[str, ...]) -> float:
    """Bytes that blocks read to compute all of a map once; what does not vary with a parallel dim is read in each."""
    own = [d for d in out_dims(c) if d in parallel]
    return sum(g.points((*own, *dims_used(ld))) * g.program.dtype_of(ld.tensor).nbytes for ld in loads(c.body))


def parallel_dims(g: Graph, members: tuple[str, ...], limits: Limits = ANY) -> tuple[str, ...] | str:
    """Dims that the kernel of `members` can be parallel over, or why there is no such kernel."""
    computes = [g.by_name[m] for m in members]
    outs = {c.name: set(out_dims(c)) for c in computes}
    reduced = {d for c in computes for d in c.rdims}
    order = list(dict.fromkeys(d for c in reversed(computes) for d in out_dims(c)))
    chosen: list[str] = []
    for d in order:
        lacking = [m for m in members if d not in outs[m]]
        if not lacking or (d not in reduced and _cheap_to_repeat(g, members, lacking, d, limits)):
            chosen.append(d)
    for c in computes:
        if c.reducer is None and not g.escapes(c.name, members):
            continue  # maps are recomputed block by block
        kept = [d for d in out_dims(c) if d not in chosen and d not in reduced]
        size = g.points(kept)
        # a result that is only written out streams; one that accumulates has to fit
        if c.reducer is not None and (size > limits.local or not all(is_static(g.program.sizes[d]) for d in kept)):
            return f"a block would have to keep {c.name} over all of {', '.join(kept)}"
    return tuple(chosen)


def splittable(g: Graph, x: Group, limits: Limits = ANY) -> bool:
    """Whether a kernel with few blocks may be cut along a long reduced axis instead.

    Few and known parallel blocks, and no result that streams along what is reduced.
    """
    if g.points(x.parallel) >= limits.few_blocks or not all(is_static(g.program.sizes[d]) for d in x.parallel):
        return False
    last = [m for m in x.members if g.by_name[m].rdims and g.points(g.by_name[m].rdims) >= limits.long_axis]
    axes = {d for m in last for d in g.by_name[m].rdims}
    return bool(last) and not any(g.escapes(m, x.members) and axes & set(out_dims(g.by_name[m])) for m in x.members)


def _cheap_to_repeat(g: Graph, members: Iterable[str], lacking: list[str], d: str, limits: Limits) -> bool:
    """Whether the members without dim d may run again in every block of d."""
    if any(g.escapes(m, members) for m in lacking):
        return False
    having = [m for m in members if m not in lacking]
    blocks = max(1, g.extent(d) // limits.repeat_block)
    return sum(map(g.flops, lacking)) * blocks <= limits.repeat_share * sum(map(g.flops, having))
