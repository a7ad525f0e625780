"""Cut a graph into regions that Tilefold covers and what is left over.

Every node gets a level: even for covered nodes, odd for the others. A node's level is at least its
inputs', one more where coverage changes. All covered nodes of one level form a region: edges never
lead to a lower level, and never leave a level and return, so regions can run in level order, and
each is as large as the uncovered nodes allow.

Uncovered nodes that wait for no covered one come first of all, at negative levels, and cut nothing: random numbers
(the masks of dropout) at -3, others at -1.

Size computations have no group: they run between groups, as early as their inputs allow. A user of
a size that was read off a computed tensor comes at a later level than that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilefold.frontend.fx_to_tensor import free_symbols, is_scalar, supports
from tilefold.frontend.guard import Fallback, Part
from tilefold.frontend.ops import COPIES, VIEWS
from tilefold.frontend.scans import carried
from tilefold.frontend.source import location

Node = torch.fx.Node
#: Levels of uncovered nodes before the first region: random numbers, which run op by op, and the rest.
_DRAWN, _EARLY = -3, -1
#: Level of what is computed from arguments' sizes alone.
_AT_ONCE = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one level, in graph order. `covered`: a region for Tilefold."""

    level: int
    covered: bool
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups in level order; `aliases`: views of arguments that the graph returns (run as they are);
    `scalars`: size computations with the level after whose groups they can run."""

    groups: tuple[Group, ...]
    aliases: tuple[Node, ...]
    scalars: tuple[tuple[int, Node], ...]
    fallbacks: tuple[Fallback, ...]


def partition(gm: torch.fx.GraphModule, covers: Callable[[Node], str | None] = supports) -> Partition:
    """Group the nodes of a functional ATen graph. `covers` gives the reason against a node, or None."""
    levels: dict[Node, int] = {}
    groups: dict[int, list[Node]] = {}
    scalars: list[tuple[int, Node]] = []
    fallbacks: list[Fallback] = []
    refused: set[Node] = set()
    with_scans = carried(gm)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        inputs = [n for n in node.all_input_nodes if n in levels]
        if is_scalar(node):
            levels[node] = max((levels[n] for n in inputs), default=_AT_ONCE)
            scalars.append((levels[node], node))
            continue
        parent = _tuple_source(node)
        reason = _reason(node, covers, fallbacks) if parent is None else (None if parent not in refused else "")
        if reason is None and (node in with_scans or _only_drawn_with(node)):
            reason = ""
        parity = 0 if reason is None else 1
        if parent is not None:
            level = levels[parent]
        else:
            first = parity if reason is None else _first_level(node)
            level = max((first, *(_next_level(levels[n], is_scalar(n), parity) for n in inputs)))
        if reason is not None:
            refused.add(node)
            if reason:
                fallbacks.append(Fallback(str(node.target), reason, location(node)))
        levels[node] = level
        groups.setdefault(level, []).append(node)
    ordered = tuple(Group(k, k % 2 == 0, tuple(groups[k])) for k in sorted(groups))
    return Partition(ordered, _aliases(gm), tuple(scalars), tuple(fallbacks))


def _reason(node: Node, covers: Callable[[Node], str | None], fallbacks: list[Fallback]) -> str | None:
    """Why a node is not covered, or None; empty where it is on record already: lowering it failed."""
    asked = Part(str(node.target), fallbacks, location(node)).attempt(lambda: (covers(node),))
    return "" if asked is None else asked[0]


def _next_level(of: int, scalar: bool, parity: int) -> int:
    """Lowest level of that parity at which the result of a node of level `of` can be used."""
    if of < 0 and (scalar or parity == 1):
        return _DRAWN if scalar else of
    at = max(0, of + 1 if scalar else of)
    return at + (at + parity) % 2


def _first_level(node: Node) -> int:
    """Of an uncovered node that waits for nothing. Sizes read off its results are not there before level 0."""
    users = [u for n in node.users for u in (n, *(n.users if _tuple_source(n) is node else ()))]
    if any(is_scalar(u) for u in users):
        return 1
    return _DRAWN if draws_numbers(node) or _only_drawn_with(node) else _EARLY


def draws_numbers(node: Node) -> bool:
    """Whether a node is a random operator."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _only_drawn_with(node: Node) -> bool:
    """Whether a node makes a tensor that nothing but random operators fill."""
    return node.op == "call_function" and not _tensor_inputs(node) and all(draws_numbers(u) for u in node.users)


def _tuple_source(node: Node) -> Node | None:
    """The node whose result tuple this one picks from."""
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], Node):
        return node.args[0]
    return None


def _aliases(gm: torch.fx.GraphModule) -> tuple[Node, ...]:
    """Views of arguments that are results of the graph, and the views they are made from."""
    output = gm.graph.output_node()
    chain: dict[Node, bool] = {}

    def is_alias(node: Node) -> bool:
        if node not in chain:
            chain[node] = node.op == "placeholder" or (
                node.op == "call_function"
                and is_free(node)
                and not isinstance(node.meta["val"], tuple | list)
                and all(is_alias(n) for n in node.all_input_nodes if not is_scalar(n))
            )
        return chain[node]

    wanted = {n for n in output.all_input_nodes if n.op == "call_function" and not is_scalar(n) and is_alias(n)}
    for node in reversed(gm.graph.nodes):
        if node in wanted:
            wanted |= {n for n in node.all_input_nodes if n.op == "call_function" and not is_scalar(n)}
    return tuple(n for n in gm.graph.nodes if n in wanted)


def is_trivial(group: Group) -> bool:
    """Whether a group only views tensors or makes constants: nothing to compile."""
    return all(is_free(n) or _tuple_source(n) is not None or not _tensor_inputs(n) for n in group.nodes)


def is_free(node: Node) -> bool:
    """Whether a node only renames elements. Copies are left to torch too, but on a GPU, where torch's own between
    layouts read or write single elements."""
    return node.target in VIEWS and not (node.target in COPIES and _on_gpu(node))


def _on_gpu(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cuda"


def _tensor_inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if not is_scalar(n)]


@dataclass(frozen=True, slots=True)
class Extracted:
    """A group as a graph module of its own; `inputs` and `results` are nodes of the original graph."""

    module: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]


def extract(gm: torch.fx.GraphModule, group: Group, skip: Sequence[Node] = ()) -> Extracted:
    """The group as a module. `skip`: nodes that are made outside and are no results of it."""
    inside = set(group.nodes)
    results = [n for n in group.nodes if n not in skip and any(u not in inside for u in n.users)]
    results = [n for n in results if not isinstance(n.meta.get("val"), tuple | list)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    inputs = list(_outside(group, inside))
    for n in inputs + [s for s in _symbol_sources(gm, group) if s not in inputs]:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for n in group.nodes:
        for a in n.all_input_nodes:
            if a.op == "get_attr" and a not in copies:
                copies[a] = graph.node_copy(a)
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in results))
    given = tuple(n for n in copies if copies[n].op == "placeholder")
    return Extracted(torch.fx.GraphModule(gm, graph), given, tuple(results))


def _outside(group: Group, inside: set[Node]) -> list[Node]:
    """Nodes that the group reads."""
    return list(
        dict.fromkeys(a for n in group.nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr")
    )


def _symbol_sources(gm: torch.fx.GraphModule, group: Group) -> list[Node]:
    """Arguments of the graph that give the symbols in the group's sizes."""
    needed = {str(s) for n in group.nodes for s in free_symbols(n)}
    found: list[Node] = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for n in placeholders:
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol and str(val.node.expr) in needed:
            needed.discard(str(val.node.expr))
            found.append(n)
    for n in placeholders:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor):
            extents: list[int | torch.SymInt] = list(val.shape)
            own = {str(s.node.expr) for s in extents if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol}
            if own & needed:
                needed -= own
                found.append(n)
    return found


#: Elements along an axis whose extent only a call tells.
UNKNOWN_EXTENT = 64


def nbytes(node: Node) -> int:
    """Bytes of a node's (first) tensor, at the sizes that it was captured with."""
    val = node.meta.get("val")
    tensors = [v for v in (val if isinstance(val, tuple | list) else [val]) if isinstance(v, torch.Tensor)]
    total = tensors[0].element_size() if tensors else 0
    for n in tensors[0].shape if tensors else ():
        hint = n.node.hint if isinstance(n, torch.SymInt) and n.node.has_hint() else None
        total *= n if isinstance(n, int) else hint or UNKNOWN_EXTENT
    return total


def halves(gm: torch.fx.GraphModule) -> Partition | None:
    """A covered graph as two regions, cut in its middle half where the fewest bytes cross; None: one operator.

    Results of an operator that has several stay with it.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    at = {n: k for k, n in enumerate(nodes)}
    together = [(at.get(source, 0), k) for k, n in enumerate(nodes) if (source := _tuple_source(n)) is not None]
    cuts = [k for k in range(1, len(nodes)) if not any(a < k <= b for a, b in together)]
    if not cuts:
        return None

    def crossing(k: int) -> tuple[bool, int]:
        """Whether a cut before node k is near an end, and the bytes that cross it."""
        crosses = (n for n in nodes[:k] if any(at.get(u, -1) >= k for u in n.users))
        return not len(nodes) <= 4 * k <= 3 * len(nodes), sum(map(nbytes, crosses))

    best = min(cuts, key=crossing)
    groups = (Group(0, True, tuple(nodes[:best])), Group(2, True, tuple(nodes[best:])))
    return Partition(groups, (), (), ())
