"""Gradients of running products, in a joint graph, as one operator: a scan of ours (`operators.product_gradient`).

PyTorch's divides the sums of what comes behind a place by what stands there, and mends that around the first zero of a
row, which it looks for whether there is one or not: three scans, the place of a greatest one, a scatter, a gather and a
sum. Compiled by another compiler these are as many kernels, which take it longer than all else.
"""

from __future__ import annotations

from math import prod

import torch

from tilefold.backends.triton.build import has_gluon
from tilefold.backends.triton.product_gradient import turns
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.product_gradient import product_gradient_op
from tilefold.frontend.operators.writer import Writer

aten = torch.ops.aten
Node = torch.fx.Node
_NAMES = frozenset({aten.alias.default, aten.detach.default})
#: Chunks of a row that are taken one after the other, at most.
MOST_TURNS = 32


def one_scan(graph: torch.fx.Graph) -> int:
    """Replace such gradients, in place; gives how many there were."""
    found = 0
    for n in list(graph.nodes):
        given = _gradient(n)
        if given is None or not _worth(n, given[3]):
            continue
        n.replace_all_uses_with(Writer(n)(product_gradient_op, *given))
        found += 1
    if found:
        graph.eliminate_dead_code()
    return found


def _worth(n: Node, dim: int) -> bool:
    made = n.meta["val"]
    if made.device.type != "cuda" or not has_gluon() or not all(isinstance(s, int) for s in made.shape):
        return False
    return turns(made.shape[dim], prod(made.shape[dim + 1 :])) <= MOST_TURNS


def _gradient(n: Node) -> tuple[Node, Node, Node, int] | None:
    """Gradient of the product, its factors, itself and its dim, where a node is what autograd makes of them:
    `where(first zero, its own gradient, where(before it, sums from the end / factors, 0))`."""
    first = _inputs(n, aten.where.self)
    inner = _inputs(first[2], aten.where.self) if first else None
    quotient = _inputs(inner[1], aten.div.Tensor) if inner else None
    if not first or not inner or not quotient or not _inputs(first[0], aten.logical_and.default):
        return None
    backwards, x = quotient
    zeros = _zeros(inner[0])
    summed = _through(backwards, aten.flip.default, aten.cumsum.default, aten.flip.default)
    if zeros is not x or summed is None:
        return None
    product = [i for i in summed.all_input_nodes if i.target is aten.mul.Tensor]
    for y, grad in [(a, b) for p in product for a, b in (p.args, p.args[::-1])]:
        made = _named(y)
        if isinstance(grad, Node) and made is not None and made.target is aten.cumprod.default and made.args[0] is x:
            dim = attrs(made)["dim"] % made.meta["val"].dim()  # type: ignore[operator]
            alike = all(i.meta["val"].dtype == n.meta["val"].dtype for i in (grad, x, made))
            whole = all(i.meta["val"].shape == n.meta["val"].shape for i in (grad, x, made))
            return (grad, x, made, dim) if alike and whole else None
    return None


def _inputs(n: object, target: object) -> tuple[Node, ...] | None:
    if not isinstance(n, Node) or n.target is not target or not all(isinstance(a, Node) for a in n.args):
        return None
    return n.args  # type: ignore[return-value]


def _through(n: object, *targets: object) -> Node | None:
    """What is behind operators of these targets, outermost first."""
    for target in targets:
        if not isinstance(n, Node) or n.target is not target:
            return None
        n = n.args[0]
    return n if isinstance(n, Node) else None


def _zeros(n: Node) -> Node | None:
    """The factors whose zeros up to a place a condition says there are none of."""
    if n.target is not aten.eq.Scalar or n.args[1] != 0:
        return None
    equal = _through(n, aten.eq.Scalar, aten.cumsum.default)
    if equal is None or equal.target is not aten.eq.Scalar or equal.args[1] != 0:
        return None
    return _named(equal.args[0])


def _named(n: object) -> Node | None:
    while isinstance(n, Node) and n.target in _NAMES:
        n = n.args[0]
    return n if isinstance(n, Node) else None
