"""`tilefold.varlen_attention`: attention over sequences of different lengths that are packed one after the other.

The names and shapes are those of `torch.nn.attention.varlen.varlen_attn` (and of flash_attn_varlen_func). The keys of
sequence b are rows `cu_seq_k[b] + j` of the packed keys, or page `block_table[b, j // page]` of a pool of pages; what
is beyond a sequence's end is masked. Of the derivation nothing is new: this is `flex_attention` with operands that are
read through indices, and nothing of the scores' size is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest

from tilefold.errors import TilefoldError
from tilefold.frontend.flex import KEPT, check_tensors, identities, masked
from tilefold.frontend.fuse import Fused, transformed

Mod = Callable[..., torch.Tensor]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    score_mod: Mod | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention within each of N packed sequences; differentiable.

    query: [Tq, Hq, E]; key: [Tk, H, E]; value: [Tk, H, Ev]; result [Tq, Hq, Ev]. Sequence b has the queries cu_seq_q[b]
    to cu_seq_q[b + 1] and the keys cu_seq_k[b] to cu_seq_k[b + 1], [N + 1] integers each; max_q and max_k are the most
    of any sequence, which is not checked. Rows of the result that belong to no sequence are 0.

    window_size: (left, right) keys that a query sees beside its own, -1 for all; the last query is aligned with the
    last key. causal: right = 0. scale: E ** -0.5 if None. enable_gqa: Hq may be a multiple of H. score_mod(score, b, h,
    q, kv): as `flex_attention`'s, where b is the sequence, and q and kv are positions in it.

    block_table: [N, pages]; keys then are pages [P, page, H, E], values [P, page, H, Ev], and position j of sequence b
    is at [block_table[b, j // page], j % page]. seqused_k: [N], how many keys a sequence has (needed with block_table).
    return_aux: `AuxRequest(lse=True)` adds the logarithms of the rows' sums, [Tq, Hq]. TilefoldError: sizes or types
    that do not fit, an operator in `score_mod` that is not covered.
    """
    _check(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window_size[0], 0 if causal else window_size[1]
    lse = return_aux is not None and return_aux.lse
    if return_aux is not None and return_aux.max_scores:
        raise TilefoldError("varlen_attention returns no maxima", hint="return_aux=AuxRequest(lse=True)")
    attend: Callable[..., Any] = _packed if torch.compiler.is_compiling() else _compiled(identities(score_mod))
    tables = (cu_seq_q, cu_seq_k, seqused_k, block_table)
    out, sums = attend(query, key, value, *tables, max_q, max_k, left, right, scale, score_mod, lse)
    return (out, sums) if lse else out


@functools.lru_cache(maxsize=KEPT)
def _compiled(score_mod: Hashable) -> Fused[..., Any]:
    """The compiled function of a score function: one each, as for `flex_attention`."""
    return Fused(_packed)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None,
    used: torch.Tensor | None,
    table: torch.Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float,
    score_mod: Mod | None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `flex_attention` of [N, H, max_q, E] and [N, H, max_k, E], which are views of what is packed."""
    long_q = cu_q[1:] - cu_q[:-1]
    if used is None:
        assert cu_k is not None
        used = cu_k[1:] - cu_k[:-1]
    shift = used - long_q
    q = _moved(query, cu_q, max_q, True)
    if table is None:
        assert cu_k is not None
        k, v = (_moved(x, cu_k, max_k, True) for x in (key, value))
    else:
        k, v = (_of_pages(x, table, max_k) for x in (key, value))

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        live = (j < used[b]) & (i < long_q[b])
        if right >= 0:
            live = live & (j <= i + (shift[b] + right))
        if left >= 0:
            live = live & (j >= i + (shift[b] - left))
        return live

    out, sums = masked(q, k, v, score_mod, mask, scale, lse)
    total = query.shape[0]
    return _moved(out, cu_q, total, False), None if sums is None else _moved(sums, cu_q, total, False)


class _Moved(torch.autograd.Function):
    """`_apart` or `_together` to an extent; each is the other's adjoint, where torch's own would scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, starts: torch.Tensor, extent: int, apart: bool) -> torch.Tensor:
        ctx.save_for_backward(starts)
        ctx.before, ctx.apart = x.shape[0 if apart else 2], apart
        return _apart(x, starts, extent) if apart else _together(x, starts, extent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (starts,) = ctx.saved_tensors
        back = _together if ctx.apart else _apart
        return back(gradient, starts, ctx.before), None, None, None


def _moved(x: torch.Tensor, starts: torch.Tensor, extent: int, apart: bool) -> torch.Tensor:
    """The same; transformations of functions take the operators themselves, and so derive the gradient."""
    if not torch.compiler.is_compiling() and transformed():
        return _apart(x, starts, extent) if apart else _together(x, starts, extent)
    return _Moved.apply(x, starts, extent, apart)


def _apart(x: torch.Tensor, starts: torch.Tensor, most: int) -> torch.Tensor:
    """[T, H, E] -> [N, H, most, E], 0 beyond a sequence's end."""
    at = starts[:-1, None] + torch.arange(most, device=x.device)
    live = (at < starts[1:, None]).view(*at.shape, *[1] * (x.dim() - 1))
    return torch.where(live, x[at.clamp(max=x.shape[0] - 1)], 0.0).transpose(1, 2)


def _together(x: torch.Tensor, starts: torch.Tensor, total: int) -> torch.Tensor:
    """[N, H, most, ...] -> [total, H, ...], 0 for rows of no sequence."""
    t = torch.arange(total, device=x.device)
    b = (starts[1:-1, None] <= t).sum(0)
    i = t - starts[b]
    live = ((i >= 0) & (t < starts[-1])).view(-1, *[1] * (x.dim() - 2))
    return torch.where(live, x[b, :, i.clamp(0, x.shape[2] - 1)], 0.0)


def _of_pages(x: torch.Tensor, table: torch.Tensor, most: int) -> torch.Tensor:
    """[P, page, H, E] -> [N, H, most, E]."""
    j = torch.arange(most, device=x.device)
    return x[table[:, j // x.shape[1]], j % x.shape[1]].transpose(1, 2)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None,
    used: torch.Tensor | None,
    table: torch.Tensor | None,
    enable_gqa: bool,
) -> None:
    """TilefoldError for arguments that make no attention."""
    check_tensors(query, key, value)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    rank = 3 if table is None else 4
    if query.dim() != 3 or key.dim() != rank or value.dim() != rank:
        wanted = "[Tk, heads, size]" if table is None else "[pages, page, heads, size] beside a block_table"
        raise TilefoldError(f"varlen_attention takes queries [Tq, heads, size] and keys {wanted}, not {shapes}")
    if query.dtype != key.dtype or query.dtype != value.dtype or not query.is_floating_point():
        found = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise TilefoldError(f"query, key and value are {found}", hint="one floating type for all three")
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise TilefoldError(f"sizes do not fit: {shapes}", hint="keys are as long as queries; keys and values as many")
    heads, shared = query.shape[1], key.shape[-2]
    if heads != shared and not enable_gqa:
        raise TilefoldError(f"{heads} heads of queries, {shared} of keys", hint="enable_gqa=True shares keys")
    if shared == 0 or heads % shared != 0:
        raise TilefoldError(f"{heads} heads of queries cannot share {shared} of keys", hint="a multiple of them can")
    if table is not None and used is None:
        raise TilefoldError("pages say not how many keys a sequence has", hint="seqused_k=lengths, [N]")
    if table is None and cu_k is None:
        raise TilefoldError("without a block_table, cu_seq_k says where sequences of keys begin")
    count = cu_q.shape[0] - 1
    given = (("cu_seq_k", cu_k, count + 1), ("seqused_k", used, count), ("block_table", table, count))
    for name, x, n in (("cu_seq_q", cu_q, count + 1), *given):
        if x is not None and (x.shape[0] != n or x.dim() != (2 if x is table else 1) or x.is_floating_point()):
            raise TilefoldError(f"{name} is {tuple(x.shape)} of {x.dtype} for {count} sequences", hint=f"{n} integers")
