"""`tilefold.verify`: a compiled function's error against float64, next to eager's own.

The measure. With `r` the reference (the function in float64, `frontend.reference`), the error
of a result y is  max |y - r| / max |r|  over the elements that are finite in both; a root mean
square form, |y - r|_2 / |r|_2, is held to the same bound, so that one large element cannot
hide the rest. Elements that are not finite must be so in y where, and as, they are in the
reference or in eager's result (which may overflow where float64 does not). Results of integer
and boolean dtype are compared exactly: their error is the fraction of elements that differ. The indices
that argmax, argmin, max, min, topk and sort return are judged by the float64 values they point at.
Each run has arguments of its own; those that it changes are judged as its results are.

The bound. An error may be at most FACTOR times eager's own plus FLOOR_ULPS units in the last place of
the result's dtype (one for dtypes narrower than float32, whose rounding eager shares). On hostile inputs,
where one rounding of an intermediate can be amplified at will, it is HOSTILE_FACTOR times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import fuse
from tilefold.frontend.fuse import plain as underlying
from tilefold.frontend.hostile import variants
from tilefold.frontend.reference import Selection, own, plain_tensor, reference

FACTOR, HOSTILE_FACTOR = 2.0, 4.0
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 8.0}
#: What eager may raise for arguments it does not take: such a hostile variant is left out.
_EAGER_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run on one list of arguments. Errors are relative; `why` says what is wrong, "" if nothing is."""

    name: str
    ok: bool
    max_rel_err: float
    eager_rel_err: float
    rms_rel_err: float
    bound: float
    why: str = ""

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL"
        tail = f"  {self.why}" if self.why else ""
        return (
            f"{mark} {self.name:<16} max {self.max_rel_err:.1e}  rms {self.rms_rel_err:.1e}  "
            f"eager {self.eager_rel_err:.1e}  bound {self.bound:.1e}{tail}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`ok`: right on the given arguments and on every hostile variant of them.

    `max_rel_err` and `eager_rel_err` are those of the given arguments; `skipped` names the hostile
    variants that eager does not take.
    """

    ok: bool
    max_rel_err: float
    eager_rel_err: float
    given: Comparison
    hostile: tuple[Comparison, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            "right" if self.ok else "WRONG",
            f"  error against float64: {self.max_rel_err:.1e}; eager's own: {self.eager_rel_err:.1e}",
            *(f"  {c}" for c in (self.given, *self.hostile)),
        ]
        if self.skipped:
            lines.append(f"  left out, eager does not take them: {', '.join(self.skipped)}")
        return "\n".join(lines)


def verify(
    fn: Callable[..., Any],
    *args: Any,
    compiled: Callable[..., Any] | None = None,
    hostile: bool | Sequence[tuple[str, tuple[Any, ...]]] = True,
) -> VerifyReport:
    """Compare `fn` compiled with `fn` in float64, on `args` and on hostile variants of them.

    `fn` is a function or module, or one that `tilefold.fuse` already wrapped. `compiled` replaces
    the compiled function. `hostile`: False for none, or the named argument lists to use instead of
    those of `frontend.hostile`. Raises what `tilefold.fuse` raises for a function that it refuses, and
    UnsupportedError where there is nothing to compare: no tensors, or random numbers.
    """
    plain = inspect.unwrap(underlying(fn))
    fast = compiled if compiled is not None else fn if plain is not fn else fuse(fn)
    given = compare("given", plain, fast, args)
    _check_comparable(plain, args)
    pairs = variants(args) if hostile is True else tuple(hostile or ())
    done: list[Comparison] = []
    skipped: list[str] = []
    for name, changed in pairs:
        try:
            with torch.no_grad():
                plain(*own(changed))
        except _EAGER_ERRORS:
            skipped.append(name)
            continue
        done.append(compare(name, plain, fast, changed, factor=HOSTILE_FACTOR))
    ok = given.ok and all(c.ok for c in done)
    return VerifyReport(ok, given.max_rel_err, given.eager_rel_err, given, tuple(done), tuple(skipped))


def compare(
    name: str,
    plain: Callable[..., Any],
    fast: Callable[..., Any],
    args: Sequence[Any],
    *,
    factor: float = FACTOR,
) -> Comparison:
    """Run both on `args` and judge every result of `fast`; the worst result stands for all."""
    mine, theirs = own(args), own(args)
    with torch.no_grad():
        results, eager = tree_leaves(fast(*mine)), tree_leaves(plain(*theirs))
    exact = reference(plain, args)
    if len(results) != len(eager):
        return _wrong(name, f"{len(results)} results instead of {len(eager)}")
    leaves = tree_leaves(exact.result)
    for k in sorted(_changed(args, mine) | _changed(args, theirs)):
        for values, after in ((results, mine), (eager, theirs), (leaves, exact.arguments)):
            values.append(tree_leaves(after)[k])
    each = [judge(name, y, e, r, factor, exact.selections) for y, e, r in zip(results, eager, leaves, strict=True)]
    if not each:
        return Comparison(name, True, 0.0, 0.0, 0.0, 0.0)
    return max(each, key=lambda c: (not c.ok, c.max_rel_err / c.bound if c.bound else c.max_rel_err))


def _check_comparable(plain: Callable[..., Any], args: Sequence[Any]) -> None:
    """UnsupportedError where a function gives nothing that can be compared."""
    name = getattr(plain, "__name__", type(plain).__name__)
    after, before = own(args), _random_states()
    with torch.no_grad():
        found = tree_leaves(plain(*after))
        if not any(isinstance(x, torch.Tensor | int | float) for x in found) and not _changed(args, after):
            raise UnsupportedError(f"{name} returns no tensors: there is nothing to compare")
        if any(map(_differ, before, _random_states())):
            again = own(args)
            other = tree_leaves(plain(*again))
            if any(map(_differ, found, other)) or _changed(after, again):
                raise UnsupportedError(
                    f"{name} draws random numbers: other ones each time it is called, so there is nothing to compare",
                    hint="take them as an argument; a module draws none for its dropout after model.eval()",
                )


def _random_states() -> list[torch.Tensor]:
    """What the generators of the processor and of the GPUs stand at."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _changed(before: Sequence[Any], after: Sequence[Any]) -> set[int]:
    """Which leaves of the arguments have other values afterwards."""
    leaves = zip(tree_leaves(tuple(before)), tree_leaves(tuple(after)), strict=True)
    return {k for k, (x, y) in enumerate(leaves) if _differ(x, y)}


def _differ(x: Any, y: Any) -> bool:
    """Whether these are tensors of different sizes or bytes."""
    if not (plain_tensor(x) and plain_tensor(y)):
        return False
    return x.shape != y.shape or not torch.equal(_bytes(x), _bytes(y))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def judge(
    name: str,
    y: Any,
    eager: Any,
    exact: Any,
    factor: float = FACTOR,
    selections: Sequence[Selection] = (),
    luck: tuple[float, float] = (0.0, 0.0),
) -> Comparison:
    """One result against eager's and the reference; `selections` are those of the reference run.

    luck: `own_error` of such a result elsewhere, for floats: where it is larger than eager's here, it counts.
    """
    if not isinstance(eager, torch.Tensor):
        if isinstance(y, torch.Tensor):
            return _wrong(name, f"a tensor is returned instead of {eager!r}")
        return Comparison(name, True, 0.0, 0.0, 0.0, 0.0) if y == eager else _wrong(name, f"{y!r} is not {eager!r}")
    if not isinstance(y, torch.Tensor) or (y.dtype, y.shape) != (eager.dtype, eager.shape):
        have = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
        return _wrong(name, f"result is {have}, not {eager.dtype} {tuple(eager.shape)}")
    chosen = next((s for s in selections if s.of(exact)), None)
    if chosen is not None:
        return _judge_index(name, y, eager, chosen, factor)
    if not eager.dtype.is_floating_point:
        error, own = (_fraction(t, exact) for t in (y, eager))
        return _bounded(name, (error, error), (own, own), factor, 0.0)
    r, e, t = (x.to(torch.float64) for x in (exact, eager, y))
    odd = _pattern(t, r) & _pattern(t, e)
    if bool(odd.any()):
        return _wrong(name, f"{int(odd.sum())} of {odd.numel()} elements are NaN or infinite where they should not be")
    ulps = FLOOR_ULPS.get(eager.dtype, 1.0)
    mine = _errors(e, r)
    mine = max(mine[0], luck[0]), max(mine[1], luck[1])
    return _bounded(name, _errors(t, r), mine, factor, ulps * torch.finfo(eager.dtype).eps)


def own_error(eager: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative errors of eager's result of floats: of the largest element, and root mean square."""
    return _errors(eager.to(torch.float64), exact.to(torch.float64))


def _judge_index(name: str, y: torch.Tensor, eager: torch.Tensor, chosen: Selection, factor: float) -> Comparison:
    """An index by the value it points at. Where equal values were to choose from and torch promises the first,
    it must be the first; several indices of one selection must differ."""
    index, own, best = (t.reshape(chosen.index.shape).to(torch.int64) for t in (y, eager, chosen.index))
    extent = chosen.values.shape[chosen.dim]
    if bool(((index < 0) | (index >= extent)).any()):
        return _wrong(name, "an index is out of range")
    ordered = index.sort(chosen.dim).values
    if bool((ordered.diff(dim=chosen.dim) == 0).any()):
        return _wrong(name, "an element is chosen twice")
    values = chosen.values.to(torch.float64)
    at, at_own, at_best = (values.gather(chosen.dim, i) for i in (index, own, best))
    equal = (at == at_best) | (at.isnan() & at_best.isnan())
    if chosen.first and bool((equal & (index != best)).any()):
        return _wrong(name, "not the first of equal elements")
    if bool((_pattern(at, at_best) & _pattern(at, at_own)).any()):
        return _wrong(name, "an index points at a NaN or an infinity where it should not, or the reverse")
    floor = FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
    return _bounded(name, _errors(at, at_best), _errors(at_own, at_best), factor, floor)


def _wrong(name: str, why: str) -> Comparison:
    return Comparison(name, False, float("inf"), 0.0, float("inf"), 0.0, why)


def _bounded(
    name: str, error: tuple[float, float], own: tuple[float, float], factor: float, floor: float
) -> Comparison:
    bounds = [factor * o + floor for o in own]
    ok = all(e <= b for e, b in zip(error, bounds, strict=True))
    return Comparison(name, ok, error[0], own[0], error[1], bounds[0], "" if ok else "less right than eager")


def _fraction(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).to(torch.float64).mean()) if a.numel() else 0.0


def _pattern(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where `a` and `b` are not both finite, both NaN, or the same infinity."""
    same = (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | (a.isinf() & (a == b))
    return ~same


def _errors(y: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """Maximum and root-mean-square relative error over the elements finite in both; 0 without any."""
    both = y.isfinite() & r.isfinite()
    if not bool(both.any()):
        return 0.0, 0.0
    d, r = (y - r)[both], r[both]
    top, size = float(r.abs().max()), float(r.norm())
    return float(d.abs().max()) / (top or 1.0), float(d.norm()) / (size or 1.0)
