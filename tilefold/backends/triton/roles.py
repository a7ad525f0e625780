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
from tilefold.algebra.expr import Const
from tilefold.backends.triton.config import SHARED, TritonConfig
from tilefold.backends.triton.parts import (
    BARRIERS,
    ROWS,
    STREAMED,
    Part,
    Reading,
    about,
    is_product,
    streams,
    writes,
)
from tilefold.backends.triton.row_draws import draws_numbers
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two
from tilefold.tile.uses import allocated

#: Least and most columns of a group: a matrix instruction's fewest, and what fits the registers of four warps.
LEAST_COLUMNS, MOST_COLUMNS = 64, 256


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
    loop = streams(kernel, config.groups)
    if loop is None or config.lanes or config.own != "columns" or draws_numbers(loop.body):
        return None
    size = kernel.sizes[loop.dim]
    most = int(size.value) if isinstance(size, Const) else bins.get(loop.dim)
    if most is not None and most <= loop.tile:
        return None
    return _Finder(kernel, config, loop).find()


class _Finder(Reading):
    def find(self) -> Roles | None:
        tiled = [t for t in self.kernel.grid if t.tile > 1]
        sums = [s for s in self.loop.body if isinstance(s, ir.Gemm) and self.loop.dim in s.rdims]
        if [t.tile for t in tiled] != [ROWS] or len(sums) != 1 or self.loop.tile not in STREAMED or sums[0].kept:
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
        value = self.part(product.b, stream, columns)
        if value is None or self.vectors(state.dims) != [row, columns] or self.vectors_of(product.a) != [row, stream]:
            return None
        groups = self.config.groups
        share, rest = divmod(value.width, groups)
        if rest or not LEAST_COLUMNS <= share <= MOST_COLUMNS or power_of_two(share) != share:
            return None
        own = tuple(s for s in self.loop.body if writes(s) == wide)
        scores = tuple(s for s in self.loop.body if writes(s) != wide)
        begun = [s for s in self.before if about(s) == wide]
        if not all(isinstance(s, ir.Alloc | ir.Fill) for s in begun) or not all(
            isinstance(s, ir.Map | ir.Gemm) for s in own
        ):
            return None
        if not self.settled(own, scores, {wide}) or any(isinstance(s, ir.Select) for s in scores):
            return None
        factors = self.read(own, {wide, made})
        later = self.depending({wide})
        rest_after = tuple(s for s in self.after if s not in later)
        finals = self.read(later, {wide, *allocated(later)})
        rows_only = all(self.vectors(self.buffer(n).dims) == [row] for n in (*factors, *finals))
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

    def _operands(self, scores: Sequence[ir.Stmt], row: str, stream: str) -> list[tuple[ir.Gemm, Part, Part]] | None:
        """The products of the scores: parts of a tensor's rows and of a streamed tensor's."""
        found = []
        for s in scores:
            if isinstance(s, ir.Reduce) and is_product(s.expr):
                return None
            if isinstance(s, ir.Gemm):
                (k, *more) = s.rdims
                a, b = self.part(s.a, row, k), self.part(s.b, stream, k)
                if a is None:  # the streamed operand may come first
                    a, b = self.part(s.b, row, k), self.part(s.a, stream, k)
                if more or a is None or b is None or self.vectors(self.buffer(s.buf).dims) != [row, stream]:
                    return None
                found.append((s, a, b))
        return found or None


def shared_bytes(r: Roles, config: TritonConfig) -> int:
    """Shared memory of a thread block."""
    held = sum(p.width for p in r.rows) * ROWS + ROWS * r.loop.tile
    streamed = sum(p.width for p in r.parts) * r.loop.tile * config.stages
    lines = ROWS * DType.F32.nbytes * (len(r.factors) + len(r.finals))
    return (held + streamed) * r.dtype.nbytes + lines + BARRIERS


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
