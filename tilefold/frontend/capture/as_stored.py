"""Arguments whose memory holds something else than their values: negated or conjugated when they are read
(`z.conj().imag` is of the memory of z), or zeros that have no memory (forward-mode derivatives make some). Kernels read
memory, so they are given tensors that hold the values.

Dynamo guards how an argument of a graph is to be read; of gradients, which autograd hands over, nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def as_stored(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, or a tensor of its values; a gradient that there is not is None."""
    if x is None:
        return None
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg()


def stored_otherwise(graph: torch.fx.Graph, gradients: bool) -> list[int]:
    """Positions of the arguments of an ATen graph whose values may not be what is in memory. gradients: among them
    those that the graph, a backward, is given."""

    def asked(n: torch.fx.Node) -> bool:
        val = n.meta.get("val")
        return isinstance(val, torch.Tensor) and (val.is_neg() or (gradients and n.name.startswith("tangents")))

    return [k for k, n in enumerate(graph.find_nodes(op="placeholder")) if asked(n)]


def with_stored(run: Callable[[list[Any]], Any], positions: list[int]) -> Callable[[list[Any]], Any]:
    """`run`, which takes the graph's arguments as a list, of such arguments in memory."""
    if not positions:
        return run

    def stored(args: list[Any]) -> Any:
        for k in positions:
            args[k] = as_stored(args[k])
        return run(args)

    return stored
