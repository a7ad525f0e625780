"""Gradients of embeddings that no region takes, as additions at indices of torch's own.

Inductor compiles the same: zeros, atomic additions in float32, a conversion. Its import and its kernels take seconds of
the processor, for three operators that torch has (eager's gradient sorts its indices instead).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.regions.extract import Extracted
from tilefold.frontend.regions.partition import Group, operators

aten = torch.ops.aten
_GRADIENT = aten.embedding_dense_backward.default
#: Indices a row from which on atomic additions queue at few addresses, and eager's sort is faster: 1,048,576 indices of
#: 32 rows of 8 columns (T5's relative biases) took 16 ms on an H200, where all of a step of four layers took eager 14.
CROWDED = 2048


def gradients(group: Group) -> list[torch.fx.Node]:
    """The group's nodes, if it is gradients of embeddings alone."""
    found = [n for n in group.nodes if n.target is _GRADIENT]
    return found if len(found) == operators(group) else []


def crowded(gradient: torch.fx.Node) -> bool:
    """Whether an embedding has few rows for its many indices."""
    indices, rows = gradient.args[1], gradient.args[2]
    found = indices.meta["val"].numel() if isinstance(indices, torch.fx.Node) else 0
    return isinstance(found, int) and isinstance(rows, int) and found > CROWDED * max(1, rows)


def added_up(group: Group, extracted: Extracted) -> torch.fx.GraphModule | None:
    """A group of gradients of embeddings on a GPU by additions at indices, in any order; None where it is another
    group, or torch is to be deterministic (eager's sort is)."""
    nodes = gradients(group)
    if not nodes or torch.are_deterministic_algorithms_enabled() or not all(map(_plain, nodes)):
        return None
    module = torch.fx.GraphModule(extracted.module, copy.deepcopy(extracted.module.graph))
    for n in module.graph.find_nodes(op="call_function", target=_GRADIENT):
        _replace(n)
    module.recompile()
    return module


def _plain(gradient: torch.fx.Node) -> bool:
    """Whether a gradient is a sum on a GPU, in float32, of a size that is known: not divided by numbers of indices."""
    a, val = attrs(gradient), gradient.meta["val"]
    sized = isinstance(a["num_weights"], int) and all(isinstance(n, int) for n in val.shape)
    summed = not a["scale_grad_by_freq"] and val.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return sized and summed and val.device.type == "cuda"


def _replace(n: torch.fx.Node) -> None:
    """sum over k with indices[k] = row of grad_output[k], but for the padding's row, which gets none."""

    def call(target: torch._ops.OpOverload, *args: Any, **how: Any) -> torch.fx.Node:
        return n.graph.call_function(target, args, how)

    a, val = attrs(n), n.meta["val"]
    rows, *shape = val.shape
    with n.graph.inserting_before(n):
        total = call(aten.new_zeros.default, a["grad_output"], [rows, *shape], dtype=torch.float32)
        at = call(aten.reshape.default, a["indices"], [-1])
        given = call(aten.reshape.default, a["grad_output"], [-1, *shape])
        if val.dtype is not torch.float32:
            given = call(aten._to_copy.default, given, dtype=torch.float32)
        total = call(aten.index_add_.default, total, 0, at, given)
        if isinstance(a["padding_idx"], int) and 0 <= a["padding_idx"] < rows:
            call(aten.zero_.default, call(aten.select.int, total, 0, a["padding_idx"]))
        if val.dtype is not torch.float32:
            total = call(aten._to_copy.default, total, dtype=val.dtype)
    n.replace_all_uses_with(total)
    n.graph.erase_node(n)
