"""Products of kernels of ours whose 16-bit rows have odd lengths, of operands with zeros behind them.

No copy that goes on beside products takes two bytes: such operands are read element by element, by every tile that
wants them, and waited for (`backends.triton.narrow`). With what is summed in multiples of 16 bytes they are read as
others are. A weight, or what a caller brings, is copied first, in a kernel of its own, where that is estimated faster;
what the program computes it computes with its zeros, in whichever kernel it does (a concatenation in front of a layer).
What another sum of ours makes stays as it is, for it may be in the same kernel; so do odd columns of results, and what
no matrix unit sums.

Law: that of `plan.aligned`
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tilefold.algebra.expr import Const, Load, dims_used, loads, tensors_read
from tilefold.plan.aligned import Copies, copied, is_whole, made_wide, ragged, read_once
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import expr_flops
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import FEW, Product
from tilefold.tensor.rewrite import drop_dead, rename_loads

#: Rows and columns of a tile; lanes of a warp; bytes of an element.
TILE, WARP, NBYTES = 128, 32, 2
#: Operations of a result (a concatenation with a bias and an activation) that is computed again rather than read.
CHEAP = 4
#: Sectors of a warp's access along a row, and where the other operand is read by 16 bytes.
NEAR, APART = 2, 16


def aligned_kernels(
    p: Program, own: Collection[str], called: Collection[str], gpu: Gpu
) -> tuple[Program, frozenset[str]]:
    """The program in which products of `own` are of such operands where that pays, and the names of copies that are
    kernels of their own. called: statements of libraries."""
    sizes, taken = dict(p.sizes), set(p.names)
    maps, copies, whole = read_once(p), Copies(), dict[str, str]()
    shared = {c.name: c for c in p.body if c.reducer is None and c.name not in {*p.outputs, *maps}}
    again = {c.name: c for c in p.body if c.name in p.outputs and c.reducer is None and expr_flops(c.body) <= CHEAP}
    computed = {c.name: c for c in p.body if c.name in {*maps, *shared, *again} and c.reducer is None}
    summed = _of_own_sums(p, called)
    body, alone, changed = list[Compute](), set[str](), False
    for c in p.body:
        found = ragged(p, c) if c.name in own and not summed & tensors_read(c.body) else None
        gains = _gains(p, found[0], computed, gpu) if found is not None and _odd(found[1].sizes.depth) else {}
        if found is None or sum(gains.values()) <= 0:
            body.append(c)
            continue
        operands = {ld.tensor: computed[ld.tensor] for ld in loads(c.body) if ld.tensor in computed}
        new = copied(c, found[0], sizes, taken, {}, operands, c.rdims, copies)
        alone |= {made.tensor for ld, made in zip(loads(c.body), loads(new[-1].body), strict=True) if ld in gains}
        body, changed = body + new, True
    if not changed:
        return p, frozenset()
    body = [
        replace(c, body=rename_loads(c.body, lambda x: replace(x, tensor=whole.get(x.tensor, x.tensor))))
        for c in made_wide(body, shared, copies, whole)
    ]
    return drop_dead(replace(p, body=tuple(body), sizes=sizes)), frozenset(alone)


def _odd(depth: int) -> bool:
    return depth % 2 == 1 and depth > FEW


def _gains(p: Program, x: Product, computed: Collection[str], gpu: Gpu) -> dict[Load, float]:
    """Operands that are copied, with the seconds that this saves (or takes, of those that are not narrow): those in
    memory. What a narrow one's copy costs too much for has its zeros where it is read."""
    there = [ld for ld in x.loads or () if ld.tensor not in computed or not is_whole(ld)]
    narrow = [ld for ld in there if not dims_used(ld.index[-1]).isdisjoint(x.rdims)]
    found = {ld: _gain(p, x, ld, gpu, (APART, NEAR)[len(narrow) - 1] if ld in narrow else 0) for ld in there}
    return {ld: gain for ld, gain in found.items() if gain > 0 or ld not in narrow}


def _gain(p: Program, x: Product, ld: Load, gpu: Gpu, sectors: int) -> float:
    """Seconds that kernels of ours save with a copy of an operand, of accesses of so many sectors, without those of the
    copy."""
    own = {d for e in ld.index for d in dims_used(e)}
    sides = (x.batch, x.of_one_side & own, x.of_one_side - own, x.rdims)
    batch, mine, other, depth = (math.prod(_extent(p, d) for d in dims) for dims in sides)
    blocks = batch * -(-mine // TILE) * -(-other // TILE)
    accesses = batch * mine * depth * -(-other // TILE) / WARP if sectors else 0.0
    saved = accesses * (gpu.narrow + sectors * gpu.narrow_sector) / min(gpu.cores, blocks)
    return saved - gpu.copied(NBYTES * batch * mine * depth)


def _extent(p: Program, d: str) -> int:
    n = p.sizes[d]
    assert isinstance(n, Const)
    return int(n.value)


def _of_own_sums(p: Program, called: Collection[str]) -> frozenset[str]:
    """What sums of ours make, and maps of that."""
    found = set[str]()
    for c in p.body:
        if c.name not in called and (c.reducer is not None or found & tensors_read(c.body)):
            found.add(c.name)
    return frozenset(found)
