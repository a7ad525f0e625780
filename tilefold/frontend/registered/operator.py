"""Lowered graphs as operators of torch's dispatcher: `torch.ops.tilefold.<name>`.

An operator is registered when it is first asked for, once a distinct program: its name ends in a digest
of the program and of how arguments and results are bound. Its fake implementation evaluates the program's
shape functions, on symbolic sizes too, so that graphs with the operator can be exported, compiled by
Inductor and traced under fake tensors. Operators are for inference: they have no gradient.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from tilefold.algebra.expr import Const, Expr, Sym
from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.frontend.operators import sizes as fx_sizes
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.regions.alike import Alike
from tilefold.frontend.regions.direct import Direct
from tilefold.frontend.regions.execute import Executable
from tilefold.frontend.registered.fused import one_by_one
from tilefold.tensor.sizes import extent, shape_function
from tilefold.tensor.text import show

NAMESPACE = "tilefold"
#: Characters of the digest in an operator's name.
DIGEST = 12
#: Kinds of arguments that an operator remembers to have checked.
SEEN = 4096

Operator = torch._ops.OpOverload


@dataclass(frozen=True, slots=True)
class Made:
    """A registered operator; `digest`: of what it computes."""

    digest: str
    operator: Operator
    run: Checked


_made: dict[str, Made] = {}


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def name_of(lowered: Lowered, vals: Sequence[torch.Tensor], base: str) -> str:
    """`base` and the graph's digest."""
    return f"{base}_{_digest(lowered, vals)}"


def operator_of(run: Checked, vals: Sequence[torch.Tensor]) -> Operator:
    """The operator of a lowered graph of tensors that returns none of its arguments; registered if it is new.

    vals: (fake) arguments like those it is for. TilefoldError: another program's operator has the name.
    """
    return register(run, _digest(run.run.lowered, vals))


def register(run: Checked, digest: str) -> Operator:
    """The same, of a digest that is known."""
    lowered, name = run.run.lowered, run.name
    known = _made.get(name)
    if known is not None:
        if known.digest != digest:
            raise TilefoldError(f"the operator {NAMESPACE}::{name} exists, for another program", hint="take a new name")
        return known.operator
    arguments = ", ".join(f"Tensor a{n}" for n in range(len(run.wanted)))
    results = ", ".join("Tensor" for _ in lowered.outputs)
    library = _library()
    library.define(f"{name}({arguments}) -> ({results})", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _implementation(run), run.wanted[0][2].upper())
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(lowered), lib=library)
    found: Operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.register_vmap(f"{NAMESPACE}::{name}", _batched(found, len(lowered.outputs) == 1), lib=library)
    _made[name] = Made(digest, found, run)
    return found


def _batched(op: Operator, single: bool) -> Callable[..., Any]:
    """The rule of an operator for `torch.vmap`."""

    def batched(info: Any, dims: Sequence[int | None], *tensors: torch.Tensor) -> Any:
        made = one_by_one(info.batch_size, dims, tensors, lambda one: (op(*one),) if single else op(*one))
        return (made[0], 0) if single else (tuple(made), (0,) * len(made))

    return batched


def made() -> Mapping[str, Made]:
    """The operators of this process, by name."""
    return _made


def _digest(lowered: Lowered, vals: Sequence[torch.Tensor]) -> str:
    """Identity of a graph: its program without its name, its bindings with constants' contents, types of arguments."""
    bound = [
        (b.name, b.position, b.axes, None if b.constant is None else _content(b.constant), b.order)
        for b in lowered.inputs
    ]
    types = [(str(v.dtype), v.device.type, fx_sizes.shape(v.shape)) for v in vals]
    outputs = [(o.name, o.position, o.shape, o.strides, o.gaps, o.offset) for o in lowered.outputs]
    text = "\n".join(map(str, (show(lowered.program).split("\n", 1)[1], bound, lowered.syms, outputs, types)))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def _content(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def _implementation(run: Checked) -> Callable[..., Any]:
    """Runs the graph; results that share memory are copied, as operators must not return the same twice."""
    outputs = run.run.lowered.outputs
    names = [o.name for o in outputs]
    again = [n in names[:k] for k, n in enumerate(names)]

    def call(*args: torch.Tensor) -> Any:
        made = run(*args)
        if len(made) == 1:
            return made[0]
        return tuple([_copied(y) if shared else y for y, shared in zip(made, again, strict=True)])

    return call


def _copied(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _fake(lowered: Lowered) -> Callable[..., Any]:
    parts = [
        (shape_function(o.shape), shape_function(o.strides), lowered.program.dtype_of(str(o.name)).torch_dtype)
        for o in lowered.outputs
    ]

    def call(*args: Any) -> Any:
        syms = {b.name: args[b.position].shape[b.axis] for b in lowered.syms}
        made = tuple(
            torch.empty_strided(shape(syms), strides(syms), dtype=dtype, device=args[0].device)
            for shape, strides, dtype in parts
        )
        return made[0] if len(made) == 1 else made

    return call


#: Extents, type and kind of device of an argument.
Wanted = tuple[tuple[Expr, ...], torch.dtype, str]
_RELATIONS: Mapping[type, str] = {
    **{sympy.Eq: "eq", sympy.Ne: "ne", sympy.Lt: "lt", sympy.Le: "le", sympy.Gt: "gt", sympy.Ge: "ge"},
}
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {n: getattr(operator, n) for n in _RELATIONS.values()}


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation of two sizes. TilefoldError of `guard`: other formulas."""

    text: str
    relation: str
    left: Expr
    right: Expr

    def holds(self, syms: Mapping[str, int]) -> bool:
        """Whether it is true of these sizes; of sizes that nobody gives, there is no telling."""
        try:
            left, right = (shape_function([e])(syms)[0] for e in (self.left, self.right))
        except KeyError:
            return True
        return _COMPARE[self.relation](left, right)


def guard(formula: sympy.Basic) -> Guard:
    """A formula of a shape environment. UnsupportedError: it is no relation of sizes."""
    relation = _RELATIONS.get(type(formula))
    if relation is None:
        raise UnsupportedError(f"the condition {formula} on sizes is not covered", hint="fix one of the sizes")
    left, right = (fx_sizes.from_sympy(side) for side in formula.args)
    return Guard(str(formula), relation, left, right)


def _never(args: Sequence[object]) -> tuple[torch.Tensor | None, ...] | None:
    """Of a graph that remembers no call."""
    return None


class Checked:
    """A lowered graph of tensors, called with the arguments that it was made for, or TilefoldError.

    wanted: extents, type and kind of device of each argument. guards: what the capture took for granted about symbolic
    sizes.
    """

    def __init__(self, name: str, run: Executable, wanted: Sequence[Wanted], guards: Sequence[Guard]):
        self.name, self.run = name, run
        self.wanted, self.guards = tuple(wanted), tuple(guards)
        self._seen: dict[tuple[object, ...], Alike] = {}
        self._last = Alike(())
        #: The results for tensors like those of the last call, which were checked then; else None.
        self.again = run.again if isinstance(run, Direct) and run.reads(len(self.wanted)) else _never

    @classmethod
    def of(cls, name: str, run: Executable, vals: Sequence[torch.Tensor]) -> Checked:
        """For (fake) arguments like these."""
        wanted = [(fx_sizes.shape(v.shape), v.dtype, v.device.type) for v in vals]
        sized: list[Any] = [s for v in vals for s in v.shape if isinstance(s, torch.SymInt)]
        guards = [g.expr for g in sized[0].node.shape_env.guards] if sized else []
        formulas = [part for g in guards for part in sympy.And.make_args(g) if part is not sympy.true]
        return cls(name, run, wanted, [guard(f) for f in formulas])

    def __call__(self, *xs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if self._last(xs):
            return self.run(*xs)
        key = (*[x.shape for x in xs], *[x.dtype for x in xs])
        known = self._seen.get(key)
        if known is None:
            self._check(xs)
            if len(self._seen) >= SEEN:
                self._seen.clear()
            known = self._seen[key] = Alike(xs)
        self._last = known
        return self.run(*xs)

    def _check(self, xs: Sequence[torch.Tensor]) -> None:
        syms: dict[str, int] = {}
        for n, (x, (shape, dtype, kind)) in enumerate(zip(xs, self.wanted, strict=True)):
            if x.dtype is not dtype or x.device.type != kind:
                raise TilefoldError(
                    f"argument {n} of {self.name} is {x.dtype} on {x.device.type}, not {dtype} on {kind}",
                    hint="make an operator for each dtype and device",
                )
            if x.ndim != len(shape) or not all(_fits(e, k, syms) for e, k in zip(shape, x.shape, strict=True)):
                wanted = ", ".join(map(_written, shape))
                raise TilefoldError(
                    f"argument {n} of {self.name} has shape {tuple(x.shape)}, not ({wanted})",
                    hint="torch._dynamo.mark_dynamic(x, axis) before custom_op leaves an extent free",
                )
        for g in self.guards:
            if not g.holds(syms):
                raise TilefoldError(f"{self.name} was made for sizes with {g.text}, which {syms} is not")


def _fits(e: Expr, n: int, syms: dict[str, int]) -> bool:
    """Whether extent n is the expression's value; a symbol's first occurrence defines it."""
    match e:
        case Const(known, _):
            return int(known) == n
        case Sym(name):
            return syms.setdefault(name, n) == n
    return extent(e, syms) == n


def _written(e: Expr) -> str:
    return str(int(e.value)) if isinstance(e, Const) else e.name if isinstance(e, Sym) else str(e)
