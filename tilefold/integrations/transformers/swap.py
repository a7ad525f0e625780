"""A compiled stand-in for a function of a model, which steps aside where Tilefold refuses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tilefold import config
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import Fused
from tilefold.integrations.transformers.rows import Row

Fn = Callable[..., Any]
#: Compiled functions by what they compute and the extents that are fixed: layers of a kind share one.
_fused: dict[Hashable, Fused[..., Any]] = {}


def free(x: object, *axes: int) -> None:
    """Say that these extents of a tensor change: one compiled function serves them all (but 1, which has its own)."""
    if isinstance(x, torch.Tensor):
        for axis in axes:
            torch._dynamo.maybe_mark_dynamic(x, axis)


class Attempts:
    """Runs a compiled function in place of the original, and keeps a row of the table true.

    `runner`: as `fuse` has it.
    """

    __slots__ = ("refused", "row", "runner")

    def __init__(self, row: Row, runner: str = "pipeline"):
        self.row, self.runner = row, runner
        self.refused: set[Hashable] = set()

    def fused(self, key: Hashable, make: Callable[[], Fn], *, strict: bool = True) -> Fused[..., Any]:
        """The compiled function of a key, made of the function that `make` gives if there is none.

        strict: all of it is compiled, or it is refused. Otherwise what Tilefold does not cover (random numbers) runs
        between its kernels.
        """
        whole = (key, strict, self.runner)
        found = _fused.get(whole)
        if found is None:
            found = _fused[whole] = Fused(make(), strict=strict, runner=self.runner, goal="fast")
        return found

    def run(self, situation: Hashable, compiled: Callable[[], Any], original: Callable[[], Any]) -> Any:
        """The compiled result; the original's where Tilefold refuses, now and from then on in this situation."""
        if torch.compiler.is_compiling() or situation in self.refused:
            return original()
        try:
            made = compiled()
        # Whatever is wrong in Tilefold must not stop a model that runs without it; TILEFOLD_STRICT=1 shows it.
        except Exception as err:
            if config.load().strict and not isinstance(err, TilefoldError):
                raise
            made = original()  # raises what the caller did wrong, if that was it
            said = err.message if isinstance(err, TilefoldError) else f"internal error: {type(err).__name__}: {err}"
            self.refused.add(situation)
            self.row.state, self.row.why = "left", said.splitlines()[0]
            return made
        if self.row.state == "ready":
            self.row.state = "fused"
        return made
