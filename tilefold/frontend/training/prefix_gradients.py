"""Gradients of running products and log-sum-exps, in a joint graph, as one operator: a scan of ours
(`operators.prefix_gradient`).

PyTorch's divides the sums of what comes behind a place by what stands there, and mends that around the first zero of a
row, which it looks for whether there is one or not: three scans, the place of a greatest one, a scatter, a gather and a
sum. Compiled by another compiler these are as many kernels, which take it longer than all else. That of a log-sum-exp
takes two scans, backwards, of the logarithms of the positive and of the negative gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilefold.backends.triton.build import has_gluon
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.prefix_gradient import prefix_gradient_op
from tilefold.frontend.operators.writer import Writer

aten = torch.ops.aten
Node = torch.fx.Node
_NAMES = frozenset({aten.alias.default, aten.detach.default})


def one_scan(graph: torch.fx.Graph) -> int:
    """Replace such gradients, in place; gives how many there were."""
    found = 0
    for n in list(graph.nodes):
        product = _of_product(n)
        given = product or _of_log_sum(n)
        if given is None or not _takes(n, given):
            continue
        dim = attrs(given[2])["dim"] % n.meta["val"].dim()  # type: ignore[operator]
        n.replace_all_uses_with(Writer(n)(prefix_gradient_op, *given, dim, "prod" if product else "logsumexp"))
        found += 1
    if found:
        graph.eliminate_dead_code()
    return found


def _takes(n: Node, given: Sequence[Node]) -> bool:
    """Whether there are kernels for such tensors."""
    made = n.meta["val"]
    if made.device.type != "cuda" or not has_gluon() or not made.dim():
        return False
    alike = all(i.meta["val"].dtype == made.dtype and i.meta["val"].shape == made.shape for i in given)
    return alike and not made.dtype.is_complex and all(isinstance(s, int) for s in made.shape)


def _of_product(n: Node) -> tuple[Node, Node, Node] | None:
    """Gradient of the product, its factors and itself, where a node is what autograd makes of them:
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
            return grad, x, made
    return None


def _of_log_sum(n: Node) -> tuple[Node, Node, Node] | None:
    """The same of a log-sum-exp: of the logarithms of the gradients above 0, and of those below,
    `exp(log-sum-exp from the end (logarithm - result) + x)`, and the difference of both."""
    sides = _inputs(n, aten.sub.Tensor)
    found = [_side(s, sign) for s, sign in zip(sides or (), (aten.gt.Scalar, aten.lt.Scalar), strict=False)]
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def _side(n: Node, sign: object) -> tuple[Node, Node, Node] | None:
    terms = _inputs(_through(n, aten.exp.default), aten.add.Tensor)
    summed = _through(terms[0], aten.flip.default, aten.logcumsumexp.default, aten.flip.default) if terms else None
    parts = _inputs(summed, aten.sub.Tensor)
    made, chosen = (_named(parts[1]), _inputs(parts[0], aten.where.self)) if parts else (None, None)
    if terms is None or chosen is None or made is None or made.target is not aten.logcumsumexp.default:
        return None
    grad = _through(chosen[1], aten.log.default, aten.abs.default)
    signed = chosen[0].target is sign and chosen[0].args == (grad, 0)
    x = made.args[0]
    return (grad, x, made) if grad is not None and signed and terms[1] is x and isinstance(x, Node) else None


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
