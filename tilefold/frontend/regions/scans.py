"""Running sums and the like: those of constants become constants, the others take what is around them along.

Hugging Face's decoders number the packed sequences of a row by a running sum over the positions where its position
ids do not go up by one. They make the position ids themselves (`arange`), so that this is a running sum of nothing
but False. Evaluated once, it is a full tensor, which regions take in, where a running sum would cut the model in two.

A scan that is left over is compiled by Inductor, which computes what is elementwise before and after it in the same
kernel. Those nodes go with it where no tensor more is written for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.frontend.operators import reduce
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.table import VIEWS

Node = torch.fx.Node
#: Extents of a tensor, and the dim along which its rows lie.
Row = tuple[tuple[int, ...], int]
_ATEN = torch.ops.aten
#: Operators whose results are prefixes of a reduction along a dim.
SCANS = frozenset(
    {
        _ATEN.cumsum.default,
        _ATEN.cumprod.default,
        _ATEN.logcumsumexp.default,
        _ATEN.cummax.default,
        _ATEN.cummin.default,
    }
)
_FOLDS = frozenset(reduce.TABLE) - {_ATEN.topk.default}
_CASTS = frozenset({_ATEN._to_copy.default, _ATEN.clone.default})
_FILLS = frozenset({_ATEN.zeros_like.default, _ATEN.ones_like.default, _ATEN.full_like.default})
#: Views whose elements stand at other places of a row.
MOVES = frozenset({_ATEN.flip.default, _ATEN.roll.default})
JOINS = frozenset({_ATEN.cat.default, _ATEN.constant_pad_nd.default})
#: Tensors that Inductor joins where they are read (`max_pointwise_cat_inputs`).
MOST_JOINED = 8
#: Elements of a row that one block of Inductor scans, and folds meanwhile: longer ones it scans in several, which none
#: of its reductions are part of (16 rows of 65,536, with their gradient, on an H100: 217 us, with a sum beside 397).
LONGEST_ROW = 4096
#: Elements of a tensor that is evaluated at most.
MOST_ELEMENTS = 1 << 20
#: Operators on the way to one result.
MOST_NODES = 64


def fold_scans(gm: torch.fx.GraphModule) -> int:
    """Replace scans that depend on no argument and whose elements are all equal; gives how many there were."""
    folded = 0
    for node in list(gm.graph.nodes):
        fill = _uniform(node) if node.target in SCANS else None
        if fill is None:
            continue
        like: torch.Tensor = node.meta["val"]
        with gm.graph.inserting_before(node):
            full = gm.graph.call_function(
                _ATEN.full.default, (list(like.shape), fill), {"dtype": like.dtype, "device": like.device}
            )
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        erase(gm, node)
        folded += 1
    if folded:
        gm.recompile()
    return folded


def carried(gm: torch.fx.GraphModule, scans: Collection[Node], others: Collection[Node] = ()) -> set[Node]:
    """Nodes that go with scans that are left over: elementwise ones that only scans use, joined parts among them (an
    exclusive sum starts with a zero), and those that use nothing but what is left over or read there already, and write
    no more than it. (A result of the graph, which is written in any case, may be as wide as anything on the way to it:
    what a comparison chooses.) On GPUs reductions of the same rows likewise, which read a row where it is: of what is
    left over, and of what the scans read, where nothing but them and `others` (left over as well) reads it then.

    What nothing but shapes gives (powers of a decay, one a step) is no tensor that is read where such nodes alone use
    it. What scans and those after them read, and nothing else, goes with them: a tensor that would be written for both
    (an exponential, in front of a running maximum and beside it).

    After a scan they are computed at its places: what stands elsewhere in a row (an order backwards, elements of a part
    of the row) is a kernel of its own to Inductor, and an index of a read to ours.
    """
    rows = {row for n in scans if (row := _rows(n, n.args[0])) is not None and row[0][row[1]] <= LONGEST_ROW}
    found = _before(scans, scans)
    beside = _beside({i for n in (*scans, *found) for i in n.all_input_nodes}, rows, {*scans, *found, *others})
    found |= beside | _before(beside, {*scans, *found, *beside})
    read = {i for n in (*scans, *found) for i in n.all_input_nodes}
    results = {*gm.graph.output_node().all_input_nodes}
    widest = {n: _nbytes(n) for n in (*scans, *beside)}
    left, parts = {*scans, *beside}, set[Node]()
    for n in gm.graph.nodes:
        inputs = [i for i in n.all_input_nodes if i.op == "call_function"]
        from_left = [i for i in inputs if i in left]
        own = {i: chain for i in inputs if from_left and (chain := _of_shapes(i, {n, *left, *found}))}
        if from_left and (_picks(n) or _folds(n, rows)):
            left.add(n)
            widest[n] = _nbytes(n)
            found |= set() if _picks(n) else {n}
        elif (
            from_left
            and movable(n)
            and n.target not in MOVES
            and not any(i in parts for i in inputs)
            and all(i in left or i in found or i in read or _made(i) or i in own for i in inputs)
            and _nbytes(n) <= max((widest[i] if n in results else _nbytes(i)) for i in from_left)
        ):
            left.add(n)
            widest[n] = max(widest[i] for i in from_left)
            found |= {n, *(i for i in inputs if _made(i)), *(x for chain in own.values() for x in chain)}
            if n.target in VIEWS and _nbytes(n) < _nbytes(inputs[0]):
                parts.add(n)
    return found | {n for n in _before({*scans, *found}, {*scans, *found}) if not _joins(n)}


def _before(starts: Collection[Node], readers: Collection[Node]) -> set[Node]:
    """The elementwise nodes and joined parts before some that nothing but them and `readers` uses."""
    found = set[Node]()
    for start in starts:
        stack = list(start.all_input_nodes)
        while stack:
            n = stack.pop()
            if n not in found and (movable(n) or _joins(n)) and all(u in found or u in readers for u in n.users):
                found.add(n)
                stack += n.all_input_nodes
    return found


def _beside(read: Collection[Node], rows: Collection[Row], left: Collection[Node]) -> set[Node]:
    """The reductions of rows that scans read, where all readers of those rows are such or left over."""
    found = set[Node]()
    for n in read:
        folds = {u for u in n.users if _folds(u, rows)}
        if all(u in folds or u in left for u in n.users):
            found |= folds
    return found


def _folds(n: Node, rows: Collection[Row]) -> bool:
    """Whether a node reduces such rows of one tensor."""
    return n.target in _FOLDS and len(n.all_input_nodes) == 1 and _rows(n, n.args[0]) in rows


def _rows(n: Node, of: object) -> Row | None:
    """The extents of what a node scans or reduces along one dim, and that dim; None of several dims, on a CPU (whose
    scans PyTorch itself computes) and where sizes are not known."""
    x = of.meta.get("val") if isinstance(of, Node) else None
    dim = attrs(n).get("dim")
    if isinstance(dim, list | tuple) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or not x.dim() or x.device.type == "cpu":
        return None
    return (tuple(x.shape), dim % x.dim()) if all(isinstance(s, int) for s in x.shape) else None


def movable(n: Node) -> bool:
    """Elementwise, a view, or made of nothing but a shape."""
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return False
    if not isinstance(n.meta.get("val"), torch.Tensor) or torch.Tag.nondeterministic_seeded in n.target.tags:
        return False
    return torch.Tag.pointwise in n.target.tags or n.target in VIEWS | _CASTS | _FILLS or _made(n)


def _joins(n: Node) -> bool:
    """Tensors side by side, or one and its padding: what reads them in a kernel of Inductor reads the parts."""
    return n.target in JOINS and len(n.all_input_nodes) <= MOST_JOINED


def _made(n: Node) -> bool:
    return n.op == "call_function" and not n.all_input_nodes


def _of_shapes(n: Node, readers: Collection[Node]) -> set[Node]:
    """A node and what it is computed from, where that is no tensor, and small, and nothing else reads any of it."""
    found = set[Node]()
    todo = [n]
    while todo:
        x = todo.pop()
        if x in found:
            continue
        if not computable(x) or not movable(x) or len(found) == MOST_NODES:
            return set()
        found.add(x)
        todo += x.all_input_nodes
    return found if all(u in readers or u in found for x in found for u in x.users) else set()


def _picks(n: Node) -> bool:
    return getattr(n.target, "__name__", "") == "getitem"


def _nbytes(n: Node) -> int:
    """Of a result, of the first of several; none where it is a size."""
    value = n.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return int(first.numel()) * first.element_size() if isinstance(first, torch.Tensor) else 0


def _uniform(node: Node) -> float | int | None:
    """The value of every element; None where they differ, or where that is not known."""
    order = _ancestors(node)
    like = node.meta.get("val")
    if order is None or not isinstance(like, torch.Tensor):
        return None
    with torch.no_grad(), _disable_current_modes():
        values: dict[Node, Any] = {}
        for n in order:
            args: Any = map_arg(n.args, values.__getitem__)
            named: Any = map_arg(n.kwargs, values.__getitem__)
            run: Any = n.target
            values[n] = run(*args, **({**named, "device": "cpu"} if "device" in named else named))
        elements = set(values[node].unique().tolist())
    return elements.pop() if len(elements) == 1 else None


def _ancestors(node: Node) -> list[Node] | None:
    """What a node is computed from, itself last; None where that is an argument, random, large, or of unknown size."""
    seen: dict[Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        if not computable(n) or len(seen) == MOST_NODES:
            return None
        seen[n] = None
        stack += n.all_input_nodes
    return [n for n in node.graph.nodes if n in seen]


def computable(n: Node) -> bool:
    """Whether a node makes one tensor of known sizes, not large, that only its inputs decide."""
    value = n.meta.get("val")
    if (
        n.op != "call_function"
        or not isinstance(n.target, torch._ops.OpOverload)
        or not isinstance(value, torch.Tensor)
    ):
        return False
    if torch.Tag.nondeterministic_seeded in n.target.tags or n.target._schema.is_mutable:
        return False
    return all(isinstance(s, int) for s in value.shape) and value.numel() <= MOST_ELEMENTS


def erase(gm: torch.fx.GraphModule, node: Node) -> None:
    """Remove a node and what only it used."""
    before: Sequence[Node] = node.all_input_nodes
    gm.graph.erase_node(node)
    for n in before:
        if n.op == "call_function" and not n.users and not n._erased:
            erase(gm, n)
