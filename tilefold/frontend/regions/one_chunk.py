"""Parts over rows (`regions.rows`) that one chunk has all rows of: no loop, but operators of the graph around them.

They are then planned with what comes before and after them. A product that sums over rows is put where its operands are
there: hidden states, which the gradient of a weight is the last to read, make room for their own gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from tilefold.frontend.regions.rows import Loop, Product, Result, leading

Node = torch.fx.Node
aten = torch.ops.aten


def in_one_piece(gm: torch.fx.GraphModule) -> int:
    """Write out such parts, in place; how many there were."""
    found = [n for n in gm.graph.nodes if isinstance(n.target, Loop) and n.target.chunks == 1]
    for n in found:
        _Written(gm.graph, n, n.target).replace()
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return len(found)


class _Written:
    """A part as operators in front of the node that it was."""

    def __init__(self, graph: torch.fx.Graph, node: Node, loop: Loop):
        self.graph, self.node, self.loop = graph, node, loop
        self.body = loop.bodies[loop.rows].graph
        self.made: dict[Node, Node] = {}
        #: Results with the body's nodes that they are made of, and what they are.
        self.waiting = list(enumerate(_operands(loop.results, self.body)))
        self.results: dict[int, Node] = {}

    def replace(self) -> None:
        with self.graph.inserting_before(self.node):
            given = zip(self.body.find_nodes(op="placeholder"), self.node.args, self.loop.sliced, strict=True)
            for x, a, cut in given:
                assert isinstance(a, Node)
                self.made[x] = self._of_rows(a) if cut else a
            self._results()
            for n in self.body.nodes:
                if n.op not in ("placeholder", "output"):
                    self.made[n] = self.graph.node_copy(n, self.made.__getitem__)
                    self._results()
        for user in list(self.node.users):
            assert user.target is operator.getitem and isinstance(user.args[1], int)
            user.replace_all_uses_with(self.results[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def _results(self) -> None:
        """Those whose operands are there by now."""
        for k, operands in list(self.waiting):
            if all(n in self.made for n in operands):
                self.results[k] = self._result(self.loop.results[k], [self.made[n] for n in operands])
                self.waiting.remove((k, operands))

    def _result(self, r: Result, operands: list[Node]) -> Node:
        x = operands[0]
        if isinstance(r, Product):
            x = self._call(aten.mm.default, self._call(aten.t.default, x), operands[1])
        if x.meta["val"].shape != torch.Size(r.shape):
            x = self._call(aten.reshape.default, x, list(r.shape))
        return x if x.meta["val"].dtype is r.dtype else self._call(_CONVERT, x, r.dtype)

    def _of_rows(self, a: Node) -> Node:
        """An argument whose leading extents, which make up the rows, are one."""
        shape = a.meta["val"].shape
        n = leading(shape, self.loop.rows)
        assert n is not None
        return a if n == 1 else self._call(aten.reshape.default, a, [self.loop.rows, *shape[n:]])

    def _call(self, op: torch._ops.OpOverload, *args: object) -> Node:
        n = self.graph.call_function(op, args)  # type: ignore[arg-type]
        n.meta["val"] = op(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        return n


_CONVERT = torch.ops.prims.convert_element_type.default


def _operands(results: tuple[Result, ...], body: torch.fx.Graph) -> Iterator[tuple[Node, ...]]:
    """What the body hands over for each result: two operands of a product, else one value."""
    given = iter(body.output_node().args[0])  # type: ignore[arg-type]
    for r in results:
        yield tuple(next(given) for _ in range(2 if isinstance(r, Product) else 1))  # type: ignore[misc]
