"""The fuzzers' long mode: random programs compiled and run, with hostile inputs.

    python -m tests.fuzz.long 100 [--device cpu|interpreter] [--goal fast|fused] [--seeds 0-999] [--minutes 60]
                                  [--record FILE]

So many programs a seed: a seed is a part, the same programs in any process. With `--record` a part that is whole is
written down, and left out by the next run with that file, so that 100,000 programs may take days.

Each program of `tests.fuzz.programs` runs with inputs in float32, bfloat16 or float16, near zero or far from it,
contiguous, permuted, or inside larger tensors, and is compared with the reference interpreter in float64. The bound is
a multiple of that interpreter's own error in float32, or of what a change of the inputs' last bit makes (the first may
be zero by luck). Failures are printed as programs that can be parsed again.
(`--device interpreter` wants TRITON_INTERPRET=1.)
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.block.programs import inputs
from tests.fuzz.programs import programs, unlucky
from tilefold.algebra.dtypes import DType
from tilefold.pipeline import compile_program
from tilefold.tensor import interp
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import drop_dead
from tilefold.tensor.text import show

#: An error may be so many times the reference's own in float32, and so much of the largest element more; kernels for
#: GPUs round computed operands of products to 16 bits where all inputs have 16 and they are between -1 and 1.
FACTOR, FLOOR, NARROW_FLOOR = 16.0, 4e-6, 2.0**-7
#: Results below the least normal number may be flushed to zero.
TINY = 2.0**-126
#: One unit in the last place of float32.
ULP = 2.0**-23


@dataclass(frozen=True, slots=True)
class Case:
    """A program, what its inputs are like, and its symbol's value."""

    program: Program
    n: int
    dtype: DType
    offset: float
    stored: str
    number: int

    def __str__(self) -> str:
        like = f"n={self.n} {self.dtype.value} + {self.offset:g} {self.stored} seed={self.number}"
        return f"{like}\n{show(self.program)}"

    def tensors(self) -> dict[str, torch.Tensor]:
        found = inputs(self.program, self.n, self.number)
        return {name: stored((x + self.offset).to(x.dtype), self.stored) for name, x in found.items()}


def stored(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, stored otherwise."""
    match how:
        case "permuted":
            return x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(3)[::3]
        case "inside":
            whole = x.new_full((*x.shape[:-1], x.shape[-1] + 4), torch.nan)
            whole[..., 1:-3] = x
            return whole[..., 1:-3]
    return x


@st.composite
def cases(draw: st.DrawFn) -> Case:
    p = draw(programs() | unlucky())
    dtype = draw(st.sampled_from((DType.F32, DType.F32, DType.BF16, DType.F16)))
    p = replace(drop_dead(p), inputs=tuple(replace(i, dtype=dtype) for i in p.inputs))
    offset = draw(st.sampled_from((0.0, 0.0, 100.0, 1e4) if dtype is DType.F32 else (0.0, 8.0)))
    how = draw(st.sampled_from(("contiguous", "permuted", "inside")))
    return Case(p, draw(st.sampled_from((1, 2, 13, 70))), dtype, offset, how, draw(st.integers(0, 1 << 16)))


def wrong(c: Case, device: str, goal: str) -> str:
    """What is wrong with the compiled program; empty: nothing."""
    tensors, syms = c.tensors(), {"n": c.n}
    exact = interp.run(c.program, tensors, exact=True)
    plain = interp.run(c.program, tensors)
    moved = interp.run(c.program, {n: x.double() * (1 + ULP) for n, x in tensors.items()}, exact=True)
    narrow = device != "cpu" and c.dtype is not DType.F32
    got = compile_program(c.program, goal=goal, device=device)(tensors, syms)  # type: ignore[arg-type]
    for name in c.program.outputs:
        want, own, other, y = (v[name].double() for v in (exact, plain, moved, got))
        bad = ~torch.isfinite(y) & torch.isfinite(want) & torch.isfinite(own)
        if bad.any():
            return f"{name} is not finite"
        fine = torch.isfinite(want) & torch.isfinite(own)
        top = float(want[fine].abs().max()) if fine.any() else 0.0
        errors = [(v - want)[fine & torch.isfinite(v)].abs() for v in (y, own, other)]
        error, *references = (float(e.max()) if e.numel() else 0.0 for e in errors)
        reference = max(references)
        if error > FACTOR * reference + (NARROW_FLOOR if narrow else FLOOR) * top + TINY:
            return f"{name} is off by {error:.2g} of {top:.2g}; the reference by {reference:.2g}"
    return ""


class _Over(BaseException):
    """The time is over: Hypothesis lets nothing but exceptions of this kind end it before all programs are drawn."""


def main(words: Sequence[str] | None = None) -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("count", type=int, help="programs a seed")
    ask.add_argument("--device", choices=("cpu", "interpreter"), default="cpu")
    ask.add_argument("--goal", choices=("fast", "fused"), default="fused")
    ask.add_argument("--seeds", type=_seeds, default=range(1), help="a number, or the first and the last: 0-999")
    ask.add_argument("--record", type=Path, help="a file of the parts that are done")
    ask.add_argument("--minutes", type=float, default=math.inf, help="programs after that are left out")
    a = ask.parse_args(words)
    done = set(a.record.read_text().splitlines()) if a.record and a.record.exists() else set()
    ran, bad, stop = 0, 0, time.monotonic() + 60 * a.minutes
    for number in a.seeds:
        title = f"{a.device} {a.goal} {a.count} programs of seed {number}:"
        if any(line.startswith(title) for line in done):
            continue
        part = _part(a.count, number, lambda c: wrong(c, a.device, a.goal), stop)
        ran, bad = ran + part.ran, bad + part.wrong
        if part.cut:
            break
        if a.record:
            with a.record.open("a") as file:
                file.write(f"{title} {part.wrong} of {part.ran} are wrong\n")
    print(f"{bad} of {ran} programs are wrong")
    return bool(bad)


def _seeds(text: str) -> range:
    """`7`, or `0-999`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass(slots=True)
class _Part:
    """How many programs of a seed ran, how many of them are wrong; cut: the time was over before the last."""

    ran: int = 0
    wrong: int = 0
    cut: bool = False


def _part(count: int, number: int, judge: Callable[[Case], str], stop: float) -> _Part:
    """The programs of one seed. stop: of `time.monotonic`."""
    part = _Part()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def every(c: Case) -> None:
        if time.monotonic() > stop:
            raise _Over
        part.ran += 1
        try:
            why = judge(c)
        except Exception as err:  # hidden: nothing, every error of a program is printed with it
            why = f"{type(err).__name__}: {err}"
        if why:
            part.wrong += 1
            print(f"{why}\n{c}", flush=True)

    try:
        every()
    except _Over:
        part.cut = True
    return part


if __name__ == "__main__":
    sys.exit(main())
