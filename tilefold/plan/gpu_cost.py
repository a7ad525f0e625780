"""Predicted time of a kernel on a GPU: what the grid can hide, as a minimax of its stages.

    blocks   = thread blocks of the tiles that the back end's rules would take, roughly
    seconds  = empty + uneven * (slowest stage + UNHIDDEN * (the other stages))
    stages   : products at their rate, element-wise work, bytes from the second-level cache and from memory at the
               share that kernels reach, and turns: loops whose blocks wait for memory

The dataflow (`plan.dataflow`) is the one of all devices. Rates are the machine's (`hardware.Gpu`). How well this ranks
kernels, `tilefold bench planner --device cuda` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod

from tilefold.algebra.expr import dims_used, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.plan.cost import Cost, block_bytes, slowest
from tilefold.plan.dataflow import GPU_UNITS, Analysis, Dataflow
from tilefold.plan.hardware import Gpu
from tilefold.plan.search import Shape
from tilefold.tensor.product import divided
from tilefold.tile.layout import arrange, product_of

#: Elements of the largest value of a block without products.
AREA = 4096
#: The same where it streams rows or columns.
STREAMED = 1 << 14
#: Blocks that a multiprocessor has at work at a time: of kernels with products, and of others.
WITH_PRODUCTS, WITHOUT = 2, 8


def gpu_shape(block: Block, sizes: Mapping[str, int], machine: Gpu) -> Shape:
    """The tiles that a kernel is priced with, and its cost. `sizes`: extents by dim."""
    units = {t: n - 1 if n else None for t, n in _ranks(block).items()}
    arranged = arrange(block, units)
    tiles = usual_tiles(arranged, sizes, machine)
    analysis = Analysis(arranged, sizes, GPU_UNITS)
    flow = analysis.dataflow(tiles, _shared(machine))
    turns = sum(_turns(n, analysis) for n in arranged.body)
    return Shape(tuple(tiles.items()), _cost(flow, block_bytes(arranged, sizes), turns, machine))


def _shared(machine: Gpu) -> Gpu:
    """The machine with caches as blocks at work at a time see them: they read much the same (keys of a head)."""
    return replace(
        machine,
        tiers=tuple(
            replace(t, capacity=t.capacity * machine.cores) if t.sharing >= machine.cores else t for t in machine.tiers
        ),
    )


def _ranks(block: Block) -> dict[str, int]:
    return {i.name: len(i.shape) for i in block.inputs} | {r.name: len(r.dims) for r in block.results}


def usual_tiles(block: Block, sizes: Mapping[str, int], machine: Gpu) -> dict[str, int]:
    """Rows of products in tiles, one index of other parallel dims; columns in neighbours; maps in as many elements as a
    block computes."""
    parallel = [n.dim for n in walk_nodes(block.body) if isinstance(n, Loop) and n.kind == "forall"]
    streamed = [n.dim for n in walk_nodes(block.body) if isinstance(n, Loop) and n.kind == "for"]
    own = {n.name: n.dims for n in walk_nodes(block.body) if isinstance(n, Let | Init)}
    products = [
        p
        for n in walk_nodes(block.body)
        if isinstance(n, Let | Accumulate) and (p := product_of(n, own[n.name])) is not None and p.loads is not None
    ]
    if products:
        sides = frozenset[str]().union(*((p.left ^ p.right) for p in products))
        tiles = {d: machine.rows if d in sides else 1 for d in parallel} | dict.fromkeys(streamed, machine.one_tile)
        shared = {
            d: c for n in walk_nodes(block.body) if not isinstance(n, Loop) for e in exprs_of(n) for d, c in divided(e)
        }
        tiles |= {d: c for d, c in shared.items() if d in tiles and _few(sides - set(shared), parallel, sizes, machine)}
        return {d: min(n, sizes[d]) for d, n in tiles.items()}
    tiles = dict.fromkeys(parallel, 1)
    column = _column(block, parallel)
    if column is not None:
        tiles[column] = min(machine.columns, sizes[column])
    room = (STREAMED if streamed else AREA) // (tiles[column] if column is not None else 1)
    for d in streamed:
        tiles[d] = max(1, min(room, sizes[d]))
    inside = prod(sizes[d] for d in sizes if d not in parallel and d not in streamed and d in _used(block))
    room //= max(1, inside * prod(tiles[d] for d in streamed))
    for d in reversed(parallel):
        if d != column and room > 1:
            tiles[d] = min(room, sizes[d])
            room //= tiles[d]
    return tiles


def _few(sides: frozenset[str], parallel: list[str], sizes: Mapping[str, int], machine: Gpu) -> bool:
    """Whether heads that share operands are packed into one tile."""
    return all(sizes[d] < machine.packed for d in parallel if d in sides)


def _used(block: Block) -> frozenset[str]:
    return frozenset(
        d for n in walk_nodes(block.body) if not isinstance(n, Loop) for e in exprs_of(n) for d in dims_used(e)
    )


def _column(block: Block, parallel: list[str]) -> str | None:
    """The parallel dim along which elements of an input lie side by side, where the kernel reduces."""
    reduces = any(isinstance(n, Let | Accumulate) and n.rdims for n in walk_nodes(block.body))
    inputs = {i.name for i in block.inputs}
    for n in walk_nodes(block.body) if reduces else ():
        if isinstance(n, Loop):
            continue
        for e in exprs_of(n):
            for ld in loads(e):
                last = dims_used(ld.index[-1]) if ld.index and ld.tensor in inputs else frozenset()
                found = [d for d in parallel if d in last]
                if found and dims_used(ld) - set(parallel):
                    return found[0]
    return None


def _cost(flow: Dataflow, whole: Mapping[str, float], turns: float, machine: Gpu) -> Cost:
    running = min(machine.cores, max(1, flow.blocks))
    stages = {"compute": sum(p.flops / machine.gemm_rate(p.narrow, library=False) for p in flow.products)}
    stages["elements"] = flow.units / machine.vector
    nbytes = 0.0
    for k, tier in enumerate(machine.tiers[1:]):
        if tier.name not in ("L2", "global"):
            continue
        moved = flow.traffic[k]
        nbytes = sum(moved.values())
        if tier is machine.tiers[-1]:
            moved = {t: x for t, x in moved.items() if machine.home(max(x, whole.get(t, 0.0))) is tier}
            stages[tier.name] = sum(moved.values()) / (machine.reached * tier.bandwidth)
        else:
            stages[tier.name] = sum(moved.values()) / (machine.cache_reached * tier.bandwidth)
    at_once = WITH_PRODUCTS if flow.products else WITHOUT
    waiting = ceil(flow.blocks / (machine.cores * at_once)) * max(1.0, turns) * machine.turn
    uneven = ceil(flow.blocks / machine.cores) * machine.cores / max(1, flow.blocks)
    busy = {
        name: s * (uneven if flow.blocks > machine.cores else machine.cores / running) for name, s in stages.items()
    }
    return Cost(machine.empty + slowest({**busy, "turns": waiting}), {**busy, "turns": waiting}, machine.empty, nbytes)


def _turns(n: Node, analysis: Analysis) -> float:
    """Turns of serial loops that one block takes."""
    if not isinstance(n, Loop):
        return 0.0
    inside = sum(_turns(x, analysis) for x in n.body)
    return inside if n.kind == "forall" else ceil(analysis.trips(n)) * max(1.0, inside)
