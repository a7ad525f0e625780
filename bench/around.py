"""Configurations around the default of kernels without products, in turn on the GPU at hand, beside Inductor's program.

    python bench/around.py 'maximum of|long rows|padding' [--seconds 2] [--dry]

Programs are rows of `tilefold bench programs` whose names match, at their sizes for a GPU. For each kernel: twice and
half of the warps, of the streamed tile, of the last parallel tile, of tile and warps together, software pipelines of
loads, and limits on registers. Microseconds, cold caches, CUDA graphs. `--dry`: the configurations that would be timed,
on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: Most threads of a thread block, as warps; limits on registers that leave room for 2,048, 1,024 and 512 threads.
MOST_WARPS, LIMITS = 32, (32, 64, 128)


def around(c: Any, streamed: Sequence[str], parallel: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The default, and what is near it (`TritonConfig`)."""
    yield "default", c

    def tiled(d: str, up: bool) -> dict[str, int]:
        return {**c.tiles, d: c.tiles[d] * 2 if up else max(1, c.tiles[d] // 2)}

    for up in (True, False):
        warps, word = (c.warps * 2, "twice") if up else (c.warps // 2, "half")
        if 1 <= warps <= MOST_WARPS:
            yield f"{word} the warps", replace(c, warps=warps)
        dims = [*streamed[:1], *[d for d in parallel if c.tiles.get(d, 1) > 1][-1:]]
        for d in dims:
            yield f"{word} {d}", replace(c, tiles=tiled(d, up))
            if 1 <= warps <= MOST_WARPS:
                yield f"{word} {d} and warps", replace(c, tiles=tiled(d, up), warps=warps)
    for stages in (2, 3, 4) if streamed else ():
        yield f"stages {stages}", replace(c, stages=stages)
    for most in LIMITS:
        yield f"registers {most}", replace(c, registers=most)


def kernels(programs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and kernels (`TritonKernel`) of compiled programs."""
    yield from ((s.name, s.triton) for made in programs for s in made.steps if hasattr(s, "triton"))


def candidates(k: Any, xs: Sequence[Any]) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Kernels with dims joined as a call of such tensors has them, one a configuration; and the tensors as they see
    them."""
    from tilefold.backends.triton.launch import TritonKernel  # noqa: PLC0415 (after `pretend`)
    from tilefold.backends.triton.tiles import Shape  # noqa: PLC0415
    from tilefold.backends.triton.views import merged  # noqa: PLC0415

    joined, merges = k.joined(xs, {})
    views = merged(xs, k.tensors, merges)
    config, s = joined._bound(views, {})[0].config, Shape.of(joined.block)
    unique = {c.key(): (name, c) for name, c in reversed(list(around(config, s.streamed, s.parallel)))}
    found = []
    for name, c in reversed(list(unique.values())):
        made = TritonKernel(joined.block, lambda b, z, c=c: c)
        made.start_building(views, {})
        found.append((f"{name} ({c})" if name == "default" else name, made))
    return found, views


def measured(program: Any, seconds: float) -> None:
    """One program: whole, beside Inductor's, then each of its kernels."""
    import torch  # noqa: PLC0415

    from tilefold import pipeline  # noqa: PLC0415
    from tilefold.errors import TilefoldError  # noqa: PLC0415
    from tilefold.runtime.tuner.worker import arguments  # noqa: PLC0415
    from tilefold.suites.gpu.measure import CudaTimer  # noqa: PLC0415

    torch._dynamo.reset()
    generator = torch.Generator(device="cuda").manual_seed(0)
    args = [d.draw(generator) for d in program.large]
    fn = program.fn or program.module(True).cuda().eval()
    found: list[Any] = []
    own = pipeline._for_gpu

    def noted(*given: Any, **more: Any) -> Any:
        found.append(own(*given, **more))
        return found[-1]

    timer = CudaTimer()
    with torch.no_grad():
        with patch.object(pipeline, "_for_gpu", noted):
            mine = torch.compile(fn, backend="tilefold")
            mine(*args)
        theirs = torch.compile(fn)
        calls = {"tilefold": timer.ready(lambda: mine(*args)), "inductor": timer.ready(lambda: theirs(*args))}
        whole = timer.rounds(calls, most=200, budget=seconds)
    print(f"{program.name}: " + ", ".join(f"{n} {s.median * 1e6:.1f} us" for n, s in whole.items()), flush=True)
    for name, k in kernels(found):
        print(f"  {name}")
        inputs = arguments(k.block, {})
        sizes = k.sizes({})
        shapes = [([sizes[d] for d in r.dims], r.dtype.torch_dtype) for r in k.block.results]
        made, xs = candidates(k, [*inputs, *(torch.zeros(s, dtype=t, device="cuda") for s, t in shapes)])
        graphs = {}
        for n, x in made:
            try:
                graphs[n] = timer.ready(lambda x=x, xs=xs: x.launch(xs, {}))
            except (TilefoldError, RuntimeError) as err:
                print(f"    {n:24} {str(err).splitlines()[0][:80]}")
        times = timer.rounds(graphs, most=200, budget=seconds)
        usual = next(iter(times.values()))
        for n, s in sorted(times.items(), key=lambda x: x[1].median):
            print(f"    {n:24} {s.median * 1e6:8.1f} us, {s.over(usual):.3f} of the default", flush=True)
        timer.release()


def planned(program: Any) -> None:
    """What `measured` would time, on a machine without a GPU."""
    import torch  # noqa: PLC0415

    import offline  # noqa: PLC0415  # isort: skip
    from tilefold.backends.triton import launch  # noqa: PLC0415
    from tilefold.backends.triton.views import Like  # noqa: PLC0415

    torch._dynamo.reset()
    args = [d.draw(torch.Generator().manual_seed(0)) for d in program.large]
    programs = offline.compile_fake(program.fn or program.module(True), args, train=False, name="NVIDIA H200")
    print(program.name)
    for name, k in kernels(programs):
        sizes = k.sizes({})
        shapes = [(tuple(int(e.value) for e in i.shape), i.dtype) for i in k.block.inputs]
        shapes += [(tuple(sizes[d] for d in r.dims), r.dtype) for r in k.block.results]
        xs = [Like.packed(s, t.torch_dtype, torch.device("cuda")) for s, t in shapes]
        print(f"  {name}")
        with (
            patch.object(launch, "is_hopper", lambda device: True),
            patch.object(launch.TritonKernel, "start_building", lambda *given: None),
        ):
            for n, _ in candidates(k, xs)[0]:
                print(f"    {n}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="a pattern of programs' names")
    parser.add_argument("--seconds", type=float, default=1.0, help="of rounds, a kernel")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.dry:
            import offline  # noqa: PLC0415

            offline.pretend(Path(folder))
        from tilefold.suites.programs.all import PROGRAMS  # noqa: PLC0415

        for p in PROGRAMS:
            if re.search(given.rows, p.name):
                planned(p) if given.dry else measured(p, given.seconds)


if __name__ == "__main__":
    main()
