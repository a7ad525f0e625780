"""The two drawings of a program: its operators before fusion, its kernels after.

Before, every operator is a box and every tensor between two operators goes through memory. After,
every statement is a box, kernels are frames, and only tensors between frames go through memory
(Blockbuster's buffered and unbuffered edges). Of a repeated sequence of kernels one is drawn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Load, tensors_read, walk
from tilefold.block.fuse import FusedKernel
from tilefold.explanation.model import Dataflow, Edge, Node
from tilefold.explanation.names import repeat
from tilefold.explanation.traffic import Sizes, operators
from tilefold.tensor.ir import Compute, Program

_TIGHT = re.compile(r", (?=[^\[\]]*\])")
#: Programs of more kernels than this are searched for a repeated sequence.
LONG = 10
#: Of programs of more statements than this, kernels are drawn as boxes, not as frames.
MANY = 24
#: Of more arguments than this, those that a single box reads are not drawn.
ARGUMENTS = 6


#: Name, title, statements and group of a box.
Boxed = tuple[str, str, tuple[Compute, ...], str | None]


@dataclass(frozen=True, slots=True)
class Shown:
    """Which kernels are drawn. `alias`: tensor of a kernel left out -> its counterpart in a drawn one."""

    kernels: tuple[int, ...]
    alias: Mapping[str, str]
    omitted: str = ""


def choose(signatures: Sequence[str], renamings: Sequence[Mapping[str, str]]) -> Shown:
    """All kernels, or where a long program repeats itself, one period and what is around it."""
    everything = Shown(tuple(range(len(signatures))), {})
    found = repeat(list(signatures)) if len(signatures) > LONG else None
    if found is None:
        return everything
    start, period, times = found
    alias: dict[str, str] = {}
    for k in range(start + period, start + times * period):
        twin = start + (k - start) % period
        back = {v: n for n, v in renamings[twin].items()}
        alias |= {n: back[v] for n, v in renamings[k].items() if v in back}
    kept = tuple(k for k in range(len(signatures)) if not start + period <= k < start + times * period)
    return Shown(kept, alias, f"kernels {start + 1} to {start + period} are repeated ×{times}, drawn once")


def after(p: Program, kernels: Sequence[FusedKernel], sizes: Sizes, shown: Shown) -> Dataflow:
    """Statements in frames, a frame for each kernel (one for both kernels of a split fold)."""
    groups: dict[str, str] = {}
    of: dict[str, str] = {}
    for k in shown.kernels:
        members = kernels[k].plan.group.members
        group = members[-1]
        groups[group] = kernels[k].block.name if group not in groups else f"{groups[group]} + {kernels[k].block.name}"
        of.update(dict.fromkeys(members, group))
    drawn = [c for c in p.body if c.name in of]
    if len(drawn) > MANY:
        whole = [(g, caption, tuple(c for c in drawn if of[c.name] == g), None) for g, caption in groups.items()]
        return _flow(p, whole, {}, sizes, shown, "kernel")
    return _flow(p, [(c.name, c.reducer or "map", (c,), of[c.name]) for c in drawn], groups, sizes, shown)


def before(p: Program, simple: Program, kernels: Sequence[FusedKernel], sizes: Sizes, shown: Shown) -> Dataflow:
    """The operators that the drawn kernels compute, one box each."""
    keep = _wanted(p, simple, kernels, shown)
    chosen = [op for op in operators(p) if any(c.name in keep for c in op.members)]
    boxes = [(op.name, op.title, op.members, None) for op in chosen]
    return _flow(p, boxes, {}, sizes, shown)


def _wanted(p: Program, simple: Program, kernels: Sequence[FusedKernel], shown: Shown) -> set[str]:
    """Statements of the given program that end up in a drawn kernel, or in no kernel by themselves."""
    alive = {c.name for c in simple.body}
    drawn = {m for k in shown.kernels for m in kernels[k].plan.group.members}
    readers: dict[str, list[str]] = {}
    for c in p.body:
        for t in tensors_read(c.body):
            readers.setdefault(t, []).append(c.name)
    keep: set[str] = set()
    for c in reversed(p.body):
        if c.name in alive:
            wanted = c.name in drawn
        else:
            uses = [u for r in c.results for u in readers.get(r, ())]
            wanted = any(u in keep for u in uses) or not (uses or shown.alias)
        if wanted:
            keep.add(c.name)
    return keep


def _flow(
    p: Program,
    boxes: Sequence[Boxed],
    groups: Mapping[str, str],
    sizes: Sizes,
    shown: Shown,
    role: Literal["op", "kernel"] = "op",
) -> Dataflow:
    owner = {r: name for name, _, members, _ in boxes for c in members for r in c.results}
    group = {name: g for name, _, _, g in boxes}
    inputs = {i.name for i in p.inputs}
    hidden = _private(inputs, boxes)
    nodes = [
        Node(name, title, _text(p, members, role == "kernel" or g is not None, sizes), role, g)
        for name, title, members, g in boxes
    ]
    used: dict[str, None] = {}
    edges: dict[tuple[str, str, str], Edge] = {}
    for name, _, members, g in boxes:
        for t in _read(members):
            source = shown.alias.get(t, t) if t not in owner and t not in inputs else t
            if source in hidden:
                continue
            if source in inputs:
                used[source] = None
                edges[(f"in {source}", name, source)] = Edge(
                    f"in {source}", name, source, "boundary", sizes.nbytes(source)
                )
            elif source in owner and owner[source] != name:
                inside = g is not None and group[owner[source]] == g
                key = (owner[source], name, source)
                edges[key] = Edge(*key, "chip" if inside else "memory", sizes.nbytes(source))
    nodes = [Node(f"in {i}", i, _shape(sizes, i), "input") for i in used] + nodes
    for t in p.outputs:
        if t in owner:
            nodes.append(Node(f"out {t}", t, _shape(sizes, t), "output"))
            edges[(owner[t], f"out {t}", t)] = Edge(owner[t], f"out {t}", t, "boundary", sizes.nbytes(t))
    kept = _acyclic([n.name for n in nodes], list(edges.values()))
    count = f"{len(hidden)} arguments that a single box reads are not drawn" if hidden else ""
    return Dataflow(tuple(nodes), kept, dict(groups), "; ".join(x for x in (shown.omitted, count) if x))


def _private(inputs: set[str], boxes: Sequence[Boxed]) -> set[str]:
    """Arguments left out of a drawing of many: weights, mostly."""
    readers = Counter(t for _, _, members, _ in boxes for t in _read(members) if t in inputs)
    return {t for t, n in readers.items() if n == 1} if len(readers) > ARGUMENTS else set()


def _acyclic(order: Sequence[str], edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Edges that go forward in program order: those from an earlier round of a repeated sequence do not."""
    at = {n: i for i, n in enumerate(order)}
    return tuple(e for e in edges if at[e.source] < at[e.target])


def _read(members: Iterable[Compute]) -> tuple[str, ...]:
    members = tuple(members)
    mine = {r for c in members for r in c.results}
    found = (n.tensor for c in members for n in walk(c.body) if isinstance(n, Load))
    return tuple(dict.fromkeys(t for t in found if t not in mine))


def _shape(sizes: Sizes, tensor: str) -> str:
    extents = "×".join(map(str, sizes.shape[tensor])) or "scalar"
    return f"{sizes.dtype[tensor].value} {extents}"


def _text(p: Program, members: Sequence[Compute], inside_kernel: bool, sizes: Sizes) -> str:
    """In a kernel the statement; of an ATen operator the tensors that it leaves in memory."""
    if inside_kernel or not members[0].origin:
        return "\n".join(map(statement, members))
    inside = {c.name for c in members}
    used = {t for c in p.body if c.name not in inside for t in tensors_read(c.body)} | set(p.outputs)
    kept = [r for c in members for r in c.results if r in used]
    return "\n".join(f"{r}: {_shape(sizes, r)}" for r in kept)


def statement(c: Compute) -> str:
    """`m[i] = max[j] x[i,j]`, indices without spaces."""
    head = f"{c.reducer}[{', '.join(c.rdims)}] " if c.reducer else ""
    dims = f"[{','.join(c.dims)}]" if c.dims else ""
    return f"{c.name}{dims} = {head}{_TIGHT.sub(',', expr_text.show(c.body))}"
