"""What a graph writes back into its arguments at its end: running statistics of norms, caches.

AOTAutograd leaves such writes to a back end, or copies result by result: of a network of 53 norms 106 kernels of one
row each. Here the graph returns what is written, and one call beside it copies everything of one type, but for what
kernels have written where it belongs (`regions.replaced`).

Where a training graph writes some arguments and AOTAutograd others (those with a gradient), its results are wrong
(torch 2.11 and 2.13, with any back end: a result is missing). Such a graph is refused, and made to write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext

Node = torch.fx.Node
_COPY = torch.ops.aten.copy_.default


class Mixed(Exception):
    """Some arguments are written in the graph, and some after it."""


def check_not_mixed() -> None:
    """Mixed, where the forward that is being compiled writes some arguments and AOTAutograd is to write others."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    if known is not None and known.mutated_graph_handled_indices and known.mutated_inp_runtime_indices:
        raise Mixed


@dataclass(frozen=True, slots=True)
class WrittenBack:
    """The positions of the arguments that a graph wrote to, in the order of the results that it has for them now, its
    last ones."""

    places: tuple[int, ...]

    @staticmethod
    def taken_out(gm: torch.fx.GraphModule) -> WrittenBack:
        """The writes of an ATen graph, which has more results afterwards, and changes no argument.

        Side conditions: every argument is written once at most, as a whole, and nothing computes with it after that.
        """
        given = gm.graph.find_nodes(op="placeholder")
        copies = gm.graph.find_nodes(op="call_function", target=_COPY)
        found = [n for n in copies if n.args[0] in given and isinstance(n.args[1], Node) and _ends(n)]
        places = tuple(given.index(n.args[0]) for n in found)  # type: ignore[arg-type]
        output = gm.graph.output_node()
        results = output.args[0]
        if len(set(places)) < len(copies) or not found or not isinstance(results, list | tuple):
            return WrittenBack(())
        new = [n.args[1] for n in found]
        for n in found:
            n.replace_all_uses_with(n.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(n)
        output.args = ((*output.args[0], *new),)  # type: ignore[misc]
        gm.recompile()
        return WrittenBack(places)

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, which takes the graph's arguments as a list, and the writes."""
        if not self.places:
            return run
        count = len(self.places)

        def writing(args: list[Any]) -> Any:
            to = [args[p] for p in self.places]
            made = run(args)
            _copied(to, made[-count:])
            return made[:-count]

        return writing


def _ends(n: Node) -> bool:
    """Whether nothing but the graph's results reads an argument after it is written."""
    to = n.args[0]
    assert isinstance(to, Node)
    after = {u for u in (*to.users, *n.users) if u is not n and u.op != "output" and n < u}
    return not after and len(n.args) == 2 and not n.kwargs


def _copied(to: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    apart: list[tuple[torch.Tensor, torch.Tensor]] = []
    for x, y in zip(to, new, strict=True):
        if y.is_set_to(x):
            continue
        if any(t.is_conj() or t.is_neg() for t in (x, y)):  # torch copies no lists of those
            apart.append((x, y))
            continue
        written, read = alike.setdefault((x.device, x.dtype, y.device, y.dtype), ([], []))
        written.append(x)
        read.append(y)
    with torch.no_grad():
        for written, read in alike.values():
            torch._foreach_copy_(written, read)
        for x, y in apart:
            x.copy_(y)
