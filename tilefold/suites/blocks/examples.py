"""Blockbuster's three examples (section 5): array programs, and the final listings of the paper.

The listings are written in our syntax: size(d) for the constant DD, t1**2 as its own statement or inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Size, call
from tilefold.blockbuster.ir import Array, Param, Program, Type, arg
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram, block_program


@dataclass(frozen=True, slots=True)
class Example:
    """An example of the paper: its array program, what the paper reports, and what it computes.

    `rules`: numbers of the rules in order, 12 where the paper says "1 or 2". `snapshots`: steps at each.
    """

    name: str
    array: ArrayProgram
    rules: tuple[int, ...]
    snapshots: tuple[int, ...]
    listing: str
    reference: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

    @property
    def program(self) -> Program:
        return block_program(self.array)


def matrix(name: str, *dims: str) -> Param:
    """An input that is a list over its dims of blocks with the same axes."""
    return Param(name, Type(dims, dims))


def array_program(
    name: str, inputs: Mapping[str, tuple[str, str]], ops: tuple[ArrayOp, ...], output: tuple[str, str, str],
    sizes: Mapping[str, int],
) -> ArrayProgram:  # fmt: skip
    """All matrices; `inputs` with dims in the order of their blocks, which is that of the arrays."""
    arrays = {n: Array(dims) for n, dims in inputs.items()} | {output[0]: Array(output[1:])}
    return ArrayProgram(
        name,
        tuple(matrix(n, *dims) for n, dims in inputs.items()),
        ops,
        (output[0],),
        {d: Const(n, DType.I64) for d, n in sizes.items()},
        arrays,
    )


def _op(out: str, op: str, *args: str, expr: Expr | None = None) -> ArrayOp:
    return ArrayOp((out,), op, args, expr)


def attention() -> Example:
    """Softmax(Q K^T / sqrt(d)) V."""
    ops = (
        _op("S", "matmul", "Q", "KT"),
        _op("C", "elementwise", "S", expr=arg(0) * Size("d") ** -0.5),
        _op("P", "softmax", "C"),
        _op("O", "matmul", "P", "VT"),
    )
    inputs = {"Q": ("m", "d"), "KT": ("n", "d"), "VT": ("l", "n")}
    sizes = {"m": 6, "n": 8, "d": 4, "l": 5}

    def reference(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        s = x["Q"] @ x["KT"].T * x["Q"].shape[1] ** -0.5
        return torch.softmax(s, -1) @ x["VT"].T

    return Example(
        "attention",
        array_program("attention", inputs, ops, ("O", "m", "l"), sizes),
        (12,) * 6 + (4, 3) + (1,) * 4 + (9, 3, 3, 6, 1),
        (15, 17),
        _ATTENTION,
        reference,
    )


def layernorm_matmul() -> Example:
    """LayerNorm(X) Y."""
    ops = (_op("L", "layernorm", "X"), _op("Z", "matmul", "L", "YT"))
    inputs = {"X": ("m", "k"), "YT": ("n", "k")}

    def reference(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x["X"], x["X"].shape[1:], eps=0.0) @ x["YT"].T

    return Example(
        "layernorm_matmul",
        array_program("layernorm_matmul", inputs, ops, ("Z", "m", "n"), {"m": 6, "k": 8, "n": 5}),
        (12,) * 7 + (4, 5, 3, 3) + (1,) * 5 + (2, 3, 3, 2, 6, 2),
        (20, 22),
        _LAYERNORM,
        reference,
    )


def rmsnorm_swiglu() -> Example:
    """(swish(R W) * (R V)) U with R = X / sqrt(sum of squares of the row)."""
    ops = (
        _op("R", "rmsnorm", "X", expr=call("div", 1, call("sqrt", arg(0)))),
        _op("A", "matmul", "R", "WT"),
        _op("S", "elementwise", "A", expr=arg(0) / (1 + call("exp", -arg(0)))),
        _op("B", "matmul", "R", "VT"),
        _op("H", "mul", "S", "B"),
        _op("O", "matmul", "H", "UT"),
    )
    inputs = {"X": ("m", "d"), "WT": ("k", "d"), "VT": ("k", "d"), "UT": ("n", "k")}

    def reference(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        r = x["X"] / (x["X"] ** 2).sum(-1, keepdim=True).sqrt()
        return (torch.nn.functional.silu(r @ x["WT"].T) * (r @ x["VT"].T)) @ x["UT"].T

    return Example(
        "rmsnorm_swiglu",
        array_program("rmsnorm_swiglu", inputs, ops, ("O", "m", "n"), {"m": 6, "d": 8, "k": 4, "n": 5}),
        (12,) * 8 + (8, 4, 4, 3) + (12,) * 6 + (3, 3, 2, 3, 6, 1, 6, 2),
        (22, 24, 26),
        _SWIGLU,
        reference,
    )


def examples() -> tuple[Example, ...]:
    """All three, in the paper's order."""
    return attention(), layernorm_matmul(), rmsnorm_swiglu()


_ATTENTION = """
forall m in range(M):
    forall l in range(L):
        for n in range(N):
            for d in range(D):
                t1 = load(Q[m,d])
                t2 = load(KT[n,d])
                t3 += dot(t1,t2)
            t4 = exp(t3*(size(d)**-0.5))
            t5 += row_sum(t4)
            t6 = load(VT[l,n])
            t7 += dot(t4,t6)
        t8 = 1/t5
        t9 = row_scale(t7,t8)
        store(t9,O[m,l])
"""

_LAYERNORM = """
forall m in range(M):
    forall n in range(N):
        for k in range(K):
            t1 = load(X[m,k])
            t2 += row_sum(t1)
            t3 += row_sum(t1**2)
            t4 = load(YT[n,k])
            t5 += row_sum(t4)
            t6 += dot(t1,t4)
        t7 = -t2/size(k)
        t8 = (t3/size(k)-t7**2)**(-0.5)
        t9 = outer(t7,t5)
        t10 = add(t9,t6)
        t11 = row_scale(t10,t8)
        store(t11,Z[m,n])
"""

_SWIGLU = """
forall m in range(M):
    forall n in range(N):
        for k in range(K):
            for d in range(D):
                t1 = load(X[m,d])
                t2 = t1**2
                t3 += row_sum(t2)
                t4 = load(WT[k,d])
                t5 += dot(t1,t4)
                t6 = load(VT[k,d])
                t7 += dot(t1,t6)
            t8 = 1/sqrt(t3)
            t9 = row_scale(t5,t8)
            t10 = t9/(1+exp(-t9))
            t11 = row_scale(t7,t8)
            t12 = mul(t10,t11)
            t13 = load(UT[n,k])
            t14 += dot(t12,t13)
        store(t14,O[m,n])
"""
