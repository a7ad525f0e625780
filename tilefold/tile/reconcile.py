"""Dimension order reconciliation (Neptune, section 5.1): an access made to fit the loop order.

Array-style back ends (Triton, vectorised torch) have no index notation: every operand of an
element-wise statement must have the loop dims as axes, in the loop order. The dim order of
an access `x[e0, e1, ...]` has one entry an axis: the loop dim that indexes it, or nothing where
the index depends on no loop dim. It is brought to the loop order in three steps:

    squeeze    axes indexed by no loop dim hold one element: drop them
    permute    the rest, into the order of the loops
    unsqueeze  an axis of extent 1 for each loop dim that the access does not use

Accesses that use a loop dim twice (`x[i, i]`) or inside a formula (`x[i + j]`) have no such form
(Neptune, 5.2); the reason is returned as a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilefold.algebra.expr import Index, Load, dims_used


@dataclass(frozen=True, slots=True)
class Reconciled:
    """How a tile with the access's axes becomes one with an axis a loop dim.

    `squeezed`: axes of the access to drop. `permutation`: order of the remaining axes.
    `new_axes`: positions, in the result, of axes of extent 1. `order`: the loop dim that indexes
    each axis of the access, None for squeezed ones.
    """

    order: tuple[str | None, ...]
    squeezed: tuple[int, ...]
    permutation: tuple[int, ...]
    new_axes: tuple[int, ...]

    def apply(self, tile: torch.Tensor) -> torch.Tensor:
        """A view of `tile` (extent 1 on the squeezed axes) with the loop dims as axes."""
        kept = [a for a in range(tile.ndim) if a not in self.squeezed]
        assert all(tile.shape[a] == 1 for a in self.squeezed), (tile.shape, self)
        out = tile.permute([kept[p] for p in self.permutation] + list(self.squeezed))
        out = out.reshape(out.shape[: len(kept)])
        for axis in self.new_axes:
            out = out.unsqueeze(axis)
        return out

    def invert(self, tile: torch.Tensor) -> torch.Tensor:
        """The converse, for stores: a tile over the loop dims, laid out as the access's axes.

        Axes that `apply` would create must have extent 1.
        """
        kept = [a for a in range(tile.ndim) if a not in self.new_axes]
        assert all(tile.shape[a] == 1 for a in self.new_axes), (tile.shape, self)
        out = tile.permute(kept + list(self.new_axes)).reshape([tile.shape[a] for a in kept])
        inverse = sorted(range(len(self.permutation)), key=lambda n: self.permutation[n])
        out = out.permute(inverse)
        for axis in self.squeezed:
            out = out.unsqueeze(axis)
        return out


@dataclass(frozen=True, slots=True)
class Irreconcilable:
    """Why an access has no array form."""

    reason: str


def reconcile(access: Load, loop_dims: Sequence[str]) -> Reconciled | Irreconcilable:
    """The squeeze, permutation and unsqueeze that bring `access` to the order of `loop_dims`."""
    order: list[str | None] = []
    for axis, e in enumerate(access.index):
        used = sorted(dims_used(e) & set(loop_dims))
        if not used:
            order.append(None)
        elif isinstance(e, Index):
            if e.dim in order:
                return Irreconcilable(
                    f"{access.tensor}: axes {order.index(e.dim)} and {axis} are both indexed by {e.dim}"
                )
            order.append(e.dim)
        else:
            return Irreconcilable(f"{access.tensor}: the index of axis {axis} is a formula in {', '.join(used)}")
    kept = [d for d in order if d is not None]
    return Reconciled(
        order=tuple(order),
        squeezed=tuple(a for a, d in enumerate(order) if d is None),
        permutation=tuple(kept.index(d) for d in loop_dims if d in kept),
        new_axes=tuple(n for n, d in enumerate(loop_dims) if d not in kept),
    )
