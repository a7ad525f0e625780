"""Steps that torch's libraries compute: plain matrix products, and 8-bit ones with scales in the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, loads
from tilefold.plan.scaled import ScaledProduct
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import shape_function

ONE = Const(1, DType.I64)
#: From a tensor to the part of it that a step reads.
Part = Callable[[torch.Tensor, Mapping[str, int]], torch.Tensor]


def part_of(load: Load, sizes: Mapping[str, Expr]) -> Part:
    """The part that a load of plain indices and zeros reads: `x[:, :300] @ w` reads 300 columns of x."""
    shape = shape_function([sizes[ix.dim] if isinstance(ix, Index) else ONE for ix in load.index])

    def part(x: torch.Tensor, syms: Mapping[str, int]) -> torch.Tensor:
        wanted = shape(syms)
        return x if x.shape == wanted else x[tuple([slice(n) for n in wanted])]

    return part


class LibraryStep:
    """A matrix product that torch's library computes: mm where it is one, else einsum. sizes: of the dims."""

    def __init__(self, c: Compute, sizes: Mapping[str, Expr]):
        self.compute = c
        self.name = c.name
        self.loads = tuple(ld for ld in getattr(c.body, "args", ()) if isinstance(ld, Load))
        self.reads = tuple(ld.tensor for ld in self.loads)
        self._parts = tuple(part_of(ld, sizes) for ld in self.loads)
        letters: dict[str, str] = {}
        for d in (*c.dims, *c.rdims):
            letters.setdefault(d, chr(ord("a") + len(letters)))
        left, right = ("".join(letters[ix.dim] for ix in ld.index if isinstance(ix, Index)) for ld in self.loads)
        out = "".join(letters[d] for d in c.dims)
        self.equation = f"{left},{right}->{out}"
        self._plain = len(left) == len(right) == len(out) == 2
        # rows of the result come from the first operand, which may be either of the two
        self._swap = self._plain and out[0] in right
        first, second = (right, left) if self._swap else (left, right)
        self._turn = (self._plain and first[0] != out[0], self._plain and second[1] != out[1])

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        a, b = (part(tensors[t], syms) for part, t in zip(self._parts, self.reads, strict=True))
        dtype = self.compute.dtype.torch_dtype
        target = tensors.get(self.name)
        if self._plain and a.dtype is b.dtype is dtype:
            if self._swap:
                a, b = b, a
            x, y = a.T if self._turn[0] else a, b.T if self._turn[1] else b
            if target is None:
                tensors[self.name] = torch.mm(x, y)
            else:
                torch.mm(x, y, out=target)
            return
        kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), dtype)
        out = torch.einsum(self.equation, a.to(kind), b.to(kind)).to(dtype)
        if target is None:
            tensors[self.name] = out.contiguous()  # einsum may return a permuted view; others count on row-major
        else:
            target.copy_(out)


class ScaledStep:
    """An 8-bit product with row and column scales in the library's epilogue (`plan.scaled`)."""

    def __init__(self, scaled: ScaledProduct, p: Program):
        self.scaled = scaled
        self.name = scaled.out
        self.reads = (scaled.a, scaled.b, scaled.rows, scaled.columns)
        both = [ld for c in p.body if c.name in (scaled.product, scaled.out) for ld in loads(c.body)]
        self._parts = tuple(part_of(next(ld for ld in both if ld.tensor == t), p.sizes) for t in self.reads)

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        a, b, rows, columns = (part(tensors[t], syms) for part, t in zip(self._parts, self.reads, strict=True))
        a = a if a.stride(1) == 1 else a.contiguous()
        b = b if b.stride(0) == 1 else b.T.contiguous().T
        out = torch._scaled_mm(
            a,
            b,
            scale_a=rows.reshape(-1, 1).contiguous(),
            scale_b=columns.reshape(1, -1).contiguous(),
            out_dtype=self.scaled.dtype.torch_dtype,
        )
        target = tensors.get(self.name)
        if target is None:
            tensors[self.name] = out
        else:
            target.copy_(out)
