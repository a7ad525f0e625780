"""A dataflow as inline SVG. Colours come from the page's style sheet through class names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from tilefold.explanation.layout import Box, Drawing, Link, Point, place
from tilefold.explanation.model import Dataflow, Edge, Node
from tilefold.explanation.routes import Area, curve, labels
from tilefold.explanation.traffic import human

#: Widths of a character (pixels) of the two fonts used, and the height of a line; margins of drawing and frames.
TITLE, MONO, LINE = 8.4, 6.25, 15.0
PAD, FRAME, CAPTION, EDGE = 10.0, 16.0, 22.0, 2.0
#: Height of an argument or result.
PILL = 38.0
#: Characters of a statement, and statements, shown in a box; the rest is in its tooltip.
LONGEST, MOST_LINES = 50, 5
INNER_GAP = 26.0
#: A wide drawing is shrunk to this share of its size, and scrolls beyond that.
SMALLEST = 0.8
#: Up to this many edges carry their size.
LABELLED = 40


@dataclass(frozen=True, slots=True)
class Frame:
    """A group laid out on its own. `ports`: x of each edge that enters or leaves, from the frame's middle."""

    group: str
    caption: str
    drawing: Drawing
    width: float
    height: float
    ports: Mapping[tuple[str, str, str], float]


def draw(flow: Dataflow, title: str) -> str:
    """The <svg> element. `title` is its description for screen readers."""
    flow = replace(flow, edges=_joined(flow.edges))
    nodes = {n.name: n for n in flow.nodes}
    frames = {g: _frame(flow, g, c, nodes) for g, c in flow.groups.items()}
    boxes = [Box(g, f.width, f.height) for g, f in frames.items()]
    boxes += [Box(n.name, *_size(n)) for n in flow.nodes if n.group is None]
    outer = [e for e in flow.edges if _home(nodes[e.source]) != _home(nodes[e.target])]
    drawing = place(boxes, [_link(e, nodes, frames) for e in outer])
    placed = {n.name: drawing.at[n.name] for n in flow.nodes if n.group is None}
    lines = list(zip(outer, drawing.routes, strict=True))
    parts = []
    inner: list[tuple[Edge, Sequence[Point]]] = []
    for g, f in frames.items():
        parts.append(_draw_frame(f, drawing.at[g], g == flow.repeated))
        dx, dy = drawing.at[g][0] + (f.width - f.drawing.width) / 2, drawing.at[g][1] + CAPTION + EDGE
        placed |= {n.name: _moved(f.drawing.at[n.name], dx, dy) for n in flow.nodes if n.group == g}
        inner += _inside(f, drawing.at[g], flow, nodes)
    parts += [_edge(e, r) for e, r in [*lines, *inner]]
    parts += [_draw_node(n, placed[n.name]) for n in flow.nodes]
    if len(flow.edges) <= LABELLED:  # above all lines
        within = [(e, r) for e, r in inner if nodes[e.source].group == nodes[e.target].group]
        memory = [(human(e.bytes), r) for e, r in [*lines, *within] if e.via == "memory"]
        every = [r for _, r in [*lines, *inner]]
        parts.append(labels(memory, [_area(n, placed[n.name]) for n in flow.nodes], every))
    w, h = drawing.width + 2 * PAD + 60, drawing.height + 2 * PAD
    frame = f'viewBox="{-PAD:g} {-PAD:g} {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}"'
    start = f'<svg class="flow" {frame} style="min-width:{SMALLEST * w:.0f}px" role="img"'
    return f'{start} aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _joined(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """All that goes from one box to another as one line."""
    together: dict[tuple[str, str], list[Edge]] = {}
    for e in edges:
        together.setdefault((e.source, e.target), []).append(e)
    return tuple(
        Edge(a, b, ", ".join(e.tensor for e in es), es[0].via, sum(e.bytes for e in es))
        for (a, b), es in together.items()
    )


def _moved(p: Point, dx: float, dy: float) -> Point:
    return p[0] + dx, p[1] + dy


def _area(n: Node, at: Point) -> Area:
    w, h = _size(n)
    return at[0], at[1], at[0] + w, at[1] + h


def _home(n: Node) -> str:
    return n.group or n.name


def _key(e: Edge) -> tuple[str, str, str]:
    return e.source, e.target, e.tensor


def _link(e: Edge, nodes: Mapping[str, Node], frames: Mapping[str, Frame]) -> Link:
    a, b = nodes[e.source], nodes[e.target]
    da = frames[a.group].ports[_key(e)] if a.group else None
    db = frames[b.group].ports[_key(e)] if b.group else None
    return Link(_home(a), _home(b), da, db)


def _frame(flow: Dataflow, group: str, caption: str, nodes: Mapping[str, Node]) -> Frame:
    """Lay out the inside of a kernel; edges that cross its frame end in points without extent."""
    inside = [n for n in flow.nodes if n.group == group]
    names = {n.name for n in inside}
    boxes, links = [Box(n.name, *_size(n)) for n in inside], list[Link]()
    crossing: list[tuple[tuple[str, str, str], str]] = []
    for e in flow.edges:
        enters, leaves = e.target in names, e.source in names
        if enters and leaves:
            links.append(Link(e.source, e.target))
        elif enters or leaves:
            port = f"port {len(crossing)}"
            boxes.append(Box(port, 4.0, 0.01))
            links.append(Link(port, e.target) if enters else Link(e.source, port))
            crossing.append((_key(e), port))
    top = frozenset(e.source for e in links) - names
    bottom = frozenset(e.target for e in links) - names
    inner = place(boxes, links, INNER_GAP, top, bottom)
    width = max(inner.width, len(caption) * TITLE) + 2 * FRAME
    height = inner.height + 2 * EDGE + CAPTION
    shift = (width - inner.width) / 2
    ports = {key: inner.at[p][0] + 2.0 + shift - width / 2 for key, p in crossing}
    return Frame(group, caption, inner, width, height, ports)


def _draw_frame(f: Frame, at: Point, repeated: bool) -> str:
    x, y = at
    kind = "frame repeated" if repeated else "frame"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{f.width:.1f}" height="{f.height:.1f}" rx="10"/>'
        f'<text class="caption" x="{x + 12:.1f}" y="{y + 17:.1f}">{escape(f.caption)}</text>'
    )


def _inside(f: Frame, at: Point, flow: Dataflow, nodes: Mapping[str, Node]) -> Iterator[tuple[Edge, Sequence[Point]]]:
    """The lines within a frame; those that enter or leave it as far as its border."""
    x, y = at
    dx, dy = x + (f.width - f.drawing.width) / 2, y + CAPTION + EDGE
    routes = iter(f.drawing.routes)
    for e in flow.edges:
        enters, leaves = nodes[e.target].group == f.group, nodes[e.source].group == f.group
        if not (enters or leaves):
            continue
        points = [_moved(p, dx, dy) for p in next(routes)]
        if not leaves:
            points = [(points[0][0], y), *points]
        if not enters:
            points = [*points, (points[-1][0], y + f.height)]
        yield e, points


def _lines(n: Node) -> list[str]:
    lines = n.text.split("\n")
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"… {len(lines) - MOST_LINES + 1} more"]
    return [s if len(s) <= LONGEST else s[: LONGEST - 1] + "…" for s in lines]


def _size(n: Node) -> tuple[float, float]:
    if n.role in ("input", "output"):
        return max(len(n.title) * TITLE, len(n.text) * MONO) + 22, PILL
    lines = _lines(n)
    return max(len(n.title) * TITLE, *(len(s) * MONO for s in lines)) + 22, 24 + LINE * len(lines)


def _draw_node(n: Node, at: Point) -> str:
    (x, y), (w, h) = at, _size(n)
    tip = f"<title>{escape(n.text)}</title>"
    if n.role in ("input", "output"):
        rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{PILL / 2:g}"/>'
        return (
            f'<g class="{n.role}">{tip}{rect}'
            f'<text class="title" text-anchor="middle" x="{x + w / 2:.1f}" y="{y + 16:.1f}">{escape(n.title)}</text>'
            f'<text class="mono" text-anchor="middle" x="{x + w / 2:.1f}" y="{y + 31:.1f}">{escape(n.text)}</text></g>'
        )
    rows = "".join(
        f'<text class="mono" x="{x + 11:.1f}" y="{y + 32 + LINE * k:.1f}">{escape(s)}</text>'
        for k, s in enumerate(_lines(n))
    )
    return (
        f'<g class="{n.role}">{tip}<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="5"/>'
        f'<text class="title" x="{x + 11:.1f}" y="{y + 16:.1f}">{escape(n.title)}</text>{rows}</g>'
    )


def _edge(e: Edge, points: Sequence[Point]) -> str:
    tip = f"<title>{escape(e.tensor)}: {human(e.bytes)}</title>"
    return f'<path class="edge {e.via}" d="{curve(points)}">{tip}</path>'
