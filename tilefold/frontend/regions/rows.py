"""A part of a graph that runs over rows a chunk at a time, as one operator of the graph.

The part's body is a graph over one chunk. Of its results some are rows (written side by side), some are sums over rows
(added up). Products that sum over rows are not the body's: it hands over their operands, and the loop multiplies them
into one accumulator, so that no second tensor of a weight's size exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilefold.backends.triton import scale
from tilefold.backends.triton.build import has_triton
from tilefold.backends.triton.written import Launch

#: Most sums that are rounded to 16 bits one after the other. n of them have sqrt((n + 1) / 2) times the error of one.
MOST_ROUNDED = 6

Body = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """A result that has the rows: a tensor of `shape`, whose rows are those of chunks side by side."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Total:
    """A result that is summed over all rows: chunks give it in the type that it is summed in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Product:
    """A result sum[row] a[row, m] b[row, n]: chunks give a and b."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Result = Rows | Total | Product


@dataclass(frozen=True, eq=False)
class Loop:
    """A node's target. rows: how many there are; chunk: of a step, but for the last. sliced: for each argument, whether
    chunks read their own rows of it. bodies: graphs over one chunk, by how many rows it has. `run`: those compiled.
    """

    rows: int
    chunk: int
    sliced: tuple[bool, ...]
    results: tuple[Result, ...]
    bodies: dict[int, torch.fx.GraphModule] = field(repr=False)
    run: dict[int, Body] = field(repr=False, default_factory=dict)

    __name__ = "rows_in_chunks"

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)

    def compiled(self, compile_body: Callable[[torch.fx.GraphModule, int], Body]) -> Loop:
        """The loop over compiled bodies."""
        return replace(self, run={n: compile_body(gm, n) for n, gm in self.bodies.items()})

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        flat = [
            a.reshape(self.rows, *_rest(a, self.rows)) if cut else a for a, cut in zip(args, self.sliced, strict=True)
        ]
        made: list[torch.Tensor | None] = [None] * len(self.results)
        for start in range(0, self.rows, self.chunk):
            n = min(self.chunk, self.rows - start)
            given = [a[start : start + n] if cut else a for a, cut in zip(flat, self.sliced, strict=True)]
            body = self.run.get(n) or self.bodies[n].forward
            found = list(body(*given))
            found.reverse()
            for k, r in enumerate(self.results):
                made[k] = self._added(made[k], r, found, start, n)
        return tuple(x.view(r.shape).to(r.dtype) for x, r in zip(made, self.results, strict=True) if x is not None)

    def _added(self, made: torch.Tensor | None, r: Result, found: list[Any], start: int, n: int) -> torch.Tensor:
        x = found.pop()
        match r:
            case Rows(_, dtype):
                if n == self.rows and x.is_contiguous():
                    return x.to(dtype)
                if made is None:
                    made = x.new_empty((self.rows, *x.shape[1:]), dtype=dtype)
                made[start : start + n] = x
                return made
            case Total():
                return x if made is None else made.add_(x)
            case Product(_, dtype):
                return self._multiplied(made, x, found.pop(), dtype)

    def _multiplied(
        self, made: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """made + a^T b, in float32 where that many sums of 16 bits would lose too much."""
        wide = dtype.itemsize == 2 and self.chunks > MOST_ROUNDED
        if wide and a.device.type != "cuda":
            a, b = a.float(), b.float()
        if made is None:
            return torch.mm(a.t(), b, out_dtype=torch.float32) if wide and a.dtype.itemsize == 2 else torch.mm(a.t(), b)
        if wide and a.dtype.itemsize == 2:
            return torch.ops.aten.addmm.dtype_out(made, a.t(), b, torch.float32, out=made)
        return torch.addmm(made, a.t(), b, out=made)


def _rest(a: torch.Tensor, rows: int) -> tuple[int, ...]:
    """The extents of a tensor behind those that make up its rows."""
    n = leading(a.shape, rows)
    assert n is not None
    return tuple(a.shape[n:])


def leading(shape: Sequence[int], rows: int) -> int | None:
    """How many leading extents multiply to the number of rows; None: none do."""
    total = 1
    for k, n in enumerate(shape):
        total *= n
        if total == rows:
            return k + 1
    return None


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times a number. Where nobody else has x (what a forward saved, in a backward that is not repeated), in place:
    a weight's gradient is large, and a kernel of ours leaves it alone where the number is 1."""
    alone = x._use_count() == 1 and torch._C._storage_Use_Count(x.untyped_storage()._cdata) <= 2  # type: ignore[attr-defined]
    if not alone:
        return x * factor
    if x.is_cuda and factor.is_cuda and x.is_contiguous() and has_triton():
        with torch.cuda.device(x.device):
            return scale.run(x, factor, _units(x))
    return x.mul_(factor)


def launches(x: torch.Tensor, factor: torch.Tensor) -> Sequence[Launch]:
    """Of `scaled` in place on a GPU; the tensors may be fake ones."""
    return scale.launches(x, factor, _units(x)) if factor.is_cuda and x.is_contiguous() else ()


def _units(x: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
