"""Which matrix products a GPU program leaves to the library.

A product whose result no reduction runs over gains an epilogue at most, and the library's main loop is faster. One in
front of a reduction over its result (scores, logits) is worth fusing: its result is what fusion keeps out of memory.
The exception are folds whose state fills a multiprocessor (512 columns of values: latent attention). One thread block
runs there alone, nothing hides its waiting, and three calls that pass the scores through memory can be faster. Both are
estimated, with rates measured on an H100 and an H200.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, dims_used, loads, tensors_read
from tilefold.block.fuse import UNIT, with_unit
from tilefold.block.group import Group, Limits
from tilefold.block.stages import StagePlan, inner_producers, plan_stages
from tilefold.plan.beside import Beside, beside_of, made_beside
from tilefold.plan.few_rows import of_few_rows
from tilefold.plan.folded import call_rate, flops, folded_faster, holds_much
from tilefold.plan.gpu_forms import blocks, kept_local, segments
from tilefold.plan.gpu_streams import multiplies, of_one_side
from tilefold.plan.greedy import group
from tilefold.plan.hardware import H100, Gpu
from tilefold.plan.library import library_convolutions
from tilefold.plan.short_products import branching, of_few_channels, of_few_sums, of_short_rows
from tilefold.tensor.analysis import Graph, is_map, is_static, out_dims
from tilefold.tensor.convolution import is_channels_last
from tilefold.tensor.convolution_tails import Tail
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product, product_of
from tilefold.tensor.reduction_laws import align_reductions

#: Elements of 16 bits that are 16 bytes; how many times what it costs a tail in a call must save.
SIXTEEN_BYTES, TAIL_DOUBT = 8, 1.2
#: Products of a fold with a wide state: scores, and what sums values by them.
CHAINED = 2


def gpu_library_products(p: Program, machine: Gpu = H100) -> frozenset[str]:
    """Names of the products that the library computes."""
    g = Graph.of(p)
    of_library = (c for c in p.body if _of_matrices(g, c) and not _ours(g, c, machine))
    outside = library_convolutions(p)
    outside |= {c.name for c in of_library if not _inside_fold(g, c.name, machine, outside)}
    return outside | _of_wide_folds(p, outside, machine)


def kept_for_nothing(p: Program, apart: frozenset[str], limits: Limits, machine: Gpu = H100) -> frozenset[str]:
    """Products that are not `apart`, for a kernel with a reduction was expected to be faster, and whose groups have
    none: what reduces them reads other elements (parts of a concatenation) or waits for another kernel, or what was
    taken for a reduction is a convolution of the library."""
    g = Graph.of(p)
    if all(c.name in apart or not _of_matrices(g, c) for c in p.body):
        return frozenset()
    aligned = align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}), apart)
    after = Graph.of(aligned)
    found = (lone_product(after, x.members, machine) for x in group(aligned, apart, limits).groups)
    return _wholes(g, after, (m for m in found if m is not None)) - apart


def _wholes(g: Graph, aligned: Graph, products: Iterable[str]) -> frozenset[str]:
    """The products of matrices of a program that these are, or are parts of, once its reductions are aligned: a part is
    read by what is left of the product alone, which has its name."""
    found = (m if m in g.by_name else aligned.consumers[m][0] for m in products)
    return frozenset(m for m in found if _of_matrices(g, g.by_name[m]))


def lone_product(g: Graph, members: Sequence[str], machine: Gpu) -> str | None:
    """The one reduction of these statements, if it is a product for the library. In a kernel with maps alone it has not
    the library's main loop, and what is in front of it is computed again for every tile of columns (windows of pooling:
    615 us on an H200 for 32 x 7 x 7 x 832 times 128, which the library takes 6 for)."""
    summed = [g.by_name[m] for m in members if g.by_name[m].reducer is not None]
    if len(summed) != 1 or not _of_matrices(g, summed[0]):
        return None
    own = _ours_alone if len(members) == 1 else _ours
    return None if own(g, summed[0], machine) else summed[0].name


def _ours(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether a product by itself, or with maps behind it, takes less time in a kernel of ours."""
    return _ours_alone(g, c, machine) or of_short_rows(g, c, machine)


def _ours_alone(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether a product takes less time in a kernel of ours with nothing else in it."""
    return of_few_rows(g, c, machine) or of_few_channels(g, c) or of_few_sums(g, c)


def gpu_tail(g: Graph, t: Tail, machine: Gpu = H100) -> bool:
    """Whether a convolution's call should do what follows it as well, with scaled weights: images of 16 bits with
    channels last, in multiples of 16 bytes. Saved is a kernel, which reads the result and writes it again; what a scale
    costs is a pass over weights, which those have anyway that are stored in another order.

    On an H200, ResNet-50's convolutions of 3 x 3, 32 images of bf16: 8 to 3 us less each, of 37 to 25.
    """
    c, sizes = t.conv, g.program.sizes
    kinds = {g.program.dtype_of(x) for x in (t.form.x.tensor, t.form.w.tensor)} | {c.dtype, t.form.dtype}
    static = all(is_static(sizes[d]) for d in (*t.outs, *t.form.channels))
    whole = static and all(g.points(side) % SIXTEEN_BYTES == 0 for side in (t.outs, t.form.channels))
    if kinds not in ({DType.F16}, {DType.BF16}) or not whole or not is_channels_last(c, t.form):
        return False
    near, made = machine.home(g.nbytes([c.name])), g.nbytes([c.name])
    saved = 2 * made / (machine.cache_reached * near.bandwidth) + machine.empty
    weight = t.form.w.tensor
    if t.scale is None:
        return not t.form.pointwise  # a product adds a bias by itself, and its own result is read again at once
    stored = weight in g.by_name and g.consumers[weight] == (c.name,)
    cost = 0.0 if stored else 2 * g.nbytes([weight]) / (machine.reached * machine.bandwidth) + machine.empty
    return saved > TAIL_DOUBT * (cost + machine.empty)  # and one for the shift


def _of_matrices(g: Graph, c: Compute) -> bool:
    """Whether c is a product of matrices that the library can compute."""
    return library_product(c, g.program.sizes) is not None and multiplies(g, c)


def _of_wide_folds(p: Program, apart: frozenset[str], machine: Gpu) -> frozenset[str]:
    """Products of folds with a wide state, where the library and a pass over the scores are estimated faster."""
    whole = Graph.of(p)
    p = align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}))
    g = Graph.of(p)
    if sum(c.name not in apart and _of_matrices(g, c) for c in p.body) < CHAINED:
        return frozenset()
    found: set[str] = set()
    for members in group(p, apart, Limits(workers=1)).groups:
        products = [m for m in members.members if _of_matrices(g, g.by_name[m])]
        if len(products) < CHAINED:
            continue
        inner = inner_producers(g, members)
        if not any(g.extent(d) >= machine.wide for m in members.members for d in kept_local(g, members, inner, m)):
            continue
        plan = plan_stages(g, with_unit(members))
        if unfused_seconds(g, plan, products, machine) < fused_seconds(g, plan, products, machine):
            found |= set(products)
    return _wholes(whole, g, found)


def fused_seconds(g: Graph, plan: StagePlan, products: list[str], machine: Gpu) -> float:
    """Estimate of a fold with a wide state as one kernel, and its combine kernel if it is cut into segments."""
    n = segments(g, plan, machine) or 1
    running = blocks(g, plan.group, machine) * n
    waves = -(-running // machine.cores)
    busy = running / (waves * machine.cores)
    shared = running >= machine.full_tiles * machine.cores and _shared_out(g, plan, products, machine)
    rate, start = (machine.shared_rate, machine.shared_start) if shared else (machine.wide_rate, machine.wide_start)
    seconds = waves * start + sum(flops(g, m) for m in products) / (rate * busy)
    if n > 1:
        partial = sum(
            g.points(out_dims(g.by_name[m])) * 4 for m in plan.group.members if kept_local(g, plan.group, plan.inner, m)
        )
        seconds += machine.call + n * partial / (machine.reached * machine.bandwidth)
    return seconds


def _shared_out(g: Graph, plan: StagePlan, products: list[str], machine: Gpu) -> bool:
    """Whether there are rows for full tiles, and all operands have the same 16 bits."""
    read = {g.program.dtype_of(ld.tensor) for m in products for ld in loads(g.by_name[m].body)} - {DType.F32}
    tall = blocks(g, plan.group, machine, machine.rows // 2) > blocks(g, plan.group, machine)
    return tall and len(read) == 1 and read < {DType.F16, DType.BF16}


def unfused_seconds(g: Graph, plan: StagePlan, products: list[str], machine: Gpu) -> float:
    """Estimate of the products as library calls and the rest as one kernel between them."""
    inside = set(plan.group.members)
    seconds, cut = machine.call, 0.0
    for m in products:
        c = g.by_name[m]
        operands = {ld.tensor: g.points({d for ix in ld.index for d in dims_used(ix)}) for ld in loads(c.body)}
        own = g.points(c.dims) * c.dtype.nbytes
        moved = own + sum(n * g.program.dtype_of(t).nbytes for t, n in operands.items())
        rate = call_rate(g, c, g.program.dtype_of(next(iter(operands))), machine)
        seconds += machine.call + max(flops(g, m) / rate, moved / (machine.reached * machine.bandwidth))
        cut += own if inside & set(g.consumers[m]) else 0
        cut += sum(n * g.program.dtype_of(t).nbytes for t, n in operands.items() if t in inside)
    return seconds + cut / (machine.reached * machine.bandwidth)


def _inside_fold(g: Graph, name: str, machine: Gpu, calls: Collection[str] = ()) -> bool:
    """Whether a product is worth keeping in a kernel with a reduction: that saves its result's way through memory.
    calls: convolutions, which read their operands from memory.

    Two products in a chain (scores and values), if tiles of both can be held, what is between them is not written to
    memory anyway (probabilities that a backward pass needs); a product whose result is reduced and not
    needed afterwards (logits, routing), or whose rows are short; the last product, of what a reduction makes of rows in
    memory (normalisation), if its columns fit in one tile and nothing else needs those rows in memory. The latter two
    where that is estimated faster than the library's main loop and a pass over what is between.
    """
    c = g.by_name[name]
    after, before = (list(g.reached(name, step, is_map)) for step in (g.consumers, g.producers))
    chains = [(c, d) for d in after if _chained(g, c, d, machine)] + [
        (d, c) for d in before if _chained(g, d, c, machine)
    ]
    ends = {second.name for _, second in chains}  # what a chain ends in is written, with whatever maps make of it
    if any(_written(g, first) for first, _ in chains if first.name not in ends):
        return False
    chains = [chain for chain in chains if _folded_between(g, *chain) or _grows(g, *chain, machine)]
    if chains:
        return any(
            folded_faster(
                g,
                chain,
                chain[1].rdims,
                2 * g.nbytes([chain[0].name]),
                machine,
                Beside(seconds=_between(g, *chain, machine)),
                wide=not _folded_between(g, *chain) and holds_much(g, *chain, machine),
            )
            for chain in chains
        )
    if _reduced_on_both_sides(g, c):
        return False
    sides = of_one_side(c)  # no matrix unit multiplies matrices of which a thread block holds several
    reduced = {d for x in after if x.reducer and not multiplies(g, x) for d in set(x.rdims) & sides}
    if reduced and (g.points(reduced) <= machine.short_row or not _needed_again(g, name, reduced, calls)):
        folds = [x for x in after if x.reducer and not multiplies(g, x) and set(x.rdims) & set(c.dims)]
        more = beside_of(g, c, folds, machine)
        return folded_faster(g, [c], reduced, g.nbytes([name]), machine, more)
    if any(multiplies(g, d) for d in after) or _in_memory_anyway(g, c):
        return False
    made = g.nbytes([ld.tensor for ld in loads(c.body) if ld.tensor in g.by_name])
    return any(
        d.reducer
        and not multiplies(g, d)
        and set(c.rdims) & set(d.rdims)
        and g.points(set(out_dims(c)) - set(out_dims(d))) <= machine.wide
        for d in before
    ) and folded_faster(g, [c], c.rdims, 2 * made, machine, made_beside(g, c, machine))


def _between(g: Graph, first: Compute, second: Compute, machine: Gpu) -> float:
    """Seconds of functions that branch, of what is between two products."""
    above = {x.name for x in g.reached(second.name, g.producers, is_map)}
    maps = (x for x in g.reached(first.name, g.consumers, is_map) if is_map(x) and x.name in above)
    return branching(g, maps, machine)


def _reduced_on_both_sides(g: Graph, c: Compute) -> bool:
    """Whether both operands of a product are made of reductions over what it contracts (columns that are normalised):
    each thread block would reduce all columns of one of them again."""
    p = product_of(c)
    assert p is not None, c

    def reduced(side: Expr) -> bool:
        made = {ld.tensor for ld in loads(side)} & g.by_name.keys()
        above = made.union(*map(g.above, made))
        return any(set(g.by_name[m].rdims) & set(c.rdims) for m in above)

    return reduced(p.a) and reduced(p.b)


def _in_memory_anyway(g: Graph, c: Compute) -> bool:
    """Whether an operand that the program computes has another reader: fusion then saves no more than reading it."""
    made = [g.by_name[ld.tensor] for ld in loads(c.body) if ld.tensor in g.by_name]
    return any(g.escapes(m.name, (m.name, c.name)) for m in made)


def _chained(g: Graph, first: Compute, second: Compute, machine: Gpu) -> bool:
    """Whether the second product sums over rows or columns of the first one, and a thread block can hold a tile of what
    the first contracts and all columns of the second.

    Where both operands of the second are made of the first (scores and values of a joint projection), each block would
    need all rows of the first one, and compute them again."""
    if not (multiplies(g, first) and multiplies(g, second)):
        return False
    columns = set(out_dims(second)) - set(out_dims(first))
    held = (
        set(second.rdims) <= of_one_side(first)
        and g.points(first.rdims) <= machine.contraction
        and g.points(columns) <= machine.wide
    )
    return held and not _both_of(g, first, second) and not _stored_between(g, first, second)


def _both_of(g: Graph, first: Compute, second: Compute) -> bool:
    """Whether both operands of the second product are made of the first one's result."""
    p = product_of(second)
    assert p is not None, second
    made = {first.name} | g.below(first.name)
    return all(made & tensors_read(side) for side in (p.a, p.b))


def _stored_between(g: Graph, first: Compute, second: Compute) -> bool:
    """Whether the first product's elements, or what maps make of them on the way to the second one, go to memory for
    something else (a residual): then one kernel saves no more than reading them."""
    above = g.above(second.name) | {second.name}
    both = of_one_side(first)
    way = [first, *(d for d in g.reached(first.name, g.consumers, is_map) if is_map(d) and both <= set(d.dims))]
    return any(not above.issuperset(g.consumers[d.name]) or d.name in g.program.outputs for d in way if d.name in above)


def _folded_between(g: Graph, first: Compute, second: Compute) -> bool:
    """Whether a reduction over what the second product sums needs the first one's result too (softmax)."""
    between = g.reached(first.name, g.consumers, is_map)
    return any(x.reducer and not multiplies(g, x) and set(x.rdims) & set(second.rdims) for x in between)


def _grows(g: Graph, first: Compute, second: Compute, machine: Gpu) -> bool:
    """Whether the first of two products makes more than it reads, and the second has rows for all multiprocessors: a
    projection in front of scores is no such one, nor are layers of few rows."""
    read = {ld.tensor: g.points({d for ix in ld.index for d in dims_used(ix)}) for ld in loads(first.body)}
    rows = blocks(g, Group((second.name,), out_dims(second)), machine)
    return g.points(out_dims(first)) > sum(read.values()) and rows >= machine.cores


def _written(g: Graph, c: Compute) -> bool:
    """Whether all that maps make of a product, row by column, is a result of the program."""
    both = of_one_side(c)
    maps = (d for d in g.reached(c.name, g.consumers, is_map) if is_map(d) and both <= set(out_dims(d)))
    return any(r in g.program.outputs for d in maps for r in d.results)


def _needed_again(g: Graph, name: str, reduced: set[str], calls: Collection[str]) -> bool:
    """Whether the product's result, or what maps make of it, goes to memory, into another product with these dims or
    into one of the calls."""
    maps = [name, *(c.name for c in g.reached(name, g.consumers, is_map) if is_map(c) and reduced & set(c.dims))]
    return any(
        any(r in g.program.outputs for r in g.by_name[m].results)
        or any(u in calls or multiplies(g, g.by_name[u]) for u in g.consumers[m])
        for m in maps
    )
