"""The lowering table: which ATen overloads Tilefold covers, one family a module."""

from __future__ import annotations

import torch

from tilefold.frontend import (
    ops_contract,
    ops_create,
    ops_elementwise,
    ops_index,
    ops_norm,
    ops_pool,
    ops_reduce,
    ops_view,
)
from tilefold.frontend.ops_elementwise import Lowerer

#: ATen (or prims) overload -> lowering.
TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    **ops_elementwise.TABLE,
    **ops_create.TABLE,
    **ops_view.TABLE,
    **ops_reduce.TABLE,
    **ops_contract.TABLE,
    **ops_norm.TABLE,
    **ops_pool.TABLE,
    **ops_index.TABLE,
}
#: Overloads that only rename elements of their input.
VIEWS = frozenset(ops_view.TABLE) - {
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.slice_scatter.default,
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
