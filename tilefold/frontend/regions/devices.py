"""The one device that a region computes on."""

from __future__ import annotations

import torch

from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.create import OF_SIZES
from tilefold.frontend.regions.extract import Extracted
from tilefold.frontend.regions.partition import is_host_number


def constant_elsewhere(part: Extracted) -> bool:
    """Whether a region reads no tensor, and is not on a CPU: nothing tells its kernels which device they run on."""
    made = [n.meta.get("val") for n in part.results]
    of_nothing = not any(map(_is_read, part.module.graph.find_nodes(op="placeholder")))
    return of_nothing and any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in made)


def _is_read(n: torch.fx.Node) -> bool:
    """Whether a result has elements of it, and not its sizes alone."""
    todo, seen = [n], {n}
    while todo:
        at = todo.pop()
        if at.op == "output":
            return True
        if at.target not in OF_SIZES:
            new = at.users.keys() - seen
            todo += new
            seen |= new
    return False


def numbers_elsewhere(part: Extracted) -> dict[torch.fx.Node, torch.device]:
    """Arguments of a region on a GPU that are tensors of one element on the CPU, and the device that they belong on.

    PyTorch takes such tensors for numbers, whatever device the others are on: a Python float that changed between
    calls arrives so.
    """
    tensors = [n.meta["val"] for n in (*part.inputs, *part.results) if isinstance(n.meta.get("val"), torch.Tensor)]
    others = {v.device for v in tensors if v.device.type != "cpu"}
    if len(others) != 1:
        return {}
    (device,) = others
    return {n: device for n in part.inputs if is_host_number(n)}


def device_of(part: Extracted) -> str:
    """The one kind of device that a region computes on. UnsupportedError: several, or one without a back end."""
    numbers = numbers_elsewhere(part)
    values = [n.meta.get("val") for n in (*part.inputs, *part.results) if n not in numbers]
    found = {v.device for v in values if isinstance(v, torch.Tensor)}
    if len(found) > 1:
        raise UnsupportedError(f"tensors of {', '.join(sorted(map(str, found)))} in one region", hint="move them first")
    kind = next(iter(found)).type if found else "cpu"
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"there is no back end for {kind}")
    return kind
