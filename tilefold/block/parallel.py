"""Which dims a kernel is parallel over, and when its independent blocks are too few.

Dims that only cheap members lack are kept parallel, and those members repeated per block (recomputation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tilefold.algebra.expr import Call, Load, dims_used, loads, tensors_read, walk
from tilefold.block.group import ANY, Group, Limits
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import matrices, product_of

#: Elements along dims that are few enough for a thread to have all of them: coordinates, the corners of a box.
COORDINATES = 4
#: Elements that are summed from which what they have in common is worth computing once.
LONG = 32


def parallel_dims(g: Graph, members: tuple[str, ...], limits: Limits = ANY) -> tuple[str, ...] | str:
    """Dims that the kernel of `members` can be parallel over, or why there is no such kernel."""
    computes = [g.by_name[m] for m in members]
    outs = {c.name: set(out_dims(c)) for c in computes}
    reduced = {d for c in computes for d in c.rdims}
    order = list(dict.fromkeys(d for c in reversed(computes) for d in out_dims(c)))
    chosen: list[str] = []
    for d in order:
        lacking = [m for m in members if d not in outs[m]]
        if limits.in_registers and _beside_coordinates(g, computes, d):
            continue
        if not lacking or (d not in reduced and _cheap_to_repeat(g, members, lacking, d, limits)):
            chosen.append(d)
    within = {*members}
    for c in computes:
        if c.reducer is None and not g.escapes(c.name, within):
            continue  # maps are recomputed block by block
        kept = [d for d in out_dims(c) if d not in chosen and d not in reduced]
        size = g.points(kept)
        # a result that is only written out streams; one that accumulates has to fit
        if c.reducer is not None and (size > limits.local or not all(is_static(g.program.sizes[d]) for d in kept)):
            return f"a block would have to keep {c.name} over all of {', '.join(kept)}"
    return tuple(chosen)


def splittable(g: Graph, x: Group, limits: Limits = ANY) -> bool:
    """Whether a kernel with few blocks may be cut along a long reduced axis instead.

    Few and known parallel blocks, and no result that streams along what is reduced; on a GPU none that needs what is
    reduced, for each segment writes what its elements alone make (`split.early_maps`).
    """
    if g.points(x.parallel) >= limits.few_blocks or not all(is_static(g.program.sizes[d]) for d in x.parallel):
        return False
    last = [m for m in x.members if g.by_name[m].rdims and g.points(g.by_name[m].rdims) >= limits.long_axis]
    axes = {d for m in last for d in g.by_name[m].rdims}
    along = [m for m in x.members if g.escapes(m, x.members) and axes & set(out_dims(g.by_name[m]))]
    if limits.in_registers:
        along = [m for m in along if not _of_elements(g, m, x.members)]
    return bool(last) and not along


def _of_elements(g: Graph, m: str, members: Sequence[str]) -> bool:
    """Whether a member is a map that needs nothing that its kernel reduces."""
    made = (g.by_name[m], *g.reached(m, g.producers, lambda c: c.name in members and c.reducer is None))
    return not any(c.reducer is not None and c.name in members for c in made)


def _cheap_to_repeat(g: Graph, members: Collection[str], lacking: list[str], d: str, limits: Limits) -> bool:
    """Whether the members without dim d may run again in every block of d."""
    within, without = {*members}, {*lacking}
    if any(g.escapes(m, within) for m in lacking):
        return False
    having = [m for m in members if m not in without]
    blocks = max(1, g.extent(d) // limits.repeat_block)
    return sum(map(g.flops, lacking)) * blocks <= limits.repeat_share * sum(map(g.flops, having))


def _beside_coordinates(g: Graph, computes: Sequence[Compute], d: str) -> bool:
    """Whether d is three coordinates, of each of which a long sum takes what all have in common (weights of pairs of
    bodies, in forces): a thread has the sums of all of them, and computes that once. A tile that had d as well would be
    of one dim more than what is computed, which threads then exchange."""
    if not 1 < (n := g.extent(d)) <= COORDINATES or n & (n - 1) == 0 or any(matrices(c, g.extent) for c in computes):
        return False
    lacking = [c.name for c in computes if d not in out_dims(c)]

    def common(c: Compute) -> bool:
        parts = (x for x in walk(c.body) if isinstance(x, Call))
        above = (m for m in lacking if c.name in g.below(m))
        every = (*map(dims_used, parts), *({*out_dims(g.by_name[m])} for m in above))
        return any({*c.rdims} <= {*x} and d not in x for x in every)

    sums = (c for c in computes if c.reducer is not None and d in out_dims(c) and g.points(c.rdims) >= LONG)
    return any(map(common, sums))


def less_parallel(g: Graph, whole: Group, limits: Limits, parts: Sequence[Group]) -> str | None:
    """The reason, if a part loses dims that it is parallel over and should not."""
    reduced = {d for m in whole.members for d in g.by_name[m].rdims}
    lost = [{d for d in x.parallel if d not in whole.parallel and d not in reduced} for x in parts]
    if limits.in_registers:
        kept = [m for m in whole.members if g.by_name[m].reducer is None and g.escapes(m, whole.members)]
        kept = [m for m in kept if not _is_state(g, m, whole)]
        gone = frozenset().union(*lost)
        for m in kept if g.points(gone) > COORDINATES else ():
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


def too_few(g: Graph, whole: Group, limits: Limits, parts: Sequence[Group]) -> str | None:
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
    if any(_narrowed(g, a, b, whole, limits) for a in parts for b in parts if a is not b):
        return f"{blocks} would read and write what more could"
    if any(_run_down(g, a, b, whole, limits) for a in parts for b in parts if a is not b):
        return f"{blocks} would run down rows that more could have"
    if any(_uncut(g, a, b, whole, limits) for a in parts for b in parts if a is not b):
        return f"{blocks} would read what segments could"
    few = left < min(limits.workers, max(had)) and not splittable(g, whole, limits)
    if few or left < min(limits.both, *had):
        return f"only {blocks} would be left"
    return None


def _starved(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a reads all it reads in so few blocks, because b sums over dims that a is parallel over, that a kernel of
    its own costs less: behind a (maxima over channels of means of images), or in front of it, where both may read the
    same (a mean over channels of what is known of each, with which all of an image is scaled and written)."""
    if limits.operands is None:
        return False
    summed = {d for m in b.members for d in g.by_name[m].rdims} & {*a.parallel} - {*whole.parallel}
    if not summed:
        return False
    behind = _little_between(g, a, b, 1.0)
    producers, readers = (a, b) if behind else (b, a)
    between = {r for m in readers.members for r in g.producers[m] if r in producers.members}
    if not between or not (behind or _known_before(g, a, b, summed, whole)):
        return False
    read = _read(g, a)
    both = set[Load]() if behind else read & _read(g, b)
    left = g.points(whole.parallel) * max(1, g.points(summed) // limits.segment)
    slower = _slower(limits, left, g.points(a.parallel))
    return slower * bytes_read(g, read) > limits.operands.kernel + 2 * g.nbytes(between) + bytes_read(g, both)


def _narrowed(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a loses dims that b lacks, and what it reads and writes takes the blocks that are left longer than a
    kernel of its own costs (parts of an image put together, beside the sum of a vector that one of them is scaled
    with)."""
    if limits.operands is None:
        return False
    if not {*a.parallel} - {*whole.parallel} - {d for m in whole.members for d in g.by_name[m].rdims}:
        return False
    last, left = _summed_last(g, whole, whole), g.points(whole.parallel)
    for summed in last if len(last) == 1 else ():
        left *= max(1, g.points(summed) // limits.segment)
    slower = _slower(limits, left, g.points(a.parallel))
    read, results = _read(g, a), {r for m in a.members if g.escapes(m, a.members) for r in g.by_name[m].results}
    between = results & {r for m in b.members for r in g.producers[m]}
    between |= {r for m in a.members for r in g.producers[m] if r in b.members}
    saved = limits.operands.kernel + 2 * g.nbytes(between) + bytes_read(g, read & _read(g, b))
    read = {ld for ld in read if ld.tensor not in whole.members}  # what b makes is at hand
    written = {r for m in a.members if g.escapes(m, whole.members) for r in g.by_name[m].results}
    return slower * (bytes_read(g, read) + g.nbytes(written)) > saved


def _run_down(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a folds rows that b sums columns of (no product of matrices, into which what is folded streams), and
    writes maps along them, so that no segments of one kernel are made: what it reads and writes takes the blocks that
    are left longer than a kernel of its own costs (the gradient of a norm's rows, beside those of each image's scale:
    436 us on an H100, apart 60)."""
    if limits.operands is None:
        return False
    summed = {d for m in b.members for d in g.by_name[m].rdims} & {*a.parallel} - {*whole.parallel}
    folds = [c for c in map(g.by_name.__getitem__, a.members) if c.reducer is not None]
    rows = {d for c in folds for d in c.rdims}
    maps = (m for m in a.members if g.by_name[m].reducer is None and g.escapes(m, whole.members))
    written = {m for m in maps if summed & (dims := {*out_dims(g.by_name[m])}) and rows & dims}
    if not summed or not folds or any(summed & {*c.rdims} for c in folds):
        return False
    products = any(matrices(g.by_name[m], g.extent) for m in whole.members)
    if products or all(_of_elements(g, m, whole.members) for m in written):
        return False
    between = {r for m in b.members for r in g.producers[m] if r in a.members}
    between |= {r for m in a.members for r in g.producers[m] if r in b.members}
    read = _read(g, a)
    slower = _slower(limits, g.points(whole.parallel), g.points(a.parallel))
    saved = limits.operands.kernel + bytes_read(g, read & _read(g, b))
    saved += sum((1 if g.escapes(m, whole.members) else 2) * g.nbytes([m]) for m in between)
    return slower * (bytes_read(g, read) + g.nbytes(written)) > saved


def _slower(limits: Limits, left: float, had: float) -> float:
    """How many times longer so few blocks as are left read than as many as there were: more than `readers` read at the
    memory's rate."""
    return max(1.0, limits.readers / left) - max(1.0, limits.readers / had)


def _known_before(g: Graph, a: Group, b: Group, summed: set[str], whole: Group) -> bool:
    """Whether b's sums over these dims are no part of a's folds (scores are), so that no segments of one kernel compute
    both, b multiplies no matrices, and a's results have those dims."""
    folded = {d for m in a.members for d in g.by_name[m].rdims}
    sums = [c for c in map(g.by_name.__getitem__, b.members) if summed & {*c.rdims}]
    if any(matrices(g.by_name[m], g.extent) for m in b.members):
        return False
    results = (m for m in a.members if g.escapes(m, whole.members))
    return not any(folded & {*out_dims(c)} for c in sums) and any(summed & {*out_dims(g.by_name[m])} for m in results)


def _read(g: Graph, x: Group) -> set[Load]:
    """What a group reads of what others compute."""
    return {ld for m in x.members for ld in loads(g.by_name[m].body) if ld.tensor not in x.members}


def bytes_read(g: Graph, read: Iterable[Load]) -> float:
    """Bytes of what these loads read, each element once."""
    return sum(g.points(dims_used(ld)) * g.program.dtype_of(ld.tensor).nbytes for ld in read)


def _uncut(g: Graph, a: Group, b: Group, whole: Group, limits: Limits) -> bool:
    """Whether a, cut into segments, costs less with a kernel of its own and one that combines them than in a kernel
    that has b's sums over other axes as well (two terms of a loss, the norms of gradients and the norm of these): such
    a kernel is not cut."""
    if limits.operands is None or not splittable(g, a, limits):
        return False
    if _sums_read(g, b, a):
        axes, others = ({frozenset(g.by_name[m].rdims) for m in x.members if g.by_name[m].reducer} for x in (a, b))
        if len(axes) != 1 or any(x & y for x in axes for y in others):
            return False
    else:
        axes, others = (_summed_last(g, x, whole) for x in (a, b))
        if len(axes) != 1 or others <= axes or _sums_read(g, a, b):
            return False
    left, (summed,) = g.points(whole.parallel), axes
    cut = left * max(1, g.points(summed) // limits.segment)
    slower = _slower(limits, left, cut)
    return slower * bytes_read(g, _read(g, a)) > 2 * limits.operands.kernel


def _summed_last(g: Graph, x: Group, whole: Group) -> set[frozenset[str]]:
    """The axes of sums that no other sum is made of (a mean over rows, not the softmax of each)."""
    sums = {m for m in whole.members if g.by_name[m].reducer is not None}
    last = (m for m in sums.intersection(x.members) if g.below(m).isdisjoint(sums))
    return {frozenset(g.by_name[m].rdims) for m in last}


def _sums_read(g: Graph, a: Group, b: Group) -> bool:
    """Whether a sum of a is made of what b computes."""
    sums = (m for m in a.members if g.by_name[m].reducer is not None)
    return any(not g.above(m).isdisjoint(b.members) for m in sums)


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
