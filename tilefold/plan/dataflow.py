"""Dataflow analysis of a block program: footprint and traffic of every tensor at every tier.

FlashFuser's analysis (section IV-B, algorithm 1) for two chained products, generalised to any block program. Given
the extents, the tiles of the loops and their order (the program's own), it answers for a cache of C bytes:

    traffic(nodes) = footprint(nodes)                         where all that `nodes` touch fits in C
                   = sum over statements of what they touch   else; for a loop over d of n tiles
                     n * traffic(body), but once for a tensor that d does not index, where the body fits in C

so a tensor is read again exactly by the loops around it that neither index it nor leave it in the cache. Values of
the block (unbuffered edges) count as footprint; they cause traffic only in the tiers that they do not fit in, which is
the paper's greedy spilling from fast tiers to slow ones. `forall` loops are taken in order on one core: tiers that
cores share hold one block's working set for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Size, dims_used, loads
from tilefold.algebra.ops import TILE_BOUNDS, TILE_EXTREMES
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Stmt, Store, Update, exprs_of
from tilefold.block.ir import walk as walk_nodes
from tilefold.errors import PlanError
from tilefold.plan.hardware import Machine
from tilefold.tensor.sizes import ESTIMATED, estimate
from tilefold.tile.layout import product_of

#: Tensor or value -> bytes.
Bytes = Mapping[str, float]


#: Units of an addition, and of moving one element.
SIMPLE = MOVE = 0.5
#: Operations that take as long as an addition.
_SIMPLE = dict.fromkeys(
    (
        *("add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "where", "and", "or", "not"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "floor", "ceil", "round", "trunc"),
        *("bits_and", "bits_or", "bits_xor", "bits_up", "bits_down"),
        *TILE_BOUNDS,
        *TILE_EXTREMES,
    ),
    SIMPLE,
)
#: Units of one vectorised operation, an addition and a multiplication being half a unit: fitted to generated kernels
#: timed on AVX2 (`tilefold bench planner`).
CPU_UNITS: Mapping[str, float] = _SIMPLE | {
    "exp": 10.0, "exp2": 9.0, "expm1": 12.0, "log": 10.0, "log2": 10.0, "log1p": 12.0, "tanh": 14.0, "sigmoid": 13.0,
    "erf": 28.0, "erfinv": 300.0, "lgamma": 150.0,
    "sin": 14.0, "cos": 14.0, "pow": 24.0, "sqrt": 3.0, "rsqrt": 4.0, "div": 4.0, "floordiv": 4.0,
    "mod": 4.0, "within": 2.0, "random": 100.0, "random16": 70.0,
}  # fmt: skip
#: The same on a GPU: special function units give 16 results a clock where there are 128 additions (CUDA's tables of
#: throughput for compute capability 9.0), so that each is 4 units, with the additions and products around it. Others
#: are polynomials: half of the instructions that Hopper's assembler leaves of them (a logarithm 25, an error function
#: 28, a sine 28 beside what it branches off to; a power 73).
GPU_UNITS: Mapping[str, float] = _SIMPLE | {
    "exp": 4.5, "exp2": 4.0, "expm1": 13.5, "log": 12.5, "log2": 13.5, "log1p": 12.5, "tanh": 10.0, "sigmoid": 9.5,
    "erf": 14.0, "erfinv": 20.0, "lgamma": 90.0,
    "sin": 14.0, "cos": 14.0, "pow": 37.0, "sqrt": 6.0, "rsqrt": 4.0, "div": 5.0, "floordiv": 5.0,
    "mod": 5.0, "within": 1.0, "random": 16.0, "random16": 9.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Matrix products of one statement: `calls` of rows x cols x depth. `dtype`: of the first operand; `narrow`: the
    narrower of both, which a matrix unit takes (a value of the block is rounded to the type of what it multiplies)."""

    calls: float
    rows: int
    cols: int
    depth: int
    dtype: DType
    narrow: DType = DType.F32

    @property
    def flops(self) -> float:
        return 2.0 * self.calls * self.rows * self.cols * self.depth


@dataclass(frozen=True, slots=True)
class Dataflow:
    """`traffic[t]`: bytes of each global tensor, and of each value that spills, that come into tier t (or go out of
    it) from the one below; `footprint`: bytes of each that one block of the grid touches. `blocks`: of the grid.
    `steps`: statements executed, tile by tile; `units`: element-wise work (`element_units`)."""

    traffic: tuple[Bytes, ...]
    footprint: Bytes
    blocks: int
    steps: float
    units: float
    products: tuple[MatrixWork, ...]

    def moved(self, tier: int) -> float:
        """All bytes between tier and the next slower one."""
        return sum(self.traffic[tier].values())


def analyse(block: Block, sizes: Mapping[str, int], tiles: Mapping[str, int], machine: Machine) -> Dataflow:
    """The dataflow of a block program (after `tile.layout.arrange`) with `sizes[d]` and `tiles[d]` for its dims."""
    return Analysis(block, sizes).dataflow(tiles, machine)


class Analysis:
    """The analysis of a block program for any tiles.

    Inside, ranges map a dim to the number of its indices that are current; absent: its whole extent.
    """

    def __init__(self, block: Block, sizes: Mapping[str, int], costs: Mapping[str, float] = CPU_UNITS):
        self.block, self.sizes, self.costs = block, sizes, costs
        self.globals = {i.name for i in block.inputs} | {r.name for r in block.results}
        self.width = {i.name: i.dtype.nbytes for i in block.inputs} | {r.name: r.dtype.nbytes for r in block.results}
        self.dtypes = {i.name: i.dtype for i in block.inputs}
        self.whole = {i.name: self._elements(i.shape) for i in block.inputs}
        self.dims: dict[str, tuple[str, ...]] = {}
        for n in walk_nodes(block.body):
            if isinstance(n, Let | Init):
                self.dims[n.name] = n.dims
                self.width[n.name], self.dtypes[n.name] = n.dtype.nbytes, n.dtype
                if n.index_name:
                    self.dims[n.index_name] = n.dims
                    self.width[n.index_name] = 8
        self._tiles: dict[str, int] = {}
        self._touched: dict[int, tuple[tuple[str, frozenset[str]], ...]] = {}
        self._along: dict[tuple[int, str], frozenset[str]] = {}
        self._flat: dict[int, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {}
        self._feet: dict[tuple[int, tuple[tuple[str, int], ...]], dict[str, float]] = {}
        self._work: dict[int, tuple[frozenset[str], float]] = {}
        self._products: dict[int, tuple[tuple[str, ...], ...] | None] = {}

    def dataflow(self, tiles: Mapping[str, int], machine: Machine) -> Dataflow:
        """With these tiles (absent: 1) on a machine."""
        self._tiles = {d: max(1, min(tiles.get(d, 1), n)) for d, n in self.sizes.items()}
        self._feet.clear()
        body = self.block.body
        traffic = []
        for t in machine.tiers[:-1]:
            copies = machine.cores if t.sharing >= machine.cores else 1
            moved, _ = self.traffic(body, {}, t.capacity / copies)
            traffic.append({n: x for n, x in moved.items() if n in self.globals or x > 0})
        steps, units, products = self.work(body, {}, 1.0)
        return Dataflow(tuple(traffic), self.one_block(body), self.blocks(body), steps, units, tuple(products))

    def _elements(self, shape: Sequence[Expr]) -> float:
        return prod(estimate(e, dims=self.sizes) for e in shape)

    # -- what a statement touches -------------------------------------------------------------

    def touches(self, n: Stmt) -> tuple[tuple[str, frozenset[str]], ...]:
        """(tensor or value, dims that index it) for each distinct access of a statement."""
        found = self._touched.get(id(n))
        if found is None:
            seen: dict[tuple[str, frozenset[str]], None] = {}
            for e in exprs_of(n):
                for x in loads(e):
                    seen[(x.tensor, dims_used(x))] = None
            match n:
                case Store(tensor=t, index=ix):
                    seen[(t, frozenset().union(*map(dims_used, ix)))] = None
                case Let(name=t) | Init(name=t) | Update(name=t) | Accumulate(name=t):
                    seen[(t, frozenset(self.dims[t]))] = None
            found = self._touched[id(n)] = tuple(seen)
        return found

    def current(self, dims: Iterable[str], ranges: Mapping[str, int]) -> float:
        """Elements at the current ranges of these dims."""
        n = 1.0
        for d in dims:
            at = ranges.get(d)
            n *= self.sizes[d] if at is None else at
        return n

    def footprint(self, nodes: Sequence[Node], ranges: Mapping[str, int]) -> Mapping[str, float]:
        """Distinct bytes of each tensor and value that one execution of the nodes touches.

        Of a tensor that is all of what the loops inside go over; of a value made in them one tile.
        """
        key = id(nodes), tuple(ranges.items())
        out = self._feet.get(key)
        if out is not None:
            return out
        found = self._flat.get(id(nodes))
        if found is None:
            found = self._flat[id(nodes)] = tuple(dict.fromkeys(self._accesses(nodes, frozenset())))
        current = {**self.sizes, **ranges}
        tiles = self._tiles
        out = self._feet[key] = {}
        for name, shared, private in found:
            n = 1.0
            for d in shared:
                n *= current[d]
            for d in private:
                n *= tiles[d]
            if name in self.whole and n > self.whole[name]:
                n = self.whole[name]
            n *= self.width[name]
            if n > out.get(name, -1.0):
                out[name] = n
        return out

    def _accesses(
        self, nodes: Sequence[Node], inside: frozenset[str]
    ) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Accesses of the nodes, those in loops included; dims at their current range, and those of which a value
        has one tile."""
        for n in nodes:
            if isinstance(n, Loop):
                yield from self._accesses(n.body, inside | {n.dim})
                continue
            for name, dims in self.touches(n):
                private = frozenset[str]() if name in self.globals else dims & inside
                yield name, tuple(sorted(dims - private)), tuple(sorted(private))

    # -- traffic ------------------------------------------------------------------------------

    def traffic(
        self, nodes: Sequence[Node], ranges: Mapping[str, int], capacity: float
    ) -> tuple[dict[str, float], bool]:
        """Bytes of each tensor into a cache of `capacity` for one execution, and whether all of it fits."""
        foot = self.footprint(nodes, ranges)
        if sum(foot.values()) <= capacity:
            return {n: x if n in self.globals else 0.0 for n, x in foot.items()}, True
        out: dict[str, float] = {}
        for n in nodes:
            moved = self._loop(n, ranges, capacity) if isinstance(n, Loop) else self._statement(n, ranges, capacity)
            for name, x in moved.items():
                out[name] = out.get(name, 0.0) + x
        return out, False

    def _statement(self, n: Stmt, ranges: Mapping[str, int], capacity: float) -> dict[str, float]:
        """What a statement touches; values come from cache as far as they fit."""
        out: dict[str, float] = {}
        for name, dims in self.touches(n):
            x = self.current(dims, ranges) * self.width[name]
            if name in self.globals:
                x = min(x, self.whole.get(name, x) * self.width[name])
            else:
                x = max(0.0, x - capacity)
            out[name] = max(out.get(name, 0.0), x)
        return out

    def _loop(self, loop: Loop, ranges: Mapping[str, int], capacity: float) -> dict[str, float]:
        n = self.trips(loop)
        inner = {**ranges, loop.dim: self.tile(loop.dim)}
        moved, fits = self.traffic(loop.body, inner, capacity)
        out = {}
        for name, x in moved.items():
            stays = fits and name not in self._indexed(loop.body, loop.dim)
            out[name] = x if stays else x * n
        return out

    def _indexed(self, nodes: Sequence[Node], dim: str) -> frozenset[str]:
        """What is accessed somewhere in the nodes at an index of this dim."""
        key = id(nodes), dim
        found = self._along.get(key)
        if found is None:
            inside = [n for n in walk_nodes(tuple(nodes)) if not isinstance(n, Loop)]
            found = self._along[key] = frozenset(t for n in inside for t, dims in self.touches(n) if dim in dims)
        return found

    def tile(self, d: str) -> int:
        return self._tiles[d]

    def trips(self, loop: Loop) -> float:
        """Tiles that a loop runs; a bounded loop's are those at the middle of what it is bounded by."""
        stop = self.sizes[loop.dim] if loop.stop is None else self.middle(loop.stop)
        start = 0.0 if loop.start is None else self.middle(loop.start)
        return max(0.0, stop - start) / self.tile(loop.dim) if self.sizes[loop.dim] else 0.0

    def middle(self, e: Expr) -> float:
        """A loop bound with every outer tile at half its extent."""
        match e:
            case Const(value, _):
                return float(value)
            case Index(d):
                return self.sizes[d] / 2
            case Size(d):
                return float(self.sizes[d])
            case Call(op, (Index(d),)) if op in TILE_BOUNDS:
                return self.sizes[d] / 2 + (self.tile(d) / 2 if op == "tile_stop" else -self.tile(d) / 2)
            case Call(op) if op in TILE_EXTREMES:  # nobody knows the data: as if it bounded nothing
                return inf if op == "tile_max" else -inf
            case Call("where", (_, a, _)):
                return self.middle(a)
            case Call(op, (a, b)) if op in ESTIMATED:
                return float(ESTIMATED[op](self.middle(a), self.middle(b)))
            case _:
                return float(estimate(e, dims=self.sizes))

    # -- work ---------------------------------------------------------------------------------

    def blocks(self, nodes: Sequence[Node]) -> int:
        """Blocks of the grid."""
        n = 1
        while len(nodes) == 1 and isinstance(nodes[0], Loop) and nodes[0].kind == "forall":
            n *= ceil(self.sizes[nodes[0].dim] / self.tile(nodes[0].dim))
            nodes = nodes[0].body
        return n

    def one_block(self, nodes: Sequence[Node]) -> Mapping[str, float]:
        """The footprint of one block of the grid."""
        ranges: dict[str, int] = {}
        while len(nodes) == 1 and isinstance(nodes[0], Loop) and nodes[0].kind == "forall":
            ranges[nodes[0].dim] = self.tile(nodes[0].dim)
            nodes = nodes[0].body
        return self.footprint(nodes, ranges)

    def work(
        self, nodes: Sequence[Node], ranges: Mapping[str, int], times: float
    ) -> tuple[float, float, list[MatrixWork]]:
        """Statements run, element-wise units, and the products."""
        steps, units, products = 0.0, 0.0, list[MatrixWork]()
        for n in nodes:
            if isinstance(n, Loop):
                inner = {**ranges, n.dim: self.tile(n.dim)}
                s, u, p = self.work(n.body, inner, times * self.trips(n))
                steps, units, products = steps + s, units + u, products + p
                continue
            steps += times
            product = self.product(n, ranges, times)
            if product is not None:
                products.append(product)
            elif not isinstance(n, Init):
                units += times * self.units(n, ranges)
        return steps, units, products

    def units(self, n: Stmt, ranges: Mapping[str, int]) -> float:
        """Element-wise work of a statement: its arithmetic, and one to move the result."""
        found = self._work.get(id(n))
        if found is None:
            found = self._work[id(n)] = self._element(n)
        dims, each = found
        return self.current(dims, ranges) * each

    def _element(self, n: Stmt) -> tuple[frozenset[str], float]:
        """The dims that a statement runs over, and its units an element."""
        dims = frozenset().union(*(dims_used(e) for e in exprs_of(n)))
        match n:
            case Let(dims=own, rdims=over, expr=e, reducer=r):
                return dims | set(own) | set(over), element_units(e, self.costs) + _REDUCING.get(r or "", MOVE)
            case Accumulate(name=name, rdims=over, expr=e, reducer=r):
                return dims | set(self.dims[name]) | set(over), element_units(e, self.costs) + _REDUCING.get(r, MOVE)
            case Update(name=name, expr=e):
                return dims | set(self.dims[name]), element_units(e, self.costs) + MOVE
            case Store(dims=own, expr=e):
                return dims | set(own), element_units(e, self.costs) + MOVE
            case Init():
                return frozenset(), 0.0
        raise AssertionError(n)

    def product(self, n: Stmt, ranges: Mapping[str, int], times: float) -> MatrixWork | None:
        """The matrix product that a statement is, if it is one."""
        if not isinstance(n, Let | Accumulate):
            return None
        if id(n) not in self._products:
            self._products[id(n)] = self._sides(n)
        sides = self._products[id(n)]
        if sides is None:
            return None
        rows, cols, batch, depth = (self.current(d, ranges) for d in sides[:4])
        first, second = (self.dtypes.get(t, DType.F32) for t in sides[4])
        narrow = min(first, second, key=lambda dtype: dtype.nbytes)
        return MatrixWork(times * batch, int(rows), int(cols), int(depth), first, narrow)

    def _sides(self, n: Let | Accumulate) -> tuple[tuple[str, ...], ...] | None:
        """Dims of the rows, the columns, both operands and the contraction of a product; the names of both."""
        p = product_of(n, self.dims[n.name])
        if p is None or p.loads is None:
            return None
        return p.rows, p.cols, p.batch, p.rdims, tuple(ld.tensor for ld in p.loads)


#: Reducers that cost more than an addition: an argmax keeps a second value, a top-k a sorted list beside each lane.
_REDUCING = {"topk": 24.0, "argmax": 14.0, "argmin": 14.0}


def operation_units(e: Call, costs: Mapping[str, float] = CPU_UNITS) -> float:
    """Units of an operation without its operands; errors as of `element_units`."""
    op = root_of(e) or e.op
    if op not in costs:
        raise PlanError(f"nobody said what {op} costs", hint="it belongs into plan/dataflow.py")
    return costs[op]


def root_of(e: Call) -> str | None:
    """What a power is computed as, if not as one: a product (two of them cost little more), a root or a quotient."""
    match e:
        case Call("pow", (_, Const(n, _))):
            return _ROOTS.get(float(n))
    return None


#: Powers that products, roots and quotients are; products of more factors are less right than a power's last places.
_ROOTS = {**dict.fromkeys((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), "mul"), 0.5: "sqrt", -0.5: "rsqrt"}
_ROOTS |= dict.fromkeys((-1.0, -2.0), "div")


def element_units(e: Expr, costs: Mapping[str, float] = CPU_UNITS) -> float:
    """Element-wise units of one evaluation, `costs` by operation; index arithmetic is free. PlanError: an operation
    without a cost, which is never taken to be cheap."""
    match e:
        case Call(args=args):
            return operation_units(e, costs) + sum(element_units(x, costs) for x in args)
        case Cast(arg=arg):
            return element_units(arg, costs)
        case _:
            return 0.0
