"""Running sums, products and log-sum-exps of columns on GPUs: an operator with kernels of ours.

A scan along the last axis in memory stays Inductor's, with what is elementwise around it. Down another axis its kernels
are far from the speed of memory; those of `backends.triton.prefixes` have the columns side by side.
"""

from __future__ import annotations

from math import prod
from typing import cast

import torch

from tilefold.backends.triton.build import has_gluon
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.prefix import prefixes_op
from tilefold.frontend.regions.partition import extents

aten = torch.ops.aten
#: Scans that a fold here gives, by its name.
_KINDS = {aten.cumsum.default: "sum", aten.cumprod.default: "prod", aten.logcumsumexp.default: "logsumexp"}
#: Columns that lie side by side, and rows, from which it is faster (Inductor keeps fewer rows in a thread block whole).
COLUMNS, ROWS = 32, 256


def own_prefixes(gm: torch.fx.GraphModule) -> int:
    """Have scans of columns on a GPU computed here; gives how many there were."""
    found = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _KINDS and _of_columns(node):
            made = node.meta["val"]
            dim = cast(int, attrs(node)["dim"]) % made.dim()
            node.args = (_narrow(node.all_input_nodes[0]), dim, _KINDS[node.target], made.dtype)
            node.target, node.kwargs = prefixes_op, {}
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


def _of_columns(node: torch.fx.Node) -> bool:
    """Whether a scan's columns lie side by side in memory, on a device with our kernels."""
    x, dim = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
    if not isinstance(dim, int) or not x.dim() or x.device.type != "cuda" or not has_gluon():
        return False
    if not x.is_contiguous() or x.dtype.is_complex:
        return False
    sizes, dim = extents(x), dim % x.dim()
    return prod(sizes[dim + 1 :]) >= COLUMNS and sizes[dim] >= ROWS
