"""torch's own test inputs, operator by operator: eager against compiled, forward and backward.

    python -m tests.fuzz.operators --dtype bfloat16 --only '^(sum|amax)$' [--samples 8] [--runner pipeline] [--dynamic]

torch lists some 700 operators with inputs that its own tests use (`op_db`). Each is called eagerly and compiled;
dtypes, shapes, strides, aliases and values of results, what became of the arguments, and gradients must agree. Floats
are judged by `verify`'s measure: an error against float64 of at most twice eager's own and some ulps; what is not a
float is exact.
What fails is compiled by torch's `aot_eager` as well: what differs there too is torch's and is printed as such with
`--torch`. `--runner interpreter` runs the definition of the tensor IR and needs no compiler; `pipeline` the kernels for
CPUs; `triton` those for GPUs in Triton's interpreter (it wants TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import os
import re
import signal
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tilefold.frontend import torch_compile
from tilefold.frontend.capture import options
from tilefold.frontend.reference import _widen, double_precision
from tilefold.frontend.verify import judge, own_error
from tilefold.pipeline import compile_program

#: (input, positional, named) arguments of one call.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
RUNNERS = ("interpreter", "pipeline", "triton")
VARIANTS = ("function", "inplace", "out")
#: Seconds that a case may take.
MOST_SECONDS = 120
#: What no two runs have in common: memory that nothing was written to.
UNSET = re.compile(r"empty|resize_$")


@functools.cache
def operators() -> tuple[Any, ...]:
    """torch's OpInfos. They import a package for a class of tests, which nothing here makes."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 (seconds to load)
    return tuple(op_db)


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of one operator, made by one compiled function. `backward`: gradients too."""

    op: Any
    dtype: torch.dtype
    calls: tuple[Call, ...]
    numbers: tuple[int, ...]
    variant: str = "function"
    backward: bool = False

    def __str__(self) -> str:
        told = "; ".join(map(_told, self.calls))
        way = "" if self.variant == "function" else f" {self.variant}"
        return f"{self.op.formatted_name}{way} {self.dtype} #{','.join(map(str, self.numbers))} {told[:300]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results, arguments afterwards and gradients, and which earlier tensor of (arguments, results) each result is."""

    values: tuple[Any, ...]
    aliases: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What is wrong with a case. kind: wrong, raises, strict (raises with TILEFOLD_STRICT=1 alone), silent (where eager
    raises), alias, strides, slow; with `torch's ` before it where `aot_eager` has it too."""

    kind: str
    case: Case
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.case}\n    {self.why}"


def cases(
    op: Any,
    dtype: torch.dtype,
    most: int | None = None,
    *,
    together: int = 1,
    variant: str = "function",
    source: str = "sample_inputs",
    shift: int = 0,
) -> Iterator[Case]:
    """An operator's cases; most: so many samples, evenly drawn from `shift` on. source: the OpInfo's method."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    backward = not whole and variant == "function" and dtype in op.backward_dtypes and bool(op.supports_autograd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = list(getattr(op, source)("cpu", dtype, requires_grad=backward))
    step = 1 if most is None else max(1, -(-len(made) // most))
    numbers = range(shift % step, len(made), step)
    for at in range(0, len(numbers), together):
        some = tuple(numbers[at : at + together])
        calls = tuple((made[k].input, tuple(made[k].args), dict(made[k].kwargs)) for k in some)
        yield Case(op, dtype, calls, some, variant, backward)


def function(case: Case) -> Callable[..., Any] | None:
    """What is compiled: takes the calls, returns their results."""
    fn = case.op.inplace_variant if case.variant == "inplace" else case.op.op
    if fn is None:
        return None

    def run(calls: Sequence[Call]) -> list[Any]:
        return [fn(x, *args, **named) for x, args, named in calls]

    return run


def outcome(case: Case, run: Callable[..., Any], *, wide: bool = False, seed: int = 0, moved: int = 0) -> Outcome:
    """One run on copies of the arguments; wide: in float64; moved: floats off by an ulp or so, drawn with this seed."""
    calls = copied(case.calls, wide=wide, moved=moved)
    given = [x for x in tree_leaves(calls) if isinstance(x, torch.Tensor)]
    torch.manual_seed(seed)
    made = tree_leaves(run(calls))
    values = [*made, *given]
    if case.backward:
        wanted = [r for r in made if isinstance(r, torch.Tensor) and r.requires_grad]
        leaves = [x for x in given if x.requires_grad]
        if wanted and leaves:
            values += torch.autograd.grad(wanted, leaves, [_weights(r) for r in wanted], allow_unused=True)
    seen: dict[int, int] = {}
    aliases: list[int | None] = []
    for k, x in enumerate([*given, *made]):
        place = _address(x)
        aliases.append(None if place is None else seen.setdefault(place, k))
    return Outcome(
        tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in values), tuple(aliases[len(given) :])
    )


def copied(calls: Sequence[Call], *, wide: bool = False, moved: int = 0) -> Any:
    """The same arguments in memory of their own, with the strides that they had."""
    drawn = torch.Generator().manual_seed(moved)

    def plain(x: Any) -> Any:
        return x.detach() if isinstance(x, torch.Tensor) else x

    def finished(x: Any, like: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return torch.float64 if wide and _widen(x) is torch.float64 else x
        if moved and x.is_floating_point() and x.layout is torch.strided:
            ulps = torch.rand(x.shape, generator=drawn, dtype=torch.float64) - 0.5
            x = (x.double() * (1 + 4 * torch.finfo(x.dtype).eps * ulps)).to(x.dtype)
        x = _widen(x) if wide else x
        return x.requires_grad_() if like.requires_grad else x

    new = copy.deepcopy(tree_map(plain, calls))
    return tree_map(finished, new, calls)


def difference(
    case: Case,
    want: Outcome,
    exact: Sequence[Any] | None,
    selections: Sequence[Any],
    got: Outcome,
    luck: Callable[[Any, int], tuple[float, float]] = lambda r, k: (0.0, 0.0),
) -> str:
    """How a compiled run differs from eager's, as `kind: why`; else nothing. exact: eager's in float64. luck: eager's
    own error of a result for arguments that are hardly different."""
    if len(got.values) != len(want.values):
        return f"wrong: {len(got.values)} results, not {len(want.values)}"
    later = ""
    for k, (y, e) in enumerate(zip(got.values, want.values, strict=True)):
        r = None if exact is None else exact[k]
        if _differ(y, e, r, selections) and (why := _differ(y, e, r, selections, luck(r, k))):
            return f"wrong: {_place(case, k, len(want.aliases), len(want.values))} {why}"
        strided = isinstance(e, torch.Tensor) and e.layout is torch.strided and k < len(want.aliases)
        if strided and strides(y) != strides(e):
            later = later or f"strides: result {k} {tuple(e.shape)} has {y.stride()}, not {e.stride()}"
    if got.aliases != want.aliases:
        later = f"alias: results are {got.aliases}, not {want.aliases}"
    return later


def strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides that say where elements are."""
    return tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1) if x.numel() > 1 else ()


def found(case: Case, runner: str = "interpreter", *, dynamic: bool | None = None) -> Found | None:
    """What is wrong with a case, worst first; None: nothing."""
    eager = function(case)
    if eager is None:
        return None
    case = replace_out(case, eager) if case.variant == "out" else case
    try:
        want = outcome(case, eager)
        other = outcome(case, eager, seed=1)
    except Exception as err:  # eager's own: compiled code must raise as well
        return _silent(case, eager, runner, dynamic, err)
    drawn = UNSET.search(case.op.name) or any(_differ(a, b) for a, b in zip(want.values, other.values, strict=True))
    exact, selections = (None, []) if drawn else _exact(case, eager)

    def why(backend: Any, *, strict: bool) -> str:
        try:
            got = outcome(case, _compiled(case, backend, dynamic))
        except Exception as err:  # any at all is what this function is to find
            return f"{'strict' if strict else 'raises'}: {said(err)}"
        luck = functools.partial(_luck, case, eager)
        return _shape_difference(got, want) if drawn else difference(case, want, exact, selections, got, luck)

    with _strict("1"):
        told = why(_backend(runner), strict=True)
    if told.startswith("strict"):
        with _strict("0"):
            told = why(_backend(runner), strict=False) or told
    if not told:
        return None
    if why("aot_eager", strict=False).split(":")[0] == told.split(":")[0]:
        told = f"torch's {told}"
    kind, _, rest = told.partition(": ")
    return Found(kind, case, rest)


def replace_out(case: Case, eager: Callable[..., Any]) -> Case:
    """The calls with `out=` tensors like the results."""
    calls = []
    for x, args, named in case.calls:
        (made,) = eager(copied([(x, args, named)]))
        empty = tree_map(lambda r: torch.full_like(r, 1).detach() if isinstance(r, torch.Tensor) else r, made)
        out = tuple(empty) if isinstance(empty, tuple | list) else empty
        calls.append((x, args, {**named, "out": out}))
    return Case(case.op, case.dtype, tuple(calls), case.numbers, "out", False)


def errors(op: Any, runner: str = "interpreter") -> Iterator[Found]:
    """Where eager raises for wrong arguments (the OpInfo's `error_inputs`) and compiled code does not."""
    for k, e in enumerate(op.error_inputs("cpu")):
        s = e.sample_input
        case = Case(op, torch.float32, ((s.input, tuple(s.args), dict(s.kwargs)),), (k,))
        eager = function(case)
        try:
            outcome(case, eager)  # type: ignore[arg-type]
        except Exception as err:  # what is expected
            said = _silent(case, eager, runner, None, err)  # type: ignore[arg-type]
            if said is not None:
                yield said


def _silent(case: Case, eager: Any, runner: str, dynamic: bool | None, err: Exception) -> Found | None:
    with _strict("0"):
        for backend, of in ((_backend(runner), ""), ("aot_eager", "torch's ")):
            try:
                outcome(case, _compiled(case, backend, dynamic))
            except Exception:  # as it must
                return None if not of else Found("silent", case, f"{type(err).__name__}: {str(err)[:200]}")
    return Found("torch's silent", case, f"{type(err).__name__}: {str(err)[:200]}")


def _compiled(case: Case, backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function(case), backend=backend, dynamic=dynamic)  # type: ignore[return-value,arg-type]


def _backend(runner: str) -> Any:
    return functools.partial(torch_compile.backend, options={"runner": runner, "leftover": "eager"})


def _luck(case: Case, eager: Callable[..., Any], r: Any, k: int) -> tuple[float, float]:
    """The largest of eager's errors, of the largest element and root mean square, of a result whose arguments' last
    bits are others; r: it in float64, of the arguments as they are."""
    found = [(0.0, 0.0)]
    for moved in range(1, 5):
        e = outcome(case, eager, moved=moved).values[k]
        if isinstance(e, torch.Tensor) and e.is_floating_point() and isinstance(r, torch.Tensor):
            found.append(own_error(e, r))
    return max(a for a, _ in found), max(b for _, b in found)


def said(err: BaseException) -> str:
    """An error's class and message, and the line of ours that raised it; of what Dynamo wraps, the inner one."""
    inner: BaseException = getattr(err, "inner_exception", None) or err
    ours = [f for f in traceback.extract_tb(inner.__traceback__) if "tilefold" in f.filename]
    at = f" at {ours[-1].filename.rpartition('tilefold')[2]}:{ours[-1].lineno}" if ours else ""
    return f"{type(inner).__name__}: {' '.join(str(inner).split())[:300]}{at}"


def _exact(case: Case, eager: Callable[..., Any]) -> tuple[Sequence[Any] | None, Sequence[Any]]:
    try:
        with double_precision() as selections:
            return outcome(case, eager, wide=True).values, selections
    except Exception:  # operators that do not take float64, or mix it with what stays
        return None, []


def _differ(
    y: Any, e: Any, r: Any = None, selections: Sequence[Any] = (), luck: tuple[float, float] = (0.0, 0.0)
) -> str:
    """How a value differs from eager's `e`; r: that in float64."""
    if not isinstance(e, torch.Tensor) or not isinstance(y, torch.Tensor):
        return "" if type(y) is type(e) and (y == e or y != y) else f"{y!r}, not {e!r}"
    if (y.dtype, y.shape, y.layout) != (e.dtype, e.shape, e.layout):
        return f"is {y.dtype} {tuple(y.shape)}, not {e.dtype} {tuple(e.shape)}"
    if e.is_conj() != y.is_conj() or e.is_neg() != y.is_neg():
        e, y = e.resolve_conj().resolve_neg(), y.resolve_conj().resolve_neg()
    fits = isinstance(r, torch.Tensor) and r.shape == e.shape and r.layout == e.layout and not e.is_complex()
    if fits and e.layout is torch.strided and e.dtype.is_floating_point == r.dtype.is_floating_point:
        if r.dtype == e.dtype and not e.dtype.is_floating_point:
            r = e if not any(s.of(r) for s in selections) else r  # comparisons of what eager rounds
        if e.dtype.is_floating_point:  # where eager alone overflows, nothing is asked
            y = torch.where(e.isfinite() | ~r.isfinite(), y, e)
        told = judge("", y, e, r, 2.0, selections, luck)
        return "" if told.ok else f"{told.why}: {told.max_rel_err:.2g}, eager {told.eager_rel_err:.2g}; {_worst(y, e)}"
    try:
        torch.testing.assert_close(y, e, equal_nan=True)
    except (AssertionError, RuntimeError, NotImplementedError) as err:
        return " ".join(str(err).split())[:300]
    return ""


def _worst(y: torch.Tensor, e: torch.Tensor) -> str:
    a, b = y.double().flatten(), e.double().flatten()
    off = (a - b).abs()
    off[(a == b) | (a.isnan() & b.isnan())] = 0
    k = int(off.nan_to_num(torch.inf, torch.inf).argmax()) if off.numel() else 0
    return f"{a[k].item()!r}, not {b[k].item()!r}" if off.numel() else ""


def _shape_difference(got: Outcome, want: Outcome) -> str:
    for k, (y, e) in enumerate(zip(got.values, want.values, strict=True)):
        if isinstance(e, torch.Tensor) and (y.dtype, y.shape) != (e.dtype, e.shape):
            return f"wrong: result {k} is {y.dtype} {tuple(y.shape)}, not {e.dtype} {tuple(e.shape)}"
    return ""


def _place(case: Case, k: int, results: int, values: int) -> str:
    given = sum(isinstance(x, torch.Tensor) for x in tree_leaves(case.calls))
    if k < results:
        return f"result {k}"
    return f"argument {k - results}" if k < results + given else f"gradient {k - results - given}"


def _weights(r: torch.Tensor) -> torch.Tensor:
    real = r.real.dtype if r.is_complex() else r.dtype
    w = torch.arange(1.0, r.numel() + 1, dtype=torch.float64).cos().to(torch.bfloat16).to(real).reshape(r.shape)
    return w.to(r.dtype)


def _address(x: Any) -> int | None:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.numel() == 0:
        return None
    return x.untyped_storage().data_ptr()


def _told(call: Call) -> str:
    def short(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dense = x.layout is not torch.strided or x.is_contiguous()
        return f"{str(x.dtype)[6:]}{list(x.shape)}{'' if dense else f'/{list(x.stride())}'}"

    x, args, named = tree_map(short, call)
    return f"({x}, {args}, {named})"


@contextmanager
def _strict(value: str) -> Iterator[None]:
    before = os.environ.get("TILEFOLD_STRICT")
    os.environ["TILEFOLD_STRICT"] = value
    try:
        yield
    finally:
        del os.environ["TILEFOLD_STRICT"]
        os.environ |= {} if before is None else {"TILEFOLD_STRICT": before}


class _Late(Exception):
    """A case takes too long."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise _Late(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--dtype", default="float32")
    ask.add_argument("--only", default="", help="a regular expression of operators' names")
    ask.add_argument("--samples", type=int, default=0, help="of an operator (default: all)")
    ask.add_argument("--together", type=int, default=1, help="samples that one function calls")
    ask.add_argument("--runner", choices=RUNNERS, default="interpreter")
    ask.add_argument("--variant", choices=VARIANTS, default="function")
    ask.add_argument("--source", choices=("sample_inputs", "reference_inputs"), default="sample_inputs")
    ask.add_argument("--errors", action="store_true", help="what eager raises, instead")
    ask.add_argument("--dynamic", action="store_true")
    ask.add_argument("--torch", action="store_true", help="what is torch's own as well")
    ask.add_argument("--part", default="1/1", help="which part of the operators")
    a = ask.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    dtype = getattr(torch, a.dtype)
    number, of = map(int, a.part.split("/"))
    chosen = [o for o in operators() if re.search(a.only, o.formatted_name)][number - 1 :: of]
    count = 0
    patched = patch.dict(options.RUNNERS, {"triton": on_gpu}) if a.runner == "triton" else nullcontext()  # type: ignore[arg-type]
    with patched:
        for op in chosen:
            for one in each(op, dtype, a):
                if a.torch or not one.kind.startswith("torch"):
                    count += 1
                    print(one, flush=True)
    print(f"{count} found in {len(chosen)} operators")
    return bool(count)


def each(op: Any, dtype: torch.dtype, a: argparse.Namespace) -> Iterator[Found]:
    """What the arguments ask for, of one operator."""
    if a.errors:
        yield from errors(op, a.runner) if op.error_inputs_func is not None else ()
        return
    if dtype not in op.dtypes or (a.variant == "out" and not op.supports_out):
        return
    made = cases(op, dtype, a.samples or None, together=a.together, variant=a.variant, source=a.source)
    for case in made:
        try:
            with _limited(MOST_SECONDS):
                one = found(case, a.runner, dynamic=True if a.dynamic else None)
        except _Late as err:
            one = Found("slow", case, str(err))
        except Exception as err:  # of this driver
            one = Found("driver", case, f"{type(err).__name__}: {str(err)[:300]}")
        if one is not None:
            yield one


def on_gpu(program: Any, *, device: str) -> Any:
    """A GPU's kernels, run by Triton's interpreter."""
    return compile_program(program, device="interpreter")


if __name__ == "__main__":
    sys.exit(main())
