"""Plans a whole model for a GPU on a machine that has none, forward and backward, and says what would run there.

    python bench/offline.py gpt2 --mode train --layers 1 --steps
    python bench/offline.py model.py:make --assemble 'softmax' --json plan.json

A model is a row of `tilefold bench models`, or FILE:NAME: a function or module with NAME_inputs() beside it, as
`tilefold bench FILE.py` takes them, or else a function that gives a module (or function) and its arguments on the CPU.
Nothing is run: tensors are fake, kernels are planned and rendered as they would be launched (those that cannot be are
named), and with `--assemble` compiled for Hopper. `--slow` names those that are predicted to take three times as
long as what they read and write, once, at the memory's rate (`backends.triton.warps`), and why.
Bytes are those that steps read and write, each tensor once a step; what a cache saves is not known here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
TORCH = Path(sysconfig.get_paths()["purelib"]) / "torch"


def pretend(folder: Path) -> None:
    """Have torch believe in a CUDA device, before it is imported. CalledProcessError where nothing compiles it."""
    assert "torch" not in sys.modules
    made = folder / "pretend_cuda.so"
    flags = ["-std=c++20", "-shared", "-fPIC", "-O1", f"-I{TORCH / 'include'}", "-o", str(made)]
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", str(HERE / "pretend_cuda.cpp"), *flags, *libraries], check=True)
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch of a kernel (`launch.TritonKernel`): what is launched (`launch.Variant`), and its predicted time
    (`warps.Forecast`)."""

    name: str
    variant: Any
    forecast: Any
    kernel: Any = None


@dataclass(frozen=True, slots=True)
class Line:
    """A step of a program: its class and name, bytes of what it reads and writes, and predicted microseconds (of
    kernels)."""

    program: int
    kind: str
    name: str
    read: int
    written: int
    us: float | None = None


@dataclass(frozen=True, slots=True)
class Assembled:
    """What a kernel takes: registers of a thread, bytes that it spills, bytes of shared memory. why: if it has none."""

    name: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    groups: bool = False
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Slow:
    """A kernel, with its configuration, that `times` launches of all programs are: microseconds predicted, and of its
    floor; what takes longest, and the access that wastes most there."""

    name: str
    config: str
    blocks: int
    times: int
    us: float
    floor: float
    stage: str
    access: str


#: Times its floor, and microseconds, from which a kernel is slow.
SLOW, LEAST = 3.0, 5.0


class _Planned(Exception):
    """Everything is planned, and must not run."""


def compile_fake(
    module: Any,
    args: Sequence[Any],
    *,
    train: bool,
    name: str,
    refused: dict[str, str] | None = None,
    launched: list[Launched] | None = None,
) -> list[Any]:
    """The programs (`pipeline.CompiledProgram`) of a model on a GPU of this name. refused: takes kernels that could not
    be launched on such tensors as they would be, and why. launched: takes every launch."""
    import torch  # noqa: PLC0415 (after `pretend`)
    from torch._functorch import config  # noqa: PLC0415
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    from tilefold import pipeline  # noqa: PLC0415
    from tilefold.backends.triton import launch  # noqa: PLC0415
    from tilefold.backends.triton.warps import forecast  # noqa: PLC0415
    from tilefold.errors import BackendError  # noqa: PLC0415
    from tilefold.frontend import torch_compile  # noqa: PLC0415
    from tilefold.frontend.regions import constants  # noqa: PLC0415
    from tilefold.plan.hardware import gpu_named  # noqa: PLC0415
    from tilefold.runtime import gpu_configs  # noqa: PLC0415

    found: list[Any] = []
    own, gpu = pipeline._for_gpu, gpu_named(name, 132)

    def rendered(k: launch.TritonKernel, *given: Any) -> None:
        try:
            job = k.job(*given)
            if job is not None and launched is not None:
                v, sizes, seen = k.rendering(*given)
                launched.append(Launched(k.block.name, v, forecast(v, seen, sizes, given[1], gpu), k))
        except BackendError as err:
            if refused is not None:
                refused[k.block.name] = err.message

    def tuned(block: Any, sizes: Any) -> Any:
        return gpu_configs.table(name).find(gpu_configs.key_of(block, sizes))

    def noted(*given: Any, **more: Any) -> Any:
        found.append(own(*given, **more))
        return found[-1]

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Any:
        torch_compile.backend(gm, inputs)
        raise _Planned

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="cuda")

    with ExitStack() as stack:
        stack.enter_context(patch.object(pipeline, "_for_gpu", noted))
        stack.enter_context(patch.object(launch.TritonKernel, "start_building", rendered))
        stack.enter_context(patch.object(gpu_configs, "_choose", tuned))
        stack.enter_context(patch.object(constants, "on_device", lambda x, like: fake(like)))
        stack.enter_context(patch.object(launch, "is_hopper", lambda device: True))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)))
        stack.enter_context(patch.object(config, "force_non_lazy_backward_lowering", True))
        stack.enter_context(patch.object(torch._C, "_conv_determine_backend_memory_format", _as_cudnn))
        for m in [m for n, m in sys.modules.items() if n.startswith("tilefold.") and hasattr(m, "gpu_here")]:
            stack.enter_context(patch.object(m, "gpu_here", lambda: gpu))
        stack.enter_context(patch.dict(os.environ, {"TILEFOLD_REUSE_GRAPHS": "0"}))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if isinstance(module, torch.nn.Module):
            module.train(train)
            _faked(module, fake)
        placed = [fake(x) if isinstance(x, torch.Tensor) else x for x in args]
        if train and not isinstance(module, torch.nn.Module):
            placed = [
                x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in placed
            ]
        stack.enter_context(torch.set_grad_enabled(train))
        try:
            torch.compile(module, backend=backend)(*placed)
        except Exception as err:  # hides `_Planned` alone, which Dynamo wraps in a class of its own or another's
            if not (isinstance(err, _Planned) or "_Planned" in repr(err)):
                raise
    return found


def _as_cudnn(x: Any, w: Any, library: Any) -> Any:
    """The memory format of a convolution's result: channels-last if an operand is."""
    import torch  # noqa: PLC0415

    def last(t: torch.Tensor) -> bool:
        return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()

    return torch.channels_last if last(x) or last(w) else torch.contiguous_format


def _faked(module: Any, fake: Any) -> None:
    """Parameters and buffers become fake ones, shared ones shared."""
    import torch  # noqa: PLC0415

    made: dict[int, torch.nn.Parameter] = {}
    for m in module.modules():
        for n, x in m._parameters.items():
            if x is not None:
                if id(x) not in made:
                    made[id(x)] = torch.nn.Parameter(fake(x), requires_grad=x.requires_grad)
                m._parameters[n] = made[id(x)]
        for n, x in m._buffers.items():
            if x is not None:
                m._buffers[n] = fake(x)


def lines(programs: Sequence[Any], launched: Sequence[Launched] = ()) -> list[Line]:
    """The steps of all programs; kernels with what was predicted of their launches."""
    found = {id(x.kernel): x.forecast.seconds * 1e6 for x in launched}
    return [
        Line(
            number,
            type(s).__name__,
            s.name,
            _bytes(made.program, s.reads),
            _bytes(made.program, (r[0] for r in s.results)),
            found.get(id(getattr(s, "triton", None))),
        )
        for number, made in enumerate(programs)
        for s in made.steps
    ]


def _bytes(p: Any, names: Iterable[str]) -> int:
    """Of tensors of the program: the parts of a fold in segments, which are small, are none."""
    from tilefold.tensor.analysis import Graph  # noqa: PLC0415

    return int(Graph.of(p).nbytes(n for n in dict.fromkeys(names) if n in p.names))


def slow(launched: Sequence[Launched]) -> list[Slow]:
    """Kernels of `SLOW` times their floor and `LEAST` microseconds, what costs most over the floor first."""
    found: dict[tuple[str, str, int, float], list[Any]] = {}
    for x in launched:
        key = (x.name, str(x.variant.config), x.forecast.blocks, x.forecast.seconds)
        found.setdefault(key, []).append(x.forecast)
    rows = []
    for (name, config, blocks, seconds), (f, *more) in found.items():
        if seconds > max(SLOW * f.floor, LEAST * 1e-6):
            a = max(f.touches, key=lambda t: t.sent * t.times, default=None)
            word = (
                "" if a is None else f"{a.tensor} {'written' if a.stored else 'read'}, {a.wasted:.1f} times its bytes"
            )
            rows.append(Slow(name, config, blocks, 1 + len(more), seconds * 1e6, f.floor * 1e6, f.worst, word))
    return sorted(rows, key=lambda r: r.times * (r.floor - r.us))


def assembled(launched: Sequence[Launched], pattern: str, folder: Path) -> list[Assembled]:
    """Distinct kernels whose names match, compiled for Hopper as they are launched."""
    from tilefold.backends.triton.build import Target  # noqa: PLC0415
    from tilefold.backends.triton.compile import resources  # noqa: PLC0415
    from tilefold.errors import TilefoldError  # noqa: PLC0415

    import triton  # noqa: PLC0415  # isort: skip

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    found, seen = [], set[tuple[str, str]]()
    for name, v in ((x.name, x.variant) for x in launched):
        key = (v.rendered.source, str(v.config))
        if key in seen or not re.search(pattern, name):
            continue
        seen.add(key)
        begin = time.perf_counter()
        try:
            r = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32))
        except TilefoldError as err:
            found.append(Assembled(name, why=err.message))
            continue
        seconds = time.perf_counter() - begin
        (folder / "kernel.ptx").write_text(r.assembly["ptx"])
        command = [
            str(ptxas),
            "-v",
            "--gpu-name=sm_90a",
            str(folder / "kernel.ptx"),
            "-o",
            str(folder / "kernel.cubin"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = (
            int(re.search(x, said)[1]) for x in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )  # type: ignore[index]
        found.append(Assembled(name, registers, spilled, r.shared, bool(v.rendered.groups), seconds))
    return found


def model(which: str, *, train: bool, layers: int | None, small: bool) -> tuple[Any, Sequence[Any]]:
    """The module and its arguments on the CPU."""
    if ":" in which:
        from tilefold.suites import own  # noqa: PLC0415 (after `pretend`)
        from tilefold.user_file import imported, made  # noqa: PLC0415

        path, name = which.rsplit(":", 1)
        user = imported(Path(path))
        if not hasattr(user, name + own.INPUTS):
            found: tuple[Any, Sequence[Any]] = made(user, name)
            return found
        case = own.row(user, Path(path).stem, name, train=train).placed("cpu")
        return case.fn, case.args("cpu")
    import torch  # noqa: PLC0415

    from tilefold.suites.models import all as models  # noqa: PLC0415

    (m,) = (m for m in models.MODELS if m.name == which)
    draws = [*m.given(not small), *((m.labels(not small),) if train else ())]
    count = layers or (models.SMALL_LAYERS if small else models.LAYERS)
    return m.make(not small, count), [d.draw(torch.Generator().manual_seed(0)) for d in draws]


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="gpt2, resnet50 ..., or FILE:FUNCTION")
    parser.add_argument("--mode", choices=("infer", "train"), default="infer")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true", help="at small sizes")
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--steps", action="store_true", help="a line a step")
    parser.add_argument("--slow", action="store_true", help="kernels that are predicted to be far from their floor")
    parser.add_argument("--assemble", metavar="PATTERN", help="compile kernels of such names")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)

    with tempfile.TemporaryDirectory() as folder:
        pretend(Path(folder))
        train = given.mode == "train"
        made, refused = model(given.model, train=train, layers=given.layers, small=given.small), dict[str, str]()
        launched: list[Launched] = []
        programs = compile_fake(*made, train=train, name=given.gpu, refused=refused, launched=launched)
        from tilefold.frontend.regions.assemble import compilations  # noqa: PLC0415

        steps = lines(programs, launched)
        for r in compilations:
            print(f"{r.name}: {len(r.regions)} regions, {r.left} operators left, {r.seconds:.1f} s")
            for f in r.fallbacks:
                print(f"    {f}")
        for kernel, why in refused.items():
            print(f"    {kernel} cannot be launched: {why}")
        for x in steps if given.steps else ():
            moved = f"reads {x.read / 1e6:8.2f} MB, writes {x.written / 1e6:8.2f}"
            us = f", {x.us:7.1f} us" if x.us is not None else ""
            print(f"{x.program:3} {x.kind:16} {x.name[:52]:52} {moved}{us}")
        whole = sum(x.read + x.written for x in steps)
        print(", ".join(f"{n} {kind}" for kind, n in Counter(x.kind for x in steps).items()), f"{whole / 1e9:.3f} GB")
        far = slow(launched) if given.slow else []
        for r in far:
            what = f"{r.times} x {r.name[:40]}: {r.stage} ({r.access}); {r.blocks} x {r.config}"
            print(f"{r.us:9.1f} us, floor {r.floor:7.1f}, {what}")
        if given.slow:
            own = sum(x.forecast.seconds for x in launched), sum(x.forecast.floor for x in launched)
            print(f"{len(launched)} launches, {own[0] * 1e6:.0f} us predicted, floor {own[1] * 1e6:.0f}")
        kernels = assembled(launched, given.assemble, Path(folder)) if given.assemble is not None else []
        for k in kernels:
            what = (
                f"{k.registers} registers, {k.spilled} bytes spilled, {k.shared} shared, compiled in {k.seconds:.1f} s"
            )
            print(f"{k.name[:52]:52} {k.why or what}")
    if given.json is not None:
        graphs = [
            {"name": r.name, "regions": len(r.regions), "left": [str(f) for f in r.fallbacks]} for r in compilations
        ]
        said = {
            "graphs": graphs,
            "refused": refused,
            "slow": [asdict(r) for r in far],
            "steps": [asdict(x) for x in steps],
            "kernels": [asdict(k) for k in kernels],
        }
        given.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
