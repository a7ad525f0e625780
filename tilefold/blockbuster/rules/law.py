"""What a law of block programs is: statement, side condition, match, apply.

A law works on one graph of a program (the top one or the body of a map) and knows nothing of
the graphs around it: it keeps the graph's inputs, outputs and meaning. `attempts` lists the places
that have the law's shape: a `Match` where it can be applied, a `Refusal` with the reason where
a side condition fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.blockbuster.ir import Graph, Path, Program, graph_at, inner_paths, with_graph


@dataclass(frozen=True, slots=True)
class Match:
    """A place where `law` applies: positions of the nodes in `graph`, and a line about them.

    `dim`: dim of the map it is about. `variant`: which form of the law, where it has several.
    """

    law: Law
    graph: Graph
    nodes: tuple[int, ...]
    note: str
    dim: str = ""
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place that has a law's shape but not its side condition."""

    law: Law
    graph: Graph
    nodes: tuple[int, ...]
    reason: str


class Law(ABC):
    """A logic-preserving substitution. Subclasses are frozen dataclasses whose fields are options."""

    #: Short name, e.g. "fuse consecutive maps"; `number` is the paper's, 0 where it has none.
    name: str
    number: int
    #: The mathematical law, and when it may be used.
    statement: str
    condition: str

    @abstractmethod
    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        """All places of this graph (not of inner ones) with the law's shape, in a fixed order."""

    @abstractmethod
    def apply(self, m: Match) -> Graph:
        """The graph after the substitution."""

    def matches(self, g: Graph) -> Iterator[Match]:
        """The places where the law applies."""
        return (m for m in self.attempts(g) if isinstance(m, Match))

    def first(self, g: Graph) -> Match | None:
        """The first of them."""
        return next(self.matches(g), None)

    @property
    def label(self) -> str:
        """How explanations call it."""
        return f"rule {self.number}: {self.name}" if self.number else self.name


def places(p: Program, law: Law) -> Iterator[tuple[Path, Match]]:
    """Every match in a program, breadth first, with the path of its graph."""
    queue: list[Path] = [()]
    while queue:
        path = queue.pop(0)
        yield from ((path, m) for m in law.matches(graph_at(p.graph, path)))
        queue += inner_paths(p.graph, path)


def rewrite(p: Program, path: Path, m: Match) -> Program:
    """The program with a match of its graph at `path` substituted."""
    return replace(p, graph=with_graph(p.graph, path, m.law.apply(m)))
