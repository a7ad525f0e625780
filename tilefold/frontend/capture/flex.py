"""`flex_attention` of torch as plain tensor operators, from which its fold is derived as any other attention's.

In a graph that Dynamo captured, a call is one higher-order operator with two subgraphs: `score_mod(score, b, h, q, kv)`
and `mask_mod(b, h, q, kv)`, functions of numbers. Here they become operators on whole tensors of indices (by
`torch.vmap`, as torch's own eager implementation has it), so that conditions over indices are masks like those that a
user writes out: loop bounds, guards or loads, as analysis finds them. Autograd sees the parts: the backward is derived.

FlexAttention: Dong et al., arXiv 2412.05496; it means what torch's eager implementation does (`math_attention` in
torch/_higher_order_ops/flex_attention.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._functorch.autograd_function import autograd_function_apply as own_gradient
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, noop_mask

#: Where a block mask's tuple has what is read here (`BlockMask.as_tuple`, the same in torch 2.11 to 2.13).
_KV_BLOCKS, _KV_INDICES, _FULL_BLOCKS, _FULL_INDICES = 2, 3, 4, 5
#: What masks are made of that compare sums of positions.
_LINEAR = (
    operator.add,
    operator.sub,
    operator.and_,
    operator.ge,
    operator.gt,
    operator.le,
    operator.lt,
    operator.getitem,
)
#: What takes a number as it takes a tensor of it.
_ARITHMETIC = frozenset(_LINEAR) - {operator.getitem} | {
    operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg, operator.eq, operator.ne,
    operator.or_, operator.xor, torch.where, torch.tensor, torch._refs.tensor,
}  # fmt: skip
Captured = torch.Tensor | int
#: A score or mask function after its captured tensors were added to its arguments.
Mod = Callable[..., torch.Tensor]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, object],
    score_mod_other_buffers: Sequence[Captured] = (),
    mask_mod_other_buffers: Sequence[Captured] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator: attention, and the logarithms of its rows' sums and their maxima, both to base 2.

    query: [B, Hq, L, E]; key: [B or 1, H, S, E]; value: [B or 1, H, S, Ev]; Hq a multiple of H. Results: [B, Hq, L,
    Ev] in the order of the query's strides, and twice [B, Hq, L] in f32 (f64 for f64). A row with every position masked
    is 0, with -inf as its logarithm. `mask_mod` says what is masked; block lists are read only where it masks nothing.
    """
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    groups = query.shape[1] // key.shape[1]
    if groups != 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
    indices = [torch.arange(n, device=query.device) for n in scores.shape]
    scored = _given(score_mod, score_mod_other_buffers, query.device)
    masked = _given(block_mask[-1], mask_mod_other_buffers, query.device)
    with TransformGetItemToIndex():  # x[i] of a tensor i, not of its number
        scores = _over(score_mod, (0,), scored)(scores, *indices, *scored).to(wide)
        mask = _mask(block_mask, indices, masked)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = (torch.ops.aten._safe_softmax(scores, -1) @ value.to(wide)).to(query.dtype)
    return _laid_out(out, query), lse / math.log(2), scores.amax(-1) / math.log(2)


def _given(mod: Mod, captured: Sequence[Captured], device: torch.device) -> list[Captured]:
    """What a function captured. Numbers become tensors, for operators under `vmap` take no symbolic ones; but those
    that something else than arithmetic reads (a bound of `clamp`, a place in a tensor) are fixed, each compiled for
    itself."""
    graph = getattr(mod, "graph", None)
    places = graph.find_nodes(op="placeholder")[-len(captured) :] if graph is not None and captured else []
    given: list[Captured] = []
    for n, x in enumerate(captured):
        if isinstance(x, torch.Tensor):
            given.append(x)
        else:
            given.append(int(x) if places and _is_read_as_number(places[n]) else torch.full((), x, device=device))
    return given


def _is_read_as_number(place: torch.fx.Node) -> bool:
    """Whether an argument, or what follows from such numbers alone, is no operand of plain arithmetic."""
    numbers, todo = {place}, [place]
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or user in numbers:
                continue
            if user.target not in _ARITHMETIC:
                return True
            if all(isinstance(a.meta.get("example_value"), int | torch.SymInt) for a in user.all_input_nodes):
                numbers.add(user)
                todo.append(user)
    return False


def _over(mod: Mod, prefix: tuple[int, ...], buffers: Sequence[Captured]) -> Mod:
    """A function of numbers as one of vectors of indices: [B], [H], [L], [S] -> [B, H, L, S]."""
    if isinstance(mod, torch.fx.GraphModule) and mod.graph.find_nodes(op="call_function", target=own_gradient):
        mod = _Interpreted(mod).run
    return _vmap_for_bhqkv(mod, prefix=prefix, suffix=(None,) * len(buffers))


class _Interpreted(torch.fx.Interpreter):
    """Runs a function that calls a `torch.autograd.Function`: what Dynamo makes of one has no rule for `vmap`."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_with_own_gradient if target is own_gradient else target, args, kwargs)


def _with_own_gradient(forward: Mod, backward: Mod, *args: Any, **_: object) -> Any:
    """`own_gradient` of torch with a rule for `vmap`.

    forward: args -> (results, what it keeps); backward: gradients of results and what was kept -> gradients of args.
    """
    shape: list[bool | int] = []  # whether the results are a tuple, and how many they are

    class Applied(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> tuple[torch.Tensor, ...]:
            out, kept = forward(*args)
            results = out if isinstance(out, tuple | list) else (out,)
            shape[:] = isinstance(out, tuple | list), len(results)
            return *results, *(x.view_as(x) for x in kept)  # what is kept may be a result

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            kept = output[shape[1] :]
            ctx.mark_non_differentiable(*kept)
            ctx.save_for_backward(*kept)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return backward(*grads[: shape[1]], *ctx.saved_tensors)

    found = Applied.apply(*args)  # type: ignore[no-untyped-call]
    return found[: shape[1]] if shape[0] else found[0]


def _mask(
    block_mask: tuple[Any, ...], indices: Sequence[torch.Tensor], buffers: Sequence[Captured]
) -> torch.Tensor | None:
    """What may be attended, [B, H, L, S] by broadcasting; None: everything."""
    mask_mod = block_mask[-1]
    rows, columns = block_mask[_KV_INDICES].shape[-2:]
    if not _is_noop(mask_mod):
        mask = _over(mask_mod, (), buffers)(*indices, *buffers)
        return mask if columns == 1 or _is_linear(mask_mod) else mask & _between(block_mask, indices)
    if columns == 1 and rows == 1:
        return None  # one block that holds everything, as torch makes it where no mask is given
    return _of_blocks(block_mask, indices)


def _between(block_mask: tuple[Any, ...], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Keys from the first to the last block listed for a block of queries: what loops over keys are bounded by.

    The lists are those of the mask function (`create_block_mask`), so nothing else is masked than by that.
    """
    first, last = (_by_queries(x, block_mask, indices) for x in _ends(block_mask))
    return (indices[3] >= first) & (indices[3] < last)


def _ends(block_mask: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that a block of queries sees and the end of the last one, [B or 1, H or 1, blocks] each; none if
    that is not after the first."""
    size, indices = block_mask[-2], block_mask[_KV_INDICES]
    columns = torch.arange(indices.shape[-1], device=indices.device)
    live = columns < block_mask[_KV_BLOCKS][..., None]
    first, last = torch.where(live, indices, len(columns)), torch.where(live, indices, -1)
    if block_mask[_FULL_BLOCKS] is not None:
        live, full = columns < block_mask[_FULL_BLOCKS][..., None], block_mask[_FULL_INDICES]
        first, last = (
            torch.where(live, torch.minimum(first, full), first),
            torch.where(live, torch.maximum(last, full), last),
        )
    return (first * size).amin(-1), ((last + 1) * size).amax(-1)


def _by_queries(x: torch.Tensor, block_mask: tuple[Any, ...], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """What each block of queries has, at each query: [B or 1, H or 1, blocks] -> [B or 1, H or 1, L, 1]."""
    b, h, q, _ = indices
    b = b[:, None, None] if x.shape[0] > 1 else torch.zeros_like(b[:1])[:, None, None]
    h = h[:, None] if x.shape[1] > 1 else torch.zeros_like(h[:1])[:, None]
    return x[b, h, q // block_mask[-3]][..., None]


def _is_noop(mask_mod: Mod) -> bool:
    """Whether a mask function is torch's `noop_mask`, or its graph makes ones of nothing it is given, as that does."""
    graph = getattr(mask_mod, "graph", None)
    if graph is None:
        return mask_mod is noop_mask
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    return [n.target for n in calls] == ["new_ones"]


def _is_linear(mask_mod: Mod) -> bool:
    """Whether a mask only compares sums of positions and of what it captured, all of which have to hold: such masks
    bound loops as they are."""
    graph = getattr(mask_mod, "graph", None)
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")] if graph is not None else []
    return bool(calls) and all(n.op == "call_function" and n.target in _LINEAR for n in calls)


def _of_blocks(block_mask: tuple[Any, ...], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Masks of block lists without a mask function: all of the blocks listed. [B or 1, H or 1, L, S]."""
    q_size, kv_size = block_mask[-3], block_mask[-2]
    listed = _listed(block_mask[_KV_BLOCKS], block_mask[_KV_INDICES])
    if block_mask[_FULL_BLOCKS] is not None:
        listed = listed | _listed(block_mask[_FULL_BLOCKS], block_mask[_FULL_INDICES])
    b, h, q, kv = indices
    rows, columns = q[:, None] // q_size, kv // kv_size
    b = b[:, None, None, None] if listed.shape[0] > 1 else torch.zeros_like(b[:1])[:, None, None, None]
    h = h[:, None, None] if listed.shape[1] > 1 else torch.zeros_like(h[:1])[:, None, None]
    return listed[b, h, rows, columns]


def _listed(count: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Which blocks of keys the first `count` of each row's indices name: [..., rows] -> [..., rows, blocks of keys]."""
    columns = torch.arange(indices.shape[-1], device=indices.device)
    live = columns < count[..., None]
    return ((indices[..., None] == columns) & live[..., None]).any(-2)


def _laid_out(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A result whose axes follow each other in memory as the query's do (the last one innermost), as torch's do."""
    order = sorted(range(3), key=lambda n: query.stride()[n], reverse=True)
    if order == [0, 1, 2]:
        return out
    axes = [*order, 3]
    return out.permute(axes).contiguous().permute([axes.index(n) for n in range(4)])


__all__ = ["flex_attention", "flex_operator"]
