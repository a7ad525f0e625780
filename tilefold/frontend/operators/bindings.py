"""How a graph's arguments and results are a program's: what lowering finds out, and what a call needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tilefold.algebra.expr import Expr
from tilefold.tensor.ir import Program


@dataclass(frozen=True, slots=True)
class InputBinding:
    """Program input `name` is argument `position` (None: `constant`) with its axes in `order` (empty: their own), of
    which axis n is cut into extents `axes[n]`."""

    name: str
    position: int | None
    axes: tuple[tuple[Expr, ...], ...]
    constant: torch.Tensor | None = None
    order: tuple[int, ...] = ()

    @property
    def is_split(self) -> bool:
        return any(len(group) != 1 for group in self.axes)


@dataclass(frozen=True, slots=True)
class SymBinding:
    """Symbol `name` is integer argument `position`, or (axis given) an extent of tensor argument `position`."""

    name: str
    position: int
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class OutputBinding:
    """One result of the graph.

    Either argument `position`, or program result `name`, whose elements lie in memory order:
    the graph's tensor is that memory with `shape` and `strides` (elements). `gaps`: the strides are
    not those of packed memory, so the result has to be copied into them. offset: the graph's tensor is a part of that
    memory, from this element on. Neither: None.
    """

    name: str | None
    position: int | None = None
    shape: tuple[Expr, ...] = ()
    strides: tuple[Expr, ...] = ()
    gaps: bool = False
    offset: Expr | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered graph. `placeholders` counts its arguments; `raw` is the program before normalisation."""

    program: Program
    raw: Program
    inputs: tuple[InputBinding, ...]
    syms: tuple[SymBinding, ...]
    outputs: tuple[OutputBinding, ...]
    placeholders: int
    single: bool = field(default=False)
