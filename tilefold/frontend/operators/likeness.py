"""Nodes that are lowered alike: the layers of a model are, and so are most of the operators of one.

What decides about a node by itself is its operator, its arguments, the metadata of the tensors among them and of its
results, which of these are read, and what was converted to an argument (`counts`). Nothing here keeps a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

Node = torch.fx.Node
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """Something whose parts are not known here, or only when it runs."""


def likeness(node: Node) -> Hashable | None:
    """What nodes that are lowered alike have in common; None: others cannot be told from it (symbolic sizes)."""
    places: dict[Node, int] = {}
    try:
        args = _argument(node.args, places), _argument(tuple(sorted(node.kwargs.items())), places)
        read = tuple([_given(n) for n in places])
        val = node.meta["val"]
        wanted = frozenset(u.args[1:] for u in node.users) if isinstance(val, tuple | list) else None
        key = node.target, args, read, _meta(val), wanted
        hash(key)
    except (_Unknown, KeyError, TypeError):
        return None
    return key


def _argument(x: object, places: dict[Node, int]) -> Hashable:
    """An argument; nodes are numbered."""
    if isinstance(x, Node):
        return "node", places.setdefault(x, len(places))
    if isinstance(x, tuple | list):
        return tuple([_argument(y, places) for y in x])
    if isinstance(x, _PLAIN):
        return type(x), x
    raise _Unknown


def _given(n: Node) -> Hashable:
    """An operand; of one that is converted also what it was."""
    source = n.args[0] if n.target is torch.ops.aten._to_copy.default else None
    return _meta(n.meta["val"]), _given(source) if isinstance(source, Node) else None


def _meta(val: object) -> Hashable:
    if isinstance(val, tuple | list):
        return tuple(map(_meta, val))
    if not isinstance(val, torch.Tensor):
        return _argument(val, {})
    strides = val.stride() if val.layout is torch.strided else ()
    sizes = (*val.shape, *strides)
    if not all(type(n) is int for n in sizes):
        raise _Unknown
    return val.dtype, val.dim(), sizes, val.layout, val.device
