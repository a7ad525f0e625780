"""Random block programs: chains of array operators on matrices with rows m, so that every rule has something to do."""

from __future__ import annotations

import random

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, call
from tilefold.blockbuster.interp import run
from tilefold.blockbuster.ir import Array, Param, Program, Type, arg
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram, block_program

SIZES = {"m": 5, "k": 6, "n": 4, "d": 3}
COLUMNS = ("k", "n", "d")
_FUNCTIONS = (
    arg(0) * 0.5 + 1.0,
    call("tanh", arg(0)),
    call("sigmoid", arg(0)),
    call("where", call("gt", arg(0), 0.0), arg(0), arg(0) * 0.1),
    arg(0) + Index("m"),
)
_UNARY = ("elementwise", "scale", "shift", "softmax", "rmsnorm", "layernorm", "softmax", "rmsnorm")


class Generator:
    """Array operators appended at random; `matrices` are (value, columns) that later ones may use."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)
        self.ops: list[ArrayOp] = []
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.matrices: list[tuple[str, str]] = []

    def name(self) -> str:
        return f"v{len(self.ops)}"

    def given(self, *dims: str) -> str:
        name = f"X{len(self.inputs)}"
        self.inputs[name] = dims
        return name

    def add(self, op: str, *args: str, columns: str, **options: object) -> None:
        self.ops.append(ArrayOp((self.name(),), op, args, **options))  # type: ignore[arg-type]
        self.matrices.append((self.ops[-1].out[0], columns))

    def unary(self, x: str, c: str) -> None:
        kind = self.r.choice(_UNARY)
        if kind in ("scale", "shift"):
            self.ops.append(ArrayOp((self.name(),), "reduce", (x,), reducer=self.r.choice(("sum", "max"))))
            total = self.ops[-1].out[0]
            self.ops.append(ArrayOp((self.name(),), "elementwise", (total,), call("tanh", arg(0))))
            self.add(f"row_{kind}", x, self.ops[-1].out[0], columns=c)
        elif kind == "elementwise":
            self.add(kind, x, columns=c, expr=self.r.choice(_FUNCTIONS))
        else:
            self.add(kind, x, columns=c, eps=None if kind == "softmax" else 1e-3)

    def step(self) -> None:
        x, c = self.r.choice(self.matrices[-3:])
        kind = self.r.choice(("unary", "unary", "matmul", "matmul", "two products", "pair"))
        others = [d for d in COLUMNS if d != c]
        match kind:
            case "unary":
                self.unary(x, c)
            case "matmul":
                new = self.r.choice(others)
                self.add("matmul", x, self.given(new, c), columns=new)
            case "two products":
                new = self.r.choice(others)
                self.unary(x, c)
                y = self.matrices[-1][0]
                self.add("matmul", y, self.given(new, c), columns=new)
                self.add("matmul", y, self.given(new, c), columns=new)
                a, b = self.matrices[-2][0], self.matrices[-1][0]
                self.add(self.r.choice(("add", "mul")), a, b, columns=new)
            case "pair":
                same = [y for y, e in self.matrices if e == c]
                self.add(self.r.choice(("add", "mul")), x, self.r.choice(same), columns=c)

    def program(self, steps: int) -> Program:
        c = self.r.choice(COLUMNS)
        self.matrices.append((self.given("m", c), c))
        for _ in range(steps):
            self.step()
        out, columns = self.ops[-1].out[0], self.matrices[-1][1]
        arrays = {n: Array(dims) for n, dims in self.inputs.items()} | {out: Array(("m", columns))}
        params = tuple(Param(n, Type(dims, dims)) for n, dims in self.inputs.items())
        sizes = {d: Const(n, DType.I64) for d, n in SIZES.items()}
        return block_program(ArrayProgram("random", params, tuple(self.ops), (out,), sizes, arrays))


def random_program(seed: int, steps: int = 4) -> Program:
    """A block program before any fusion."""
    return Generator(seed).program(steps)


def sample(p: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs for a program with constant sizes, float64."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for i in p.graph.inputs:
        shape = [int(p.sizes[d].value) for d in p.arrays[i.name].axes]  # type: ignore[attr-defined]
        out[i.name] = torch.randn(shape, generator=g, dtype=torch.float64)
    return out


def outputs(p: Program, x: dict[str, torch.Tensor], blocks: int) -> list[torch.Tensor]:
    """What a program computes with so many blocks a dim (ragged ones included)."""
    return list(run(p, x, blocks=dict.fromkeys(p.sizes, blocks)).values())
