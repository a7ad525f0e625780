"""Rows added to a table at indices that may repeat, on GPUs: operators with kernels of ours.

The gradient of an embedding, and of rows that are picked from a tensor:

    embedding_dense_backward(dy, at, n) = index_put(zeros, [at], dy, accumulate) = zeros[at[k]] += dy[k]

Torch sorts the indices for either; summing in float32 as a whole table, as other compilers do, moves the table five
times over. A table that is also a weight (a language model's tied head) has a second gradient, which nothing else
reads: the rows are added to that, and no table of zeros is made.

    x + embedding_dense_backward(dy, at, n) = (x[at[k]] += dy[k])      where x is new and read here alone

Indices that count from 0 (positions) say where the rows lie already: dy itself, and zeros behind it.

Many indices of few rows (relative distances, types of tokens) would queue at them. Their sums are a fold like any
other, which needs no order and no zeros, and is fused with what makes dy:

    embedding_dense_backward(dy, at, n)[r] = sum(k: where(at[k] == r, dy[k], 0)) = (at == r) @ dy

So are sums of which all terms together are few (`SMALL`): a launch takes longer. Several indices of the first axes
(pairs of labels) are compared each, or are one index of a table of as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from tilefold.backends.triton.build import has_triton
from tilefold.frontend.operators.added_rows import added_rows_op, rows_of_sums_op
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.table import COPIES, VIEWS
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.regions.partition import Group, operators
from tilefold.frontend.regions.rows import scaled
from tilefold.plan.keyed import CROWDED

aten = torch.ops.aten
Node = torch.fx.Node
#: Rows, and indices a row, of a table whose sums are a product with where the indices are: its rows are one tile, so
#: that dy is read once. An addition to a row that all indices name took 30 ns on an H200, and a product's second launch
#: takes the time of 250. In float32 a product may round its operands (torch's `allow_tf32`): a sum a row, of fewer
#: rows.
FEW, FEW_IN_FLOAT32, EACH = 128, 32, 32
#: Comparisons of indices with a table's rows, for each column, that take less time than the launch that they save.
SMALL = 1 << 20
#: Bytes that go in the time of a launch.
LAUNCH = 3 << 20
#: Views of as many elements in the same order.
_IN_ORDER = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.alias.default,
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_FULL = (aten.full.default, aten.new_full.default, aten.full_like.default)
#: Operators whose result is memory of its own, whatever they are given.
_NEW = frozenset({scaled, aten.mm.default, aten.bmm.default, aten.addmm.default, rows_of_sums_op, added_rows_op})


@dataclass(frozen=True, slots=True)
class _Added:
    """What a node adds to zeros of its own shape: rows at indices of its first axes, none to row `skipped`. checked:
    indices may be none of a row's, or count from the end."""

    at: tuple[Node, ...]
    rows: Node
    skipped: int
    checked: bool

    @property
    def shape(self) -> torch.Size:
        """That of the indices together."""
        return torch.broadcast_shapes(*(x.meta["val"].shape for x in self.at))


def own_additions(gm: torch.fx.GraphModule) -> int:
    """Have rows added by our kernels, in place where a sum is read by nothing else; gives how many additions there
    were. None in any order where torch is to be deterministic: eager's sort is."""
    if not has_triton():
        return 0
    found = {n: a for n in gm.graph.nodes if (a := _added(n)) is not None}
    if torch.are_deterministic_algorithms_enabled():
        found = {n: a for n, a in found.items() if _is_few(n, a) or _is_small(n, a)}
    for n, a in found.items():
        if len(a.at) == 1 and counts(a.at[0]) and a.skipped < 0:
            _as_they_lie(n, a)
        elif _is_few(n, a) or _is_small(n, a):
            _as_a_fold(n, a)
        elif len(a.at) > 1:
            _at_one_index(n, a)
        else:
            n.target, n.args, n.kwargs = rows_of_sums_op, (a.at[0], a.rows, list(n.meta["val"].shape), a.skipped), {}
    for total in [n for n in gm.graph.nodes if n.target is aten.add.Tensor and _top(n)]:
        _in_place(gm.graph, total)
    for n in [n for n in gm.graph.nodes if n.target is rows_of_sums_op and n.users]:
        if n.meta["val"].dtype is not torch.float32 and _whole(n):
            _in_float32(n)
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return len(found)


def _added(n: Node) -> _Added | None:
    """The rows that a node adds to zeros, if it is a sum on a GPU in floats, of sizes that are known."""
    val = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.device.type != "cuda" or val.dtype not in _FLOATS:
        return None
    if n.target is aten.embedding_dense_backward.default:
        rows, at, _, skipped, by_counts = attrs(n).values()
        added = None if by_counts else _Added((at,), rows, skipped, False)  # type: ignore[arg-type]
    elif n.target is aten.index_put.default and len(n.args) > 3 and n.args[3] is True and _is_zeros(n.args[0]):
        indices = n.args[1]
        given = tuple(x for x in indices if isinstance(x, Node)) if isinstance(indices, list | tuple) else ()
        first = bool(given) and tuple(indices) == given  # type: ignore[arg-type]
        added = _Added(given, n.args[2], -1, True) if first else None  # type: ignore[arg-type]
    else:
        return None
    if added is None or not _plain(val, added):
        return None
    rows = prod(val.shape[: len(added.at)])
    return added if _is_few(n, added) or not _queue(prod(added.shape), rows) else None


def _plain(val: torch.Tensor, a: _Added) -> bool:
    """Whether there is a row for each index, of the table's type."""
    at, rows = [x.meta["val"] for x in a.at], a.rows.meta["val"]
    sizes = (*val.shape, *(n for x in at for n in x.shape), *rows.shape)
    if not all(isinstance(n, int) for n in sizes) or not isinstance(a.skipped, int) or not val.is_contiguous():
        return False
    known = all(x.dtype in (torch.int64, torch.int32) and x.device == val.device for x in at)
    same = rows.dtype is val.dtype and rows.device == val.device
    return known and same and tuple(rows.shape) == (*a.shape, *val.shape[len(at) :]) and prod(sizes) > 0


def _queue(indices: int, rows: int) -> bool:
    """Whether atomic additions of so many rows wait for each other at a table's few."""
    return indices > CROWDED * max(1, rows)


def _is_few(n: Node, a: _Added) -> bool:
    """Whether rows are few for their many indices: an embedding's, none of which is counted from its end, and such
    whose additions would queue at them."""
    val = n.meta["val"]
    rows = FEW_IN_FLOAT32 if val.dtype is torch.float32 else FEW
    embedding = n.target is aten.embedding_dense_backward.default
    many = prod(a.shape) >= EACH * val.shape[0] if embedding else _queue(prod(a.shape), val.shape[0])
    return len(a.at) == 1 and val.shape[0] <= rows and many


def _is_small(n: Node, a: _Added) -> bool:
    """Whether indices are few for a table that is small."""
    return bool(prod(a.shape) * prod(n.meta["val"].shape) <= SMALL)


def counts(at: Node) -> bool:
    """Whether indices are 0, 1, 2 ... in the order in which they lie."""
    count = at.meta["val"].numel()
    while at.target in _IN_ORDER or _adds_nothing(at):
        at = at.all_input_nodes[0]
    return at.target is aten.arange.default and at.args[0] == count


def _adds_nothing(n: Node) -> bool:
    return n.target is aten.add.Tensor and isinstance(n.args[1], int) and n.args[1] == 0


def _as_they_lie(n: Node, a: _Added) -> None:
    """Put rows, and zeros behind them, in the place of what adds them where they lie."""
    val, count, write = n.meta["val"], prod(a.shape), Writer(n)
    made = write(aten.reshape.default, a.rows, [count, *val.shape[1:]])
    if count < val.shape[0]:
        behind = [*(0, 0) * (val.dim() - 1), 0, val.shape[0] - count]
        made = write(aten.constant_pad_nd.default, made, behind)
    n.replace_all_uses_with(made)


def _as_a_fold(n: Node, a: _Added) -> None:
    """Put the fold in the place of what adds rows in any order."""
    val, write, axes = n.meta["val"], Writer(n), len(a.at)
    count, width, dtype = prod(a.shape), prod(val.shape[axes:]), val.dtype
    is_at = None
    for axis, at in enumerate(_each(n, a, write)):
        each = write(aten.arange.default, val.shape[axis], dtype=at.meta["val"].dtype, device=val.device)
        row = write(aten.reshape.default, each, [-1, *(1,) * (axes - axis)])
        here = write(aten.eq.Tensor, write(aten.reshape.default, at, [count]), row)
        if 0 <= a.skipped < val.shape[0]:
            here = write(aten.logical_and.default, here, write(aten.ne.Scalar, row, a.skipped))
        is_at = here if is_at is None else write(aten.logical_and.default, is_at, here)
    rows = write(aten.reshape.default, a.rows, [count, width])
    if dtype is torch.float32 or not _is_few(n, a):
        none = write(aten.full.default, [], 0.0, dtype=dtype, device=val.device)
        picked = write(aten.where.self, write(aten.unsqueeze.default, is_at, -1), rows, none)
        total = write(aten.sum.dim_IntList, picked, [axes])
    else:
        total = write(aten.mm.default, write(aten._to_copy.default, is_at, dtype=dtype), rows)
    n.replace_all_uses_with(write(aten.reshape.default, total, list(val.shape)))


def _at_one_index(n: Node, a: _Added) -> None:
    """Put a table of as many rows as several indices have places in the place of what they index."""
    val, write = n.meta["val"], Writer(n)
    axes, total = len(a.at), None
    for axis, at in enumerate(_each(n, a, write)):
        part = write(aten.mul.Tensor, at, prod(val.shape[axis + 1 : axes]))
        total = part if total is None else write(aten.add.Tensor, total, part)
    made = write(rows_of_sums_op, total, a.rows, [prod(val.shape[:axes]), *val.shape[axes:]], a.skipped)
    n.replace_all_uses_with(write(aten.reshape.default, made, list(val.shape)))


def _whole(n: Node) -> bool:
    """Whether a table is summed faster as a whole in float32: bytes written, read and added to, and launches as the
    bytes that go in their time.

    whole    zeros, read, and written in 16 bits: 4 + 4 + 2 bytes an element; what is added: 4
    by rows  zeros: 2; what is added is read by its owner or by the others, sums are begun, added to and ended: 12
    """
    elements, added = n.meta["val"].numel(), n.args[1].meta["val"].numel()  # type: ignore[union-attr]
    as_whole, by_rows = 10 * elements + 4 * added + 3 * LAUNCH, 2 * elements + 12 * added + 6 * LAUNCH
    return bool(n.meta["val"].dtype is torch.float32 or as_whole < by_rows)


def _in_float32(n: Node) -> None:
    """Put sums in float32, rounded once, in the place of sums of 16 bits."""
    write, (at, rows, shape, skipped) = Writer(n), n.args
    total = write(rows_of_sums_op, at, write(aten._to_copy.default, rows, dtype=torch.float32), shape, skipped)
    n.replace_all_uses_with(write(aten._to_copy.default, total, dtype=n.meta["val"].dtype))


def _each(n: Node, a: _Added, write: Writer) -> Iterator[Node]:
    """The indices, of one shape: those that count from the end from the beginning, and an error where one is none."""
    for extent, at in zip(n.meta["val"].shape, a.at, strict=False):
        each = at if tuple(at.meta["val"].shape) == tuple(a.shape) else write(aten.expand.default, at, list(a.shape))
        if a.checked:
            places = write(aten.arange.default, extent, dtype=torch.int64, device=at.meta["val"].device)
            each = write(aten.index.Tensor, places, [each])
        yield each


def crowded(group: Group) -> bool:
    """Whether a group is gradients of embeddings alone, one of which has few rows for its many indices."""
    found = [n for n in group.nodes if n.target is aten.embedding_dense_backward.default]
    return len(found) == operators(group) and any(map(_crowded, found))


def _crowded(gradient: Node) -> bool:
    indices, rows = gradient.args[1], gradient.args[2]
    found = indices.meta["val"].numel() if isinstance(indices, Node) else 0
    return isinstance(found, int) and isinstance(rows, int) and _queue(found, rows)


def _is_zeros(n: object) -> bool:
    if not isinstance(n, Node):
        return False
    value = n.args[-1] if n.target in _FULL and not isinstance(n.args[-1], list) else None
    return n.target in _ZEROS or (isinstance(value, int | float) and value == 0)


def _top(n: Node) -> bool:
    """Whether a sum is no term of another one."""
    return not any(u.target is aten.add.Tensor and len(n.users) == 1 and _same(n, u) for u in n.users)


def _same(n: Node, m: Node) -> bool:
    """Whether two nodes have tensors of one shape and type."""
    a, b = n.meta["val"], m.meta["val"]
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype is b.dtype


def _terms(n: Node, total: Node) -> Iterator[Node]:
    """The terms of a sum, through sums that nothing else reads."""
    plain = n.target is aten.add.Tensor and not n.kwargs and all(isinstance(a, Node) for a in n.args)
    if plain and _same(n, total) and (n is total or len(n.users) == 1):
        for a in n.args:
            yield from _terms(a, total)  # type: ignore[arg-type]
    else:
        yield n


def _is_new(n: Node) -> bool:
    """Whether a tensor, or what it is a view of, is memory that nothing else reads."""
    while n.target in VIEWS - COPIES and len(n.users) == 1 and len(n.all_input_nodes) == 1:
        (n,) = n.all_input_nodes
    return n.target in _NEW and len(n.users) == 1


def _in_place(graph: torch.fx.Graph, total: Node) -> None:
    """Add rows to a term of a sum that nothing else reads, one after the other."""
    terms = list(_terms(total, total))
    sums = [t for t in terms if t.target is rows_of_sums_op and len(t.users) == 1]
    rest = [t for t in terms if t not in sums]
    new = [t for t in rest if _is_new(t) and t.meta["val"].is_contiguous()]
    if len(rest) > 1 or len(set(terms)) < len(terms) or not sums or (rest and not (new and _same(rest[0], total))):
        return
    if not rest and all(map(_whole, sums)):
        return  # a region adds all of them to one table
    table = new[0] if new else sums.pop(0)
    with graph.inserting_before(total):
        for s in sums:
            table = graph.call_function(added_rows_op, (table, s.args[0], s.args[1], s.args[3]))
            table.meta = dict(total.meta)
    total.replace_all_uses_with(table)
