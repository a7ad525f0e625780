"""The lowering table: which ATen overloads Tilefold covers, one family a module."""

from __future__ import annotations

import torch

from tilefold.frontend.operators import (
    bits,
    classes,
    contract,
    convolution_gradients,
    counts,
    create,
    elementwise,
    grid,
    index,
    keyed_sums,
    norm,
    pool,
    pool_gradients,
    random,
    reduce,
    resize_gradients,
    scatter,
    search,
    special,
    view,
)
from tilefold.frontend.operators.elementwise import Lowerer

#: ATen (or prims) overload -> lowering.
TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    **elementwise.TABLE,
    **special.TABLE,
    **bits.TABLE,
    **create.TABLE,
    **view.TABLE,
    **reduce.TABLE,
    **counts.TABLE,
    **classes.TABLE,
    **contract.TABLE,
    **convolution_gradients.TABLE,
    **norm.TABLE,
    **pool.TABLE,
    **pool_gradients.TABLE,
    **resize_gradients.TABLE,
    **index.TABLE,
    **grid.TABLE,
    **scatter.TABLE,
    **search.TABLE,
    **keyed_sums.TABLE,
    **random.TABLE,
}
#: Overloads that only rename elements of their input.
VIEWS = frozenset(view.TABLE) - {
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
}
#: Those among them that write what they rename.
COPIES = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten.repeat.default,
        torch.ops.aten.flip.default,
        torch.ops.aten.roll.default,
    }
)
