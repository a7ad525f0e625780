"""What writes to parts of constants makes of them, and lists of pairs, made once: a constant of the graph, where its
readers are.

Windowed attention numbers the parts of an image by a dozen assignments to slices of zeros, and masks scores where two
numbers differ. Nothing of that is an argument's. What is made of indices alone (causal masks) is left: a kernel
computes it where it is needed, and sees its form.

Numbers of the graph on the CPU are read where they are: a copy of one would be copied to a device at each call, which
CUDA graphs do not capture. So would tensors that a function spells out (`torch.tensor([8, 5], device=x.device)`, levels
of a quantiser, anchors, a colour's mean): they are held on the device, as is what is made of them and no larger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_arg

from tilefold.frontend.operators.table import VIEWS
from tilefold.frontend.regions.real import on_real_tensors
from tilefold.frontend.regions.scans import MOST_ELEMENTS, computable, erase
from tilefold.names import fresh

Node = torch.fx.Node
_ATEN = torch.ops.aten
#: Operators that write to a part of a tensor.
WRITES = frozenset(
    {
        _ATEN.slice_scatter.default,
        _ATEN.select_scatter.default,
        _ATEN.diagonal_scatter.default,
        _ATEN.index_put.default,
    }
)
#: Operators of numbers alone that no kernel computes: the pairs below or above a diagonal, one after another.
PAIRS = frozenset({_ATEN.tril_indices.default, _ATEN.triu_indices.default})
#: Operators that take no more than a tensor's type and sizes, and what they fill a tensor with.
_FILLED = {
    _ATEN.new_zeros.default: 0,
    _ATEN.zeros_like.default: 0,
    _ATEN.new_ones.default: 1,
    _ATEN.ones_like.default: 1,
}


def fold_constants(gm: torch.fx.GraphModule) -> int:
    """Put constants in place of what is computed from none of the arguments, of a write at some place, of `PAIRS` or of
    what is copied to a device, and is read by what is not; gives how many there are. What the graph returns stays: each
    call returns another tensor."""
    _numbers_where_they_are(gm)
    written = _written(gm)
    wanted = [n for n, w in written.items() if w and n.target not in VIEWS and _wanted(n, written)]
    values = _evaluated(gm, written, wanted)
    taken = {name for name, _ in gm.named_buffers()} | {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    for n in wanted:
        name = fresh("_made_constant", taken)
        setattr(gm, name, on_device(values[n], n.meta["val"]))
        with gm.graph.inserting_before(n):
            constant = gm.graph.create_node("get_attr", name)
        constant.meta = dict(n.meta)
        n.replace_all_uses_with(constant)
        erase(gm, n)
    for n in [n for n in gm.graph.nodes if n.op == "get_attr" and not n.users]:
        gm.graph.erase_node(n)
    if wanted:
        gm.recompile()
    return len(wanted)


def on_device(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU as one of the device and strides of another."""
    with on_real_tensors():
        made = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device)
        return made.copy_(x)


def _numbers_where_they_are(gm: torch.fx.GraphModule) -> None:
    for n in [n for n in gm.graph.nodes if n.target is _ATEN.lift_fresh_copy.default or n.target in VIEWS]:
        source, whole = n.all_input_nodes[0], n.meta.get("val")
        same = n.target is _ATEN.lift_fresh_copy.default or (isinstance(whole, torch.Tensor) and whole.dim() == 0)
        if same and _is_number(gm, source) and all(map(_only_reads, _readers(n))):
            source.meta.setdefault("val", n.meta["val"])
            n.replace_all_uses_with(source)
            gm.graph.erase_node(n)


def _is_number(gm: torch.fx.GraphModule, n: Node) -> bool:
    """Whether a node is a tensor of one element on the CPU that the graph holds."""
    x = getattr(gm, str(n.target), None) if n.op == "get_attr" else None
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.device.type == "cpu"


def _is_spelled(gm: torch.fx.GraphModule, n: Node) -> bool:
    """Whether a node is a tensor of the CPU that the graph holds and does nothing with but make copies of it, as
    tracing leaves `torch.tensor` of numbers: no argument of the function, and nothing else writes to it."""
    x = getattr(gm, str(n.target), None) if n.op == "get_attr" else None
    held = isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel() <= MOST_ELEMENTS
    return held and all(u.target is _ATEN.lift_fresh_copy.default for u in n.users)


def _is_sent(n: Node) -> bool:
    """Whether a node copies a tensor of the CPU to a device. (Numbers are read where they are.)"""
    source = n.args[0] if n.target is _ATEN._to_copy.default else None
    source = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(source, torch.Tensor) or not source.dim():
        return False
    return bool(source.device.type == "cpu" and n.meta["val"].device.type != "cpu")


def _written(gm: torch.fx.GraphModule) -> dict[Node, bool]:
    """The nodes that depend on no argument, and whether a constant of the graph is to hold them: a write, or one of
    `PAIRS`, is among what makes them, or they are sent to a device, or made of what is and no larger (what grows, as
    slopes times distances, is a table to hold and read, where a kernel computes it of few numbers)."""
    found: dict[Node, bool] = {}
    grows = set[Node]()
    for n in gm.graph.nodes:
        if _is_number(gm, n) or _is_spelled(gm, n) or (n.target in _FILLED and computable(n)):
            found[n] = False
        elif computable(n) and all(i in found for i in n.all_input_nodes):
            if n.target in WRITES or n.target in PAIRS or any(i in grows for i in n.all_input_nodes):
                grows.add(n)
            held = [i for i in n.all_input_nodes if found[i]]
            found[n] = n in grows or _is_sent(n) or any(_elements(n) <= _elements(i) for i in held)
    return found


def _elements(n: Node) -> int:
    return int(n.meta["val"].numel())


def _wanted(n: Node, known: dict[Node, bool]) -> bool:
    """Whether what no constant holds reads a node, and nothing returns it or writes to it."""
    readers = _readers(n)
    return any(not known.get(r, False) for r in readers) and all(map(_only_reads, readers))


def _readers(n: Node) -> list[Node]:
    """What reads a node, or a view of it."""
    through, found = [n], list[Node]()
    while through:
        for u in through.pop().users:
            (through if u.target in VIEWS else found).append(u)
    return found


def _only_reads(n: Node) -> bool:
    mutable = isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    return n.op == "call_function" and not mutable


def _evaluated(gm: torch.fx.GraphModule, known: dict[Node, bool], wanted: list[Node]) -> dict[Node, torch.Tensor]:
    """Their values, on the CPU."""
    needed, todo = set[Node](), list(wanted)
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            todo += [] if n.target in _FILLED else n.all_input_nodes
    values: dict[Node, Any] = {}
    with torch.no_grad(), on_real_tensors():
        for n in (n for n in known if n in needed):
            if n.op == "get_attr":
                values[n] = getattr(gm, str(n.target))
            elif n.target in _FILLED:
                like = n.meta["val"]
                values[n] = torch.full(tuple(like.shape), _FILLED[n.target], dtype=like.dtype)
            else:
                args: Any = map_arg(n.args, values.__getitem__)
                named: Any = map_arg(n.kwargs, values.__getitem__)
                run: Any = n.target
                values[n] = run(*args, **({**named, "device": "cpu"} if "device" in named else named))
    return {n: values[n] for n in wanted}
