"""What a scan reads that others read too, computed for it again where it is made of less.

A scan of Inductor's computes what is elementwise before it, but not where others read that: it is then written, and
read by all of them. Its own copy of those nodes reads what they are made of instead. That is done where that is less
than what was written (half as much, of a product of 16 bits that is scanned in 32); the others, in a kernel of their
own, compute theirs from it likewise. Those that go with the scan (`scans.carried`; an exclusive sum, which is a running
one less its elements) read it in the scan's kernel, and need no copy.
"""

from __future__ import annotations

from math import prod

import torch

from tilefold.frontend.regions.scans import MOST_NODES, SCANS, carried, movable

Node = torch.fx.Node


def scans_apart(gm: torch.fx.GraphModule) -> int:
    """Give scans on GPUs copies of their own of what is elementwise before them; gives how many have."""
    found = 0
    scans = [n for n in gm.graph.nodes if n.target in SCANS]
    for scan in scans:
        source = scan.all_input_nodes[0]
        before = _before(source)
        if source.meta["val"].device.type != "cuda" or not before or _reads(before) >= _nbytes(source):
            continue
        together = {*scans, *before, *carried(gm, scans)}
        if any(u not in together for n in before for u in n.users):
            found += _copied(gm, scan, before)
    if found:
        gm.recompile()
    return found


def _before(source: Node) -> list[Node]:
    """The elementwise nodes that make a tensor, in graph order; none where they are many."""
    seen: set[Node] = set()
    stack = [source]
    while stack and len(seen) <= MOST_NODES:
        n = stack.pop()
        if n not in seen and movable(n) and n.all_input_nodes:
            seen.add(n)
            stack += n.all_input_nodes
    return [] if stack else [n for n in source.graph.nodes if n in seen]


def _reads(before: list[Node]) -> float:
    """Bytes of the tensors that these nodes are made of."""
    inputs = {i for n in before for i in n.all_input_nodes if i.all_input_nodes or i.op != "call_function"}
    return sum(_nbytes(i) for i in inputs - {*before})


def _nbytes(n: Node) -> float:
    """Of a tensor of known sizes; without end for another, nothing for a size."""
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0 if isinstance(value, int | torch.SymInt) else float("inf")
    known = all(isinstance(s, int) for s in value.shape)
    return prod(value.shape) * value.element_size() if known else float("inf")


def _copied(gm: torch.fx.GraphModule, scan: Node, before: list[Node]) -> bool:
    """Copy those of the nodes that others read, or what others read is made of."""
    inside, shared = {scan, *before}, set[Node]()
    for n in reversed(before):
        if any(u not in inside or u in shared for u in n.users):
            shared.add(n)
    copies: dict[Node, Node] = {}
    for n in before:
        if n in shared:
            with gm.graph.inserting_before(n):
                copies[n] = gm.graph.node_copy(n, lambda i: copies.get(i, i))
    for n in (*before, scan):
        if n not in shared:
            for i in n.all_input_nodes:
                if i in copies:
                    n.replace_input_with(i, copies[i])
    return bool(copies)
