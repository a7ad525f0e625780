"""Operators of a joint graph that are there twice, made one.

torch has `fx_graph_cse`, which asks Inductor's pattern matcher what changes a tensor in place, and so imports all of
Inductor: half a second of every process that trains. What it keeps apart is kept apart here: random numbers, memory
that nobody has written, what shares memory with a result, sizes that depend on data, and what is before and after a
change in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import sympy
import torch
from torch._functorch.compile_utils import get_aten_target, rand_ops
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

Node = torch.fx.Node
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def drop_repeated(graph: torch.fx.Graph) -> None:
    """Where an operator is called again with the same arguments, readers take the first result."""
    kept = _results(graph)
    first: dict[Hashable, Node] = {}
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        if _changes(n):
            first.clear()
            continue
        call = None if n in kept or _is_own(n) else _call(n)
        if call is None:
            continue
        same = first.setdefault(call, n)
        if same is not n:
            n.replace_all_uses_with(same)
            graph.erase_node(n)


def _call(n: Node) -> Hashable | None:
    """What is called with what: 1, 1.0 and True differ. None where an argument has no hash."""
    call = (n.target, _told(n.args), _told(n.kwargs))
    try:
        hash(call)
    except TypeError:
        return None
    return call


def _told(a: object) -> Hashable:
    """An argument with its type, and those of its parts."""
    if isinstance(a, list | tuple):
        return (type(a), *map(_told, a))
    if isinstance(a, Mapping):
        return (type(a), *((k, _told(x)) for k, x in a.items()))
    return (type(a), a.node if isinstance(a, _SYMBOLIC) else a)


def _is_own(n: Node) -> bool:
    """Whether each call has a result of its own, or one whose description elsewhere would not be mended."""
    val = n.meta.get("val")
    if isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags:
        return True
    unbacked = isinstance(val, sympy.Symbol | torch.SymInt) and bool(free_unbacked_symbols(val))
    return unbacked or get_aten_target(n) in (*rand_ops, torch.ops.aten.empty)


def _changes(n: Node) -> bool:
    """Whether a call changes an argument; of what has no schema, it is not known."""
    if isinstance(n.target, torch._ops.OpOverload):
        return bool(n.target._schema.is_mutable)
    return isinstance(n.target, torch._ops.HigherOrderOperator)


def _results(graph: torch.fx.Graph) -> frozenset[Node]:
    """Nodes that share memory with a result: two results never become one."""
    results = {s for n in graph.output_node().all_input_nodes if (s := _memory(n)) is not None}
    return frozenset(n for n in graph.nodes if _memory(n) in results)


def _memory(n: Node) -> StorageWeakRef | None:
    val = n.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return None
    try:
        return StorageWeakRef(val.untyped_storage())
    except NotImplementedError:  # a tensor without memory
        return None
