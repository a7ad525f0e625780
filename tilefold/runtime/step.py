"""The protocol of a step of a compiled program.

A step reads tensors by the program's names and adds its results under theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tilefold.tensor.sizes import Shape

#: Name, dtype and shape of what a step makes.
Result = tuple[str, torch.dtype, Shape]
#: Axis of stride 1 of each tensor that a kernel reads; None where there is none, or it is not known.
Units = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """What was generated for a step: grid and tile kernel in text form, and the source in `language`; empty for a
    library call."""

    grid: str = ""
    tile: str = ""
    source: str = ""
    library: bool = False
    language: str = ""


#: Of what a library computes.
LIBRARY = Code(library=True)


def handed_over(tensors: dict[str, torch.Tensor], name: str, y: torch.Tensor, *, packed: bool = True) -> None:
    """Add what a library made to `tensors`, or write it into what is there. packed: what is added is contiguous."""
    target = tensors.get(name)
    if target is None:
        tensors[name] = y.contiguous() if packed else y
    else:
        target.copy_(y)


class Step(Protocol):
    """One call of a compiled program. `reads`: tensors by name; `results`: what it adds to them; `members`: the
    program's statements that it computes."""

    @property
    def name(self) -> str: ...
    @property
    def members(self) -> tuple[str, ...]: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def results(self) -> tuple[Result, ...]: ...

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Add the results; where `tensors` has one already (any strides), it is written into that."""

    def code(self, units: Mapping[str, int | None]) -> Code:
        """What runs, for the axes of stride 1 of these tensors (others: the last)."""
