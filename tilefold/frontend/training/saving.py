"""Which values a forward saves for its backward: a minimal cut of the joint graph.

AOTAutograd traces forward and backward as one graph (arguments and gradients of the results in; results and gradients
of the arguments out). What depends on no gradient may run in either pass. A value that the backward reads is saved, or
computed again from values that are: each vertex below is on the source's side if the forward makes it.

    source --(price of computing x again)--> in(x)
    in(x) --(price of saving x)--> out(x)
    out(x) --(never)--> in(each reader of x), and the sink where the backward reads x

So a state of a fold is saved, for it is small, and computing it again is another pass; an element's lift from it is
computed again, with the products that stream: attention saves q, k, v and two numbers a row.

torch's own partitioner cuts afterwards: what is chosen here is written on the nodes as selective checkpointing writes
it (`CheckpointPolicy`), which leaves it one cut. Its handling of sizes, random numbers, effects and mutated arguments
holds for us, whatever its version; the public tags are all that is relied on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from tilefold.frontend.capture.complex_parts import complex_parts
from tilefold.frontend.capture.random import gather_seeds
from tilefold.frontend.capture.result_names import name_results
from tilefold.frontend.operators.fx_to_tensor import is_scalar
from tilefold.frontend.regions.assemble import CompiledGraph, compilations
from tilefold.frontend.regions.flow import NEVER, Network
from tilefold.frontend.regions.guard import Part
from tilefold.frontend.regions.layouts import channels_last
from tilefold.frontend.regions.partition import nbytes
from tilefold.frontend.regions.scans import fold_scans
from tilefold.frontend.training.chunks import in_chunks
from tilefold.frontend.training.compared import compared
from tilefold.frontend.training.laid_out import as_arguments_lie
from tilefold.frontend.training.log_sums import from_log_sums
from tilefold.frontend.training.prefix_gradients import one_scan
from tilefold.frontend.training.prices import KEEP, Prices
from tilefold.frontend.training.read_less import narrow_places, signs_of_sources
from tilefold.frontend.training.reassociate import reassociate
from tilefold.frontend.training.repeated import drop_repeated
from tilefold.frontend.training.scatters import as_gathers
from tilefold.frontend.training.states import take_apart

Node = torch.fx.Node
#: (joint graph, its inputs, *, num_fwd_outputs, ...) -> forward and backward.
Partitioner = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
#: Parts of a byte that prices are rounded to.
_UNIT = 16
#: What holding a byte may be worth where a budget asks for less: halvings of the search, and the most.
_STEPS, _MOST = 12, 2.0**20


@dataclass(frozen=True, slots=True)
class Saved:
    """The choice, in graph order: values that are saved, operators that the backward runs again. `nbytes`: held from
    pass to pass, but for parameters."""

    values: tuple[Node, ...]
    again: tuple[Node, ...]
    nbytes: int


def partitioner(kind: Literal["folds", "min_cut"] = "folds", budget: float | None = None) -> Partitioner:
    """A `partition_fn` for AOTAutograd: ours, or torch's own cut. budget, from 0 to 1: the part of the bytes that the
    fastest choice holds beyond the least possible (None: torch's `activation_memory_budget`).
    """

    def run(
        joint: torch.fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **rest: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        gather_seeds(joint.graph)
        joint.recompile()
        share: float = functorch.activation_memory_budget if budget is None else budget
        static = list(static_lifetime_input_indices or ())
        complex_parts(joint)
        fold_scans(joint)
        as_arguments_lie(joint, num_fwd_outputs, inputs)
        channels_last(joint)
        part = Part("what is saved", [])
        made = part.attempt(lambda: prepared(joint.graph, num_fwd_outputs, static, share)) if kind == "folds" else None
        if made is not None:
            joint.graph = made
        elif part.fallbacks:
            compilations.append(CompiledGraph(part.name, [], part.fallbacks))
        name_results(joint.graph)  # the backward has those names of what is saved
        joint.recompile()
        ours = {} if made is None else {"activation_memory_budget": 1.0, "cse": False}  # nothing is there twice
        with functorch.patch({"activation_memory_budget": share} | ours):
            return min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static, **rest
            )

    return run


def prepared(graph: torch.fx.Graph, results: int, static: Collection[int], budget: float = 1.0) -> torch.fx.Graph:
    """A joint graph with its folds taken apart, and on its nodes what is saved. Arguments as those of `chosen`."""
    graph = _copy(graph)
    drop_repeated(graph)
    as_gathers(graph)
    one_scan(graph)
    take_apart(graph)
    drop_repeated(graph)
    reassociate(graph)
    from_log_sums(graph, _passes(graph, results).late, _without_gradients(graph, results))
    signs_of_sources(graph, _passes(graph, results).late)
    narrow_places(graph, _passes(graph, results).late)
    graph.eliminate_dead_code()
    in_chunks(graph, _passes(graph, results).late, budget)
    found = chosen(graph, results, static, budget)
    if found is not None:
        _tag(found)
    return graph


def _without_gradients(graph: torch.fx.Graph, results: int) -> set[Node]:
    """Tensors that are arguments of a joint graph and have no gradient: its outputs behind the results are the
    gradients of arguments in order."""
    gradients = tree_leaves(graph.output_node().args[0])[results:]
    arguments = graph.find_nodes(op="placeholder")[: len(gradients)]
    tensors = (n for n, g in zip(arguments, gradients, strict=True) if g is None)
    return {n for n in tensors if isinstance(n.meta["val"], torch.Tensor)}


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph to change: if that goes wrong, torch cuts the one that was given."""
    made, nodes = torch.fx.Graph(), dict[Node, Node]()
    for n in graph.nodes:
        nodes[n] = made.node_copy(n, nodes.__getitem__)
    return made


def chosen(graph: torch.fx.Graph, results: int, static: Collection[int], budget: float = 1.0) -> Saved | None:
    """What to save of a joint graph whose first `results` outputs are the forward's; None where nothing of it is a
    backward. static: positions of arguments that live on in any case (parameters)."""
    passes = _passes(graph, results)
    if not passes.late:
        return None
    prices = _prices(graph, passes, static)
    best = _cut(passes, prices, KEEP)
    if budget >= 1:
        return best
    low, high = KEEP, _MOST
    least = _cut(passes, prices, high)
    allowed = least.nbytes + budget * max(0, best.nbytes - least.nbytes)
    best = best if best.nbytes <= allowed else least
    for _ in range(_STEPS):
        worth = (low * high) ** 0.5
        found = _cut(passes, prices, worth)
        low, high = (low, worth) if found.nbytes <= allowed else (worth, high)
        best = found if found.nbytes <= allowed and found.nbytes >= best.nbytes else best
    return best


@dataclass(frozen=True, slots=True)
class _Passes:
    """Nodes by what they depend on, in graph order. early: on no gradient, so that either pass may run them. late: the
    backward alone. forward: those that results need. read: early ones that the backward reads or returns. once: those
    that would not come out the same twice where it matters (`compared`)."""

    early: tuple[Node, ...]
    late: tuple[Node, ...]
    forward: frozenset[Node]
    results: frozenset[Node]
    read: frozenset[Node]
    once: frozenset[Node]


def _passes(graph: torch.fx.Graph, results: int) -> _Passes:
    outputs = [n if isinstance(n, Node) else None for n in tree_leaves(graph.output_node().args[0])]
    given, gradients = outputs[:results], outputs[results:]
    late: dict[Node, None] = {}
    for n in graph.nodes:
        if n.op == "output":
            continue
        if _is_gradient(n) or _stays_late(n) or any(a in late for a in n.all_input_nodes):
            late[n] = None
    early = tuple(n for n in graph.nodes if n.op != "output" and n not in late and not is_scalar(n))
    forward: set[Node] = {n for n in given if n is not None}
    for n in reversed(graph.nodes):
        if n in forward:
            forward.update(n.all_input_nodes)
    read = {a for n in late for a in n.all_input_nodes if a not in late} | {n for n in gradients if n is not None}
    own = frozenset(n for n in given if n is not None)
    equal = compared(graph)
    read |= equal.stored & set(early)
    return _Passes(early, tuple(late), frozenset(forward), own, frozenset(read - late.keys()), equal.once)


def _is_gradient(n: Node) -> bool:
    """Whether an argument is given to the backward only. AOTAutograd's names say so, as they do to torch."""
    return n.op == "placeholder" and ("tangents" in str(n.target) or "bwd_seed" in str(n.target))


def _stays_late(n: Node) -> bool:
    """Whether an operator that depends on no gradient was put into the backward (a change in place there)."""
    tag, target = n.meta.get("partitioner_tag"), n.target
    changes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return tag == "must_be_in_backward" or (tag == "is_backward" and changes)


def _prices(graph: torch.fx.Graph, passes: _Passes, static: Collection[int]) -> Prices:
    arguments = [n for n in graph.find_nodes(op="placeholder") if not _is_gradient(n)]
    free = frozenset(n for k, n in enumerate(arguments) if k in static)
    return Prices(passes.forward, frozenset(passes.late), passes.results, free)


def _cut(passes: _Passes, prices: Prices, worth: float) -> Saved:
    place = {n: k for k, n in enumerate(passes.early)}
    net = Network(2 * len(place) + 2)
    source, sink = 2 * len(place), 2 * len(place) + 1
    ends = _ends_of_blocks(passes.early)
    once = ends | passes.once
    for n, k in place.items():
        repeated = n.meta.get("recompute") in _RECOMPUTED and n not in ends
        kept = n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or n in once
        net.edge(source, 2 * k, 0 if repeated else _whole(None if kept else prices.again(n)))
        net.edge(2 * k, 2 * k + 1, NEVER if repeated else _whole(prices.keep(n, worth)))
        for user in n.users:
            if user in place:
                net.edge(2 * k + 1, 2 * place[user], NEVER)
        if n in passes.read:
            net.edge(2 * k + 1, sink, NEVER)
    made = net.source_side(source, sink)
    needed = set(passes.read)
    for n in reversed(passes.early):
        if n in needed and 2 * place[n] not in made:
            needed.update(a for a in n.all_input_nodes if a in place)
    values = tuple(n for n, k in place.items() if n in needed and 2 * k in made)
    again = tuple(n for n, k in place.items() if n in needed and 2 * k not in made)
    return Saved(values, again, sum(nbytes(n) for n in values if n not in prices.free))


def _whole(price: float | None) -> int:
    return NEVER if price is None else round(price * _UNIT)


def _ends_of_blocks(nodes: Sequence[Node]) -> frozenset[Node]:
    """Values that one checkpointed block hands to a later one: torch saves them, so that a backward runs one block
    again and not all before it."""

    def block(n: Node) -> int | None:
        return n.meta.get("ac_graph_id") if n.meta.get("recompute") in _RECOMPUTED else None

    def handed_on(n: Node) -> bool:
        own = block(n)
        return own is not None and any((other := block(u)) is not None and other > own for u in n.users)

    return frozenset(n for n in nodes if handed_on(n))


def _tag(found: Saved) -> None:
    """Write the choice on the nodes. What a user's checkpoint wrote there stays."""
    for n in found.again:
        if n.op == "call_function":
            n.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    for n in found.values:
        if n.op == "call_function":
            n.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            if n.target is operator.getitem:  # torch asks the operator, not the result that is picked
                n.args[0].meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # type: ignore[union-attr]
