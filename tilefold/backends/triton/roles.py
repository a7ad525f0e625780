"""A streamed fold with a wide state, shared out among the warps of a thread block.

Four warps compute what each tile adds (scores, their maximum, probabilities), further groups of four hold some columns
of the wide state each (512 columns of values: latent attention), and one warp copies tiles into shared memory ahead of
them. Probabilities and the factors that rescale the state pass through shared memory. All of it follows from the tile
kernel: the state is what a product over the streamed dim accumulates, everything else that the loop does is the first
group's. Two groups that each hold half of the columns compute no score twice, which four warps more of `tl.dot` do.

Kernels that have no such form keep the usual one: `roles_of` says None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, tensors_read
from tilefold.backends.triton.config import TritonConfig
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two
from tilefold.tile.uses import allocated, expressions, written

#: Rows of a Hopper matrix instruction of four warps; streamed indices a tile may have.
ROWS, STREAMED = 64, (32, 64, 128)
#: Least and most columns of a group: a matrix instruction's fewest, and what fits the registers of four warps.
LEAST_COLUMNS, MOST_COLUMNS = 64, 256
#: Bytes of shared memory of a thread block on Hopper, and of them for barriers and gaps.
SHARED, BARRIERS = 232_448, 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Columns [start, start + width) of a tensor at a tile of one other dim: what one copy brings.

    index: the tensor's index without its last axis. streamed: the tile is the loop's, else the rows'.
    """

    tensor: str
    index: tuple[Expr, ...]
    start: int
    width: int
    streamed: bool

    @property
    def stop(self) -> int:
        """One past the last column."""
        return self.start + self.width


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what. `scores`, `sums`: bodies of the loop of the first group, of the groups with columns.

    before, after: what each does around the loop; the state `wide` has `columns` as its last dim, in `groups` shares.
    probabilities: the buffer that the state's product reads. factors: buffers of a value a row that `sums` reads;
    finals: those that `sums_after` reads. parts: what is copied once a tile; rows: once. `products`: the parts of the
    first operand and of the second, for each product of the scores.
    """

    loop: ir.For
    row: str
    wide: str
    columns: str
    groups: int
    scores: tuple[ir.Stmt, ...]
    sums: tuple[ir.Stmt, ...]
    before: tuple[ir.Stmt, ...]
    sums_before: tuple[ir.Stmt, ...]
    after: tuple[ir.Stmt, ...]
    sums_after: tuple[ir.Stmt, ...]
    probabilities: str
    factors: tuple[str, ...]
    finals: tuple[str, ...]
    parts: tuple[Part, ...]
    rows: tuple[Part, ...]
    products: tuple[tuple[ir.Gemm, tuple[tuple[int, int], ...]], ...]
    shares: tuple[int, ...]
    dtype: DType

    @property
    def width(self) -> int:
        """Columns of a group."""
        return sum(self.parts[n].width for n in self.shares) // self.groups


def roles_of(kernel: ir.Kernel, config: TritonConfig, bins: Mapping[str, int]) -> Roles | None:
    """The roles of a kernel in this configuration; None where it has no such form. bins: as for `render`."""
    loops = [s for s in kernel.body if isinstance(s, ir.For)]
    if config.groups < 1 or len(loops) != 1 or config.lanes or any(isinstance(s, ir.For) for s in loops[0].body):
        return None
    size = kernel.sizes[loops[0].dim]
    most = int(size.value) if isinstance(size, Const) else bins.get(loops[0].dim)
    if most is not None and most <= loops[0].tile:
        return None
    return _Finder(kernel, config, loops[0]).find()


class _Finder:
    def __init__(self, kernel: ir.Kernel, config: TritonConfig, loop: ir.For):
        self.kernel, self.config, self.loop = kernel, config, loop
        self.tensors = {t.name: t for t in kernel.tensors}
        at = kernel.body.index(loop)
        self.before, self.after = kernel.body[:at], kernel.body[at + 1 :]

    def find(self) -> Roles | None:
        tiled = [t for t in self.kernel.grid if t.tile > 1]
        sums = [s for s in self.loop.body if isinstance(s, ir.Gemm) and self.loop.dim in s.rdims]
        if [t.tile for t in tiled] != [ROWS] or len(sums) != 1 or self.loop.tile not in STREAMED:
            return None
        row, (product,), stream = tiled[0].dim, sums, self.loop.dim
        wide, made = product.buf, product.a.tensor
        state = next((s.buffer for s in self.before if isinstance(s, ir.Alloc) and s.buffer.name == wide), None)
        if (
            state is None
            or made not in allocated(self.loop.body)
            or not product.accumulate
            or product.rdims != (stream,)
        ):
            return None
        columns = state.dims[-1]
        value = self._part(product.b, stream, columns)
        if value is None or self._vectors(state.dims) != [row, columns] or self._vectors_of(product.a) != [row, stream]:
            return None
        groups = self.config.groups
        share, rest = divmod(value.width, groups)
        if rest or not LEAST_COLUMNS <= share <= MOST_COLUMNS or power_of_two(share) != share:
            return None
        own = tuple(s for s in self.loop.body if _writes(s) == wide)
        scores = tuple(s for s in self.loop.body if _writes(s) != wide)
        begun = [s for s in self.before if _about(s) == wide]
        if not all(isinstance(s, ir.Alloc | ir.Fill) for s in begun) or not all(
            isinstance(s, ir.Map | ir.Gemm) for s in own
        ):
            return None
        if not self._settled(own, scores, wide) or any(isinstance(s, ir.Select) for s in scores):
            return None
        factors = self._read(own, {wide, made})
        later = self._depending(wide)
        rest_after = tuple(s for s in self.after if s not in later)
        finals = self._read(later, {wide, *allocated(later)})
        rows_only = all(self._vectors(self._buffer(n).dims) == [row] for n in (*factors, *finals))
        if not rows_only or any(isinstance(s, ir.Reduce | ir.Gemm | ir.Select) for s in later):
            return None
        operands = self._operands(scores, row, stream)
        if operands is None:
            return None
        parts = _cut([*[b for _, _, b in operands], *_shares(value, groups)])
        rows = tuple(dict.fromkeys(p for _, a, b in operands for p, _ in _beside(a, b, parts)))
        shares = [[n for n, p in enumerate(parts) if _inside(p, s)] for s in _shares(value, groups)]
        dtypes = {self.tensors[p.tensor].dtype for p in (*parts, *rows)}
        if any(len(s) != 1 for s in shares) or len(dtypes) != 1 or not dtypes <= {DType.F16, DType.BF16}:
            return None
        (dtype,) = dtypes
        found = Roles(
            self.loop, row, wide, columns, groups, scores, own,
            tuple(s for s in self.before if s not in begun), tuple(begun),
            rest_after, later, made, factors, finals, parts, rows,
            tuple((s, tuple((rows.index(p), n) for p, n in _beside(a, b, parts))) for s, a, b in operands),
            tuple(s[0] for s in shares), dtype,
        )  # fmt: skip
        return found if shared_bytes(found, self.config) <= SHARED else None

    def _settled(self, own: Sequence[ir.Stmt], scores: Sequence[ir.Stmt], wide: str) -> bool:
        """Whether what the state's statements read has, at the end of a tile, the value that they would have read."""
        if any(wide in tensors_read(e) for e in expressions(scores)):
            return False
        for s in own:
            later = self.loop.body[self.loop.body.index(s) + 1 :]
            read = {t for e in expressions((s,)) for t in tensors_read(e)}
            if set(written(tuple(x for x in later if x in scores))) & read:
                return False
        return True

    def _depending(self, wide: str) -> tuple[ir.Stmt, ...]:
        """Statements after the loop that need the state."""
        names, found = {wide}, list[ir.Stmt]()
        for s in self.after:
            read = {t for e in expressions((s,)) for t in tensors_read(e)}
            if read & names or _about(s) in names:
                found.append(s)
                names.add(_about(s))
        made = {_about(s) for s in found} - {""}
        return tuple(s for s in self.after if s in found or _about(s) in made)

    def _read(self, stmts: Sequence[ir.Stmt], known: set[str]) -> tuple[str, ...]:
        """Buffers that statements read beside those known."""
        read = [t for e in expressions(stmts) for t in tensors_read(e)]
        return tuple(dict.fromkeys(t for t in read if t not in known and t not in self.tensors))

    def _operands(self, scores: Sequence[ir.Stmt], row: str, stream: str) -> list[tuple[ir.Gemm, Part, Part]] | None:
        """The products of the scores: parts of a tensor's rows and of a streamed tensor's."""
        found = []
        for s in scores:
            if isinstance(s, ir.Reduce) and _is_product(s.expr):
                return None
            if isinstance(s, ir.Gemm):
                (k, *more) = s.rdims
                a, b = self._part(s.a, row, k), self._part(s.b, stream, k)
                if a is None:  # the streamed operand may come first
                    a, b = self._part(s.b, row, k), self._part(s.a, stream, k)
                if more or a is None or b is None or self._vectors(self._buffer(s.buf).dims) != [row, stream]:
                    return None
                found.append((s, a, b))
        return found or None

    def _part(self, ld: Load, along: str, across: str) -> Part | None:
        """A load as columns of a tile of `along`; None: it has no such form."""
        t = self.tensors.get(ld.tensor)
        size = self.kernel.sizes[across]
        if t is None or t.role != "in" or t.unit_axis != len(t.shape) - 1 or not isinstance(size, Const):
            return None
        start = _offset(ld.index[-1], across)
        plain = [e for e in ld.index[:-1] if dims_used(e) & {along, across}]
        fixed = [e for e in ld.index[:-1] if e not in plain]
        if start is None or plain != [Index(along)] or any(self._vectors(tuple(dims_used(e))) for e in fixed):
            return None
        return Part(ld.tensor, ld.index[:-1], start, int(size.value), along == self.loop.dim)

    def _buffer(self, name: str) -> ir.Buffer:
        every = (*self.before, *self.loop.body, *self.after)
        return next(s.buffer for s in every if isinstance(s, ir.Alloc) and s.buffer.name == name)

    def _vectors(self, dims: Sequence[str]) -> list[str]:
        """Dims of more than one index at a time."""
        sizes = self.kernel.sizes
        single = {t.dim for t in self.kernel.grid if t.tile == 1}
        single |= {d for d in dims if isinstance(e := sizes[d], Const) and int(e.value) == 1}
        return [d for d in dims if d not in single]

    def _vectors_of(self, ld: Load) -> list[str]:
        return self._vectors([e.dim for e in ld.index if isinstance(e, Index)])


def shared_bytes(r: Roles, config: TritonConfig) -> int:
    """Shared memory of a thread block."""
    held = sum(p.width for p in r.rows) * ROWS + ROWS * r.loop.tile
    streamed = sum(p.width for p in r.parts) * r.loop.tile * config.stages
    lines = ROWS * DType.F32.nbytes * (len(r.factors) + len(r.finals))
    return (held + streamed) * r.dtype.nbytes + lines + BARRIERS


def _about(s: ir.Stmt) -> str:
    """The buffer that a statement brings to life or writes; empty: a store."""
    return s.buffer.name if isinstance(s, ir.Alloc) else _writes(s)


def _writes(s: ir.Stmt) -> str:
    return next(iter(written((s,))), "")


def _is_product(e: Expr) -> bool:
    match e:
        case Call("mul", (Load(), Load())):
            return True
    return False


def _offset(e: Expr, d: str) -> int | None:
    match e:
        case Index(x) if x == d:
            return 0
        case Call("add", (Index(x), Const(n, DType.I64))) if x == d:
            return int(n)
    return None


def _shares(p: Part, groups: int) -> list[Part]:
    n = p.width // groups
    return [Part(p.tensor, p.index, p.start + g * n, n, p.streamed) for g in range(groups)]


def _inside(p: Part, whole: Part) -> bool:
    same = (p.tensor, p.index) == (whole.tensor, whole.index)
    return same and whole.start <= p.start and p.stop <= whole.stop


def _cut(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Disjoint parts that cover the same columns, cut wherever one of these begins or ends."""
    found: list[Part] = []
    for tensor, index in dict.fromkeys((p.tensor, p.index) for p in parts):
        mine = [p for p in parts if (p.tensor, p.index) == (tensor, index)]
        marks = sorted({m for p in mine for m in (p.start, p.stop)})
        for lo, hi in pairwise(marks):
            piece = Part(tensor, index, lo, hi - lo, mine[0].streamed)
            found += [piece] if any(_inside(piece, p) for p in mine) else []
    return tuple(found)


def _beside(a: Part, b: Part, parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    """For each piece of b its number, and the columns of a that it is multiplied with."""
    for n, p in enumerate(parts):
        if _inside(p, b):
            yield Part(a.tensor, a.index, a.start + p.start - b.start, p.width, a.streamed), n


def readers(r: Roles, n: int) -> int:
    """Groups that read part n of a tile."""
    by_scores = any(n == streamed for _, pairs in r.products for _, streamed in pairs)
    return int(by_scores) + r.shares.count(n)
