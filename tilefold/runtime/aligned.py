"""Products of ragged extents (`plan.aligned`) whose sizes are only known at a call: operands are copied here."""

from __future__ import annotations

import torch

from tilefold.plan.aligned import rounded


def filled(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x, with zeros to so many rows and columns; x itself where it has them. Its unit axis stays what it is."""
    if tuple(x.shape[-2:]) == (rows, columns):
        return x
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return filled(x.mT, columns, rows).mT
    y = x.new_empty((*x.shape[:-2], rows, columns))
    y[..., : x.shape[-2], : x.shape[-1]].copy_(x)
    if columns > x.shape[-1]:
        y[..., x.shape[-1] :].zero_()
    if rows > x.shape[-2]:
        y[..., x.shape[-2] :, :].zero_()
    return y


def alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of as many matrices; one matrix that is the same for all is not copied. Matrices stay as they are."""
    if x.dim() < 3 or x.shape[0] == y.shape[0]:
        return x, y
    return (x.expand(y.shape[0], -1, -1), y) if x.shape[0] == 1 else (x, y.expand(x.shape[0], -1, -1))


def product(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None, *, deep: bool = True) -> torch.Tensor:
    """x [.., rows, depth] times y [.., depth, columns], and a bias of the columns; the rows of the result lie apart
    where columns are ragged. deep: an operand lies in memory along what is summed."""
    size, columns = x.element_size(), y.shape[-1]
    depth, wide = (rounded(n, size) for n in y.shape[-2:])
    depth = depth if deep else y.shape[-2]
    a, b = filled(x, x.shape[-2], depth), filled(y, depth, wide)
    if bias is not None and wide == columns:
        return torch.addmm(bias, a, b)
    out = (torch.bmm(*alike(a, b)) if a.dim() == 3 else torch.mm(a, b))[..., :columns]
    return out if bias is None else out + bias
