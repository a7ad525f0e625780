"""Operators that are added to a traced graph, with the fake tensors that they would have been traced with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

Node = torch.fx.Node


class Writer:
    """Adds operators before a node of a graph, with its history, or that of `like`: its line, and what checkpointing
    wants of it."""

    def __init__(self, at: Node, like: Node | None = None):
        self.at = at
        self.like = at if like is None else like
        known = [n.meta.get("val") for x in (at, self.like) for n in (x, *x.all_input_nodes)]
        self.mode = next((v.fake_mode for v in tree_leaves(known) if isinstance(v, FakeTensor)), nullcontext())

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.at.graph.inserting_before(self.at):
            made = self.at.graph.call_function(op, args, kwargs)
        made.meta = {k: v for k, v in self.like.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
        given = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            made.meta["val"] = op(*given[0], **given[1])
        return made

    def sizes(self, shape: Sequence[int | torch.SymInt]) -> list[Node | int] | None:
        """A shape as arguments of operators: nodes for its symbolic extents; None where the graph has none."""
        known: dict[object, Node] = {}
        for n in self.at.graph.nodes:
            if n is self.at:
                break
            if isinstance(val := n.meta.get("val"), torch.SymInt):
                known.setdefault(val.node.expr, n)
        found = [n if isinstance(n, int) else known.get(n.node.expr) for n in shape]
        return None if None in found else found  # type: ignore[return-value]

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """x in another type; x itself if it has it."""
        if x.meta["val"].dtype is dtype:
            return x
        return self(torch.ops.prims.convert_element_type.default, x, dtype)
