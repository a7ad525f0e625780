"""Drawings of block graphs as Blockbuster's figures: buffered edges red, maps dotted with their dim in a corner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Expr, Load, substitute
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, Map, Misc, Node, Program, Reduce, Type, View, arg
from tilefold.blockbuster.verify import infer
from tilefold.explanation.layout import Box, Drawing, Link, Point, place

#: Width of a character, height of a box, and the space around the inside of a map (pixels).
CHAR, TALL, PAD, GAP = 6.6, 24.0, 14.0, 24.0
DOT = 7.0
#: Characters of an operator that are shown; the rest is in its tooltip.
LONGEST = 28
_SIGNS = {"sum": "⊕", "prod": "⊗", "max": "max", "min": "min"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A node with its size. `ins`, `outs`: where edges of its operands and results meet it, from its middle."""

    width: float
    height: float
    inner: Inside | None
    ins: Mapping[str, float]
    outs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Inside:
    """A graph laid out: the drawing, its nodes' shapes, and edges as (source, target, value)."""

    graph: Graph
    types: Mapping[str, Type]
    drawing: Drawing
    shapes: Mapping[str, Shape]
    edges: tuple[tuple[str, str, str], ...]


def draw_program(p: Program, title: str) -> str:
    """The <svg> element of a whole program."""
    inside = _lay_out(p.graph, (), top=True)
    parts = _draw(inside, (0.0, 0.0), top=True)
    w, h = inside.drawing.width + 2 * PAD, inside.drawing.height + 2 * PAD
    frame = f'viewBox="{-PAD:g} {-PAD:g} {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}"'
    return f'<svg class="flow blocks" {frame} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def label(n: Node) -> str:
    """What stands in the box of an operator."""
    match n:
        case Func(expr=e, args=args) if e is not None:
            names: dict[Expr, Expr] = {arg(k): Load("xyzuvw"[k] if k < 6 else f"x{k}", ()) for k in range(len(args))}
            return expr_text.show(substitute(e, names))
        case Func(op=op):
            return op
        case Reduce(op=op):
            return _SIGNS[op]
        case Head(dim=d):
            return f"{d} = 0"
        case Cons(dim=d):
            return f"{d} = 0, 1 .."
        case View():
            return "view"
        case Misc(compute=c):
            return c.reducer or "misc"
        case Map(dim=d, start=s):
            return f"{d}=1:{d.upper()}" if s else d.upper()
    raise AssertionError(n)


def _lay_out(g: Graph, around: tuple[str, ...], *, top: bool) -> Inside:
    types = infer(g, around)
    shapes = {f"node {k}": _shape(n, around) for k, n in enumerate(g.nodes)}
    source = {p.name: f"in {p.name}" for p in g.inputs}
    for k, n in enumerate(g.nodes):
        source |= dict.fromkeys(n.outs, f"node {k}")
    for p in g.inputs:
        wide = CHAR * len(_typed(p.name, p.type)) + 18 if top else DOT
        shapes[f"in {p.name}"] = Shape(wide, TALL if top else DOT, None, {}, {})
    for k, v in enumerate(g.outputs):
        wide = CHAR * len(_typed(v, types[v])) + 18 if top else DOT
        shapes[f"out {k}"] = Shape(wide, TALL if top else DOT, None, {}, {})
    edges = [(source[v], f"node {k}", v) for k, n in enumerate(g.nodes) for v in dict.fromkeys(n.uses)]
    edges += [(source[v], f"out {k}", v) for k, v in enumerate(g.outputs)]
    links = [Link(a, b, shapes[a].outs.get(v, 0.0), shapes[b].ins.get(v, 0.0)) for a, b, v in edges]
    first = frozenset(f"in {p.name}" for p in g.inputs)
    last = frozenset(f"out {k}" for k in range(len(g.outputs)))
    boxes = [Box(name, s.width, s.height) for name, s in shapes.items()]
    return Inside(g, types, place(boxes, links, GAP, first, last), shapes, tuple(edges))


def _typed(name: str, t: Type) -> str:
    return f"{name}({','.join(d.upper() for d in t.lists)})" if t.lists else name


def _shape(n: Node, around: tuple[str, ...]) -> Shape:
    if not isinstance(n, Map):
        round_one = isinstance(n, Reduce)
        wide = TALL if round_one and len(label(n)) == 1 else CHAR * min(len(label(n)), LONGEST) + 14
        return Shape(wide, TALL, None, {}, {})
    inside = _lay_out(n.body, (*around, n.dim), top=False)
    width, height = inside.drawing.width + 2 * PAD, inside.drawing.height + 2 * PAD
    middle = inside.drawing.width / 2
    ins = {i.value: inside.drawing.at[f"in {i.name}"][0] + DOT / 2 - middle for i in n.ins}
    outs = {o.name: inside.drawing.at[f"out {k}"][0] + DOT / 2 - middle for k, o in enumerate(n.results)}
    return Shape(width, height, inside, ins, outs)


def _draw(inside: Inside, at: Point, *, top: bool) -> list[str]:
    x, y = at
    parts: list[str] = []
    for (_, _, v), points in zip(inside.edges, inside.drawing.routes, strict=True):
        t = inside.types[v]
        kind = "memory" if t.buffered else "chip"
        line = " ".join(f"{'ML'[k > 0]}{px + x:.1f} {py + y:.1f}" for k, (px, py) in enumerate(points))
        tip = f"{_typed(v, t)}: {'buffered' if t.buffered else 'in local memory'}"
        parts.append(f'<path class="edge {kind}" d="{line}"><title>{escape(tip)}</title></path>')
    for name, s in inside.shapes.items():
        px, py = inside.drawing.at[name]
        parts += _box(name, s, inside, (px + x, py + y), top=top)
    return parts


def _box(name: str, s: Shape, inside: Inside, at: Point, *, top: bool) -> list[str]:
    kind, _, key = name.partition(" ")
    x, y = at
    if kind != "node":
        value = key if kind == "in" else inside.graph.outputs[int(key)]
        if not top:
            return [f'<circle class="port" cx="{x + DOT / 2:.1f}" cy="{y + DOT / 2:.1f}" r="{DOT / 2:g}"/>']
        text = _typed(value, inside.types[value])
        return [_rect("input" if kind == "in" else "output", at, s, TALL / 2, text, text)]
    n = inside.graph.nodes[int(key)]
    if not isinstance(n, Map):
        tip = f"{', '.join(n.outs)} = {label(n)}"
        return [_rect("op", at, s, TALL / 2 if isinstance(n, Reduce) else 5.0, label(n), tip)]
    assert s.inner is not None
    sums = [f"{o.name}: {_SIGNS[o.reduce]}" for o in n.results if o.reduce]
    tip = f"map over {n.dim}" + (f", accumulates {', '.join(sums)}" if sums else "")
    frame = (
        f'<rect class="map" x="{x:.1f}" y="{y:.1f}" width="{s.width:.1f}" height="{s.height:.1f}" rx="9">'
        f"<title>{escape(tip)}</title></rect>"
        f'<text class="title" text-anchor="end" x="{x + s.width - 5:.1f}" y="{y + s.height - 5:.1f}">{label(n)}</text>'
    )
    marks = []
    for k, o in enumerate(n.results):
        if o.reduce:
            px, py = s.inner.drawing.at[f"out {k}"]
            marks.append(
                f'<text class="mono" x="{x + PAD + px + DOT + 2:.1f}" y="{y + PAD + py + DOT:.1f}">'
                f"{_SIGNS[o.reduce]}</text>"
            )
    return [frame, *_draw(s.inner, (x + PAD, y + PAD), top=False), *marks]


def _rect(kind: str, at: Point, s: Shape, round_by: float, text: str, tip: str) -> str:
    x, y = at
    shown = text if len(text) <= LONGEST or kind != "op" else text[: LONGEST - 1] + "…"
    return (
        f'<g class="{kind}"><title>{escape(tip)}</title>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{s.width:.1f}" height="{s.height:.1f}" rx="{round_by:g}"/>'
        f'<text class="mono" text-anchor="middle" x="{x + s.width / 2:.1f}" y="{y + 16:.1f}">{escape(shown)}</text></g>'
    )
