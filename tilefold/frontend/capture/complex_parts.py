"""Arithmetic of complex numbers as arithmetic of their real and imaginary parts.

    (a + bi) (c + di) = (ac - bd) + (ad + bc) i          exp(a + bi) = e^a cos b + e^a sin b i

Rotary positions are written so (`view_as_complex(x) * turns`), and filters between transforms. No compiler of kernels
has complex numbers: each operator would be a kernel of its own, and regions would end there. What a transform or a
product of complex matrices reads is put together again, and what it makes is taken apart: both are views.

Side condition: where nothing is computed (views alone), values stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilefold.frontend.operators.writer import Writer

Node = torch.fx.Node
aten = torch.ops.aten
#: A real tensor, or the same number everywhere.
Part = Node | float
Pair = tuple[Part, Part]

#: Operators that do with each part what they do with a number.
_EACH = {
    **{op: aten.reshape.default for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)},
    **{
        op: op
        for op in (
            *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.transpose.int),
            *(aten.t.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.alias.default),
            *(aten.detach.default, aten.clone.default, aten.roll.default, aten.flip.default, aten.cat.default),
            *(aten.slice_scatter.default, aten.where.self, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim),
        )
    },
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_SUMS = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_CONJUGATES = {aten._conj.default, aten._conj_physical.default, aten.conj_physical.default}
_SAME = {aten.resolve_conj.default: 0, aten._to_copy.default: 0, aten.scalar_tensor.default: 0, aten.copy.default: 1}
#: Those that make complex numbers of real ones.
_MADE = {aten.view_as_complex.default, aten.complex.default, aten.polar.default}
_COMPUTED = {*_SUMS, *_PRODUCTS, *_QUOTIENTS, *_CONJUGATES, aten.polar.default, aten.complex.default}
_COMPUTED |= {aten.exp.default, aten.neg.default, aten.reciprocal.default, aten.sgn.default, aten.log.default}
_COMPUTED |= {aten.where.self, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim}
_COMPUTED |= {aten.abs.default, aten.angle.default}
#: Those that make real numbers of complex ones.
_READ = {aten.view_as_real.default, aten.abs.default, aten.angle.default}
_AS_IT_LIES = {"memory_format": torch.contiguous_format}
_COVERED = {*_EACH, *_ZEROS, *_SAME, *_MADE, *_COMPUTED} - _READ


def complex_parts(gm: torch.fx.GraphModule) -> int:
    """Take complex arithmetic of an ATen graph apart; gives how many operators that were."""
    chosen = _chosen(gm.graph)
    if not chosen:
        return 0
    work = _Parts(chosen)
    for n in list(gm.graph.nodes):
        work.visit(n)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return len(chosen)


def _is_complex(n: object) -> bool:
    val = n.meta.get("val") if isinstance(n, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype in (torch.complex64, torch.complex128)


def _chosen(graph: torch.fx.Graph) -> set[Node]:
    """Operators that are connected by complex values, where one of each such set computes something."""
    own = {n for n in graph.nodes if n.op == "call_function" and _covered(n)}
    chosen: set[Node] = set()
    for n in graph.nodes:
        if (
            n not in own
            or n in chosen
            or not (n.target in _COMPUTED or n.target in _READ - {aten.view_as_real.default})
        ):
            continue
        todo = [n]
        while todo:
            m = todo.pop()
            if m in own and m not in chosen:
                chosen.add(m)
                todo += [a for a in m.all_input_nodes if _is_complex(a)]
                todo += list(m.users) if _is_complex(m) else []
    return chosen


def _covered(n: Node) -> bool:
    if n.target in _READ:
        return _is_complex(n.args[0])
    if not _is_complex(n) or n.target not in _COVERED or any(_lazy(a) for a in n.all_input_nodes):
        return False
    return not (n.target is aten._to_copy.default and n.kwargs.get("device") is not None)


def _lazy(a: Node) -> bool:
    """Whether a value that stays complex may be conjugated when it is read: it has no real view."""
    val = a.meta.get("val")
    return isinstance(val, torch.Tensor) and a.op == "placeholder" and val.is_conj()


class _Parts:
    """Writes the parts of complex values beside them. pairs: those of nodes."""

    def __init__(self, chosen: set[Node]):
        self.chosen = chosen
        self.pairs: dict[Node, Pair] = {}
        self.at: Node | None = None

    def visit(self, n: Node) -> None:
        """Compute a node by parts, if it is chosen; have others read complex values that were put together again."""
        self.at = n
        if n in self.chosen and n.target in _READ:
            self._read(n)
        elif n in self.chosen:
            self.pairs[n] = self._computed(n)
        elif n.op == "output":
            for a in [a for a in n.all_input_nodes if a in self.chosen and a in self.pairs]:
                made = self._whole(a)
                if made.meta["val"].stride() == a.meta["val"].stride():  # else it is computed as it was
                    n.replace_input_with(a, made)
        else:
            for a in [a for a in n.all_input_nodes if a in self.pairs]:
                n.replace_input_with(a, self._whole(a))

    def _emit(self, target: Any, *args: Any, **named: Any) -> Node:
        assert self.at is not None
        return Writer(self.at)(target, *args, **named)

    def _pair(self, a: object) -> Pair:
        """The parts of a value, complex or real."""
        if isinstance(a, Node) and a in self.pairs:
            return self.pairs[a]
        if isinstance(a, Node) and _is_complex(a):
            self.pairs[a] = self._picked(self._emit(aten.view_as_real.default, a), a.meta["val"].dim())
            return self.pairs[a]
        if isinstance(a, Node):
            return a, 0.0
        number = complex(a)  # type: ignore[call-overload]
        return number.real, number.imag

    def _picked(self, x: object, dim: int) -> Pair:
        """Of [..., 2]."""
        return self._emit(aten.select.int, x, dim, 0), self._emit(aten.select.int, x, dim, 1)

    def _full(self, p: Part, like: torch.Tensor) -> Node:
        """A part as a tensor of the shape and type of a complex one's."""
        dtype = like.dtype.to_real()
        if not isinstance(p, Node):
            return self._emit(aten.full.default, list(like.shape), p, dtype=dtype, device=like.device)
        if p.meta["val"].dtype is not dtype:
            p = self._emit(aten._to_copy.default, p, dtype=dtype)
        if p.meta["val"].shape != like.shape:
            p = self._emit(aten.expand.default, p, list(like.shape))
        return p

    def _stacked(self, a: Node) -> Node:
        """[..., 2], as `view_as_real` has it."""
        like = a.meta["val"]
        parts = [self._emit(aten.unsqueeze.default, self._full(p, like), like.dim()) for p in self.pairs[a]]
        return self._emit(aten.cat.default, parts, like.dim())

    def _whole(self, a: Node) -> Node:
        """The complex value itself, with its axes in the order that they had in memory."""
        if a not in self.chosen:  # what the parts were taken from
            return a
        like: torch.Tensor = a.meta["val"]
        strides = [int(s) if isinstance(s, int) else s.node.hint for s in like.stride()]
        order = sorted(range(like.dim()), key=lambda d: -strides[d])
        if order == [*range(like.dim())]:
            return self._emit(aten.view_as_complex.default, self._stacked(a))
        turned = self._emit(aten.permute.default, self._stacked(a), [*order, like.dim()])
        made = self._emit(aten.view_as_complex.default, self._emit(aten.clone.default, turned, **_AS_IT_LIES))
        return self._emit(aten.permute.default, made, [order.index(d) for d in range(like.dim())])

    def _read(self, n: Node) -> None:
        a = n.args[0]
        assert isinstance(a, Node)
        x, y = self._pair(a)
        if n.target is aten.view_as_real.default:
            if a not in self.chosen:
                return
            last = n.meta["val"].dim() - 1
            for u in list(n.users):
                if u.target is aten.select.int and u.args[1] in (last, -1):
                    self.at = u
                    part = self._full((x, y)[u.args[2]], a.meta["val"])  # type: ignore[index]
                    for out in [m for m in u.users if m.op == "output"]:  # every second number, as it was
                        if u.meta["val"].stride() != part.meta["val"].stride():
                            out.replace_input_with(u, self._emit(aten.select.int, self._stacked(a), *u.args[1:]))
                    u.replace_all_uses_with(part)
            self.at = n
            made = self._stacked(a) if any(u.target is not aten.select.int or u.users for u in n.users) else n
        elif n.target is aten.abs.default:
            made = self._full(self._abs(x, y), a.meta["val"])
        else:
            full = [self._full(p, a.meta["val"]) for p in (y, x)]
            made = self._emit(aten.atan2.default, *full)
        n.replace_all_uses_with(made)

    def _computed(self, n: Node) -> Pair:
        target, args = n.target, n.args
        val: torch.Tensor = n.meta["val"]
        if target in _ZEROS:
            return 0.0, 0.0
        if target is aten.view_as_complex.default:
            return self._picked(args[0], val.dim())
        if target is aten.complex.default:
            return args[0], args[1]  # type: ignore[return-value]
        if target is aten.polar.default:
            return self._turned(args[0], args[1])  # type: ignore[arg-type]
        if target in _EACH:
            return self._each(_EACH[target], n, 0), self._each(_EACH[target], n, 1)  # type: ignore[index]
        if target in _SAME:
            return self._pair(args[_SAME[target]])  # type: ignore[index]
        x, y = self._pair(args[0])
        if target in _CONJUGATES:
            return x, self._neg(y)
        if target in _SUMS:
            u, v = self._pair(args[1])
            by: Any = float(_SUMS[target]) * n.kwargs.get("alpha", 1)  # type: ignore[index, operator]
            return self._add(x, self._mul(u, by)), self._add(y, self._mul(v, by))
        if target in _PRODUCTS:
            return self._times((x, y), self._pair(args[1]))
        if target in _QUOTIENTS:
            return self._over((x, y), self._pair(args[1]))
        if target is aten.reciprocal.default:
            return self._over((1.0, 0.0), (x, y))
        if target is aten.neg.default:
            return self._neg(x), self._neg(y)
        if target is aten.exp.default:
            return self._turned(self._map(aten.exp.default, math.exp, x), y)
        size = self._full(self._abs(x, y), val)
        if target is aten.log.default:
            angle = self._emit(aten.atan2.default, self._full(y, val), self._full(x, val))
            return self._emit(aten.log.default, size), angle
        none = self._emit(aten.eq.Scalar, size, 0)  # sgn
        return tuple(self._emit(aten.where.self, none, size, self._div(self._full(p, val), size)) for p in (x, y))  # type: ignore[return-value]

    def _each(self, target: Any, n: Node, k: int) -> Part:
        def own(a: Node) -> Node:
            if not _is_complex(a):
                return a
            return self._full(self._pair(a)[k], a.meta["val"])

        real = n.meta["val"].dtype.to_real()
        named = {name: real if isinstance(v, torch.dtype) else v for name, v in n.kwargs.items()}
        args = list(n.args)
        if target is aten.where.self:  # a real value has no imaginary part
            like = n.meta["val"]
            args[1:] = [a if _is_complex(a) else self._full(self._pair(a)[k], like) for a in args[1:]]  # type: ignore[misc]
        args, named = torch.fx.map_arg((args, named), own)
        return self._emit(target, *args, **named)

    def _times(self, a: Pair, b: Pair) -> Pair:
        (x, y), (u, v) = a, b
        real = self._add(self._mul(x, u), self._neg(self._mul(y, v)))
        return real, self._add(self._mul(x, v), self._mul(y, u))

    def _over(self, a: Pair, b: Pair) -> Pair:
        """By the larger part of what divides, which neither overflows nor vanishes."""
        u, v = b
        if v == 0.0:
            return self._div(a[0], u), self._div(a[1], u)
        if not isinstance(u, Node) and not isinstance(v, Node):
            inverse = 1 / complex(u, v)
            return self._times(a, (inverse.real, inverse.imag))
        most = self._most(u, v)
        u, v = self._div(u, most), self._div(v, most)
        square = self._mul(self._add(self._mul(u, u), self._mul(v, v)), most)
        x, y = self._times(a, (u, self._neg(v)))
        return self._div(x, square), self._div(y, square)

    def _most(self, x: Part, y: Part) -> Node:
        first, second = (self._map(aten.abs.default, abs, p) for p in (x, y))
        if isinstance(first, Node) and isinstance(second, Node):
            return self._emit(aten.maximum.default, first, second)
        tensor, number = (first, second) if isinstance(first, Node) else (second, first)
        assert isinstance(tensor, Node)
        return self._emit(aten.clamp_min.default, tensor, number)

    def _abs(self, x: Part, y: Part) -> Part:
        """sqrt(x^2 + y^2), by the larger of them: none of the squares overflows or vanishes."""
        if x == 0.0 or y == 0.0:
            return self._map(aten.abs.default, abs, y if x == 0.0 else x)
        if not isinstance(x, Node) and not isinstance(y, Node):
            return math.hypot(x, y)
        most = self._most(x, y)
        odd = self._emit(aten.logical_or.default, *(self._emit(aten.eq.Scalar, most, v) for v in (0, math.inf)))
        x, y = self._div(x, most), self._div(y, most)
        size = self._mul(self._emit(aten.sqrt.default, self._add(self._mul(x, x), self._mul(y, y))), most)
        return self._emit(aten.where.self, odd, most, size)

    def _turned(self, size: Part, angle: Part) -> Pair:
        return (
            self._mul(size, self._map(aten.cos.default, math.cos, angle)),
            self._mul(size, self._map(aten.sin.default, math.sin, angle)),
        )

    def _map(self, target: Any, of_number: Callable[[float], float], x: Part) -> Part:
        return self._emit(target, x) if isinstance(x, Node) else of_number(x)

    def _neg(self, x: Part) -> Part:
        return self._emit(aten.neg.default, x) if isinstance(x, Node) else -x

    def _mul(self, x: Part, y: Part) -> Part:
        if not isinstance(x, Node):
            x, y = y, x
        if not isinstance(x, Node):
            return x * y  # type: ignore[operator]
        if isinstance(y, Node):
            return self._emit(aten.mul.Tensor, x, y)
        if y in (0.0, 1.0):
            return 0.0 if y == 0.0 else x
        return self._emit(aten.mul.Tensor, x, y)

    def _add(self, x: Part, y: Part) -> Part:
        if not isinstance(x, Node):
            x, y = y, x
        if not isinstance(x, Node):
            return x + y  # type: ignore[operator]
        return x if y == 0.0 else self._emit(aten.add.Tensor, x, y)

    def _div(self, x: Part, y: Part) -> Part:
        if not isinstance(y, Node):
            return self._mul(x, 1 / y) if y else math.nan
        if isinstance(x, Node):
            return self._emit(aten.div.Tensor, x, y)
        return 0.0 if x == 0.0 else self._mul(self._emit(aten.reciprocal.default, y), x)
