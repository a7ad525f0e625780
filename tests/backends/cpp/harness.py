"""Running a kernel's text in C++ and in the interpreter, and comparing what they write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from tilefold.backends.cpp.launch import CppKernel
from tilefold.runtime.executor import build_cached
from tilefold.tile.interp import run_kernel
from tilefold.tile.ir import Kernel
from tilefold.tile.text import parse
from tilefold.tile.verify import verify


@cache
def compiled(text: str) -> CppKernel:
    return CppKernel(verify(parse(text)), build_cached)


def outputs(kernel: Kernel) -> tuple[str, ...]:
    return tuple(t.name for t in kernel.tensors if t.role != "in")


def compare(text: str, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], **tolerance: float) -> None:
    """Both write the same, up to rounding; NaN in the same places."""
    fast = compiled(text)
    names = outputs(fast.kernel)
    want = {n: t.clone() if n in names else t for n, t in tensors.items()}
    run_kernel(fast.kernel, want, syms)
    fast(tensors, syms)
    for n in names:
        torch.testing.assert_close(_plain(tensors[n]), _plain(want[n]), equal_nan=True, **tolerance)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


def hostile(*shape: int, huge: float = 1e38, tiny: float = 1e-40) -> torch.Tensor:
    """Random values with infinities, NaN, zeros of both signs, ties, huge and tiny ones among them."""
    x = torch.randn(*shape)
    flat = x.view(-1)
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, huge, -huge, tiny, 1.0, 1.0, -1.0])
    if flat.numel():
        at = torch.randint(0, flat.numel(), (max(1, flat.numel() // 5),))
        flat[at] = specials[torch.randint(0, len(specials), at.shape)]
    return x


def strided(x: torch.Tensor, *order: int) -> torch.Tensor:
    """The same values in memory ordered by `order`, every second element of a larger tensor."""
    wide = torch.zeros(*[x.shape[o] for o in order], 2, dtype=x.dtype)[..., 0]
    back = [order.index(n) for n in range(x.ndim)]
    out = wide.permute(back)
    return out.copy_(x)
