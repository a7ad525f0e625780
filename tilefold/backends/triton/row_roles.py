"""A streamed fold whose rows are shared out among groups of warps.

The body of the loop is cut at its two products. `lifts` multiply rows by a tile of the stream; what depends on them
alone is the elementwise part; `merges` multiply that by a tile of the stream into states of rows and columns, which
`repairs` rescale before. A group of four warps owns 64 rows of everything, and shares nothing but tiles of the stream.
The lifts of a tile can then run beside the elementwise part of the one before, as merges are one tile behind.

What is read decides nothing: plain attention, any score, sums without a softmax and several states have this form.
Kernels that have none keep the usual one: `row_roles_of` says why not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, loads, tensors_read, walk
from tilefold.algebra.ops import TILE_EXTREMES
from tilefold.backends.triton.config import SHARED, TritonConfig
from tilefold.backends.triton.extremes import few
from tilefold.backends.triton.parts import (
    ROWS,
    STREAMED,
    Part,
    Reading,
    about,
    described,
    is_product,
    offset,
    streams,
    writes,
)
from tilefold.backends.triton.row_bounds import never_empty
from tilefold.backends.triton.row_draws import drawn_by_threads, draws_numbers
from tilefold.backends.triton.row_planes import Plane, planes_of
from tilefold.backends.triton.row_room import LEAST_COLUMNS, LEAST_STAGES, MOST_COLUMNS, REGISTERS, Room
from tilefold.backends.triton.row_scores import scored_once
from tilefold.tile import ir
from tilefold.tile.gathered import gathered_in_products
from tilefold.tile.pieces import lengths, power_of_two
from tilefold.tile.uses import allocated, expressions, written

#: A product that lifts, one that merges.
ONE_OF_EACH = 2


@dataclass(frozen=True, slots=True)
class Lift:
    """A product of rows and a tile of the stream, or of some columns of these; numbers of the parts it multiplies.
    adds: to the result of the lift before."""

    gemm: ir.Gemm
    rows: int
    part: int
    adds: bool


@dataclass(frozen=True, slots=True)
class Merge:
    """A product of what the elementwise part `made` and a tile of the stream, added to a state."""

    gemm: ir.Gemm
    made: str
    part: int
    columns: str


@dataclass(frozen=True, slots=True)
class Out:
    """A result that leaves by tensor map: 64 rows and all columns of `part`. turned: rows are last in memory, and the
    part's index has the columns."""

    store: ir.Store
    part: Part
    column: str
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of a group's tile in memory, without axes of one."""
        return (self.part.lanes, ROWS) if self.turned else (ROWS, self.part.lanes)

    @property
    def box(self) -> tuple[int, ...]:
        """The same with all axes of the tensor."""
        plain = [isinstance(e, Index) and e.dim in self.store.dims[-2:] for e in self.part.index]
        return (*(self.shape[0] if p else 1 for p in plain), self.shape[1])


@dataclass(frozen=True, slots=True)
class RowRoles:
    """Who does what.

    behind: merges are a tile behind lifts (`row_groups`). single: parts that lifts alone read have one buffer beside a
    ring of the others; the next is copied while what follows the lifts runs. elementwise: the loop's statements beside
    products and `repairs`. before, after: around the loop, on values a row; begun, finish: the same on states. taken:
    buffers of a value a row that repairs or finish read. parts: what is copied once a tile; `early`: those that lifts
    need. rows: what is copied once for each group; planes: once a tile for each. stored: results that leave by tensor
    map. kept: sums a row, per thread until the end. never_empty: every block of rows has a tile, for certain.
    """

    loop: ir.For
    row: str
    groups: int
    behind: bool
    single: bool
    lifts: tuple[Lift, ...]
    merges: tuple[Merge, ...]
    prepared: tuple[tuple[int, ir.Map], ...]
    elementwise: tuple[ir.Stmt, ...]
    repairs: tuple[ir.Stmt, ...]
    before: tuple[ir.Stmt, ...]
    begun: tuple[ir.Stmt, ...]
    after: tuple[ir.Stmt, ...]
    finish: tuple[ir.Stmt, ...]
    taken: tuple[str, ...]
    parts: tuple[Part, ...]
    rows: tuple[Part, ...]
    planes: tuple[Plane, ...]
    stored: tuple[Out, ...]
    kept: tuple[str, ...]
    never_empty: bool
    dtype: DType

    @property
    def wide(self) -> frozenset[str]:
        """The states."""
        return frozenset(m.gemm.buf for m in self.merges)

    @property
    def early(self) -> tuple[int, ...]:
        """Parts that lifts alone read: free when those are done."""
        late = {m.part for m in self.merges}
        return tuple(dict.fromkeys(x.part for x in self.lifts if x.part not in late))

    @property
    def late(self) -> tuple[int, ...]:
        """Parts that merges read."""
        return tuple(dict.fromkeys(m.part for m in self.merges))

    @property
    def with_planes(self) -> str:
        """Which parts of a tile planes come with, and are free with: those that are read first."""
        return "early" if self.early else "late"

    @property
    def several(self) -> bool:
        """Whether there are several products in the lift: what else a tile reads is then asked for before they end."""
        return len(self.lifts) > 1

    @property
    def shares(self) -> bool:
        """Whether lifts read parts of the late ones too."""
        return any(x.part in self.late for x in self.lifts)


def row_roles_of(kernel: ir.Kernel, config: TritonConfig) -> RowRoles | str:
    """The roles of a kernel in this configuration, or why it has none."""
    kernel = scored_once(gathered_in_products(kernel))
    loop = streams(kernel, config.groups)
    if loop is None or config.own != "rows":
        return "groups of rows are not asked for, or there is not one loop"
    if config.lanes:
        return "padded rows"
    if config.groups not in REGISTERS or config.stages < 2 or loop.tile not in STREAMED:
        return f"{config.groups} groups, {config.stages} stages, tiles of {loop.tile}"
    return _Finder(kernel, config, loop).find()


class _Finder(Reading):
    def find(self) -> RowRoles | str:
        tiled = [t for t in self.kernel.grid if t.tile > 1]
        if [t.tile for t in tiled] != [ROWS]:
            return "rows are not in tiles of 64"
        row, stream, body = tiled[0].dim, self.loop.dim, self.loop.body
        if not drawn_by_threads(self.loop, row):
            return "random numbers at places that begin anywhere, or of more bits than are compared"
        bounds = [e for e in (self.loop.start, self.loop.stop) if e is not None]
        data = [x for e in bounds for x in walk(e) if isinstance(x, Call) and x.op in TILE_EXTREMES]
        if not all(few(x.args[0], row, ROWS * self.config.groups) for x in data):
            return "the stream is bounded by data that every row has for itself"
        gemms = [s for s in body if isinstance(s, ir.Gemm)]
        sums = [s for s in gemms if s.rdims == (stream,)]
        wide = {s.buf for s in sums}
        if not sums or len(sums) == len(gemms) or any(isinstance(s, ir.Select) for s in body):
            return "no product in the lift, or none in the merge"
        if any(s.kept and not {s.a.tensor, s.b.tensor} <= self.tensors.keys() for s in gemms):
            return "a product keeps computed operands in float32"
        products = [s for s in gemms if s not in sums]
        computed = self._computed(products)
        own = [s for s in body if writes(s) in wide]
        repairs = tuple(s for s in own if s not in sums)
        elementwise = tuple(s for s in body if s not in own and s not in products)
        begun = tuple(s for s in self.before if about(s) in wide)
        if self._sums_beside() and not self.config.descriptors:
            return "a sum beside the stream, which no device has run yet, is not asked for"
        if not all(self._summed(s, row, stream) for s in self._sums_beside()):
            return "something else than a sum of a row's is reduced before the loop"
        why = self._orderly(own, sums, elementwise, products, wide, set(computed))
        if why or not all(isinstance(s, ir.Alloc | ir.Fill) for s in begun):
            return why or "a state begins with a computed value"
        lifts = self._lifts(products, row, stream, computed)
        merges = self._merges(sums, row, stream)
        if isinstance(lifts, str) or isinstance(merges, str):
            return lifts if isinstance(lifts, str) else str(merges)
        whole = {p for _, p, _ in merges} | {a for s, a, _ in lifts if {s.a.tensor, s.b.tensor} & computed.keys()}
        lifts = list(_cut(lifts, whole))
        if not all(self._whole(p) for _, *ab in lifts for p in ab):
            return "columns that no copy brings"
        parts = tuple(dict.fromkeys([b for _, _, b in lifts] + [p for _, p, _ in merges]))
        rows = tuple(dict.fromkeys(a for _, a, _ in lifts))
        if any(p.page for p in parts) and len({s.buf for s, *_ in lifts}) + len(merges) > ONE_OF_EACH:
            return "several products of what lies in pages"
        prepared = tuple(
            dict.fromkeys(
                (rows.index(a), computed[x.tensor][0]) for s, a, _ in lifts for x in (s.a, s.b) if x.tensor in computed
            )
        )
        dtypes = {self.tensors[p.tensor].dtype for p in (*parts, *rows)}
        if len(dtypes) != 1 or not dtypes <= {DType.F16, DType.BF16}:
            return "operands are not of one 16-bit type"
        finish = self.depending(wide)
        if any(isinstance(s, ir.Reduce | ir.Gemm | ir.Select | ir.For) for s in finish):
            return "states are reduced or multiplied after the loop"
        taken = self.read((*repairs, *finish), {*wide, *allocated(finish)})
        if not all(self.vectors(self.buffer(n).dims) == [row] for n in taken):
            return "states meet more than values a row"
        columns = {c for _, _, c in merges}
        if any(len(columns & set(_dims(s, self))) != 1 for s in finish):
            return "a result is of columns of several states"
        found = RowRoles(
            self.loop, row, self.config.groups, True, False,
            tuple(
                Lift(s, rows.index(a), parts.index(b), s.accumulate or (n > 0 and lifts[n - 1][0] is s))
                for n, (s, a, b) in enumerate(lifts)
            ),
            tuple(Merge(s, s.a.tensor, parts.index(p), c) for s, p, c in merges),
            prepared, elementwise, repairs,
            tuple(s for s in self.before if s not in begun and about(s) not in computed), begun,
            tuple(s for s in self.after if s not in finish), finish, taken, parts, rows,
            planes_of(self, elementwise, row) if len({s.buf for s, *_ in lifts}) == 1 else (),
            tuple(o for s in finish if isinstance(s, ir.Store) and (o := self._stored(s, row, columns))),
            self._kept(elementwise, (*repairs, *own)), never_empty(self.kernel, self.loop, row), next(iter(dtypes)),
        )  # fmt: skip
        return self._fits(found)

    def _kept(self, elementwise: Sequence[ir.Stmt], others: Sequence[ir.Stmt]) -> tuple[str, ...]:
        """Sums over the stream that begin at 0 and are only rescaled and added to: threads may add up at the end."""
        found = []
        for name in allocated(self.before):
            mine = [s for s in elementwise if writes(s) == name]
            rest = [s for s in (*elementwise, *others) if s not in mine]
            read = {t for e in expressions(rest) for t in tensors_read(e)}
            begun = [s for s in self.before if writes(s) == name]
            zero = len(begun) == 1 and isinstance(begun[0], ir.Fill) and begun[0].value == Const(0.0, DType.F32)
            sums = [s for s in mine if isinstance(s, ir.Reduce)]
            alone = all(s.op == "sum" and s.accumulate and s.rdims == (self.loop.dim,) for s in sums)
            scaled = all(_rescales(s, self.buffer(name)) for s in mine if s not in sums)
            if zero and sums and alone and scaled and name not in read:
                found.append(name)
        return tuple(sorted(found))

    def _sums_beside(self) -> list[ir.Reduce]:
        return [s for s in self.before if isinstance(s, ir.Reduce)]

    def _summed(self, s: ir.Reduce, row: str, stream: str) -> bool:
        """Whether a reduction before the loop is a sum over columns of a value for each row and column of tensors."""
        return s.op == "sum" and len(s.rdims) == 1 and s.rdims != (stream,) and (
            self.vectors(self.buffer(s.buf).dims) == [row] and self.buffer(s.buf).dtype is DType.F32
            and tensors_read(s.expr) <= self.tensors.keys() and LEAST_COLUMNS <= self._lanes(s.rdims[0]) <= MOST_COLUMNS
        )  # fmt: skip

    def _lanes(self, d: str) -> int:
        size = self.kernel.sizes[d]
        return power_of_two(int(size.value)) if isinstance(size, Const) else 0

    def _orderly(
        self,
        own: Sequence[ir.Stmt],
        sums: Sequence[ir.Gemm],
        elementwise: Sequence[ir.Stmt],
        products: Sequence[ir.Gemm],
        wide: set[str],
        computed: set[str],
    ) -> str:
        """Empty where products come first, and repairs before merges; else why not."""
        body = self.loop.body
        if not all(isinstance(s, ir.Map | ir.Gemm) for s in own) or not all(s.accumulate for s in sums):
            return "a state is not only rescaled and added to"
        for s in own:
            if isinstance(s, ir.Map) and any(body.index(m) < body.index(s) for m in sums if m.buf == s.buf):
                return "a state is changed after what a tile adds"
        made = {n for s in products for n in (s.a.tensor, s.b.tensor)} & (allocated((*self.before, *body)) - computed)
        results = {s.buf for s in products}
        if made or results & set(written(elementwise)) or results & wide:
            return "a product in the lift is of computed values, or its result is changed"
        if any(isinstance(s, ir.Reduce) and is_product(s.expr) for s in elementwise):
            return "a product that is a sum"
        if not self.settled(own, (*elementwise, *products), wide):
            return "what a tile computes depends on a state, or what a state reads changes"
        return ""

    def _computed(self, products: Sequence[ir.Gemm]) -> dict[str, tuple[ir.Map, Load]]:
        """Operands of lifts that are computed before the loop, each element of one of a tensor's: scaled queries."""
        found = {}
        others = [s for s in (*self.before, *self.loop.body, *self.after) if s not in products]
        own = allocated(self.before)
        for name in dict.fromkeys(x.tensor for s in products for x in (s.a, s.b) if x.tensor in own):
            made = [s for s in self.before if writes(s) == name]
            read = {t for e in expressions(others) for t in tensors_read(e)}
            of = set(loads(made[0].expr)) if len(made) == 1 and isinstance(made[0], ir.Map) else set()
            if len(of) == 1 and name not in read and isinstance(made[0], ir.Map):
                found[name] = (made[0], of.pop())
        return found

    def _lifts(
        self, products: Sequence[ir.Gemm], row: str, stream: str, computed: Mapping[str, tuple[ir.Map, Load]]
    ) -> list[tuple[ir.Gemm, Part, Part]] | str:
        found = []
        made: dict[Part, str] = {}
        begun: set[str] = set()
        for s in products:
            (k, *more) = s.rdims
            if more or s.accumulate != (s.buf in begun):
                return "a product contracts several dims, or adds to what is no product"
            begun.add(s.buf)
            x, y = (computed[v.tensor][1] if v.tensor in computed else v for v in (s.a, s.b))
            a, b = self.part(x, row, k), self.part(s.b, stream, k, paged=True)
            own = s.a.tensor
            if a is None or b is None:  # the streamed operand may come first
                a, b, own = self.part(y, row, k), self.part(s.a, stream, k, paged=True), s.b.tensor
            if a is None or b is None or self.vectors(self.buffer(s.buf).dims) != [row, stream]:
                return "a product in the lift is not of rows of a tensor and rows of another"
            if power_of_two(a.width) < LEAST_COLUMNS:
                return "columns that no copy brings"
            if made.setdefault(a, own) != own:
                return "rows are read as they are and computed, or computed twice"
            found.append((s, a, b))
        return found

    def _merges(self, sums: Sequence[ir.Gemm], row: str, stream: str) -> list[tuple[ir.Gemm, Part, str]] | str:
        found = []
        inside = allocated(self.loop.body)
        for s in sums:
            columns = self.buffer(s.buf).dims[-1]
            part = self.part(s.b, stream, columns, paged=True)
            whole = part is not None and self._whole(part) and power_of_two(part.width) >= LEAST_COLUMNS
            if part is None or not whole or self.vectors(self.buffer(s.buf).dims) != [row, columns]:
                return "a product in the merge is not of rows and columns of a streamed tensor"
            if s.a.tensor not in inside or self.vectors_of(s.a) != [row, stream]:
                return "a product in the merge is not of what a tile computes"
            found.append((s, part, columns))
        return found

    def _whole(self, p: Part) -> bool:
        """Whether a copy of a power of two of columns brings these and zeros."""
        last = self.tensors[p.tensor].shape[-1]
        ends = isinstance(last, Const) and p.stop == int(last.value)
        return LEAST_COLUMNS <= p.lanes <= MOST_COLUMNS and (p.lanes == p.width or ends)

    def _stored(self, s: ir.Store, row: str, columns: set[str]) -> Out | None:
        """A result that a tensor map describes; None: it is not stored so."""
        t = self.tensors[s.tensor]
        column = next(d for d in s.dims if d in columns)
        size = self.kernel.sizes[column]
        turned = s.index[-1] == Index(row) and self.config.descriptors
        start = 0 if turned else offset(s.index[-1], column)
        if not described(t) or t.dtype not in (DType.F16, DType.BF16) or start is None or not isinstance(size, Const):
            return None
        along = Index(column if turned else row)
        axis = [n for n, e in enumerate(s.index[:-1]) if e == along]
        others = [e for e in s.index[:-1] if e != along]
        if len(axis) != 1 or any(_names_dim(e, (row, column)) for e in others):
            return None
        rows = t.shape[-1 if turned else axis[0]]
        if rows not in (self.kernel.sizes[row], Size(row)):
            return None
        p = Part(s.tensor, s.index[:-1], start, int(size.value), False)
        whole = t.shape[axis[0]] == size and p.lanes <= MOST_COLUMNS if turned else self._whole(p)
        return Out(s, p, column, turned) if whole else None

    def _fits(self, r: RowRoles) -> RowRoles | str:
        """The roles as far as there is room: results leave by pointers where shared memory has none for them, parts
        that lifts alone read have one buffer, and merges are not a tile behind where registers do not suffice."""
        rings = (False, True) if r.shares and r.early else (False,)
        given = dict.fromkeys((r.planes, ()))
        ways = [replace(r, stored=x, single=y, planes=z) for z in given for y in rings for x in (r.stored, ())]
        fit = next((x for x in ways if shared_bytes(x, self.config) <= SHARED), None)
        if fit is None:
            return f"{shared_bytes(ways[-1], self.config)} bytes of shared memory"
        # what merges read is in the ring for two tiles where they are behind: the next has to come beside these
        room = not r.shares or self.config.stages > LEAST_STAGES
        ways = [fit] * (room or not r.several) + [replace(fit, behind=False)] * r.several
        return next(
            (x for x in ways if registers(x) <= REGISTERS[r.groups]), f"{registers(ways[-1])} registers a thread"
        )


def room(r: RowRoles) -> Room:
    """What a thread block holds."""
    states = {m.gemm.buf: r.parts[m.part].lanes for m in r.merges}
    return Room(
        tuple(p.lanes for p in r.rows),
        tuple(p.lanes for p in r.parts),
        tuple(states.values()),
        tuple(o.part.lanes for o in r.stored),
        len({x.gemm.buf for x in r.lifts}),
        len({m.made for m in r.merges}),
        sum(r.parts[n].lanes for n in r.early),
        draws_numbers(r.elementwise),
        tuple(p.dtype.nbytes for p in r.planes),
    )


def registers(r: RowRoles) -> int:
    """Registers of a thread of a group."""
    return room(r).registers(r.loop.tile, behind=r.behind)


def shared_bytes(r: RowRoles, config: TritonConfig) -> int:
    """Shared memory of a thread block."""
    return room(r).shared(r.loop.tile, r.groups, config.stages, single=r.single)


def _cut(lifts: Sequence[tuple[ir.Gemm, Part, Part]], whole: Collection[Part]) -> Iterator[tuple[ir.Gemm, Part, Part]]:
    """Lifts by columns, so that few are padded: those of parts that nothing else needs as a whole."""
    for s, a, b in lifts:
        pieces = lengths(a.width) if a.width == b.width and a not in whole and b not in whole else (a.width,)
        at = 0
        for n in pieces:
            yield s, replace(a, start=a.start + at, width=n), replace(b, start=b.start + at, width=n)
            at += n


def _rescales(s: ir.Stmt, b: ir.Buffer) -> bool:
    """Whether a statement multiplies a buffer by something else."""
    own = Load(b.name, tuple(Index(d) for d in b.dims))
    match s:
        case ir.Map(_, Call("mul", (a, x))):
            return (a == own) != (x == own) and b.name not in tensors_read(x if a == own else a)
    return False


def _plain(b: ir.Buffer) -> tuple[Expr, ...]:
    return tuple(Index(d) for d in b.dims)


def _dims(s: ir.Stmt, k: Reading) -> tuple[str, ...]:
    return s.dims if isinstance(s, ir.Store) else k.buffer(about(s)).dims


def _names_dim(e: Expr, dims: Sequence[str]) -> bool:
    match e:
        case Index(d):
            return d in dims
        case Call(_, args):
            return any(_names_dim(a, dims) for a in args)
        case Load():
            return True
    return False
