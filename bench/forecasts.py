"""Kernels of programs, measured on the GPU at hand beside what they are forecast to take (`backends.triton.warps`).

    python bench/forecasts.py --json kernels.json --workers 15 --seconds 200
    python bench/forecasts.py --json kernels.json --read

Programs are the rows of `tilefold bench programs`, the GPU suites' (as `tilefold.fuse` makes them), and of the files
in `bench/unseen`, in inference and those of their `TRAIN` in training; `--rows` are those whose names match. Each is
planned on fake tensors; a kernel that it asks for, also for a plan that is not chosen, is compiled once and timed
alone, cold caches, on random elements (indices are 0 and 1: what looks things up, or adds where indices say, is not as
in use). A lock lets one worker time at a time. `--read`: what was forecast over what was measured, by the longest stage
and the time, and the kernels that take longest over their forecasts. Without a GPU, `--dry` forecasts alone.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
GPU = "NVIDIA H200"
#: Rounds and seconds of a kernel; microseconds from which times are told apart, and most kernels that are named.
ROUNDS, SECONDS, BANDS, NAMED = 25, 0.06, (0, 8, 20, 60), 30
#: Elements from which a tensor is not drawn at random.
LARGE = 1 << 28
#: Seconds that a row takes at most beyond the last moment at which it is begun: a worker that hangs is ended then.
GRACE = 60.0


def rows(pattern: str) -> Iterator[tuple[str, Any]]:
    """Names and rows (`GpuCase`)."""
    from tilefold.suites import own  # noqa: PLC0415 (after `pretend`)
    from tilefold.suites.gpu import neptune, redfuser  # noqa: PLC0415
    from tilefold.suites.programs.all import PROGRAMS  # noqa: PLC0415
    from tilefold.user_file import imported  # noqa: PLC0415

    found = [(p.name, p.case) for p in PROGRAMS]
    found += [(c.row, functools.partial(lambda c: c, c)) for c in (*redfuser.ROWS, *neptune.ROWS)]
    for path in sorted((HERE / "unseen").glob("*.py")):
        module = imported(path)
        for name in [n for n in vars(module) if callable(vars(module).get(n + own.INPUTS))]:
            for train in (False, True) if name in module.TRAIN else (False,):
                row = functools.partial(own.row, module, path.stem, name, train=train)
                found.append((f"{path.stem}: {name}{' train' if train else ''}", row))
    yield from ((name, make()) for name, make in found if re.search(pattern, name))


def planned(case: Any) -> list[tuple[Any, list[Any]]]:
    """Kernels (`TritonKernel`) that a row asks for, and the fake tensors that they see."""
    import offline  # noqa: PLC0415  # isort: skip
    import torch  # noqa: PLC0415

    from tilefold.backends.triton.launch import TritonKernel  # noqa: PLC0415
    from tilefold.frontend import fuse, torch_compile  # noqa: PLC0415

    torch._dynamo.reset()
    found: list[tuple[Any, list[Any]]] = []
    job = TritonKernel.job

    def noted(k: Any, xs: Sequence[Any], syms: Any, *more: Any) -> Any:
        made = job(k, xs, syms, *more)
        if not syms:
            found.append((k, list(xs)))
        return made

    case = case.placed("cpu")
    strict = functools.partial(fuse._strict, options=fuse.Fused(case.fn)._options)
    backend = torch_compile.backend if case.planned else strict
    with patch.object(TritonKernel, "job", noted), patch.object(torch_compile, "backend", backend):
        offline.compile_fake(case.fn, case.args("cpu"), train=case.train, name=GPU)
    return found


def drawn(x: Any) -> Any:
    """A tensor on the GPU like a fake one: its strides, random elements."""
    import torch  # noqa: PLC0415

    size, stride, kind = tuple(x.shape), tuple(x.stride()), x.dtype
    n = 1 + sum((a - 1) * b for a, b in zip(size, stride, strict=True)) if all(size) else 0
    if not kind.is_floating_point:
        base = torch.randint(0, 2, (n,), device="cuda")
    elif n >= LARGE:
        base = torch.ones(n, device="cuda", dtype=kind)
    else:  # of 32 bits they are often sums or counts, which something is divided by
        base = torch.rand(n, device="cuda") + 0.5 if kind.itemsize >= 4 else torch.randn(n, device="cuda")
    return torch.as_strided(base.to(kind), size, stride)


def work(pattern: str, share: str, path: Path, seconds: float, *, dry: bool) -> None:
    """A worker's share of the rows: every n-th one. What was found is written after each."""
    import torch  # noqa: PLC0415

    from tilefold.backends.triton import launch  # noqa: PLC0415
    from tilefold.backends.triton.launch import TritonKernel  # noqa: PLC0415
    from tilefold.backends.triton.warps import forecast  # noqa: PLC0415
    from tilefold.plan.hardware import gpu_named  # noqa: PLC0415
    from tilefold.suites.gpu.measure import CudaTimer  # noqa: PLC0415

    gpu, timer = gpu_named(GPU, 132), None if dry else CudaTimer()
    first, every = (int(x) for x in share.split("/"))
    begin, known, found = time.monotonic(), set[object](), list[dict[str, Any]]()
    for n, (name, case) in enumerate(rows(pattern)):
        if n % every != first or time.monotonic() - begin > seconds:
            continue
        try:
            kernels = planned(case)
        except Exception as err:  # a row that cannot be planned here, whyever: the others can; `told` counts them
            found.append({"row": name, "why": repr(err)[:200]})
            continue
        for k, xs in kernels:
            with patch.object(launch, "is_hopper", lambda device: True):
                v, sizes, seen = k.rendering(xs, {})
            key = (v.rendered.source, str(v.config), tuple((tuple(x.shape), tuple(x.stride())) for x in seen))
            if key in known:
                continue
            known.add(key)
            f = forecast(v, seen, sizes, {}, gpu)
            stages = {s: round(t * 1e6, 3) for s, t in f.stages.items()}
            line = {"row": name, "kernel": k.block.name, "config": str(v.config), "blocks": f.blocks, "stages": stages}
            line |= {"groups": bool(v.rendered.groups), "floor": f.floor * 1e6, "forecast": f.seconds * 1e6}
            if timer is not None:
                try:
                    block = k.joined(xs, {})[0].block
                    line["measured"] = _timed(TritonKernel(block, lambda b, z, c=v.config: c), seen, timer)
                except Exception as err:  # of one kernel: it does not compile, or has no room; `told` counts them
                    line["why"] = repr(err)[:200]
                torch.cuda.empty_cache()
            found.append(line)
        path.write_text(json.dumps(found))
    path.write_text(json.dumps(found))


def _timed(kernel: Any, seen: Sequence[Any], timer: Any) -> float:
    """Microseconds of a kernel's launch, while no other worker times."""
    xs = [drawn(x) for x in seen]
    kernel.planned(xs, {}, [x.data_ptr() for x in xs])
    with Path(tempfile.gettempdir(), "tilefold-forecasts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = timer.ready(lambda: kernel.launch(xs, {}))
        return float(timer.rounds({"kernel": ready}, most=ROUNDS, budget=SECONDS)["kernel"].median * 1e6)


def told(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines about what was forecast over what was measured."""
    timed = [x for x in found if "measured" in x]
    yield f"{len(timed)} kernels, {sum('why' in x for x in found)} failed"
    kinds: dict[tuple[str, int], list[float]] = {}
    for x in timed:
        worst = "groups of warps" if x["groups"] else max(x["stages"], key=x["stages"].get)
        band = max(b for b in BANDS if b <= x["measured"])
        kinds.setdefault((worst, band), []).append(math.log(x["forecast"] / x["measured"]))
    for (worst, band), logs in sorted(kinds.items()):
        a, b, c = (math.exp(sorted(logs)[len(logs) * k // 10]) for k in (1, 5, 9))
        yield f"{worst:16} from {band:3} us: {len(logs):4} kernels, forecast / measured {b:.2f} ({a:.2f} to {c:.2f})"
    for x in sorted(timed, key=lambda x: x["forecast"] - x["measured"])[:NAMED]:
        what = f"{x['row'][:44]}, {x['kernel'][:24]}: {x['blocks']} x {x['config']}"
        yield f"{x['measured']:9.1f} us, forecast {x['forecast']:8.1f}, floor {x['floor']:8.1f}, {what}"


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", default=".")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="no row is begun after these")
    parser.add_argument("--read", action="store_true", help="tell about the file")
    parser.add_argument("--dry", action="store_true", help="forecast alone, on a machine without a GPU")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.read:
        print(*told(json.loads(given.json.read_text())), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.share is not None:
            if given.dry:
                import offline  # noqa: PLC0415

                offline.pretend(Path(folder))
            work(given.rows, given.share, given.json, given.seconds, dry=given.dry)
            return
        parts = [Path(folder) / f"{n}.json" for n in range(given.workers)]
        command = [sys.executable, __file__, "--rows", given.rows, "--seconds", str(given.seconds)]
        command += ["--dry"] if given.dry else []
        started = [
            subprocess.Popen([*command, "--json", str(p), "--share", f"{n}/{given.workers}"])
            for n, p in enumerate(parts)
        ]
        end = time.monotonic() + given.seconds + GRACE
        for x in started:
            try:
                x.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                x.kill()
                x.wait()
        found = [x for p in parts if p.exists() for x in json.loads(p.read_text())]
    given.json.write_text(json.dumps(found))
    print(*told(found), sep="\n")


if __name__ == "__main__":
    main()
