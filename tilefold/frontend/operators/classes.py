"""`tilefold::existing`: classes of elements, an error where there is no such class, as indices are checked."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilefold.frontend.operators.context import Context, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.index import checker

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define("existing(Tensor at, SymInt n) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(_LIBRARY, "existing", "CompositeExplicitAutograd")
def _existing(at: torch.Tensor, n: int) -> torch.Tensor:
    torch._assert_async(((at >= 0) & (at < n)).all(), f"a class that is none of {n}")  # type: ignore[attr-defined]
    return at.clone()


torch.library.register_fake("tilefold::existing", lambda at, n: torch.empty_like(at), lib=_LIBRARY)


def one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's. What it asks of all classes beforehand, traced (two reductions, and two operators that are left to
    others), is asked of each where it is read. Not under transforms, and where data say how many classes there are."""
    unknown = isinstance(num_classes, int) and num_classes < 1
    if unknown or input.dtype is not torch.int64 or torch._C._functorch.peek_interpreter_stack() is not None:
        return F.one_hot(input, num_classes)
    at = torch.ops.tilefold.existing.default(input, num_classes)
    classes = torch.arange(num_classes, device=input.device)
    return (at.unsqueeze(-1) == classes).to(torch.int64)


def existing(ctx: Context, node: torch.fx.Node) -> Value:
    """The index, checked."""
    a = attrs(node)
    at, n, check = ctx.value(a["at"]), ctx.int_arg(a["n"]), checker()
    shape, dtype = meta_of(node)
    return ctx.map(shape, dtype, lambda i: check(at.at(i), n))


TABLE: dict[torch._ops.OpOverload, Lowerer] = {torch.ops.tilefold.existing.default: existing}
