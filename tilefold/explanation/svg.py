"""A dataflow as inline SVG. Colours come from the page's style sheet through class names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from tilefold.explanation.layout import GAP_Y, Box, Drawing, Link, Point, place
from tilefold.explanation.model import Dataflow, Edge, Node
from tilefold.explanation.traffic import human

#: Widths of a character (pixels) of the two fonts used, and the height of a line; margins of drawing and frames.
TITLE, MONO, LINE = 8.4, 6.25, 15.0
PAD, FRAME, CAPTION, EDGE = 10.0, 16.0, 22.0, 2.0
#: Height of an argument or result; of the text on an edge.
PILL, SMALL = 38.0, 12.0
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
    nodes = {n.name: n for n in flow.nodes}
    frames = {g: _frame(flow, g, c, nodes) for g, c in flow.groups.items()}
    boxes = [Box(g, f.width, f.height) for g, f in frames.items()]
    boxes += [Box(n.name, *_size(n)) for n in flow.nodes if n.group is None]
    outer = [e for e in flow.edges if _home(nodes[e.source]) != _home(nodes[e.target])]
    links = [_link(e, nodes, frames) for e in outer]
    drawing = place(boxes, links)
    parts = [_edge(e, r) for e, r in zip(outer, drawing.routes, strict=True)]
    if len(flow.edges) <= LABELLED:  # above all lines
        memory = [(human(e.bytes), r) for e, r in zip(outer, drawing.routes, strict=True) if e.via == "memory"]
        parts += _labels(memory)
    for g, f in frames.items():
        parts.append(_draw_frame(f, drawing.at[g], flow, nodes))
    parts += [_draw_node(n, drawing.at[n.name]) for n in flow.nodes if n.group is None]
    w, h = drawing.width + 2 * PAD + 60, drawing.height + 2 * PAD
    frame = f'viewBox="{-PAD:g} {-PAD:g} {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}"'
    start = f'<svg class="flow" {frame} style="min-width:{SMALLEST * w:.0f}px" role="img"'
    return f'{start} aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _home(n: Node) -> str:
    return n.group or n.name


def _key(e: Edge) -> tuple[str, str, str]:
    return e.source, e.target, e.tensor


def _link(e: Edge, nodes: Mapping[str, Node], frames: Mapping[str, Frame]) -> Link:
    a, b = nodes[e.source], nodes[e.target]
    da = frames[a.group].ports[_key(e)] if a.group else 0.0
    db = frames[b.group].ports[_key(e)] if b.group else 0.0
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


def _draw_frame(f: Frame, at: Point, flow: Dataflow, nodes: Mapping[str, Node]) -> str:
    x, y = at
    dx, dy = x + (f.width - f.drawing.width) / 2, y + CAPTION + EDGE
    top, bottom = y, y + f.height
    parts = [
        f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{f.width:.1f}" height="{f.height:.1f}" rx="10"/>',
        f'<text class="caption" x="{x + 12:.1f}" y="{y + 17:.1f}">{escape(f.caption)}</text>',
    ]
    routes = iter(f.drawing.routes)
    for e in flow.edges:
        enters, leaves = nodes[e.target].group == f.group, nodes[e.source].group == f.group
        if not (enters or leaves):
            continue
        points = [(px + dx, py + dy) for px, py in next(routes)]
        if not leaves:
            points = [(points[0][0], top), *points]
        if not enters:
            points = [*points, (points[-1][0], bottom)]
        parts.append(_edge(e, points))
    for n in flow.nodes:
        if n.group == f.group:
            px, py = f.drawing.at[n.name]
            parts.append(_draw_node(n, (px + dx, py + dy)))
    return "".join(parts)


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
    return f'<path class="edge {e.via}" d="{_curve(points)}">{tip}</path>'


def _labels(found: Sequence[tuple[str, Sequence[Point]]]) -> list[str]:
    """Texts beside routes, none over another: one that is free nowhere is left out (its edge's tooltip has it)."""
    taken: list[tuple[float, float, float]] = []  # left end, width, baseline
    parts = []
    for text, route in found:
        width = len(text) * TITLE
        for x, y in _beside(route, width):
            if all(x >= a + w or a >= x + width or abs(y - b) >= SMALL for a, w, b in taken):
                taken.append((x, width, y))
                parts.append(f'<text class="bytes" x="{x:.1f}" y="{y:.1f}">{text}</text>')
                break
    return parts


def _beside(route: Sequence[Point], width: float) -> Iterator[Point]:
    """Where a text of that width may stand: where the route begins, on the side that it does not bend to; then beside
    the places that it goes through."""
    (x, y), (following, _) = route[0], route[1]
    yield (x - 6 - width if following > x + 1 else x + 6), y + 15
    yield from ((px + 6, py + SMALL / 2) for px, py in route[1:-1])


def _curve(points: Sequence[Point]) -> str:
    """Vertical where it starts and ends, straight down within a row, bent between rows."""
    out = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (xa, ya), (xb, yb) in pairwise(points):
        bend = min((yb - ya) / 2, GAP_Y)
        out.append(f"C{xa:.1f} {ya + bend:.1f} {xb:.1f} {yb - bend:.1f} {xb:.1f} {yb:.1f}")
    return "".join(out)
