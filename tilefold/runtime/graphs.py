"""A block graph made to run: loop programs, tile kernels, code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tilefold.block import ir
from tilefold.blockbuster.ir import Program
from tilefold.blockbuster.rules.algorithm import fuse_reductions
from tilefold.blockbuster.safety import make_safe
from tilefold.blockbuster.to_loops import to_loops
from tilefold.runtime.executor import Launch, load_kernel
from tilefold.tensor.sizes import extent
from tilefold.tile.lower import lower
from tilefold.tile.verify import verify


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """Kernels in order, ready to be called. Inputs must have their last axis contiguous."""

    program: Program
    blocks: tuple[ir.Block, ...]
    launches: tuple[Launch, ...]

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Outputs by name."""
        tensors, bound = dict(inputs), dict(syms or {})
        for b, launch in zip(self.blocks, self.launches, strict=True):
            for r in b.results:
                shape = [extent(b.sizes[d], bound) for d in r.dims]
                tensors[r.name] = torch.empty(shape, dtype=r.dtype.torch_dtype)
            launch({n: tensors[n] for n in (*(i.name for i in b.inputs), *(r.name for r in b.results))}, bound)
        return {v: tensors[v] for v in self.program.graph.outputs}


def compile_graph(p: Program, whole: Iterable[str] = ()) -> CompiledGraph:
    """Compile a block program, made safe; `whole`: dims that are one block. UnsupportedError: as `to_loops`."""
    p = make_safe(fuse_reductions(p))
    blocks = to_loops(p, whole)
    return CompiledGraph(p, blocks, tuple(load_kernel(verify(lower(b))) for b in blocks))
