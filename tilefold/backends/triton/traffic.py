"""What a kernel without matrix products moves, and an estimate of its time: the price of a choice of tiles.

A tile of an access is made of runs of neighbouring elements. Memory and the second-level cache deal in sectors of 32
bytes, so that a run costs its sectors, and something beside them: its request. What several thread blocks read is moved
once by the memory and each time by the cache. Little is on its way where blocks are few or small: the time is then that
of their loops, a latency of the memory a turn, after the last block has started: they start one after the other.
Rates are those of an H100; they rank tiles, they predict no times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, dims_used, loads
from tilefold.backends.triton.work import FILL, room
from tilefold.block.ir import Accumulate, Block, Let, Loop, Node, Store, Update, exprs_of
from tilefold.plan.hardware import H100, Gpu
from tilefold.tensor.index_simplify import poly
from tilefold.tile.affine import coefficients
from tilefold.tile.layout import UnitAxes
from tilefold.tile.pieces import power_of_two

#: Threads of a warp; bytes of the widest load or store of a thread.
WARP, VECTOR = 32, 16
#: Bytes of a register.
REGISTER = 4


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of an element; for each axis, fastest first, its coefficients by dim (None: a computed position); the dims
    that the address varies with; the serial loops around it, outermost first; whether it begins between two vectors of
    16 bytes, so that each element is a load of its own (`memory._one_by_one`)."""

    nbytes: int
    axes: tuple[Mapping[str, int] | None, ...]
    dims: frozenset[str]
    loops: tuple[str, ...]
    between: bool = False

    def run(self, tiles: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
        """Elements of a run of neighbours in a tile, and elements from its first to its last. Of an axis of which a
        tile has a part the rest lies between: one of three coordinates is every third element."""
        count = span = whole = 1
        for axis in self.axes:
            if axis is None:
                break
            inner = whole  # elements of the axes behind this one
            for d, c in sorted(axis.items(), key=lambda x: abs(x[1])):
                step = abs(c) * inner
                near = step <= span or (span == 1 and step * self.nbytes < H100.sector)
                if not near:
                    return count, span
                lanes = min(tiles.get(d, sizes[d]), sizes[d])
                count, span = count * lanes, max(span, step * lanes)
                whole = max(whole, step * sizes[d])
            if not axis:
                break
        return count, span

    def near(self, sizes: Mapping[str, int], narrow: int) -> list[str]:
        """Dims along which elements are neighbours: the last axis' nearest, and what is beside it where it has two
        indices (`block.pairs`), and where that axis is short of `narrow` elements, the next axis' too."""
        found: list[str] = []
        whole = 1
        for axis in self.axes:
            along = sorted((d for d, c in (axis or {}).items() if c), key=lambda d: abs((axis or {})[d]))
            beside = [abs((axis or {})[d]) for d in along[:2]] == [1, 2] and sizes[along[0]] == 2
            found += along[: 2 if beside else 1]
            whole *= math.prod(sizes[d] for d in along)
            if not along or whole >= narrow:
                break
        return found


def accesses(b: Block, unit: UnitAxes) -> tuple[Access, ...]:
    """How the statements of a block program read and write tensors; the same element twice in a loop is read once."""
    kinds = {i.name: (i.dtype, len(i.shape)) for i in b.inputs} | {r.name: (r.dtype, len(r.dims)) for r in b.results}
    found: dict[tuple[object, ...], Access] = {}
    for loops, tensor, index in _touched(b.body, ()):
        if tensor in kinds:
            dtype, rank = kinds[tensor]
            axis = unit.get(tensor, rank - 1)
            first = poly(index[axis], b.sizes).get((), 0) if axis is not None and axis in range(len(index)) else 0
            made = _access(dtype, index, axis, loops)
            found[loops, tensor, index] = replace(made, between=first * dtype.nbytes % VECTOR != 0)
    return tuple(found.values())


def _touched(nodes: Sequence[Node], loops: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, tuple[Expr, ...]]]:
    for n in nodes:
        if isinstance(n, Loop):
            yield from _touched(n.body, (*loops, n.dim) if n.kind == "for" else loops)
        if isinstance(n, Store):
            yield loops, n.tensor, n.index
        if isinstance(n, Let | Accumulate | Update | Store):
            for e in exprs_of(n):
                for ld in loads(e):
                    yield loops, ld.tensor, ld.index


def _access(dtype: DType, index: tuple[Expr, ...], unit: int | None, loops: tuple[str, ...]) -> Access:
    order = [len(index) - 1 - k for k in range(len(index))]
    if unit is not None and unit in order:
        order = [unit, *(a for a in order if a != unit)]
    axes = tuple(coefficients(index[a]) for a in order)
    dims = frozenset(d for e in index for d in dims_used(e))
    return Access(dtype.nbytes, ((None, *axes) if unit is None else axes), dims, tuple(d for d in loops if d in dims))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Accesses of a kernel; `grid`: its parallel dims; `streamed`: dims of serial loops, each with its turns a block.

    sizes: extents as one thread block meets them; `segments`: thread blocks for each of those.
    """

    accesses: tuple[Access, ...]
    grid: tuple[str, ...]
    sizes: Mapping[str, int]
    segments: int

    def points(self, a: Access) -> int:
        """Elements that an access reads or writes in a segment, each counted once."""
        return math.prod(self.sizes[d] for d in a.dims)

    def sectors(self, tiles: Mapping[str, int]) -> float:
        """Bytes of the sectors and requests that the caches serve."""
        return sum(self._of(a, tiles) * self._times(a, tiles) for a in self.accesses)

    def _of(self, a: Access, tiles: Mapping[str, int]) -> float:
        """Bytes of the sectors of one tile."""
        count, span = a.run(tiles, self.sizes)
        runs = max(1.0, self._elements(a, tiles) / count)
        return runs * (-(-span * a.nbytes // H100.sector) * H100.sector + H100.request)

    def _elements(self, a: Access, tiles: Mapping[str, int]) -> float:
        return math.prod(min(tiles.get(d, self.sizes[d]), self.sizes[d]) for d in a.dims)

    def _times(self, a: Access, tiles: Mapping[str, int]) -> float:
        return self.blocks(tiles) * math.prod(self._turns(d, tiles) for d in a.loops)

    def _turns(self, d: str, tiles: Mapping[str, int]) -> int:
        return -(-self.sizes[d] // tiles.get(d, self.sizes[d]))

    def blocks(self, tiles: Mapping[str, int]) -> int:
        """Thread blocks."""
        return self.segments * math.prod(self._turns(d, tiles) for d in self.grid)

    def held(self, tiles: Mapping[str, int], area: int) -> float:
        """Registers of a thread block for a value of so many elements, and for all that is read for it or stored: of
        lanes, whether they have an index or not."""
        lanes = {d: tiles.get(d, power_of_two(self.sizes[d])) for a in self.accesses for d in a.dims}
        return area + sum(math.prod(lanes[d] for d in a.dims) * a.nbytes / REGISTER for a in self.accesses)

    def warps(self, tiles: Mapping[str, int], area: int, each: int, most: int) -> int:
        """Warps whose threads have so many elements of the largest value each; more where they have no registers for
        what is read for it (both neighbours along three axes, of two tensors: 1,172 bytes spilled of four warps)."""
        found = max(1, min(most, area // (WARP * each)))
        while found < min(most, FILL // WARP) and self.held(tiles, area) > room(found * WARP):
            found *= 2
        return found

    def seconds(self, tiles: Mapping[str, int], warps: int, area: int, machine: Gpu = H100) -> float:
        """Estimate for tiles of so many elements in the largest value, and so many warps a thread block."""
        memory = self.segments * sum(a.nbytes * self.points(a) for a in self.accesses)
        sectors = self.sectors(tiles)
        moved, served = memory / machine.bandwidth, sectors / (machine.cache_reached * machine.last_cache.bandwidth)
        served = max(served, sectors / (min(machine.cores, self.blocks(tiles)) * machine.near_rate))
        threads = warps * WARP
        registers = threads * (machine.own_registers + machine.each_element * area / threads)
        resident = max(1, min(machine.blocks, machine.threads // threads, int(machine.registers // registers)))
        loops = {a.loops for a in self.accesses if a.loops}
        turns = 0.5 + max(1, sum(math.prod(self._turns(d, tiles) for d in p) for p in loops))
        # what registers do not hold is written and read again
        spilled = 2 * REGISTER * max(0.0, self.held(tiles, area) - room(threads)) * self.blocks(tiles)
        served += spilled / (machine.cache_reached * machine.last_cache.bandwidth)
        running = max(1.0, min(resident, self.blocks(tiles) / machine.cores))
        waves = max(1.0, self.blocks(tiles) / (resident * machine.cores))
        # one block's waiting is hidden by those beside it
        waiting = waves * turns * machine.turn
        last = self.blocks(tiles) * machine.dispatch + turns * machine.turn
        return machine.empty + max(moved, served, waiting, last) + waiting / running + (moved + served) / 10
