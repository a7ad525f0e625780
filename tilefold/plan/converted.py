"""Operands of products that are converted on their way: stored so once, or read and converted for every tile.

No matrix library converts an operand, so that a product of one is a kernel of ours, which keeps the copy out of memory:
right for weights of 8 bits, and for few rows. But each tile of rows reads the operand again, as wide as it is stored,
out of the cache: 2,000 rows times 2,048 x 3,072 integers of 64 bits took 181 us on an H100, in tiles of 128, where a
kernel stores them in 16 bits in 24 and the library multiplies in 35.

What a kernel here makes in a wide type, for itself and for a product that converts it, it stores as the product reads
it.

Law: sum over k of a[k] cast(b[k])  is  sum over k of a[k] c[k], c[k] = cast(b[k])
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilefold.algebra.expr import Cast, Expr, Index, Load, call, dims_used, loads
from tilefold.block.parallel import bytes_read
from tilefold.names import fresh
from tilefold.plan.folded import call_seconds, flops
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_static
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import Product, library_product, matrices

#: How many times what a kernel of ours is estimated to take the copy and the call may not take; the same where nothing
#: but passes through memory differs.
DOUBT, CLEAR = 1.5, 1.2
#: Part of the rate of products of ours that those have which convert an operand. One point: 8,192 x 2,048 halves times
#: 2,048 x 2,048 integers of 8 bits behind a layer norm took 246 us on an H200 (Inductor, which copies, 163), of which
#: the norm was forecast 50.
CONVERTING = 0.6


def converted_once(p: Program, machine: Gpu, alone: frozenset[str] = frozenset()) -> Program:
    """The program in which products read copies of what they convert, where that is estimated faster. alone: products
    of which it is known (`better_stored`)."""
    g, taken, body = Graph.of(p), set(p.names), list[Compute]()
    for c in p.body:
        x = matrices(c, g.extent)
        made = [] if x is None or not x.whole else _copied(g, c, x, taken)
        if made and (c.name in alone or _pays(g, Graph.of(replace(p, body=(*body, *made))), c, made, machine)):
            taken |= {m.name for m in made}
            body += made
        else:
            body.append(c)
    return replace(p, body=tuple(body)) if len(body) > len(p.body) else p


def better_stored(g: Graph, c: Compute, machine: Gpu, own: float) -> bool:
    """Whether a product that converts operands is better the library's, where a kernel of ours, which computes it and
    nothing else, is forecast to take `own` seconds: one that sums over two dims at once (experts and their places), or
    reads a mask as numbers. What a map here makes for the product alone is made as the library takes it, and no kernel
    more. Two of eight experts with a capacity, 1,024 tokens: 162 us on an H200, 65 so (Inductor 92)."""
    p = g.program
    x = matrices(c, g.extent)
    made = [] if x is None or not x.whole else _copied(g, c, x, {*p.names})
    if not made:
        return False
    *copies, product = made
    memory, stored = machine.reached * machine.bandwidth, 0.0
    for copy in copies:
        read, kept = bytes_read(g, loads(copy.body)), g.points(copy.dims) * copy.dtype.nbytes
        of = _operand(copy)
        mapped = of in g.by_name and g.by_name[of].reducer is None and of not in p.outputs
        if mapped and g.consumers[of] == (c.name,):
            stored += (kept - read) / memory
        else:
            stored += machine.second_kernel + (read + kept) / memory
    body = [m for y in p.body for m in (made if y.name == c.name else (y,))]
    return own > CLEAR * (stored + call_seconds(Graph.of(replace(p, body=tuple(body))), product, machine))


def _copied(g: Graph, c: Compute, x: Product, taken: set[str]) -> list[Compute]:
    """The operands that a product of known extents converts, stored, and the product of them, for the library."""
    if not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)):
        return []
    sides: list[Expr] = [x.a, x.b]
    copies = list[Compute]()
    for n, e in enumerate(sides):
        if not (isinstance(e, Cast) and isinstance(e.arg, Load)):
            continue
        dims = tuple(dict.fromkeys(d for ix in e.arg.index for d in sorted(dims_used(ix))))
        name = fresh(f"{e.arg.tensor}_converted", {*taken, *(y.name for y in copies)})
        sides[n] = Load(name, tuple(map(Index, dims)))
        copies.append(Compute(name, dims, e.dtype, e, loc=c.loc, origin=c.origin))
    if not copies or not all(isinstance(e, Load) for e in sides):
        return []
    kinds = {y.name: y.dtype for y in copies}
    of = (kinds.get(e.tensor) or g.program.dtype_of(e.tensor) for e in sides if isinstance(e, Load))
    product = replace(c, body=call("mul", *sides))
    return [*copies, product] if len({*of}) == 1 and library_product(product, g.program.sizes) is not None else []


def _operand(copy: Compute) -> str:
    """What a copy is of."""
    assert isinstance(copy.body, Cast) and isinstance(copy.body.arg, Load), copy
    return copy.body.arg.tensor


def _pays(g: Graph, after: Graph, c: Compute, made: list[Compute], machine: Gpu) -> bool:
    """Whether storing operands and a call take less than a kernel that converts them for every tile of rows, and what
    follows the product less than it saves: the result passes memory once more."""
    *copies, product = made
    memory = machine.reached * machine.bandwidth
    stored, again, whole = 0.0, 0.0, 0.0
    beside = all(_beside(g, c, copy) for copy in copies)
    for copy in copies:
        read, kept = bytes_read(g, loads(copy.body)), after.nbytes([copy.name])
        stored += kept / memory if beside else machine.second_kernel + (read + kept) / memory
        rows = g.points({*c.dims} - {*copy.dims})
        again += read * math.ceil(rows / (2 * machine.rows)) / (machine.cache_reached * machine.last_cache.bandwidth)
        whole += read / memory
    passed = machine.copied(g.nbytes([c.name]))
    rate = CONVERTING * machine.gemm_rate(copies[0].dtype, library=False)
    own = max(flops(g, c.name) / rate, again, whole) + (whole if beside else 0.0)
    return own > (CLEAR if beside else DOUBT) * (stored + call_seconds(after, product, machine) + passed)


def _beside(g: Graph, c: Compute, copy: Compute) -> bool:
    """Whether the copy can be stored in place of what it is of, by the kernel that makes that: all else that reads it,
    statements that are no products, may be in that kernel. Probabilities of 16 million scores, which their gradient has
    in float32: 134 MB and a product of them, 135 us of an H100 by forecast, for 67 MB and a call."""
    of = _operand(copy)
    others = [g.by_name[n] for n in g.consumers[of] if n != c.name] if of in g.by_name else []
    return bool(others) and of not in g.program.outputs and all(matrices(x, g.extent) is None for x in others)
