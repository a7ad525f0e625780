"""`tilefold::put` and `tilefold::scattered`: parts of a tensor are written where they lie, and the tensor given back.

What a graph knows of the order of writes and reads is which values it gives to which operators, so that a reader of a
written tensor is given the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define("put(Tensor(a!) x, SymInt[] cuts, Tensor?[] at, Tensor values) -> Tensor(a!)")
_LIBRARY.define("scattered(Tensor(a!) x, int dim, Tensor index, Tensor values) -> Tensor(a!)")


@torch.library.impl(_LIBRARY, "put", "CompositeExplicitAutograd")
def _put(x: torch.Tensor, cuts: Sequence[int], at: Sequence[torch.Tensor | None], values: torch.Tensor) -> torch.Tensor:
    """cuts: (dim, start, end, step) after (dim, start, end, step). at: indices into that part; none: it is values."""
    part = x
    for k in range(0, len(cuts), 4):
        part = torch.ops.aten.slice.Tensor(part, *cuts[k : k + 4])
    if at:
        torch.ops.aten.index_put_.default(part, list(at), values)
    else:
        part.copy_(values)
    return x


@torch.library.impl(_LIBRARY, "scattered", "CompositeExplicitAutograd")
def _scattered(x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.scatter_(dim, index, values)


torch.library.register_fake("tilefold::put", lambda x, cuts, at, values: x, lib=_LIBRARY)
torch.library.register_fake("tilefold::scattered", lambda x, dim, index, values: x, lib=_LIBRARY)
put_op = torch.ops.tilefold.put.default
scattered_op = torch.ops.tilefold.scattered.default
