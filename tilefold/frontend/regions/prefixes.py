"""Running sums, products and log-sum-exps on GPUs: an operator with kernels of ours.

A scan along the last axis in memory is Inductor's where something elementwise is around it, which its kernels compute,
or where rows are few and long; others are ours (`backends.triton.prefix_rows`), for its rows that do not begin at
vectors take twice the time of their bytes (log-sum-exps sixteen times, which are ours in any case). Down another axis
its kernels are far from the speed of memory; those of `backends.triton.prefixes` have the columns side by side, and
take turns of the axis in front of the scan and behind it along (gradients of running sums are suffixes).
"""

from __future__ import annotations

from math import prod
from typing import cast

import torch

from tilefold.backends.triton.build import has_gluon
from tilefold.backends.triton.prefix_rows import row_cut
from tilefold.backends.triton.prefixes import READ, WRITTEN
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.prefix import prefixes_op
from tilefold.frontend.regions.partition import extents
from tilefold.frontend.regions.scans import JOINS, MOVES, erase, movable
from tilefold.plan.hardware import H100

aten = torch.ops.aten
#: Scans that a fold here gives, by its name.
_KINDS = {aten.cumsum.default: "sum", aten.cumprod.default: "prod", aten.logcumsumexp.default: "logsumexp"}
#: Columns that lie side by side, and rows, from which it is faster (Inductor keeps fewer rows in a thread block whole).
COLUMNS, ROWS = 32, 256
#: Elements of a row from which that is.
ALONG = 256


def own_prefixes(gm: torch.fx.GraphModule) -> int:
    """Have such scans on a GPU computed here; gives how many there were."""
    found = 0
    for node in list(gm.graph.nodes):  # nodes around a scan are erased
        if node.op != "call_function" or node.target not in _KINDS:
            continue
        columns = _of_columns(node)
        if columns or _of_rows(node):
            made = node.meta["val"]
            dim = cast(int, attrs(node)["dim"]) % made.dim()
            node.args = (_narrow(node.all_input_nodes[0]), dim, _KINDS[node.target], made.dtype)
            node.target, node.kwargs = prefixes_op, {}
            if columns and (turned := _turned(gm, node, dim)):
                node.args = (*node.args, turned)
            found += 1
    if found:
        gm.recompile()
    return found


def _narrow(x: torch.fx.Node) -> torch.fx.Node:
    """What a float was before it was made wider: the kernel does that."""
    source = x.args[0] if x.target is aten._to_copy.default and set(x.kwargs) == {"dtype"} else None
    if not isinstance(source, torch.fx.Node):
        return x
    given, wide = source.meta["val"], x.meta["val"]
    wider = given.dtype.is_floating_point and torch.promote_types(given.dtype, wide.dtype) is wide.dtype
    return source if wider and given.is_contiguous() else x


def _turned(gm: torch.fx.GraphModule, node: torch.fx.Node, dim: int) -> str:
    """Turns of a scan's axis in front of it and behind it, which its kernels take along: the scan reads what is turned,
    and stands for what turns it."""
    read = written = False
    while _turns(turned := node.all_input_nodes[0], dim):
        source = turned.all_input_nodes[0]
        if not source.meta["val"].is_contiguous():
            break
        node.args = (_narrow(source), *node.args[1:])
        read = not read
        if not turned.users:
            erase(gm, turned)
    while node.users and all(_turns(u, dim) for u in node.users):
        written = not written
        for u in list(node.users):
            u.replace_all_uses_with(node)
            gm.graph.erase_node(u)
    return READ * read + WRITTEN * written


def _turns(node: torch.fx.Node, dim: int) -> bool:
    """Whether a node turns that axis, and no other."""
    if node.target is not aten.flip.default:
        return False
    rank = node.meta["val"].dim()
    return [d % rank for d in cast(list[int], node.args[1])] == [dim]


def _of_columns(node: torch.fx.Node) -> bool:
    """Whether a scan's columns lie side by side in memory, on a device with our kernels."""
    found = _axes(node)
    return found is not None and found[2] >= COLUMNS and found[1] >= ROWS


def _of_rows(node: torch.fx.Node) -> bool:
    """Whether a scan is along the last axis of floats, for our kernels."""
    found = _axes(node)
    if found is None or found[2] != 1 or found[1] < ALONG or not node.meta["val"].is_floating_point():
        return False
    x, dear = _narrow(node.all_input_nodes[0]), node.target is aten.logcumsumexp.default
    how = row_cut(found[0], found[1], min(n.meta["val"].element_size() for n in (x, node)), H100.cores)
    if dear and found[1] % how.even:
        return True
    return (dear or how.blocks == 1) and _alone(x) and all(u.op == "output" for u in node.users)


def _alone(x: torch.fx.Node) -> bool:
    """Whether nothing in front of what is scanned, and no other that reads it, would be in the scan's kernel."""
    before = x.op == "call_function" and (movable(x) or x.target in MOVES | JOINS)
    return not before and len([u for u in x.users if u.op != "output"]) == 1


def _axes(node: torch.fx.Node) -> tuple[int, int, int] | None:
    """Elements in front of a scan's axis, along it and behind it; None where it is none of our kernels'."""
    x, dim = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
    if not isinstance(dim, int) or not x.dim() or x.device.type != "cuda" or not has_gluon():
        return None
    if not x.is_contiguous() or x.dtype.is_complex:
        return None
    sizes, dim = extents(x), dim % x.dim()
    return prod(sizes[:dim]), sizes[dim], prod(sizes[dim + 1 :])
