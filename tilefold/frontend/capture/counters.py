"""Counters of a graph: arguments to which it adds a number, and which it never reads.

Batch norm in training counts its batches. AOTAutograd makes two kernels of each counter, the sum and a copy into the
argument: of a network of 53 norms, 106 kernels of one number. Beside the graph, all counters are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Counters:
    """What was taken out of a graph. `places`: positions of the arguments that each number is added to. `nodes`: these
    arguments, each with its number."""

    gm: torch.fx.GraphModule
    places: Mapping[float, tuple[int, ...]]
    nodes: tuple[tuple[Node, float], ...]

    @staticmethod
    def taken_out(gm: torch.fx.GraphModule) -> Counters:
        """The counters of a graph of Dynamo's, which has none afterwards.

        Side conditions: a number is added to an argument in place, once; nothing else reads it, or memory that it
        shares; it needs no gradient.
        """
        given = gm.graph.find_nodes(op="placeholder")
        shared = _shared(given)
        places: dict[float, list[int]] = {}
        nodes: list[tuple[Node, float]] = []
        for position, argument in enumerate(given):
            (user, *others) = argument.users or (argument,)
            amount = None if others or argument in shared else _added(argument, user)
            if amount is not None:
                places.setdefault(amount, []).append(position)
                nodes.append((argument, amount))
                gm.graph.erase_node(user)
        if nodes:
            gm.recompile()
        return Counters(gm, {k: tuple(v) for k, v in places.items()}, tuple(nodes))

    def put_back(self) -> None:
        """The graph counts again, at its end."""
        for argument, amount in self.nodes:
            with self.gm.graph.inserting_before(self.gm.graph.output_node()):
                self.gm.graph.call_method("add_", (argument, amount))
        if self.nodes:
            self.gm.recompile()

    def around(self, run: Callable[..., object]) -> Callable[..., object]:
        """`run`, called with the graph's arguments, and the counters counted."""
        if not self.places:
            return run

        def counted(*args: object) -> object:
            made = run(*args)
            with torch.no_grad():
                for amount, positions in self.places.items():
                    torch._foreach_add_([args[p] for p in positions], amount)  # type: ignore[misc]
            return made

        return counted


def _added(argument: Node, user: Node) -> float | None:
    """The number that a node adds to an argument, if that is all it does."""
    val = argument.meta.get("example_value")
    if user.op != "call_method" or user.target != "add_" or user.users or user.kwargs or len(user.args) != 2:
        return None
    amount = user.args[1]
    plain = isinstance(val, torch.Tensor) and val.layout is torch.strided and not val.requires_grad
    return amount if plain and type(amount) in (int, float) and user.args[0] is argument else None  # type: ignore


def _shared(given: Sequence[Node]) -> set[Node]:
    """Arguments whose memory another argument has too."""
    by_memory: dict[object, list[Node]] = {}
    for n in given:
        val = n.meta.get("example_value")
        if isinstance(val, torch.Tensor) and val.layout is torch.strided:
            by_memory.setdefault(val.untyped_storage()._cdata, []).append(n)
    return {n for nodes in by_memory.values() if len(nodes) > 1 for n in nodes}
