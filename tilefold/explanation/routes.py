"""Lines of a drawing as curves, and texts beside them that lie over nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from tilefold.explanation.layout import GAP_Y, Point

#: Width of a character of a text beside a line, its height, and its distances from the line (pixels).
CHAR, SMALL = 7.7, 12.0
ASIDE = (6.0, 16.0)
#: Points looked at of each bend of a line.
STEPS = 10

#: Left, top, right and bottom.
Area = tuple[float, float, float, float]


def curve(points: Sequence[Point]) -> str:
    """The path: vertical where it starts and ends, straight down within a row, bent between rows."""
    out = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (xa, ya), (xb, yb) in pairwise(points):
        bend = min((yb - ya) / 2, GAP_Y)
        out.append(f"C{xa:.1f} {ya + bend:.1f} {xb:.1f} {yb - bend:.1f} {xb:.1f} {yb:.1f}")
    return "".join(out)


def sampled(points: Sequence[Point]) -> list[Point]:
    """Points of the same path, near each other."""
    out = [points[0]]
    for (xa, ya), (xb, yb) in pairwise(points):
        bend = min((yb - ya) / 2, GAP_Y)
        steps = max(STEPS, int((yb - ya) / SMALL * 2))
        for k in range(1, steps + 1):
            t = k / steps
            s = 1 - t
            x = xa * (s**3 + 3 * s * s * t) + xb * (t**3 + 3 * s * t * t)
            y = ya * s**3 + (ya + bend) * 3 * s * s * t + (yb - bend) * 3 * s * t * t + yb * t**3
            out.append((x, y))
    return out


def labels(
    found: Sequence[tuple[str, Sequence[Point]]], boxes: Sequence[Area], lines: Sequence[Sequence[Point]]
) -> str:
    """Texts, each beside its route, over no box and no other text, and over as few of the lines as can be.

    One that is free nowhere is left out (its line's tooltip has it).
    """
    points = [p for line in lines for p in sampled(line)]
    taken = list(boxes)
    parts = []
    for text, route in found:
        width = len(text) * CHAR
        best: tuple[int, Area] | None = None
        for x, y in _beside(route, width):
            area = (x, y - SMALL + 2, x + width, y + 2)
            if any(_meet(area, other) for other in taken):
                continue
            hits = sum(area[0] <= px <= area[2] and area[1] <= py <= area[3] for px, py in points)
            if best is None or hits < best[0]:
                best = hits, area
            if not hits:
                break
        if best is not None:
            taken.append(best[1])
            x, _, _, bottom = best[1]
            parts.append(f'<text class="bytes" x="{x:.1f}" y="{bottom - 2:.1f}">{escape(text)}</text>')
    return "".join(parts)


def _meet(a: Area, b: Area) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _beside(route: Sequence[Point], width: float) -> Iterator[Point]:
    """Where a text of that width may begin: right and left of the route where it starts, then further down."""
    points = sampled(route)
    start = route[0][1]
    for x, y in points[2:-2] if len(points) > 4 else points:
        middle = max(y, start + SMALL / 2) + SMALL / 2 - 2
        for d in ASIDE:
            yield x + d, middle
            yield x - d - width, middle
