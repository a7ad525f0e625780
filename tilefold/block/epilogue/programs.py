"""The block programs of kernels found by the laws, and what each of them is.

A kernel is described in CODA's terms: the product, the primitives of its epilogue (section 3.1:
elementwise maps, pairs, vectors, tiles, partial reductions), and which of the paper's kernels 1-10
(appendix C.1) it is an instance of, judged by those primitives alone.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.block.epilogue.kernels import Kernels
from tilefold.block.fuse import FusedKernel, fuse_group
from tilefold.block.group import Group
from tilefold.tensor.analysis import Graph


def block_programs(found: Kernels) -> tuple[FusedKernel, ...]:
    """One block program a kernel (two where a fold is split), in execution order."""
    p = replace(found.program, sizes={**found.program.sizes, "unit": Const(1, DType.I64)})
    g = Graph.of(p)
    return tuple(b for k in found.kernels for b in fuse_group(g, Group(k.members, k.parallel)))
