"""A process that runs candidates of one kernel on the GPU, and may die of it.

Reads a job (JSON) from standard input; writes a line a step: `{"start": n}` before candidate n is
touched, then `{"done": n, "microseconds": t}` or `{"done": n, "why": text}`. A candidate whose results
differ from the reference is never timed. The parent takes silence for a hang.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.block.ir import Block
from tilefold.block.text import parse
from tilefold.errors import TilefoldError
from tilefold.runtime.tuner.table import from_json
from tilefold.tensor.sizes import shape_function

#: Timed calls a candidate; between them the L2 cache is overwritten.
CALLS = 20
FLUSH_BYTES = 256 << 20
#: Error allowed, relative to the largest result: of one rounding to the result's type, and of sums in float32.
ROUNDINGS = 8


def main() -> None:
    """Run the job on standard input."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    job = json.load(sys.stdin)
    block = parse(job["block"])
    sizes: dict[str, int] = job["sizes"]
    candidates = [from_json(c) for c in job["candidates"]]
    inputs = arguments(block, job["syms"])
    reference: list[torch.Tensor] | None = None
    for n, c in enumerate(candidates):
        say(start=n)
        try:
            run, results = prepared(block, c, inputs, sizes, job["syms"])
            run()
            torch.cuda.synchronize()
            if reference is None:
                reference = [r.double() for r in results]  # the default's: tests hold it against float64
            why = difference(results, reference, eps_of(block))
            if why:
                say(done=n, why=why)
                continue
            say(done=n, microseconds=timed(run, flush))
        except (TilefoldError, RuntimeError) as err:
            say(done=n, why=f"{type(err).__name__}: {str(err).splitlines()[0][:200] if str(err) else ''}")
            if "CUDA error" in str(err):
                sys.exit(3)


def say(**line: Any) -> None:
    """One line to the parent."""
    print(json.dumps(line), flush=True)


def arguments(block: Block, syms: Mapping[str, int]) -> list[torch.Tensor]:
    """Random inputs."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    out = []
    for i in block.inputs:
        shape = shape_function(i.shape)(syms)
        kind = i.dtype.torch_dtype
        if kind.is_floating_point:
            # float32 inputs are often masses, sums or counts: positive, so that no quotient is ill-conditioned
            wide = kind.itemsize >= 4
            x = (
                torch.rand(shape, device="cuda", generator=generator) + 0.5
                if wide
                else torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator)
            )
            out.append(x.to(kind))
        elif kind is torch.bool:
            out.append(torch.rand(shape, device="cuda", generator=generator) < 0.5)
        else:
            out.append(torch.randint(0, 2, shape, device="cuda", dtype=kind, generator=generator))
    return out


def prepared(
    block: Block, c: TritonConfig, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], syms: Mapping[str, int]
) -> tuple[Any, list[torch.Tensor]]:
    """A call of the kernel with configuration c, and its results."""
    kernel = TritonKernel(block, lambda b, s: c, exactly=True)
    results = []
    for r in block.results:
        results.append(torch.zeros([sizes[d] for d in r.dims], dtype=r.dtype.torch_dtype, device="cuda"))
    xs = [*inputs, *results]
    return (lambda: kernel.launch(xs, syms)), results


def eps_of(block: Block) -> float:
    """The unit roundoff of the kernel's coarsest input: what its arithmetic may round operands to."""
    return max((torch.finfo(i.dtype.torch_dtype).eps for i in block.inputs if i.dtype.is_float), default=0.0)


def difference(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], roundoff: float) -> str:
    """How the results differ from the reference beyond rounding; empty where they do not."""
    for y, r in zip(results, reference, strict=True):
        if not y.dtype.is_floating_point:
            continue  # indices of near ties may differ with the order of sums
        if not torch.equal(torch.isnan(y), torch.isnan(r)):
            return "wrong: NaN in other places than the default's"
        eps = max(roundoff, torch.finfo(y.dtype).eps)
        finite = torch.isfinite(r)
        scale = float(r[finite].abs().max()) if bool(finite.any()) else 1.0
        worst = float((y.double() - r)[finite].abs().max()) if bool(finite.any()) else 0.0
        if worst > max(ROUNDINGS * eps, 1e-5) * max(scale, 1e-30):
            return f"wrong: differs from the default by {worst / scale:.1e}"
    return ""


def timed(run: Any, flush: torch.Tensor) -> float:
    """Median microseconds of a call in a CUDA graph, with a cold L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
    for before, after in marks:
        flush.zero_()
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in marks)


if __name__ == "__main__":
    main()
