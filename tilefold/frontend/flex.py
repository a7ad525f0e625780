"""`tilefold.flex_attention`: torch's `flex_attention` compiled by Tilefold, with the same arguments and results.

Nothing here knows attention: the call becomes plain operators (`frontend.capture.flex`), and the fold, its masks and
its gradient are derived from them. What torch leaves out is covered too: gradients on a CPU, and maxima.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    _create_empty_block_mask,
    _identity,
)

from tilefold.errors import TilefoldError
from tilefold.frontend.capture.flex import flex_attention as as_operators
from tilefold.frontend.capture.flex import flex_operator
from tilefold.frontend.fuse import Fused, transformed

Mod = Callable[..., torch.Tensor]
#: Functions of scores and masks whose compiled attention is kept, a few for each combination of dtypes and devices.
KEPT = 256
#: torch's name for the mask function of a mask that was sliced, which raises (not in every version).
SLICED = "_sliced_mask_mod_error"
#: How deep functions in closures of functions are looked at to tell two apart: `and_masks(or_masks(a, b), c)` is two.
DEPTH = 4


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """softmax(score_mod(q k^T scale)) v, as `torch.nn.attention.flex_attention.flex_attention`; differentiable.

    query: [B, Hq, L, E]; key: [B, H, S, E]; value: [B, H, S, Ev]; result [B, Hq, L, Ev]. Hq is a multiple of H with
    `enable_gqa`, else H; keys and values of batch 1 serve every batch if the mask is given. `score_mod(score, b, h, q,
    kv)` and `block_mask.mask_mod(b, h, q, kv)` are functions of numbers; tensors that they capture get gradients.
    scale: E ** -0.5 if None. A row that attends nothing is 0, and its logarithm -inf.

    return_aux: `AuxRequest(lse=, max_scores=)`; the result then is (out, AuxOutput), of [B, Hq, L] each: the natural
    logarithms of the rows' sums of exponentials and the rows' largest scores. return_lse: the older (out, lse).
    kernel_options is accepted and has no effect here: kernels are planned.

    Of a block mask, `mask_mod` is the truth; its lists of blocks count only where it masks nothing
    (`BlockMask.from_kv_blocks` without a function). Called in a graph that another compiler makes, it is torch's own
    operator there. TilefoldError: shapes that do not fit; a mask of other lengths; an operator in `score_mod` or
    `mask_mod` that is not covered.
    """
    _check(query, key, value, block_mask, enable_gqa)
    if return_lse and return_aux is not None:
        raise TilefoldError(
            "return_lse and return_aux are given", hint="return_aux=AuxRequest(lse=True) is the newer one"
        )
    if score_mod is not None and not callable(score_mod):
        raise TilefoldError(
            f"score_mod is {type(score_mod).__name__}", hint="a function of the score and its indices, or None"
        )
    if isinstance(scale, str | list | tuple):
        raise TilefoldError(f"scale is {type(scale).__name__}", hint="a number, or None")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wanted = (return_lse if return_aux is None else return_aux.lse, return_aux is not None and return_aux.max_scores)
    if torch.compiler.is_compiling():
        attend: Callable[..., Any] = _attention
    else:
        attend = _compiled(identities(score_mod), identities(block_mask and block_mask.mask_mod))
    out, lse, largest = attend(query, key, value, score_mod, block_mask, scale, *wanted)
    if return_aux is not None:
        return out, AuxOutput(lse, largest)
    return (out, lse) if return_lse else out


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float,
    lse: bool,
    largest: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What Dynamo captures."""
    mask = _create_empty_block_mask(query, key) if block_mask is None else block_mask
    return operator(query, key, value, score_mod, mask.as_tuple(), scale, lse, largest)


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod,
    scale: float,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with a mask function alone, and its logarithms, in a function that Dynamo captures."""
    mask = (*_create_empty_block_mask(query, key).as_tuple()[:-1], mask_mod)
    return operator(query, key, value, score_mod, mask, scale, lse, False)[:2]


def operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask: tuple[Any, ...],
    scale: float,
    lse: bool,
    largest: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """torch's operator, which gives logarithms and maxima to base 2, with natural ones where they are wanted.

    Under transformations of functions and dispatch modes, of which torch's has no rule, the operators that it means.
    """
    if not torch.compiler.is_compiling() and transformed():
        attend: Callable[..., Any] = as_operators
    else:
        attend = flex_operator
    options = {
        "BACKEND": "AUTO",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": lse or (torch.is_grad_enabled() and query.device.type != "cpu"),  # as torch asks for it
        "OUTPUT_MAX": largest,
    }
    mod = _identity if score_mod is None else score_mod
    out, sums, tops = attend(query, key, value, mod, mask, scale, options)
    return out, sums * math.log(2) if lse else None, tops * math.log(2) if largest else None


@functools.lru_cache(maxsize=KEPT)
def _compiled(score_mod: Hashable, mask_mod: Hashable) -> Fused[..., Any]:
    """The compiled attention of functions: one each, because Dynamo limits how often one function is compiled."""
    return Fused(_attention)


def identities(fn: Any, depth: int = DEPTH) -> Hashable:
    """What tells functions apart that Dynamo should not count as one: their code, and that of functions they hold."""
    if isinstance(fn, functools.partial):
        return "partial", identities(fn.func, depth)
    if isinstance(fn, tuple | list):
        return tuple([identities(f, depth) for f in fn])
    code = getattr(fn, "__code__", None)
    if code is None or depth == 0:
        return str(type(fn))
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or () if _filled(c)]
    held = [c for c in cells if callable(c) or isinstance(c, tuple | list)]
    return code, tuple([identities(c, depth - 1) for c in held])


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that its function has not bound yet
        return False


def check_tensors(query: object, key: object, value: object) -> None:
    """TilefoldError for queries, keys or values that are no tensors."""
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        kinds = f"{type(query).__name__}, {type(key).__name__} and {type(value).__name__}"
        raise TilefoldError(f"query, key and value are {kinds}", hint="three tensors")


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    """TilefoldError for arguments that make no attention."""
    check_tensors(query, key, value)
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TilefoldError(
            f"the block mask is {type(block_mask).__name__}",
            hint="torch.nn.attention.flex_attention.create_block_mask makes one of a function",
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.is_nested or key.is_nested or value.is_nested:
        raise TilefoldError(
            "flex_attention takes no nested tensors", hint="tilefold.varlen_attention takes ragged batches"
        )
    if not (query.dim() == key.dim() == value.dim() == 4):
        raise TilefoldError(f"flex_attention takes tensors [batch, heads, length, size], not {shapes}")
    if query.dtype != key.dtype or query.dtype != value.dtype or not query.is_floating_point():
        found = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise TilefoldError(f"query, key and value are {found}", hint="one floating type for all three")
    if not (query.device == key.device == value.device):
        raise TilefoldError(f"tensors are on {query.device}, {key.device} and {value.device}", hint="move them to one")
    if query.shape[-1] != key.shape[-1] or key.shape[:3] != value.shape[:3]:
        raise TilefoldError(f"sizes do not fit: {shapes}", hint="keys are as long as queries; keys and values as many")
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not enable_gqa:
        raise TilefoldError(f"{heads} heads of queries, {shared} of keys", hint="enable_gqa=True shares keys")
    if shared == 0 or heads % shared != 0:
        raise TilefoldError(f"{heads} heads of queries cannot share {shared} of keys", hint="a multiple of them can")
    if query.shape[0] != key.shape[0] and (block_mask is None or key.shape[0] != 1):
        raise TilefoldError(f"batches do not fit: {shapes}", hint="keys of batch 1 serve all if a block_mask is given")
    if block_mask is not None:
        _check_mask(query, key, block_mask)


def _check_mask(query: torch.Tensor, key: torch.Tensor, mask: BlockMask) -> None:
    if getattr(mask.mask_mod, "__name__", "") == SLICED:
        raise TilefoldError(
            "the block mask was sliced, which takes its mask_mod away", hint="set it: sliced.mask_mod = whole.mask_mod"
        )
    if mask.kv_num_blocks.device != query.device:
        raise TilefoldError(
            f"the block mask is on {mask.kv_num_blocks.device}, query on {query.device}", hint="mask.to()"
        )
    lengths, given = (query.shape[-2], key.shape[-2]), tuple(mask.shape[-2:])
    if mask.BLOCK_SIZE[0] < 1 << 30 and lengths != given:  # torch's mask of one block that holds everything has 2 ** 30
        raise TilefoldError(
            f"the block mask is for lengths {given}, not {lengths}",
            hint="make one for these lengths: torch.nn.attention.flex_attention.create_block_mask",
        )
