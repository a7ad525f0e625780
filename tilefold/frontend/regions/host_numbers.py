"""Numbers that follow from sizes, beside tensors of a GPU: computed where they are read.

Of `scores * q.shape[-1] ** -0.5` with a size that is left free, PyTorch makes tensors of one element on the CPU. Left
there they would be copied to the device in every call, which CUDA graphs do not capture.
"""

from __future__ import annotations

import torch

Node = torch.fx.Node
_SCALAR = torch.ops.aten.scalar_tensor.default


def numbers_on_device(gm: torch.fx.GraphModule) -> int:
    """Have numbers that are made of no tensor, and that only tensors of the graph's one GPU are made of, computed
    there; gives how many there are."""
    devices = {v.device for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    others = [d for d in devices if d.type != "cpu"]
    if len(others) != 1:
        return 0
    (device,) = others
    made: dict[Node, None] = {}
    for n in gm.graph.nodes:
        if _is_number(n) and (n.target is _SCALAR or _of_numbers(n, made)):
            made[n] = None
    moved: list[Node] = []
    for n in reversed(made):
        if n.users and all(u in moved or _on(u, device) for u in n.users):
            moved.append(n)
    for n in moved:
        if n.target is _SCALAR:
            n.kwargs = {**n.kwargs, "device": device}
        val = n.meta["val"]
        with val.fake_mode:
            n.meta["val"] = torch.empty((), dtype=val.dtype, device=device)
    return len(moved)


def _is_number(n: Node) -> bool:
    val = n.meta.get("val")
    fake = isinstance(val, torch._subclasses.FakeTensor)
    return n.op == "call_function" and fake and val.dim() == 0 and val.device.type == "cpu"  # type: ignore[union-attr]


def _of_numbers(n: Node, made: dict[Node, None]) -> bool:
    """Whether it is an operator of elements that reads numbers like these alone."""
    pointwise = isinstance(n.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in n.target.tags or n.target is torch.ops.prims.convert_element_type.default
    )
    read = [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    return pointwise and bool(read) and all(a in made for a in read)


def _on(n: Node, device: torch.device) -> bool:
    val = n.meta.get("val")
    return n.op == "call_function" and isinstance(val, torch.Tensor) and val.device == device
