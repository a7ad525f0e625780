"""Folds of a joint graph taken apart, so that their final states are values that a backward can be given.

An operator such as softmax hides a fold and its lift: the maximum and the sum of exponentials of a row, and the map of
an element and these two. A value inside an operator cannot be saved, so the lift is written out:

| operator | states | lift |
|---|---|---|
| softmax, and the one whose empty rows are 0 | m = max x, l = sum exp(x - m) | exp(x - m) / l |
| log-softmax | m, l | x - m - log l |
| layer norm | mean, rstd | (x - mean) rstd w + b |
| RMS norm | rstd | x rstd w |

Softmax's gradient is taken apart too, for its sum is often there already (`reassociate`).

The parts are those that `operators.norm` lowers the operators to, so that a forward comes out as it would have.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.writer import Writer

aten = torch.ops.aten
Node = torch.fx.Node


def take_apart(graph: torch.fx.Graph) -> None:
    """Replace the operators of the table above, in place."""
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        for old, new in rule(Writer(node), node):
            old.replace_all_uses_with(new)
        if not node.users:
            graph.erase_node(node)


#: What is replaced, and by what.
Replaced = Sequence[tuple[Node, Node]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type that states have."""
    return dtype if dtype is torch.float64 else torch.float32


def _shifted(write: Writer, node: Node) -> tuple[Node, int, torch.dtype] | None:
    """The scores of a softmax in wide arithmetic, its axis and the type of its result; None for that of a scalar, and
    for rows of nothing, which have no maximum."""
    a = attrs(node)
    x, result = a["self"], node.meta["val"]
    if not isinstance(x, Node) or result.dim() == 0 or not result.dtype.is_floating_point:
        return None
    axis = int(a["dim"])  # type: ignore[call-overload]
    if isinstance(result.shape[axis], int) and result.shape[axis] == 0:
        return None
    return write.cast(x, _wide(result.dtype)), axis, result.dtype


def _softmax(write: Writer, node: Node) -> Replaced:
    found = _shifted(write, node)
    if found is None:
        return ()
    x, axis, dtype = found
    e = write(aten.exp.default, write(aten.sub.Tensor, x, write(aten.amax.default, x, [axis], True)))
    total = write(aten.sum.dim_IntList, e, [axis], True)
    return ((node, write.cast(write(aten.div.Tensor, e, total), dtype)),)


def _safe_softmax(write: Writer, node: Node) -> Replaced:
    """The shift of a row without any finite score is 0, and so is its sum, which then divides as 1."""
    found = _shifted(write, node)
    if found is None:
        return ()
    x, axis, dtype = found
    wide, device = _wide(dtype), x.meta["val"].device

    def number(value: float) -> Node:
        return write(aten.full.default, [], value, dtype=wide, device=device)

    top = write(aten.amax.default, x, [axis], True)
    shift = write(aten.where.self, write(aten.eq.Scalar, top, -math.inf), number(0.0), top)
    e = write(aten.exp.default, write(aten.sub.Tensor, x, shift))
    total = write(aten.sum.dim_IntList, e, [axis], True)
    divisor = write(aten.where.self, write(aten.eq.Scalar, total, 0.0), number(1.0), total)
    return ((node, write.cast(write(aten.div.Tensor, e, divisor), dtype)),)


def _log_softmax(write: Writer, node: Node) -> Replaced:
    found = _shifted(write, node)
    if found is None:
        return ()
    x, axis, dtype = found
    below = write(aten.sub.Tensor, x, write(aten.amax.default, x, [axis], True))
    total = write(aten.sum.dim_IntList, write(aten.exp.default, below), [axis], True)
    return ((node, write.cast(write(aten.sub.Tensor, below, write(aten.log.default, total)), dtype)),)


def _layer_norm(write: Writer, node: Node) -> Replaced:
    a = attrs(node)
    x, dtype = _wide_input(write, node)
    moments = write(aten.native_layer_norm.default, x, a["normalized_shape"], None, None, a["eps"])
    mean, rstd = write(operator.getitem, moments, 1), write(operator.getitem, moments, 2)
    y = write(aten.mul.Tensor, write(aten.sub.Tensor, x, mean), rstd)
    y = _scaled(write, y, a["weight"], a["bias"])
    return _picked(write, node, (write.cast(y, dtype), mean, rstd))


def _rms_norm(write: Writer, node: Node) -> Replaced:
    a = attrs(node)
    x, dtype = _wide_input(write, node)
    eps = torch.finfo(_wide(dtype)).eps if a["eps"] is None else a["eps"]
    moments = write(aten._fused_rms_norm.default, x, a["normalized_shape"], None, eps)
    rstd = write(operator.getitem, moments, 1)
    y = _scaled(write, write(aten.mul.Tensor, x, rstd), a["weight"], None)
    return _picked(write, node, (write.cast(y, dtype), rstd))


def _wide_input(write: Writer, node: Node) -> tuple[Node, torch.dtype]:
    x = attrs(node)["input"]
    assert isinstance(x, Node)
    dtype = x.meta["val"].dtype
    return write.cast(x, _wide(dtype)), dtype


def _scaled(write: Writer, y: Node, weight: object, bias: object) -> Node:
    wide = y.meta["val"].dtype
    if isinstance(weight, Node):
        y = write(aten.mul.Tensor, y, write.cast(weight, wide))
    return write(aten.add.Tensor, y, write.cast(bias, wide)) if isinstance(bias, Node) else y


def _picked(write: Writer, node: Node, parts: Sequence[Node]) -> Replaced:
    """What takes the place of the results that are picked from a node, in their types."""
    found = []
    for user in list(node.users):
        part = parts[user.args[1]]  # type: ignore[index]
        found.append((user, write.cast(part, user.meta["val"].dtype)))
    return found


def _softmax_backward(write: Writer, node: Node) -> Replaced:
    """p (g - sum[k] g p)."""
    a = attrs(node)
    g, p, dtype = a["grad_output"], a["output"], node.meta["val"].dtype
    if not isinstance(g, Node) or not isinstance(p, Node) or node.meta["val"].dim() == 0:
        return ()
    g, p = write.cast(g, _wide(dtype)), write.cast(p, _wide(dtype))
    dot = write(aten.sum.dim_IntList, write(aten.mul.Tensor, g, p), [a["dim"]], True)
    return ((node, write.cast(write(aten.mul.Tensor, p, write(aten.sub.Tensor, g, dot)), dtype)),)


_RULES: dict[object, Callable[[Writer, Node], Replaced]] = {
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _rms_norm,
}
