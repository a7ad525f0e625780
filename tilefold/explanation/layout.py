"""Layered drawing of a directed acyclic graph (Sugiyama, Tagawa, Toda 1981): boxes in rows, edges downwards.

Rows by longest path; long edges get a point in every row that they cross; order within a row by
repeated barycentres; x coordinates by least squares under the order (pool adjacent violators).
Lengths are pixels, y grows downwards, a box is placed by its upper left corner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP_X, GAP_Y, LANE = 26.0, 44.0, 14.0
#: Ends of links on one side of a box stand this far apart, or as far as its width without CORNER at both ends allows.
FAN, CORNER = 58.0, 10.0
SWEEPS = 12


@dataclass(frozen=True, slots=True)
class Box:
    """Something with an extent. Two boxes of a layout have different names."""

    name: str
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Link:
    """An edge; `source_dx`, `target_dx` shift its ends from the middle of the boxes. None: wherever the layout sets
    them."""

    source: str
    target: str
    source_dx: float | None = None
    target_dx: float | None = None


Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Where every box is, and the points of every link in the order given."""

    at: Mapping[str, Point]
    routes: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def place(
    boxes: Sequence[Box],
    links: Sequence[Link],
    gap_y: float = GAP_Y,
    top: frozenset[str] = frozenset(),
    bottom: frozenset[str] = frozenset(),
) -> Drawing:
    """Lay out a graph. `top` and `bottom`: boxes (sources and sinks) that stand in the first and last row.

    ValueError: the graph has a cycle. KeyError: a link to a box that is not there.
    """
    if not boxes:
        return Drawing({}, (), 0.0, 0.0)
    row_of = rows({b.name for b in boxes}, [(e.source, e.target) for e in links], [b.name for b in boxes])
    row_of.update(dict.fromkeys(top, 0))
    row_of.update(dict.fromkeys(bottom, max(row_of.values())))
    chains = [_chain(n, e, row_of) for n, e in enumerate(links)]
    size = {b.name: (b.width, b.height) for b in boxes}
    depth = max(row_of.values()) + 1
    grid: list[list[str]] = [[] for _ in range(depth)]
    for b in boxes:
        grid[row_of[b.name]].append(b.name)
    for chain in chains:
        for k, name in enumerate(chain[1:-1], 1):
            size[name] = (LANE, 0.0)
            grid[row_of[chain[0]] + k].append(name)
    pairs = [
        (a, b, (links[n].source_dx or 0.0) if k == 0 else 0.0, (links[n].target_dx or 0.0) if b == chain[-1] else 0.0)
        for n, chain in enumerate(chains)
        for k, (a, b) in enumerate(pairwise(chain))
    ]
    grid = order(grid, [(a, b) for a, b, *_ in pairs])
    middle = _columns(grid, pairs, {n: w for n, (w, _) in size.items()})
    return _drawing(grid, chains, _set_apart(links, chains, size, middle), size, middle, gap_y)


def rows(names: set[str], edges: Sequence[tuple[str, str]], given: Sequence[str]) -> dict[str, int]:
    """Row of each box: below everything that points to it; sources directly above their first target."""
    into: dict[str, list[str]] = {n: [] for n in names}
    out: dict[str, list[str]] = {n: [] for n in names}
    for a, b in edges:
        into[b].append(a)
        out[a].append(b)
    row: dict[str, int] = {}
    todo, waiting = [n for n in given if not into[n]], {n: len(into[n]) for n in names}
    while todo:
        n = todo.pop(0)
        row[n] = max((row[a] + 1 for a in into[n]), default=0)
        for b in out[n]:
            waiting[b] -= 1
            if waiting[b] == 0:
                todo.append(b)
    if len(row) != len(names):
        raise ValueError("the graph has a cycle")
    for n in names:
        if not into[n] and out[n]:
            row[n] = min(row[b] for b in out[n]) - 1
    return row


def _chain(number: int, e: Link, row: Mapping[str, int]) -> list[str]:
    """The boxes and lane points along a link, one a row."""
    between = range(row[e.source] + 1, row[e.target])
    return [e.source, *(f"{number}|{r}" for r in between), e.target]


def order(grid: list[list[str]], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Rows reordered so that few edges cross; the best of several barycentre sweeps."""
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for a, b in edges:
        above.setdefault(b, []).append(a)
        below.setdefault(a, []).append(b)
    best, fewest = grid, crossings(grid, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        grid = [list(r) for r in grid]
        near = above if down else below
        for k in range(1, len(grid)) if down else range(len(grid) - 2, -1, -1):
            place_in = {n: i for i, n in enumerate(grid[k - 1 if down else k + 1])}
            here = {n: float(i) for i, n in enumerate(grid[k])}
            for n in grid[k]:
                seen = [place_in[m] for m in near.get(n, ()) if m in place_in]
                here[n] = sum(seen) / len(seen) if seen else here[n]
            grid[k].sort(key=here.__getitem__)
        count = crossings(grid, below)
        if count < fewest:
            best, fewest = grid, count
    return best


def crossings(grid: Sequence[Sequence[str]], below: Mapping[str, Sequence[str]]) -> int:
    """Pairs of edges between neighbouring rows that cross."""
    total = 0
    for upper, lower in pairwise(grid):
        at = {n: i for i, n in enumerate(lower)}
        ends = [(i, at[b]) for i, a in enumerate(upper) for b in below.get(a, ()) if b in at]
        total += sum(a[0] < b[0] and a[1] > b[1] for a in ends for b in ends)
    return total


def _columns(
    grid: Sequence[Sequence[str]], pairs: Sequence[tuple[str, str, float, float]], width: Mapping[str, float]
) -> dict[str, float]:
    """x of the middle of every box and lane."""
    pull: dict[bool, dict[str, list[tuple[str, float]]]] = {True: {}, False: {}}
    for a, b, da, db in pairs:
        pull[True].setdefault(b, []).append((a, da - db))
        pull[False].setdefault(a, []).append((b, db - da))
    x: dict[str, float] = {}
    for row in grid:
        x.update(zip(row, spread([0.0] * len(row), [width[n] for n in row]), strict=True))
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for row in grid if down else reversed(grid):
            wanted = []
            for n in row:
                seen = [x[m] + d for m, d in pull[down].get(n, ())] or [x[m] + d for m, d in pull[not down].get(n, ())]
                wanted.append(sum(seen) / len(seen) if seen else x[n])
            x.update(zip(row, spread(wanted, [width[n] for n in row]), strict=True))
    return x


def _set_apart(
    links: Sequence[Link],
    chains: Sequence[Sequence[str]],
    size: Mapping[str, tuple[float, float]],
    middle: Mapping[str, float],
) -> list[Link]:
    """The links with both shifts: the free ends on one side of a box apart, in the order of what is at the other end of
    their first piece (so that they do not cross there), and as near to straight as that allows."""
    shifts: dict[tuple[int, bool], float] = {}
    for outgoing in (True, False):
        ends: dict[str, list[tuple[float, int]]] = {}
        for n, (e, chain) in enumerate(zip(links, chains, strict=True)):
            box, following, given = (
                (e.source, chain[1], e.source_dx) if outgoing else (e.target, chain[-2], e.target_dx)
            )
            if given is None:
                ends.setdefault(box, []).append((middle[following], n))
        for box, found in ends.items():
            found.sort()
            at = apart([x - middle[box] for x, _ in found], size[box][0] / 2 - CORNER)
            shifts |= {(n, outgoing): x for (_, n), x in zip(found, at, strict=True)}
    return [
        Link(e.source, e.target, shifts.get((n, True), e.source_dx), shifts.get((n, False), e.target_dx))
        for n, e in enumerate(links)
    ]


def apart(wanted: Sequence[float], limit: float) -> list[float]:
    """Places near `wanted` (in order) within -limit .. limit, FAN apart or as far as there is room; a lone one is 0."""
    if len(wanted) == 1:
        return [0.0]
    gap = min(FAN, 2 * limit / (len(wanted) - 1))
    last = len(wanted) - 1
    return [
        min(max(x, gap * k - limit), limit - gap * (last - k))
        for k, x in enumerate(spread(wanted, [0.0] * len(wanted), gap))
    ]


def spread(wanted: Sequence[float], widths: Sequence[float], gap: float = GAP_X) -> list[float]:
    """Middles as near to `wanted` as possible (least squares), in order, boxes `gap` apart."""
    offset, at = [], 0.0
    for k, w in enumerate(widths):
        at += w / 2 + (gap + widths[k - 1] / 2 if k else 0.0)
        offset.append(at)
    blocks: list[list[float]] = []  # [sum, count] of wanted - offset; pooled while they decrease
    for w, o in zip(wanted, offset, strict=True):
        blocks.append([w - o, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    shifts = [total / count for total, count in blocks for _ in range(int(count))]
    return [o + s for o, s in zip(offset, shifts, strict=True)]


def _drawing(
    grid: Sequence[Sequence[str]],
    chains: Sequence[Sequence[str]],
    links: Sequence[Link],
    size: Mapping[str, tuple[float, float]],
    middle: Mapping[str, float],
    gap_y: float,
) -> Drawing:
    left = min(middle[n] - size[n][0] / 2 for row in grid for n in row)
    right = max(middle[n] + size[n][0] / 2 for row in grid for n in row)
    at: dict[str, Point] = {}
    span: dict[str, tuple[float, float]] = {}
    y = 0.0
    for row in grid:
        tall = max(size[n][1] for n in row)
        for n in row:
            h = size[n][1]
            at[n] = (middle[n] - size[n][0] / 2 - left, y + (tall - h) / 2)
            span[n] = (y, y + tall) if h == 0 else (y + (tall - h) / 2, y + (tall + h) / 2)
        y += tall + gap_y
    routes = []
    for e, chain in zip(links, chains, strict=True):
        points = [(middle[chain[0]] - left + (e.source_dx or 0.0), span[chain[0]][1])]
        for n in chain[1:-1]:
            x = middle[n] - left
            points += [(x, span[n][0]), (x, span[n][1])]
        points.append((middle[chain[-1]] - left + (e.target_dx or 0.0), span[chain[-1]][0]))
        routes.append(tuple(points))
    return Drawing({n: p for n, p in at.items() if "|" not in n}, tuple(routes), right - left, y - gap_y)
