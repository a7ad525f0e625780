"""`tilefold tune library`: times the library's products and convolutions over a grid, for the planner.

The grid: rows, columns and depths of products in steps of four from 16 to 16384, without what is tiny or takes long;
small products in batches; products with a bias; convolutions of images with 1 x 1 and 3 x 3 taps. All in the types that
matrix units take, and float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import torch

from tilefold.algebra.dtypes import DType
from tilefold.plan.library_rates import Kind, LibraryRates, Sizes, Timed
from tilefold.suites.gpu.measure import Thunk, Timer

DTYPES = (DType.BF16, DType.F16, DType.F32)
SIZES = (16, 64, 256, 1024, 4096, 16384)
BATCHES, BATCHED = (8, 64, 512), (64, 256, 1024)
#: FLOP of the calls that are timed.
LEAST, MOST = 1e6, 1e12
#: Elements of an operand, or of the result, at most.
LARGEST = 1 << 28
#: Images, channels, edge of the image, taps along an edge.
CONVOLUTIONS = tuple(product((1, 32), (64, 256), (14, 56), (1, 3)))
#: Rounds and seconds of a call.
ROUNDS, SECONDS = 30, 0.02


def grid(dtypes: Iterable[DType] = DTYPES) -> Iterator[tuple[Kind, DType, Sizes]]:
    """Every call that is timed."""
    for dtype in dtypes:
        for rows, cols, depth in product(SIZES, repeat=3):
            yield from _worth("mm", dtype, Sizes(1, rows, cols, depth))
            if rows >= SIZES[2]:
                yield from _worth("addmm", dtype, Sizes(1, rows, cols, depth))
        for batch, rows, cols, depth in product(BATCHES, BATCHED, BATCHED, (64, 128, 1024)):
            yield from _worth("bmm", dtype, Sizes(batch, rows, cols, depth))
        for images, channels, edge, taps in CONVOLUTIONS:
            yield from _worth("conv", dtype, Sizes(1, images * edge * edge, channels, channels * taps * taps))


def _worth(kind: Kind, dtype: DType, s: Sizes) -> Iterator[tuple[Kind, DType, Sizes]]:
    largest = s.batch * max(s.rows * s.depth, s.depth * s.cols, s.rows * s.cols)
    if LEAST <= s.flops <= MOST and largest <= LARGEST:
        yield kind, dtype, s


def call_of(kind: Kind, dtype: DType, s: Sizes, device: str) -> Thunk:
    """A call on operands of ones: times do not depend on values much, zeros would draw less power."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype.torch_dtype, device=device)

    if kind == "conv":
        images, channels, edge, taps = next(
            c for c in CONVOLUTIONS if (c[0] * c[2] ** 2, c[1], c[1] * c[3] ** 2) == (s.rows, s.cols, s.depth)
        )
        x, w = ones(images, channels, edge, edge), ones(channels, channels, taps, taps)
        return lambda: torch.nn.functional.conv2d(x, w, padding=taps // 2)
    lead = (s.batch,) if kind == "bmm" else ()
    a, b, c = ones(*lead, s.rows, s.depth), ones(*lead, s.depth, s.cols), ones(s.cols)
    calls: dict[str, Thunk] = {
        "mm": lambda: torch.mm(a, b),
        "bmm": lambda: torch.bmm(a, b),
        "addmm": lambda: torch.addmm(c, a, b),
    }
    return calls[kind]


def measured(
    timer: Timer,
    device: str,
    name: str,
    *,
    of: Iterable[tuple[Kind, DType, Sizes]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LibraryRates:
    """Time the calls on a device (its name is the table's). A call that the library refuses is left out."""
    points = []
    for kind, dtype, s in tuple(grid() if of is None else of):
        progress(f"{kind} {dtype.value} {s.batch} x {s.rows} x {s.cols} x {s.depth}")
        try:
            ready = timer.ready(call_of(kind, dtype, s, device))
            seconds = timer.rounds({"": ready}, most=ROUNDS, budget=SECONDS)[""].median
        except (RuntimeError, NotImplementedError):  # of a type or size that the library does not take
            continue
        if seconds > 0:
            points.append(Timed(kind, dtype, s, seconds))
    versions = (("torch", torch.__version__), ("cuda", str(torch.version.cuda)))
    return LibraryRates(name, tuple(points), versions, timer.policy)
