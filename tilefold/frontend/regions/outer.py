"""The graph of a model's parts, called with arguments that the caller gives up.

Torch hands a backward pass the only references to what the forward saved. `torch.fx.GraphModule.forward` keeps every
argument until it returns; here values are let go after their last use, and parts that can (`boxed`) let theirs go while
they run, so that saved tensors make room for gradients as with Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: What a node computes: from all values so far.
Compute = Callable[[list[Any]], Any]


class Outer:
    """A graph and its modules: `run` with arguments, as any callable; `boxed` with a list of them, which it empties."""

    def __init__(self, run: Callable[..., Sequence[object]], root: torch.nn.Module, graph: torch.fx.Graph):
        self._run = run
        nodes = list(graph.nodes)
        at = {n: k for k, n in enumerate(nodes)}
        last = {a: n for n in nodes for a in n.all_input_nodes}
        self._given = [at[n] for n in nodes if n.op == "placeholder"]
        self._unread = [at[n] for n in nodes if n.op == "placeholder" and n not in last]
        self._values = [getattr(root, str(n.target)) if n.op == "get_attr" else None for n in nodes]
        self._steps: list[tuple[int, Compute, list[int]]] = []
        for n in nodes:
            drops = [at[a] for a in n.all_input_nodes if last[a] is n]
            if n.op == "call_module":
                run_part = getattr(root, str(n.target)).run
                self._steps.append((at[n], _part(run_part, [at[a] for a in n.args], drops), drops))
            elif n.op == "call_function":
                self._steps.append((at[n], _operator(n, at), drops))
        self._results = graph.output_node().args[0]
        self._at = at

    def __call__(self, *args: object) -> Sequence[object]:
        return self._run(*args)

    def boxed(self, args: list[Any]) -> Sequence[object]:
        """The results; values are let go after their last use."""
        values = list(self._values)
        for k, x in zip(self._given, args, strict=True):
            values[k] = x
        for k in self._unread:
            values[k] = None
        x = None
        args.clear()
        for k, compute, drops in self._steps:
            values[k] = compute(values)
            for d in drops:
                values[d] = None
        found: Any = torch.fx.map_arg(self._results, lambda n: values[self._at[n]])
        return list(found)


def item(results: Any, k: Any) -> Any:
    """One of a part's results."""
    return results[k]


def _part(run: Callable[..., object], places: Sequence[int], drops: Sequence[int]) -> Compute:
    boxed: Callable[[list[Any]], object] | None = getattr(run, "boxed", None)

    def call(values: list[Any]) -> object:
        given = [values[k] for k in places]
        if boxed is None:
            return run(*given)
        for d in drops:
            values[d] = None
        return boxed(given)

    return call


def _operator(n: torch.fx.Node, at: dict[torch.fx.Node, int]) -> Compute:
    if n.target is item and isinstance(n.args[0], torch.fx.Node):
        source, k = at[n.args[0]], n.args[1]
        return lambda values: item(values[source], k)

    def call(values: list[Any]) -> object:
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda a: values[at[a]])
        return n.target(*args, **kwargs)  # type: ignore[operator]

    return call
