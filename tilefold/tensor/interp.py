"""The meaning of a tensor program: slow, direct evaluation with torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate, reader, reduce_values, select_values
from tilefold.algebra.expr import Const, Sym
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import extent


def bind_syms(p: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Values of the runtime symbols, read off the inputs' shapes.

    A symbol must appear by itself as some input extent; ValueError where shapes contradict.
    """
    syms: dict[str, int] = {}
    for i in p.inputs:
        shape = inputs[i.name].shape
        if len(shape) != len(i.shape):
            raise ValueError(f"{i.name}: expected {len(i.shape)} axes, got {tuple(shape)}")
        for e, n in zip(i.shape, shape, strict=True):
            if isinstance(e, Sym) and syms.setdefault(e.name, n) != n:
                raise ValueError(f"{i.name}: {e.name} is both {syms[e.name]} and {n}")
    for i in p.inputs:
        for e, n in zip(i.shape, inputs[i.name].shape, strict=True):
            if all(isinstance(s, Const) or getattr(s, "name", "") in syms for s in [e]) and extent(e, syms) != n:
                raise ValueError(f"{i.name}: extent {n} where {extent(e, syms)} is required")
    return syms


def run(
    p: Program,
    inputs: Mapping[str, torch.Tensor],
    *,
    exact: bool = False,
    syms: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """All results by name (outputs among them). `exact`: float64 throughout, results in float64."""
    bound = dict(syms) if syms is not None else bind_syms(p, inputs)
    sizes = {d: extent(e, bound) for d, e in p.sizes.items()}
    tensors: dict[str, torch.Tensor] = dict(inputs)
    for c in p.body:
        env = Env(reader(tensors), sizes, bound, exact)
        tensors.update(run_compute(c, env))
    return tensors


def run_compute(c: Compute, env: Env) -> dict[str, torch.Tensor]:
    """The results of one statement."""
    out = c.dims[:-1] if c.reducer == "topk" else c.dims
    grid = Grid({d: (0, env.sizes[d]) for d in (*out, *c.rdims)})
    x = evaluate(c.body, grid, env).broadcast_to(grid.shape)
    if c.reducer is None:
        return {c.name: _store(x, c.dtype, env.exact)}
    if c.reducer in ("argmax", "argmin", "topk"):
        flat = x.reshape(*x.shape[: len(out)], -1)
        k = env.sizes[c.dims[-1]] if c.reducer == "topk" else 1
        values, at = select_values(flat, torch.arange(flat.shape[-1]), c.reducer, -1, k)
        if c.reducer != "topk":
            return {c.name: at[..., 0]}
        assert c.index_name is not None
        return {c.name: _store(values, c.dtype, env.exact), c.index_name: at}
    axes = range(len(out), x.ndim)
    return {c.name: _store(reduce_values(x, c.reducer, axes), c.dtype, env.exact)}


def _store(x: torch.Tensor, dtype: DType, exact: bool) -> torch.Tensor:
    if exact and dtype.is_float:
        return (
            x.to(torch.float64).to(torch.float32).to(dtype.torch_dtype).to(torch.float64)
            if dtype.rounds
            else x.double()
        )
    return x.to(dtype.torch_dtype)
