"""Undo a user's own safety before fusion: softmax does not change when a row is shifted.

    law    exp(x + c) = exp(x) exp(c), and exp(c) cancels in  exp(x + c) / sum exp(x + c)

c is the same for a whole row (the negative of its maximum, in practice). The maximum then has no use
and goes, and with it the pass over the row before the exponentials. `blockbuster.safety` brings an exponent
back after fusion, so that nothing overflows in between: this is exact arithmetic on programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Call, Expr, Load, call, loads, substitute, transform
from tilefold.blockbuster.ir import Type, arg
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram
from tilefold.blockbuster.pairs import Pair, pair_of
from tilefold.names import fresh


def unshift(a: ArrayProgram, types: Mapping[str, Type]) -> ArrayProgram:
    """The program without shifts that cancel, or itself. `types`: of all its values."""
    new = _Unshift(a, types).run()
    return new if len(new.ops) < len(a.ops) else a


@dataclass(frozen=True, slots=True)
class _Factored:
    """A value as `sig` times exp of a combination of values."""

    sig: str
    exponent: Mapping[str, float]


class _Unshift:
    def __init__(self, a: ArrayProgram, types: Mapping[str, Type]):
        self.a, self.types = a, dict(types)
        self.ops: list[ArrayOp] = []
        self.shifted: dict[str, tuple[str, str]] = {}  # x + c -> x, c
        self.factored: dict[str, _Factored] = {}
        self.same: dict[str, str] = {}  # value -> one that equals it
        self.taken = {*types, *a.sizes, *a.syms}

    def run(self) -> ArrayProgram:
        for op in self.a.ops:
            op = replace(op, args=tuple(self.same.get(v, v) for v in op.args))
            self.ops.append(op)
            if op.op == "row_shift":
                self.shifted[op.out[0]] = (op.args[0], op.args[1])
            elif op.op == "elementwise":
                self.elementwise(op)
            elif any(v in self.factored for v in op.args):
                self.structured(op)
        outputs = set(self.a.outputs)
        swap = {v: w for v, w in self.same.items() if v in outputs}
        ops = [replace(o, out=tuple(_swapped(v, swap) for v in o.out), args=tuple(_swapped(v, swap) for v in o.args))
               for o in self.ops]  # fmt: skip
        return replace(self.a, ops=_alive(ops, outputs))

    def rep(self, v: str) -> _Factored:
        return self.factored.get(v, _Factored(v, {}))

    def emit(self, op: ArrayOp, args: tuple[str, ...], exponent: Mapping[str, float], expr: Expr | None = None) -> None:
        """The operator on significands; its exponent, if it has one left, goes on."""
        out = fresh(f"{op.out[0]}_u", self.taken)
        self.ops.append(replace(op, out=(out,), args=args, expr=expr if expr is not None else op.expr))
        self.types[out] = self.types[op.out[0]]
        left = {c: n for c, n in exponent.items() if n}
        if left:
            self.factored[op.out[0]] = _Factored(out, left)
        else:
            self.same[op.out[0]] = out

    def elementwise(self, op: ArrayOp) -> None:
        assert op.expr is not None
        args: list[str] = []

        def load(v: str) -> Expr:
            if v not in args:
                args.append(v)
            return arg(args.index(v))

        known: dict[str, Pair] = {}
        for k, v in enumerate(op.args):
            if v in self.shifted:
                x, c = self.shifted[v]
                known[f"exp{k}"] = Pair(call("exp", load(x)), {Load(c, ()): 1.0})
            r = self.rep(v)
            known[f"value{k}"] = Pair(load(r.sig), {Load(c, ()): n for c, n in r.exponent.items()})

        def mark(n: Expr) -> Expr | None:
            match n:
                case Call("exp", (Load(t, ()),)) if f"exp{t.removeprefix('value')}" in known:
                    return Load(f"exp{t.removeprefix('value')}", ())
            return None

        named = substitute(op.expr, {arg(k): Load(f"value{k}", ()) for k in range(len(op.args))})
        marked = transform(named, mark)
        if not any(known[n.tensor].exponent for n in loads(marked)):
            return
        p = pair_of(marked, lambda n: known.get(n.tensor), lambda _: True)
        if any(not isinstance(t, Load) or t.tensor in known for t in p.exponent):
            return
        exponent = {t.tensor: n for t, n in p.exponent.items() if isinstance(t, Load)}
        if any(isinstance(n, Load) and not n.tensor.startswith("a") for n in loads(p.sig)):
            return
        used = [v for k, v in enumerate(args) if arg(k) in loads(p.sig)]
        table: dict[Expr, Expr] = {arg(k): arg(used.index(v)) for k, v in enumerate(args) if v in used}
        if max((len(self.types[v].lists) for v in used), default=-1) < len(self.types[op.out[0]].lists):
            return
        self.emit(op, tuple(used), exponent, substitute(p.sig, table))

    def structured(self, op: ArrayOp) -> None:
        reps = [self.rep(v) for v in op.args]
        exponent: dict[str, float] = {}
        for r in reps:
            for c, n in r.exponent.items():
                exponent[c] = exponent.get(c, 0.0) + n
        match op.op:
            case "mul" | "outer" | "row_scale" | "col_scale" | "transpose":
                pass
            case "matmul" | "reduce" if op.op == "matmul" or op.reducer == "sum":
                over = set(op.over or self.types[op.args[0]].item[-1:])
                if any(over & set(self.types[c].lists) for r in reps for c in r.exponent):
                    return
            case _:
                return
        self.emit(op, tuple(r.sig for r in reps), exponent)


def _swapped(v: str, swap: Mapping[str, str]) -> str:
    """Outputs keep their names: the value that equals one takes its name."""
    back = {w: o for o, w in swap.items()}
    return back.get(v, f"{v}_shifted" if v in swap else v)


def _alive(ops: list[ArrayOp], outputs: set[str]) -> tuple[ArrayOp, ...]:
    wanted, kept = set(outputs), list[ArrayOp]()
    for op in reversed(ops):
        if wanted & set(op.out):
            wanted |= set(op.args)
            kept.append(op)
    return tuple(reversed(kept))
