"""Which operators can share a kernel: a group over common parallel dims, or the reason against it.

A set of operators is legal when every value that crosses an internal edge is computed in the same block of the
parallel dims as it is used (plain indices), when what stays local to a block is bounded, and when enough independent
blocks are left (`block.parallel`). That no path leaves the set and returns (it is convex) is the caller's to see to.

What is enough, and what a block holds, are the `Limits` of the device. The exact selection asks about whole sets, the
greedy grouping (`plan.greedy`) about two groups made one: it is the same test, which then also looks at what the two
had.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, dims_used, loads, tensors_read, walk
from tilefold.block.build import ONE_BLOCK
from tilefold.block.group import ANY, Group, Limits, Operands
from tilefold.block.parallel import bytes_read, ends_a_chain, less_parallel, parallel_dims, too_few
from tilefold.block.stages import inner_producers
from tilefold.tensor.analysis import Graph, is_map, is_static, out_dims, plain_axes
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import matrices, product_of


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
    return less_parallel(g, whole, limits, parts) or too_few(g, whole, limits, parts) or whole


def one_kernel(g: Graph, members: tuple[str, ...], limits: Limits = ANY) -> Group | str:
    """The group of members whose values do not cross from block to block, or the one that does; whatever it costs."""
    parallel = parallel_dims(g, members, limits)
    if isinstance(parallel, str):
        return parallel
    crossing = _crossing(g, members, parallel)
    if crossing is None:
        crossing = _moved(g, members) if limits.in_registers else _looked_up(g, members) or _ahead(g, members, parallel)
    if crossing is None and limits.in_registers:
        crossing = _one_of_parts(g, members) or _beside_a_sum(g, members, limits.operands)
    if crossing is None and limits.operands is not None:
        crossing = _computed_again(g, members, parallel, limits.operands)
        crossing = crossing or _among_neighbours(g, members, parallel, limits.operands)
    return Group(members, parallel) if crossing is None else crossing


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


def _ahead(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...]) -> str | None:
    """The reason, if a loop would read what a reduction is at another of its indices than it is at (scores of the key
    before): maps are computed again there, a reduction is not."""
    elsewhere: dict[str, set[str]] = {}
    for name in members:
        for r in g.producers[name]:
            if r in members and (along := set(g.by_name[r].dims) - plain_axes(g.by_name[name], g.by_name[r])):
                elsewhere.setdefault(r, set()).update(along)
    if not elsewhere:
        return None
    streamed = _streamed(g, members, parallel)
    for name in filter(inner_producers(g, Group(members, parallel)).__contains__, members):
        maps = g.reached(name, g.consumers, lambda c: c.name in members and is_map(c))
        for r in (name, *(c.name for c in maps if is_map(c))):
            if elsewhere.get(r, set()) & streamed:
                return f"{r} is read at a computed position"
    return None


def _streamed(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...]) -> set[str]:
    """Local dims that a loop of a kernel may be over: of what it reduces, and of what it writes."""
    found: set[str] = set()
    for c in map(g.by_name.__getitem__, members):
        axes = set(c.rdims) if c.reducer else set(c.dims) - set(parallel) if g.escapes(c.name, members) else set()
        if g.points(axes) > ONE_BLOCK or not all(is_static(g.program.sizes[d]) for d in axes):
            found |= axes
    return found


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
            if not along or not large:
                continue
            apart = not _follows_a_product(g, m, members) and not _of_whole_columns(g, m, c, members, cost)
            if apart and not _among_columns(g, m, members):
                return f"{m.name} goes to memory, where {name} sums its columns"
    return None


def _of_whole_columns(g: Graph, m: Compute, c: Compute, members: tuple[str, ...], cost: Operands) -> bool:
    """Whether a map is made of what its kernel reduces down the same short columns (exponentials, of their maxima):
    blocks that write it have them whole, and the sum of them with it."""
    before = g.reached(m.name, g.producers, lambda x: x.name in members)
    same = any(x.name in members and x.reducer is not None and {*x.rdims} == {*c.rdims} for x in before)
    return same and g.points(c.rdims) * cost.neighbours <= cost.kept


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
        p = matrices(g.by_name[name], g.extent)
        if p is None:
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


def _among_neighbours(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...], cost: Operands) -> str | None:
    """The reason, if a product of matrices would be computed again for each index of the dims along which most of what
    a kernel reads has its neighbours (a gate of channels, for each place of an image): its rows fill tiles, beside
    which blocks have one such index, and writing it once costs less than reading that in single elements."""
    products = [m for m in members if matrices(g.by_name[m], g.extent)]
    for name in products:
        own = set(out_dims(g.by_name[name]))
        again = {d for d in parallel if d not in own and g.extent(d) > 1}
        if not again or any(again & {*out_dims(g.by_name[m]), *g.by_name[m].rdims} for m in products):
            continue
        read = {ld for m in members for ld in loads(g.by_name[m].body) if ld.tensor not in members and ld.index}
        near = [ld for ld in read if again & dims_used(ld.index[-1])]
        if bytes_read(g, near) > 2 * g.nbytes([name]) + cost.kernel:
            return f"{name} would be computed in blocks of one index of {', '.join(sorted(again))}"
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
    return any(matrices(c, g.extent) for c in above)


def is_folded(g: Graph, name: str) -> bool:
    """Whether a reduction is over a dim of a result, or of a map of it: scores."""
    own = set(out_dims(g.by_name[name]))
    return any(own & set(c.rdims) for c in g.reached(name, g.consumers, lambda c: c.reducer is None))


def _read_for(g: Graph, c: Compute, parallel: tuple[str, ...]) -> float:
    """Bytes that blocks read to compute all of a map once; what does not vary with a parallel dim is read in each."""
    own = [d for d in out_dims(c) if d in parallel]
    return sum(g.points((*own, *dims_used(ld))) * g.program.dtype_of(ld.tensor).nbytes for ld in loads(c.body))
