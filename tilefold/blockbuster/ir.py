"""Block programs: a hierarchical DAG of operators on blocks (Blockbuster, section 2).

    Program ::= name, graph, sizes {dim: Expr}, syms, arrays {input or output: Array}
    Array   ::= axes, dtype, shape                                   how a list of blocks lies in memory
    Graph   ::= inputs: Param*, nodes: Node*, outputs: value*
    Param   ::= name: Type
    Type    ::= lists, item, raw                                     a list of lists of items
    Node    ::= Func(out, op, args, expr)                            functional operator on items
              | Map(dim, ins, body, outs, start)                     forall; with a reduced out: for
              | Reduce(out, op, arg, dim)                            list of items -> item
              | Head(out, arg, dim) | Cons(out, first, rest, dim)    first item of a list (rule 7)
              | View(out, arg, index, type)                          blocks gathered from a raw array
              | Misc(outs, args, compute)                            everything else, on whole arrays
    In      ::= value, name, each                                    each: one item an iteration
    Out     ::= name, reduce, exponent                               reduce None: a list; aligned with body.outputs

Values are named, names are local to a graph, and a node comes after those it uses. A dim has a
number of blocks; a list over a dim has one entry a block. An item is a block, vector or scalar:
`item` names its axes, rows first, and where an axis is in no list it is a single block. An edge
is *buffered* (goes through global memory) if its type has lists, else it stays in local memory.

Scales of exponentials (appendix): `Out.exponent` names a sibling out that is a running max z of
inner exponents; the out is then the sum of value * exp(exponent) relative to exp(z).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Load
from tilefold.tensor.ir import Compute


@dataclass(frozen=True, slots=True)
class Type:
    """`lists`: dims it is a list over, outermost first; `item`: axes of an item. `raw`: an array as it is."""

    lists: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    raw: bool = False

    @property
    def buffered(self) -> bool:
        """Whether an edge of this type goes through global memory."""
        return bool(self.lists) or self.raw

    def at(self, dim: str) -> Type:
        """The type of one entry of a list over `dim`."""
        return replace(self, lists=tuple(d for d in self.lists if d != dim))


@dataclass(frozen=True, slots=True)
class Param:
    """An input of a graph."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True)
class Func:
    """`out = op(args)`, a row of `graph.ops`, or "elementwise": `expr` over `arg(0)`, `arg(1)`, ..."""

    out: str
    op: str
    args: tuple[str, ...]
    expr: Expr | None = None

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def uses(self) -> tuple[str, ...]:
        return self.args


@dataclass(frozen=True, slots=True)
class Reduce:
    """`out` = op ("sum", "prod", "max", "min") over the items of a list over `dim`."""

    out: str
    op: str
    arg: str
    dim: str

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class In:
    """`value` of the graph around a map is `name` in its body; `each`: one entry an iteration, else whole."""

    value: str
    name: str
    each: bool


@dataclass(frozen=True, slots=True)
class Out:
    """A result of a map: a list over its dim, or (`reduce`) the reduction of the body's items."""

    name: str
    reduce: str | None = None
    exponent: str | None = None


@dataclass(frozen=True, slots=True)
class Map:
    """`body` once for every block of `dim` from `start` (1: the first iteration was peeled off)."""

    dim: str
    ins: tuple[In, ...]
    body: Graph
    results: tuple[Out, ...]
    start: int = 0

    @property
    def outs(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.results)

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(i.value for i in self.ins)

    @property
    def pairs(self) -> tuple[tuple[Out, str], ...]:
        """Each out with the value of the body it comes from."""
        return tuple(zip(self.results, self.body.outputs, strict=True))

    @property
    def serial(self) -> bool:
        """Whether iterations carry a reduction."""
        return any(o.reduce for o in self.results)


@dataclass(frozen=True, slots=True)
class Head:
    """`out` = the entry of the first block of `dim` in the list `arg`."""

    out: str
    arg: str
    dim: str

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class Cons:
    """`out` = the list over `dim` that begins with `first` and goes on with `rest` (which starts at 1)."""

    out: str
    first: str
    rest: str
    dim: str

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.first, self.rest)


@dataclass(frozen=True, slots=True)
class View:
    """`out[d] = arg[index]` for the dims d of `type`: blocks of a raw array, loaded where they are used."""

    out: str
    arg: str
    index: tuple[Expr, ...]
    type: Type

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class Misc:
    """A statement of the tensor IR on whole arrays; `args` are called `names` in it, `results` by its own names."""

    results: tuple[Param, ...]
    args: tuple[str, ...]
    names: tuple[str, ...]
    compute: Compute

    @property
    def outs(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.results)

    @property
    def uses(self) -> tuple[str, ...]:
        return self.args


Node = Func | Map | Reduce | Head | Cons | View | Misc


@dataclass(frozen=True, slots=True)
class Graph:
    """See the module."""

    inputs: tuple[Param, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """All names, inputs first."""
        return (*(p.name for p in self.inputs), *(v for n in self.nodes for v in n.outs))


@dataclass(frozen=True, slots=True)
class Array:
    """Memory of an input or output: its axes as dims (() with `shape` for raw ones), and element type."""

    axes: tuple[str, ...]
    dtype: DType = DType.F32
    shape: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A whole block program. `sizes`: elements of each dim, over `syms`."""

    name: str
    graph: Graph
    sizes: Mapping[str, Expr]
    arrays: Mapping[str, Array] = field(default_factory=dict)
    syms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))


def arg(k: int) -> Load:
    """Argument k of an elementwise operator, in its expression."""
    return Load(f"a{k}", ())


#: Place of a graph in a program: positions of the maps around it, outermost first.
Path = tuple[int, ...]


def graph_at(g: Graph, path: Path) -> Graph:
    """The inner graph at a path."""
    for k in path:
        node = g.nodes[k]
        assert isinstance(node, Map)
        g = node.body
    return g


def with_graph(g: Graph, path: Path, new: Graph) -> Graph:
    """`g` with the inner graph at a path replaced."""
    if not path:
        return new
    node = g.nodes[path[0]]
    assert isinstance(node, Map)
    inner = replace(node, body=with_graph(node.body, path[1:], new))
    return replace(g, nodes=(*g.nodes[: path[0]], inner, *g.nodes[path[0] + 1 :]))


def inner_paths(g: Graph, path: Path) -> list[Path]:
    """Paths of the graphs directly inside the one at `path`."""
    return [(*path, k) for k, n in enumerate(graph_at(g, path).nodes) if isinstance(n, Map)]


def walk(g: Graph) -> Iterator[Node]:
    """All nodes, outer ones first."""
    for n in g.nodes:
        yield n
        if isinstance(n, Map):
            yield from walk(n.body)
