"""What operators are taken apart before lowering, and how.

Operators that the lowering table covers stay whole, so that their structure is chosen there. All
others use torch's decompositions. `scaled_dot_product_attention` is replaced in the captured
graph, before autograd sees it: its backward is then derived from the parts, on every device.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions

from tilefold.frontend.capture import convolutions, distances, flex, foreach, random, resize, running_products
from tilefold.frontend.operators import classes
from tilefold.frontend.operators.table import TABLE

_SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
#: Left to the library: decompositions that end in scatters, and one that is for inference alone (the CPU's flash
#: attention comes apart into probabilities where its backward reads the logarithms of their sums).
_KEEP_WHOLE = (
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)

#: Taken apart although they are core ATen.
_BEYOND_CORE = (
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten.native_batch_norm.default,
)


def decompositions(*, eagers_numbers: bool = False) -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    """The table for AOTAutograd. eagers_numbers: random operators stay what they are.

    Only what reaches it: composite operators are taken apart by the dispatcher. (`core_aten_decompositions` lists those
    too, which takes a tenth of a second of every process.)
    """
    table: dict[Any, Callable[..., object]] = {
        **_core_aten_decompositions_post_autograd(),
        **get_decompositions(_BEYOND_CORE),
    }
    for op in (*TABLE, *_KEEP_WHOLE):
        table.pop(op, None)
    drawn = {} if eagers_numbers else random.decompositions()
    own: dict[Any, Callable[..., object]] = {
        torch.ops.aten.native_dropout.default: _dropout,
        torch.ops.aten.convolution.default: convolutions.convolution,
        torch.ops.aten.convolution_backward.default: convolutions.gradients,
        torch.ops.aten.copy.default: _copied,
        torch.ops.aten.index_put.default: _filled_by_mask,
        torch.ops.aten.select_scatter.default: _select_scattered,
        torch.ops.aten.as_strided_scatter.default: _on_the_diagonal,
        torch.ops.aten.index_add.default: functools.partial(_index_added, table[torch.ops.aten.index_add.default]),
        torch.ops.aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
        torch.ops.aten._trilinear.default: _trilinear,
        torch.ops.aten._cdist_forward.default: distances.distances,
        torch.ops.aten._cdist_backward.default: distances.gradient,
        torch.ops.aten._neg_view.default: torch.neg,
        torch.ops.aten._efficientzerotensor.default: torch.zeros,
        torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward,
    }
    return {**table, **drawn, **own, **dict(foreach.decompositions())}


def _copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What an assignment to a part of a tensor writes: `source` in the shape and type of `into`. A number of the host
    (`x[a, b] = 2`) may go to any device."""
    if source.dim() == 0 and source.device.type == "cpu" != into.device.type and not source.dtype.is_complex:
        return torch.full(into.shape, -0.0, dtype=into.dtype, device=into.device) + source.to(into.dtype)
    if source.device != into.device or source.dtype.is_complex:
        return NotImplemented  # type: ignore[no-any-return]
    return source.to(into.dtype).expand(into.shape).clone()


def _select_scattered(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """A place of an axis as a slice of one: torch asks every element whether it is there."""
    place = index + x.shape[dim] if index < 0 else index
    made: torch.Tensor = torch.ops.aten.slice_scatter.default(x, source.unsqueeze(dim), dim, place, place + 1)
    return made


def _on_the_diagonal(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """What `fill_diagonal_` writes into x [n, m], m >= n: a selection by positions. Others are the library's."""
    plain = x.dim() == 2 and x.is_contiguous() and not storage_offset and x.shape[0] <= x.shape[1]
    if not plain or x.storage_offset() or list(size) != [x.shape[0]] or list(stride) != [x.shape[1] + 1]:
        return NotImplemented  # type: ignore[no-any-return]
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return torch.where(rows[:, None] == columns, source[:, None], x)


def _trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """The sum over dims of the product of three tensors that lack the dims `expand`, as products of matrices.

    `bilinear` and its gradients: x [B, I], w [O, I, J], y [B, J] -> [B, O].
    """
    every = range(a.dim() + len(expand1))
    own = [[d for d in every if d not in lacks] for lacks in (expand1, expand2, expand3)]
    kept = [d for d in every if d not in sumdim]
    if not {*kept} <= {d for dims in own for d in dims}:
        return NotImplemented  # type: ignore[no-any-return]
    x, y, z = own
    result: torch.Tensor = torch.einsum(a, x, b, y, c, z, kept)
    return result


def _index_added(
    parts: Callable[..., Any],
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
) -> torch.Tensor:
    """torch's decomposition, which broadcasts sources that the operator itself refuses. RuntimeError for those."""

    def others(t: torch.Tensor) -> list[int]:
        return [n for k, n in enumerate(t.shape) if k != dim % max(t.dim(), 1)]

    message = f"the source of index_add is {tuple(source.shape)} for {tuple(x.shape)} along axis {dim}"
    torch._check(others(x) == others(source), lambda: message)
    made: torch.Tensor = parts(x, dim, index, source, alpha=alpha)
    return made


def _soft_margin_loss_backward(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """-y dy sigmoid(-x y), over the count for a mean. (torch's own, y dy (sigmoid(x y) - 1), is of few digits where the
    loss is small.)"""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dx = -y * dy * torch.sigmoid(-x.to(wide) * y.to(wide))
    return (dx / x.numel() if reduction == 1 else dx).to(x.dtype)


def _weight_norm_backward(
    dw: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of v and g of w = g v / |v|, where |v| is a number for each place of `dim`."""
    wide, along = dw.to(norms.dtype), v.to(norms.dtype)
    over = [d for d in range(v.dim()) if d != dim % v.dim()]
    dg = (wide * along).sum(over, keepdim=True) / norms
    dv = g / norms * (wide - along * (dg / norms))
    return dv.to(v.dtype), dg.to(g.dtype)


def _filled_by_mask(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """`x[mask] = number` as a selection: x [.., *mask's, ..]. Other assignments at indices stay whole.

    Inductor, which would get it, writes 0 where one at integers goes before it (torch 2.13, on a CPU).
    """
    masks = [m for m in indices if m is not None]
    if len(masks) != 1 or masks[0].dtype is not torch.bool or accumulate or values.numel() != 1:
        return NotImplemented  # type: ignore[no-any-return]
    behind = x.dim() - (len(indices) - 1) - masks[0].dim() if indices[-1] is not None else -1
    if behind < 0:
        return NotImplemented  # type: ignore[no-any-return]
    mask = masks[0].reshape([*masks[0].shape, *[1] * behind])
    return torch.where(mask, values.reshape(()), x)


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask that depends on nothing but the shape, and a product: drawing it cuts no region in two.

    The backward reads the same mask. The numbers are not eager's.
    """
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.ops.aten.bernoulli.p(torch.empty(x.shape, dtype=torch.bool, device=x.device), 1.0 - p)
    return x * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def rewrite_attention(gm: torch.fx.GraphModule) -> Callable[[], None]:
    """Replace fused attention calls by `attention`, in place, in checkpointed parts too, what Dynamo makes of
    `addcmul_` by a product and a sum, and resizing and products along rows by those with other gradients. What is
    returned puts them back."""
    parts: dict[object, Callable[..., object]] = dict.fromkeys(_SDPA, attention)
    if hasattr(torch.ops.prims, "fma"):  # Inductor's, which Dynamo loads where it writes one
        parts[torch.ops.prims.fma.default] = _added_product
    parts |= {F.multi_head_attention_forward: multi_head_attention, flex.flex_operator: flex.flex_attention}
    parts |= {F.interpolate: resize.interpolate, F.one_hot: classes.one_hot}
    products = {"cumprod": running_products.cumprod, "prod": running_products.prod}
    parts |= products | {getattr(torch, name): made for name, made in products.items()}  # methods, and functions
    graphs = list(_traced(gm))
    calls = [n for m in graphs for n in m.graph.nodes if n.op in ("call_function", "call_method")]
    fused = [(n, n.op, n.target) for n in calls if n.target in parts]

    def put(targets: Iterable[tuple[torch.fx.Node, str, Any]]) -> None:
        for node, op, target in targets:
            node.op, node.target = op, target
        for m in graphs:
            m.recompile()

    put((n, "call_function", parts[target]) for n, _, target in fused)

    def undo() -> None:
        put(fused)

    return undo


def _added_product(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


def _traced(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The graph and those of its checkpoints, which AOTAutograd traces as parts of it, but for those whose user says by
    operator what is saved (`context_fn`): that operator is to be there."""
    yield gm
    for n in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        part = getattr(gm, n.args[0].target)
        if "_checkpoint_context_fn" not in part.meta:
            yield from _traced(part)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v with scores in at least f32.

    query: [..., Hq, L, E], key: [..., H, S, E], value: [..., H, S, Ev]; Hq a multiple of H with
    `enable_gqa`. is_causal aligns the mask to the upper left, as torch does. A row with every
    position masked is 0.
    """
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * factor
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = torch.where(columns <= rows[:, None], scores, -math.inf)
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    masked = is_causal or attn_mask is not None
    p = torch.ops.aten._safe_softmax(scores, -1) if masked else torch.softmax(scores, -1)
    if dropout_p > 0:
        p = F.dropout(p, dropout_p)
    return (p @ value.to(wide)).to(query.dtype)


#: torch's function (one call in a captured graph) with `attention` where its global name is the fused one. It does not
#: ask again whether a tensor has a function of its own in its place: while AOTAutograd traces, some have.
multi_head_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "scaled_dot_product_attention": attention, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
