"""The step of an attention that torch's library computes (`plan.attention`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilefold.algebra.expr import Index, Load
from tilefold.plan.attention import AttentionCall
from tilefold.runtime.library import part_of
from tilefold.runtime.step import LIBRARY, Code, Result, handed_over
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import shape_function


class AttentionStep:
    """softmax(scale q k^T) v as one call of torch's operator, which chooses the library: cuDNN's where it has the
    device, or another. Operands are viewed as [batch, heads, rows, columns]; the result has the order of memory that
    the library gives it (that of q) where only steps read it that take any strides (`packed` is false).
    """

    def __init__(self, call: AttentionCall, p: Program):
        self.call, self.name, self.members = call, call.out, call.members
        x = call
        self.reads = tuple(dict.fromkeys(ld.tensor for ld in (x.q, x.k, x.v)))
        self.dtype = x.dtype.torch_dtype
        self.results: tuple[Result, ...] = ((self.name, self.dtype, shape_function([p.sizes[d] for d in x.dims])),)
        self.packed = True
        each = ((x.q, x.rows, x.width), (x.k, x.keys, x.width), (x.v, x.keys, x.columns))
        self._operands = tuple(
            (ld.tensor, part_of(ld, p.sizes, p.shape_of(ld.tensor)), _Order(ld, (*x.batch, a, b))) for ld, a, b in each
        )
        self._batch = len(x.batch)
        made = (*x.batch, x.rows, x.columns)
        self._made = shape_function([p.sizes[d] for d in made])
        self._turn = [made.index(d) for d in x.dims]

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Compute the result; where `tensors` has one, into that."""
        q, k, v = (self._heads(order(part(tensors[t], syms))) for t, part, order in self._operands)
        y = scaled_dot_product_attention(q, k, v, is_causal=self.call.causal, scale=self.call.scale)
        if self._batch != 2:
            y = y.reshape(self._made(syms))
        handed_over(tensors, self.name, y.permute(self._turn), packed=self.packed)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """There is none of ours."""
        return LIBRARY

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """As [batch, heads, rows, columns]: of other numbers of batch axes some are flattened, or there is one of 1."""
        return x.flatten(0, self._batch - 2) if self._batch >= 2 else x[(None,) * (2 - self._batch)]


class _Order:
    """What makes of a tensor with the axes of a load one of these dims: axes read at one place are dropped."""

    def __init__(self, ld: Load, dims: Sequence[str]):
        axes = [ix.dim for ix in ld.index if isinstance(ix, Index)]
        self.order = [axes.index(d) for d in dims]
        self.places = tuple(0 if not isinstance(ix, Index) else slice(None) for ix in ld.index)
        self.all = len(axes) == len(ld.index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.all else x[self.places]).permute(self.order)
