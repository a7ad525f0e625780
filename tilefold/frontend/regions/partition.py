"""Cut a graph into regions that Tilefold covers and what is left over.

All operators of one level (`levels`) and kind are a region or a leftover. What costs next to nothing is no part of a
level but goes with whatever reads it, several times if need be: constants, and views that do not leave most of a
tensor out. So neither crosses between regions, and no argument (a parameter) is ever copied by one.

Uncovered operators that wait for no region come first of all, at negative levels, and cut nothing: random numbers
(the masks of dropout) at -3, others at -1.

Size computations have no group: they run between groups, as early as their inputs allow. A user of
a size that was read off a computed tensor comes at a later level than that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod

import torch

from tilefold.frontend.operators.added_rows import added_rows_op, rows_of_sums_op
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.fx_to_tensor import is_scalar, supports
from tilefold.frontend.operators.keyed_sums import against_sums, in_a_region
from tilefold.frontend.operators.prefix import prefixes_op
from tilefold.frontend.operators.prefix_gradient import prefix_gradient_op
from tilefold.frontend.operators.put import put_op, scattered_op
from tilefold.frontend.operators.random import draws_seeds
from tilefold.frontend.operators.source import location
from tilefold.frontend.operators.table import COPIES, VIEWS
from tilefold.frontend.regions.guard import Fallback, Part
from tilefold.frontend.regions.levels import Unit, earliest, settled
from tilefold.frontend.regions.remade import remade, unneeded
from tilefold.frontend.regions.rows import Loop, scaled
from tilefold.frontend.regions.scans import SCANS, carried, movable

Node = torch.fx.Node
#: Levels of uncovered operators before the first region: random numbers, which run op by op, and the rest.
_DRAWN, _EARLY = -3, -1
_OWN = (prefixes_op, prefix_gradient_op, added_rows_op, rows_of_sums_op, scaled, put_op, scattered_op)
#: The same memory as numbers of another kind.
_RETYPED = (torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default)
#: Operators that a library computes whoever calls it.
LIBRARY = frozenset(
    {
        torch.ops.aten.convolution_backward.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._grouped_mm.default,
    }
)
#: Those that are PyTorch's own to compute, by choice: its kernels are calls of a library, and nothing was lost.
MEANT = LIBRARY | {torch.ops.aten.embedding_dense_backward.default}
#: Elements times how many of them are picked, of a row, from which on a GPU's kernel of ours, which looks through a row
#: for each, takes longer than PyTorch's selection by digits: the best 50 of 50,257 are predicted to take 830 us.
PICKED = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one level, in graph order. `covered`: a region for Tilefold. `results`: those that something outside
    reads; the others may be computed in several groups."""

    level: int
    covered: bool
    nodes: tuple[Node, ...]
    results: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups in level order; `aliases`: views of arguments that the graph returns or reads sizes of (run as they are);
    `scalars`: size computations with the level after whose groups they can run."""

    groups: tuple[Group, ...]
    aliases: tuple[Node, ...]
    scalars: tuple[tuple[int, Node], ...]
    fallbacks: tuple[Fallback, ...]


def partition(gm: torch.fx.GraphModule, covers: Callable[[Node], str | None] = supports) -> Partition:
    """Group the nodes of a functional ATen graph. `covers` gives the reason against a node, or None."""
    fallbacks: list[Fallback] = []
    refused: set[Node] = set()
    elsewhere = any(v.device.type != "cpu" for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    reasons = {n: _reason(n, covers, fallbacks) for n in _operators(gm) if _tuple_source(n) is None}
    left = [n for n, reason in reasons.items() if reason is not None]
    with_scans = carried(gm, [n for n in left if n.target in SCANS], left)
    for node in _operators(gm):
        source = _tuple_source(node)
        if source is not None:
            reason = None if source not in refused else ""
        else:
            reason = reasons[node]
        if reason is None and (node in with_scans or _only_drawn_with(node) or (elsewhere and is_host_number(node))):
            reason = ""
        if reason is not None:
            refused.add(node)
            if reason:
                fallbacks.append(Fallback(str(node.target), reason, location(node), meant=is_meant(node)))
    aliases, light = _aliases(gm), _light(gm, refused)
    given = set(aliases) - light
    units, levels = _units(gm, refused, light, given)
    sizes = {n: at for n, at in levels.items() if is_scalar(n)}
    arguments = {n: nbytes(n) for u in units for n in u.arguments}
    found = settled(units, {u.node: levels[u.node] for u in units}, arguments)
    copies = remade(units, found, arguments, {u.node: _elements(u.node) for u in units if _again(u)})
    gone = unneeded(units, found, copies)
    owners = {n: found[_unit_of(n)] for n in _operators(gm) if not (n in light or n in given or n in gone)}
    groups = _groups(gm, owners, sizes, light, aliases, copies)
    return Partition(groups, aliases, tuple((at, n) for n, at in sizes.items()), tuple(fallbacks))


def is_host_number(node: Node) -> bool:
    """Whether a node makes a tensor of one element on the CPU: PyTorch takes it for a number wherever it is read. In a
    graph of a GPU it runs op by op, before all regions if it waits for none."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


def _operators(gm: torch.fx.GraphModule) -> list[Node]:
    """The nodes that compute tensors."""
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output") and not is_scalar(n)]


def _light(gm: torch.fx.GraphModule, refused: AbstractSet[Node]) -> set[Node]:
    """What goes with its readers: constants, and views with at least as many bytes as what is in memory, or of
    something that is there in any case."""
    root: dict[Node, Node | None] = {}  # None: an argument or a constant
    for n in _operators(gm):
        source, inputs = _tuple_source(n), _tensor_inputs(n)
        if n in refused or _turned_for_others(n, refused):
            continue
        if not inputs:
            root[n] = None
        elif source is not None:
            if source in root:
                root[n] = root[source]
        elif n.target in VIEWS and len(inputs) == 1:
            (base,) = inputs
            below = root.get(base, base if base.op == "call_function" else None)
            if below is None or (not isinstance(n.meta["val"], tuple | list) and nbytes(n) >= nbytes(below)):
                root[n] = below
    return set(root)


def _units(
    gm: torch.fx.GraphModule, refused: Collection[Node], light: Collection[Node], given: Collection[Node]
) -> tuple[list[Unit], dict[Node, int]]:
    """The operators that have a level, and the first levels of them and of sizes. What a light node reads is read by
    its readers."""
    behind: dict[Node, tuple[Node, ...]] = {}
    units: dict[Node, Unit] = {}
    levels: dict[Node, int] = {}
    returned, sized = set(gm.graph.output_node().all_input_nodes), _sized(gm, light)
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "get_attr") or n in given:
            behind[n] = (n,) if isinstance(n.meta.get("val"), torch.Tensor) else ()
        if n in behind or n.op == "output":
            continue
        reads = tuple(dict.fromkeys(r for a in n.all_input_nodes for r in behind.get(a, ())))
        computed = tuple(a for a in reads if a in units)
        arguments = tuple(a for a in reads if a not in levels)
        source = _tuple_source(n)
        if is_scalar(n):
            levels[n] = max((levels[a] for a in reads if a in levels), default=-1)
            behind[n] = (n,)
        elif n in light:
            behind[n] = reads
        elif source is not None and source in units:
            u = units[source]
            behind[n] = (source,)
            units[source] = replace(u, nbytes=u.nbytes + nbytes(n), returned=u.returned or n in returned)
        else:
            after = max((levels[a] for a in reads if a in levels and a not in units), default=-1)
            size = 0 if isinstance(n.meta.get("val"), tuple | list) else nbytes(n)
            first = _first_level(n, n not in refused, n in sized)
            unit = Unit(n, n not in refused, computed, arguments, after, first, size, n in sized, n in returned)
            units[n], behind[n] = unit, (n,)
            levels[n] = earliest(unit, levels)
    return list(units.values()), levels


def _again(u: Unit) -> bool:
    """Whether a later region on a GPU may compute an operator again: a map of known sizes. (A CPU's caches hold what
    crosses.)"""
    return u.covered and movable(u.node) and u.node.meta["val"].device.type == "cuda"


def _elements(n: Node) -> int:
    return prod(extents(n.meta["val"]))


def _first_level(n: Node, covered: bool, sized: bool) -> int:
    """The lowest level that an operator may have. Sizes read off its results are not there before level 0."""
    if covered or sized:
        return 0 if covered else 1
    return _DRAWN if draws_numbers(n) or draws_seeds(n) or _only_drawn_with(n) else _EARLY


def _sized(gm: torch.fx.GraphModule, light: Collection[Node]) -> set[Node]:
    """The operators that sizes are read off."""
    found: set[Node] = set()
    todo = [a for n in gm.graph.nodes if n.op == "call_function" and is_scalar(n) for a in n.all_input_nodes]
    while todo:
        n = todo.pop()
        if n.op == "call_function" and n not in found:
            found.add(n)
            if n in light or _tuple_source(n) is not None:
                todo += n.all_input_nodes
    return found


def draws_numbers(node: Node) -> bool:
    """Whether a node is a random operator."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _only_drawn_with(node: Node) -> bool:
    """Whether a node makes a tensor that nothing but random operators fill."""
    return node.op == "call_function" and not _tensor_inputs(node) and all(draws_numbers(u) for u in node.users)


def _unit_of(node: Node) -> Node:
    """The operator that computes a node: itself, or what it is picked from."""
    source = _tuple_source(node)
    return node if source is None else _unit_of(source)


def _groups(
    gm: torch.fx.GraphModule,
    owners: Mapping[Node, int],
    sizes: Mapping[Node, int],
    light: Collection[Node],
    aliases: Collection[Node],
    copies: Mapping[int, AbstractSet[Node]],
) -> tuple[Group, ...]:
    """A group a level, with the light nodes that its own read. `owners`: levels of all that is not light; `sizes`: the
    levels after which they are known; `copies`: what a level computes again."""
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    outer = [n for n in gm.graph.nodes if n.op == "output" or is_scalar(n)]
    read = {a for o in outer for a in o.all_input_nodes}
    owners = {**owners, **{n: _ready(n, owners, sizes) for n in read if n in light and n not in aliases}}
    inside: dict[int, set[Node]] = {}
    for n, level in owners.items():
        inside.setdefault(level, set()).add(n)
    for level, nodes in inside.items():
        nodes |= copies.get(level, set())
        todo = list(nodes)
        while todo:
            for a in todo.pop().all_input_nodes:
                if a in light and a not in nodes:
                    nodes.add(a)
                    todo.append(a)
                elif a not in nodes:
                    read.add(a)
    return tuple(
        Group(
            level,
            level % 2 == 0,
            tuple(sorted(nodes, key=place.__getitem__)),
            tuple(sorted((n for n in nodes & read if owners.get(n) == level), key=place.__getitem__)),
        )
        for level, nodes in sorted(inside.items())
    )


def _ready(n: Node, owners: Mapping[Node, int], sizes: Mapping[Node, int]) -> int:
    """The level at which all is there that a light node reads: that of the operator whose result it views."""
    found: list[int] = []
    for a in n.all_input_nodes:
        if a in sizes:
            found.append(sizes[a] + 1)
        elif a.op == "call_function":
            found.append(owners[a] if a in owners else _ready(a, owners, sizes))
    return max(found, default=0)


def _reason(node: Node, covers: Callable[[Node], str | None], fallbacks: list[Fallback]) -> str | None:
    """Why a node is not covered, or None; empty where it is on record already: lowering it failed."""
    if draws_seeds(node) or is_own(node) or node.target in _RETYPED:  # what is drawn is covered; kernels of ours
        return ""
    if _picks_many(node):
        return "PyTorch selects many of many elements by their digits"
    why = against_sums(node)
    if why is not None:
        return why
    part = Part(str(node.target), fallbacks, location(node), instead="by another compiler")
    asked = part.attempt(lambda: (covers(node),))
    return "" if asked is None else asked[0]


def is_meant(node: Node) -> bool:
    """Whether PyTorch computes an operator by choice."""
    return node.target in MEANT or _picks_many(node)


def _picks_many(node: Node) -> bool:
    if node.target is not torch.ops.aten.topk.default or node.meta["val"][0].device.type != "cuda":
        return False
    x, k, axis, *_ = attrs(node).values()
    extent = x.meta["val"].shape[axis] if isinstance(x, Node) and x.meta["val"].dim() else 1  # type: ignore[index]
    return isinstance(k, int) and isinstance(extent, int) and k * extent > PICKED


def is_own(node: Node) -> bool:
    """Whether a node is an operator of Tilefold's that runs as it is."""
    return (node.target in _OWN and not in_a_region(node)) or isinstance(node.target, Loop)


def _tuple_source(node: Node) -> Node | None:
    """The node whose result tuple this one picks from."""
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], Node):
        return node.args[0]
    return None


def _aliases(gm: torch.fx.GraphModule) -> tuple[Node, ...]:
    """Views of arguments that are results of the graph or tell a size, and the views they are made from."""
    readers = [gm.graph.output_node(), *(n for n in gm.graph.nodes if n.op == "call_function" and is_scalar(n))]
    chain: dict[Node, bool] = {}

    def is_alias(node: Node) -> bool:
        if node not in chain:
            source = _tuple_source(node)
            chain[node] = node.op == "placeholder" or (
                node.op == "call_function"
                and (source is not None or (node.target in VIEWS and not _rearranges(node)))
                and all(is_alias(n) for n in node.all_input_nodes if not is_scalar(n))
            )
        return chain[node]

    read = {a for n in readers for a in n.all_input_nodes}
    wanted = {n for n in read if n.op == "call_function" and not is_scalar(n) and is_alias(n)}
    for node in reversed(gm.graph.nodes):
        if node in wanted:
            wanted |= {n for n in node.all_input_nodes if n.op == "call_function" and not is_scalar(n)}
    return tuple(n for n in gm.graph.nodes if n in wanted)


def is_trivial(group: Group) -> bool:
    """Whether a group only views tensors, copies them as they lie, or makes constants: nothing to compile."""
    return not operators(group) and not (group.covered and any(map(_rearranges, group.nodes)))


def _rearranges(node: Node) -> bool:
    """Whether a node writes the elements of a tensor elsewhere than they lie in it."""
    if node.target not in COPIES:
        return False
    if node.target is not torch.ops.aten.clone.default:
        return True
    return _strides(node) != _strides(node.all_input_nodes[0])


def _turned_for_others(node: Node, refused: Collection[Node]) -> bool:
    """Whether a node is a copy in another order on a GPU, which is worth a region also where nothing but an operator of
    others reads it: kernels of ours move tiles, eager's single elements. An order backwards is, for kernels of ours
    that run as they are (prefixes): another compiler reads it so by itself."""
    if node.op != "call_function" or not _rearranges(node) or node.meta["val"].device.type != "cuda":
        return False
    others = [u for u in _readers(node) if u in refused]
    return bool(others) if node.target is torch.ops.aten.clone.default else any(map(is_own, others))


def _readers(node: Node) -> set[Node]:
    """What reads a node, through views."""
    found, todo = set[Node](), [node]
    while todo:
        new = {*todo.pop().users} - found
        found |= new
        todo += (u for u in new if u.op == "call_function" and u.target in VIEWS and not _rearranges(u))
    return found


def _strides(node: Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(_number(s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1)


def operators(group: Group) -> int:
    """How many nodes of a group compute something: neither views nor constants."""
    return count_operators(group.nodes)


def count_operators(nodes: Iterable[Node]) -> int:
    """How many nodes compute something of tensors, that another compiler could take."""
    calls = (n for n in nodes if n.op == "call_function" and not is_scalar(n) and not is_own(n))
    views = (*VIEWS, *_RETYPED)
    return sum(n.target not in views and _tuple_source(n) is None and bool(_tensor_inputs(n)) for n in calls)


def _tensor_inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if not is_scalar(n)]


#: Elements along an axis whose extent only a call tells.
UNKNOWN_EXTENT = 64


def extents(value: torch.Tensor) -> tuple[int, ...]:
    """The extents of a tensor at the sizes that it was captured with."""
    return tuple(_number(n) for n in value.shape)


def _number(n: int | torch.SymInt) -> int:
    """A size as it was captured."""
    return n if isinstance(n, int) else (n.node.hint if n.node.has_hint() else None) or UNKNOWN_EXTENT


def nbytes(node: Node) -> int:
    """Bytes of a node's (first) tensor, at the sizes that it was captured with."""
    val = node.meta.get("val")
    tensors = [v for v in (val if isinstance(val, tuple | list) else [val]) if isinstance(v, torch.Tensor)]
    return prod(extents(tensors[0])) * tensors[0].element_size() if tensors else 0


def halves(gm: torch.fx.GraphModule) -> Partition | None:
    """A covered graph as two regions, cut in its middle half where the fewest bytes cross; None: one operator.

    Results of an operator that has several stay with it.
    """
    light = _light(gm, frozenset())
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n not in light]
    at = {n: k for k, n in enumerate(nodes)}
    together = [(at.get(source, 0), k) for k, n in enumerate(nodes) if (source := _tuple_source(n)) is not None]
    cuts = [k for k in range(1, len(nodes)) if not any(a < k <= b for a, b in together)]
    if not cuts:
        return None

    def last_reader(n: Node) -> int:
        return max((last_reader(u) if u in light else at.get(u, -1) for u in n.users), default=-1)

    last = {n: last_reader(n) for n in nodes}

    def crossing(k: int) -> tuple[bool, int]:
        """Whether a cut before node k is near an end, and the bytes that cross it."""
        crosses = (n for n in nodes[:k] if last[n] >= k)
        return not len(nodes) <= 4 * k <= 3 * len(nodes), sum(map(nbytes, crosses))

    best = min(cuts, key=crossing)
    owners = {n: 2 * (at[n] >= best) for n in nodes}
    return Partition(_groups(gm, owners, {}, light, (), {}), (), (), ())
