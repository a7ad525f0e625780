"""Attention as transformers calls it (`AttentionInterface`), in plain PyTorch and compiled as one pass.

Everything that an implementation may be asked for is one function of tensors: heads that share keys, a soft cap
(Gemma 2), a bias of positions (T5), masks that are given or causal, dropout. Which of them a call has is fixed when
it is compiled; batch and lengths are not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tilefold.errors import UnsupportedError
from tilefold.integrations.transformers.rows import Row
from tilefold.integrations.transformers.swap import Attempts, free

#: The name under which attention and its mask are registered.
NAME = "tilefold"
#: Arguments by which a model changes the scores in ways that are not built here: sinks, paged keys, weights wanted.
UNKNOWN = ("s_aux", "cache", "output_attentions")


@dataclass(frozen=True, slots=True)
class Form:
    """What is fixed of an attention. `dropout`: the chance of a weight to be dropped; 0 in inference."""

    scaling: float
    causal: bool
    softcap: float | None = None
    dropout: float = 0.0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [B, H, Sq, D], k, v: [B, G, Sk, D], G divides H -> [B, Sq, H, D].

        mask: true where a key is seen, or scores to be added; bias: scores to be added; both broadcast to
        [B, H, Sq, Sk]. keep: weights that are not dropped, [B, H, Sq, Sk]. A row that sees nothing is the mean of the
        values, as in transformers' eager attention.
        """
        shared = q.shape[1] // k.shape[1]
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        s = (q @ k.mT) * self.scaling
        if self.softcap is not None:
            s = torch.tanh(s / self.softcap) * self.softcap
        if bias is not None:
            s = s + bias
        if mask is not None and mask.dtype != torch.bool:
            s = s + mask
        elif mask is not None:
            s = torch.where(mask, s, torch.finfo(s.dtype).min)
        elif self.causal:
            rows, columns = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
            s = torch.where(rows[:, None] >= columns, s, -torch.inf)  # every row sees the first key
        w = torch.softmax(s, -1, dtype=torch.float32).to(q.dtype)
        if keep is not None:
            w = w * keep / (1 - self.dropout)
        return (w @ v).transpose(1, 2).contiguous()


#: The row of each attention module of a model that was applied to.
attempts: WeakKeyDictionary[torch.nn.Module, Attempts] = WeakKeyDictionary()


def register() -> None:
    """Make the implementation known to transformers: `attn_implementation="tilefold"`."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 (optional)
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415 (optional)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # booleans, and nothing where causal order says it all


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers calls; query: [B, H, Sq, D], key, value: [B, G, Sk, D] -> ([B, Sq, H, D], no weights)."""
    tried = attempts.get(module)
    if tried is None:
        row = Row(type(module).__name__, type(module).__name__, "attention", "ready")
        tried = attempts[module] = Attempts(row)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    form = Form(query.shape[-1] ** -0.5 if scaling is None else float(scaling), causal, softcap, float(dropout))

    def compiled() -> tuple[torch.Tensor, None]:
        unknown = [name for name in UNKNOWN if kwargs.get(name) is not None and kwargs.get(name) is not False]
        if unknown:
            raise UnsupportedError(f"attention with {' and '.join(unknown)}")
        return _compiled(tried, form, query, key, value, attention_mask, position_bias), None

    def original() -> tuple[torch.Tensor, torch.Tensor | None]:
        given = dict(kwargs, scaling=form.scaling, dropout=dropout, position_bias=position_bias, softcap=softcap)
        return _original(module)(
            module, query, key, value, _added(attention_mask, causal, query, key), **_without_none(given)
        )

    wanted = tuple(name for name in UNKNOWN if kwargs.get(name))
    return tried.run((module.training, torch.is_grad_enabled(), form, wanted), compiled, original)


def _compiled(
    tried: Attempts,
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    b, h, n, d = q.shape
    keep: torch.Tensor | None = None
    if form.causal and k.shape[2] > n:  # an empty cache of fixed length: what is behind the queries is not seen
        k, v = k[:, :, :n], v[:, :, :n]
        bias = bias[..., :n] if bias is not None else None
    if form.dropout:
        shape = (b, h, n, k.shape[2])
        keep = torch.empty(shape, dtype=torch.bool, device=q.device).bernoulli_(1 - form.dropout)
    for x in (q, k, v):
        free(x, 0, 2)
    for given in (mask, keep):
        free(given, 0, 2, 3)
    free(bias, 2, 3)
    return tried.fused((form, h, k.shape[1], d, v.shape[-1], q.dtype), lambda: _function(form))(
        q, k, v, mask, bias, keep
    )


def _function(form: Form) -> Callable[..., torch.Tensor]:
    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        return Form.__call__(form, q, k, v, mask, bias, keep)

    return attention


def _added(mask: torch.Tensor | None, causal: bool, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A mask as scores to be added, which is what eager attention takes."""
    if mask is None and causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)


def _original(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The eager attention of the file that a model is written in."""
    for owner in type(module).__mro__:
        found = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415 (optional)

    return sdpa_attention_forward  # type: ignore[no-any-return]


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
