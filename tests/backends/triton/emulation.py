"""A kernel for groups of warps, run in threads of this machine (`emulated`), beside its tile kernel in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.backends.triton import emulated
from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.launch import TritonKernel
from tilefold.tile.interp import run_kernel
from tilefold.tile.layout import usual_units

Results = dict[str, torch.Tensor]


def emulate(
    k: TritonKernel,
    change: tuple[str, str] = ("", ""),
    most: int | None = None,
    late: bool = False,
    spoil: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    **syms: int,
) -> tuple[Results, Results]:
    """The kernel's results and those of the tile kernel in float64, of random arguments.

    change: of the source, old and new. most: thread blocks, of a persistent kernel. late: see `emulated.run`. spoil:
    changes what the kernel is given, after the other had it.
    """
    sizes = k.sizes(syms)
    v = k.variant(usual_units(k.block), sizes, hopper=True, tf32=False, interpreted=False)
    assert v.rendered.groups and v.rendered.persistent == (most is not None)
    gen = torch.Generator().manual_seed(0)
    tensors = {}
    for t, shape in v.params:
        x = torch.randn(shape(syms), generator=gen)
        tensors[t.name] = (x > 0) if t.dtype is DType.BOOL else x.to(t.dtype.torch_dtype)
    wanted = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    run_kernel(v.kernel, wanted, syms, exact=True)
    spoil(tensors)
    numbers = [s for t, _ in v.params for a, s in enumerate(tensors[t.name].stride()) if a != t.unit_axis]
    numbers += [syms[n] for n in v.kernel.syms]
    counter = torch.zeros((), dtype=torch.int32)
    numbers += [emulated.Pointer(counter)] * v.rendered.draws
    maps = [emulated.Described(tensors[t], box) for t, box in v.rendered.descriptors.values()]
    given = [*(emulated.Pointer(tensors[t.name]) for t, _ in v.params), *numbers, *maps]
    blocks = math.prod(-(-sizes[t.dim] // t.tile) for t in v.rendered.grid)
    assert change[0] in v.rendered.source
    source = v.rendered.source.replace(*change, 1)
    arguments = dict(zip(v.rendered.arguments, given, strict=True))
    emulated.run(source, v.rendered.name, blocks if most is None else min(blocks, most), arguments, late)
    assert int(counter) == 0, "the counter is not put back"
    out = [t.name for t, _ in v.params if t.role == "out"]
    return {n: tensors[n].double() for n in out}, {n: wanted[n] for n in out}


def same(found: Results, exact: Results) -> None:
    """AssertionError where results of 16 bits differ from exact ones by more than rounding."""
    for n, x in exact.items():
        size = float(x[x.isfinite()].abs().max()) if bool(x.isfinite().any()) else 1.0
        torch.testing.assert_close(found[n], x, rtol=0, atol=2**-7 * size, equal_nan=True, msg=n)
