"""The body of a part that runs over rows: its graph over one chunk, in which the leading axes of rows are one."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tilefold.frontend.operators import create
from tilefold.frontend.operators.table import VIEWS
from tilefold.frontend.regions.rows import leading
from tilefold.frontend.training.row_parts import ALONG, NLL, PRODUCTS, TURNS, Part, axes_of, is_total, shape_of

aten = torch.ops.aten
Node = torch.fx.Node


def roots(part: Part) -> tuple[Node, ...]:
    """What a part is given: its inputs, but of a matrix that is only read turned (a weight) the matrix as it is, which
    would be copied as a result of what comes before."""

    def root(n: Node) -> Node:
        found = n
        while n not in part.sliced and found.op == "call_function" and found.target in TURNS:
            found = _node(found.args[0])
        return n if found in part.sliced else found

    return tuple(dict.fromkeys(root(n) for n in part.inputs))


class Body:
    """The graph of a part over one chunk: leading axes that make up rows are one."""

    def __init__(self, part: Part, rows: int):
        self.part, self.rows = part, rows
        self.graph = torch.fx.Graph()
        self.new: dict[Node, Node] = {}

    def module(self) -> torch.fx.GraphModule:
        for n in roots(self.part):
            x = self.graph.placeholder(n.name)
            val = n.meta["val"]
            k = leading(val.shape, self.part.rows) if n in self.part.sliced else None
            x.meta["val"] = val if k is None else val.new_empty((self.rows, *val.shape[k:]))
            self.new[n] = x
        for n in self.part.inputs:
            self._turned(n)
        for n in self.part.members:
            if not (n.target in PRODUCTS and is_total(n, self.part.rows, self.part.members)) and n.target not in TURNS:
                self.new[n] = self._one(n)
        out: list[Node] = []
        for n in self.part.results:
            if n.target is aten.mm.default and is_total(n, self.part.rows, self.part.members):
                a, b = map(_node, n.args)
                out += [self.new[_node(a.args[0])], self.new[b]]
            else:
                out.append(self.new[n])
        self.graph.output(tuple(out))
        return torch.fx.GraphModule({}, self.graph)

    def _turned(self, n: Node) -> Node:
        """An input, or a view of what is given instead of it."""
        if n not in self.new:
            self.new[n] = self._call(n.target, self._turned(_node(n.args[0])), *n.args[1:])
        return self.new[n]

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        n = self.graph.call_function(op, args, kwargs)
        given: Any = torch.fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        n.meta["val"] = op(*given[0], **given[1])
        return n

    def _one(self, n: Node) -> Node:
        """A member over one chunk."""
        whole, val = self.part.rows, n.meta["val"]
        found: Any = torch.fx.map_arg((n.args, n.kwargs), lambda x: self.new.get(x, x))
        args, kwargs = found
        if n.target is NLL or n.target is operator.getitem:
            return self._call(n.target, *args)
        if is_total(n, whole, self.part.members):
            return self._sum(n, args[0])
        k = leading(val.shape, whole)
        assert k is not None, n
        shape = [self.rows, *val.shape[k:]]
        if n.target is aten.expand.default:
            x = args[0]
            if x.meta["val"].dim() > len(shape):
                x = self._call(aten.reshape.default, x, x.meta["val"].shape[-len(shape) :])
            return self._call(aten.expand.default, x, shape)
        if n.target is aten.clone.default or n.target in (aten.detach.default, aten.alias.default):
            return _node(args[0])
        if n.target in VIEWS:
            return self._call(aten.reshape.default, args[0], shape)
        if n.target in create.TABLE and not n.all_input_nodes:
            return self._call(n.target, *((shape, *args[1:])), **kwargs)
        if n.target in ALONG:
            own = leading(shape_of(n.args[0]), whole)
            axes = [d - _known(own) + 1 for d in axes_of(n) or []]
            return self._call(n.target, args[0], axes, *args[2:], **kwargs)
        if n.target in (aten.gather.default, aten._log_softmax_backward_data.default):
            at = 1 if n.target is aten.gather.default else 2
            own = leading(shape_of(n.args[0]), whole)
            rank = len(shape_of(n.args[0]))
            args = (*args[:at], int(found[0][at]) % rank - _known(own) + 1, *args[at + 1 :])
        return self._call(n.target, *(self._fitted(x, len(shape)) for x in args), **kwargs)

    def _fitted(self, x: object, rank: int) -> object:
        """An operand without the leading axes of 1 that stood for rows."""
        val = x.meta["val"] if isinstance(x, Node) else None
        if not isinstance(val, torch.Tensor) or val.dim() <= rank:
            return x
        return self._call(aten.reshape.default, x, val.shape[-rank:])

    def _sum(self, n: Node, x: Node) -> Node:
        """A sum over all rows, in a type that chunks can be added up in."""
        old = _node(n.args[0]).meta["val"]
        own = leading(old.shape, self.part.rows)
        assert own is not None
        axes = axes_of(n) if n.target is aten.sum.dim_IntList else list(range(old.dim()))
        assert axes is not None
        if x.meta["val"].dtype.itemsize == 2 and x.meta["val"].dtype.is_floating_point:
            x = self._call(torch.ops.prims.convert_element_type.default, x, torch.float32)
        return self._call(aten.sum.dim_IntList, x, [0, *(d - own + 1 for d in axes if d >= own)])


def _node(x: object) -> Node:
    assert isinstance(x, Node), x
    return x


def _known(n: int | None) -> int:
    assert n is not None
    return n
