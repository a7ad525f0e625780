"""The families of `tilefold.integrations.transformers` on a GPU: errors, and speed next to eager and compiled models.

    python bench/families.py [family ...] [--seconds 75] [--json FILE]       (--device cpu --small: a dry run)
    python bench/families_page.py FILE --docs docs/how-to/transformers.md    (its tables for people)

Two layers of each family with random weights in bf16 and no dropout, two sequences of 1024 tokens (ViT: 16 images), in
inference and for a training step (loss and all gradients). Contenders: the model as it is (eager), `apply(model)`,
`torch.compile` with Inductor, `torch.compile(backend="tilefold")`, and Liger's kernels where it is installed and has
the family. Errors are those of logits, and in training of
logits and gradients, against the same weights in float32 with eager attention, relative to the largest element.

A family and mode is a process of its own, so that they compile side by side. None is timed before all have compiled,
or have spent `--seconds` on it (a contender that is not reached by then is named, not guessed), and then one at a
time: contenders by turns, a plain call from start to the end of its last kernel, and the sum of its kernels' times.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.integrations.families import MODELS, model_of, results, worst
from tilefold.frontend.torch_compile import backend
from tilefold.integrations.transformers import apply
from tilefold.runtime.native.load import native
from tilefold.suites.gpu.environment import commit_here
from tilefold.suites.timing import in_turn

MODES = ("infer", "train")
CONTENDERS = ("eager", "apply", "inductor", "tilefold", "liger")
LENGTH, WINDOW, VOCABULARY = 1024, 512, 32000
WIDTH = dict(
    vocab_size=VOCABULARY,
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    max_position_embeddings=LENGTH,
)
GROUPED = {**WIDTH, "num_key_value_heads": 4}
VISION = {k: WIDTH[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")}
#: Sizes by family where they are not GROUPED.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {**GROUPED, "head_dim": 64},
    "gemma": {**GROUPED, "head_dim": 64},
    "gemma2": {**GROUPED, "head_dim": 64, "sliding_window": WINDOW},
    "gemma3": {**GROUPED, "head_dim": 64, "sliding_window": WINDOW},
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "gpt2": dict(vocab_size=VOCABULARY, n_embd=1024, n_head=16, n_positions=LENGTH),
    "bert": WIDTH,
    "t5": dict(vocab_size=VOCABULARY, d_model=1024, d_kv=64, d_ff=2816, num_heads=16),
    "vit": {**VISION, "image_size": 224, "patch_size": 16},
}
#: Weights are drawn this far around what the model begins with.
SPREAD = 0.02
WARM_UP, ROUNDS = 5, 9
OUT_OF_TIME = "not compiled in the given time"
#: Seconds after the compilations in which the timings end.
AFTER = 45


@dataclass(slots=True)
class Timed:
    """One contender of a family in one mode; `error` relative to the largest element, `why` where there is none.

    step_ms: a plain call until its last kernel has ended; gpu_ms: the sum of its kernels' times; nan: not measured.
    """

    family: str
    mode: str
    contender: str
    error: float = float("nan")
    step_ms: float = float("nan")
    gpu_ms: float = float("nan")
    compile_s: float = float("nan")
    why: str = ""
    rows: list[str] = field(default_factory=list)


def build(family: str, device: str, *, small: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in bf16 and its inputs with labels."""
    sizes = {} if small else SIZES.get(family, GROUPED)
    model = model_of(family, spread=SPREAD, **sizes).to(device, torch.bfloat16)
    torch.manual_seed(1)
    if family == "vit":
        images, side = (2, 16) if small else (16, 224)
        pixels = torch.randn(images, 3, side, side, device=device, dtype=torch.bfloat16)
        return model, {"pixel_values": pixels, "labels": torch.arange(images, device=device) % 2}
    length = 12 if small else LENGTH
    ids = torch.randint(3, 96 if small else VOCABULARY, (2, length), device=device)
    return model, {"input_ids": ids, "labels": (ids[:, : length // 4] if family == "t5" else ids).contiguous()}


def step(model: Any, inputs: dict[str, torch.Tensor], mode: str) -> Callable[[], dict[str, torch.Tensor]]:
    """One call: logits, or loss and gradients."""
    if mode == "train":
        return lambda: results(model, inputs)
    given = {k: v for k, v in inputs.items() if k != "labels"}
    if "labels" in inputs and "input_ids" in inputs and inputs["labels"].shape != inputs["input_ids"].shape:
        given["decoder_input_ids"] = inputs["labels"]

    def infer() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": model(**given).logits}

    return infer


def plain(model: Any, inputs: dict[str, torch.Tensor], mode: str) -> Callable[[], object]:
    """The same as is timed: nothing is copied out."""
    if mode == "infer":
        return step(model, inputs, mode)

    def train() -> None:
        model.zero_grad()
        model(**inputs).loss.backward()

    return train


def contender(name: str, model: Any) -> tuple[Any, Any]:
    """The model prepared, in place, and what `apply` said."""
    match name:
        case "apply":
            return model, apply(model)
        case "inductor":
            model.compile(dynamic=False)
        case "tilefold":
            model.compile(backend=backend, dynamic=False)  # the name needs an installed package
        case "liger":  # last, for it changes transformers' modules too
            importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
            if not any("liger" in type(m).__module__ or "liger" in str(m.forward) for m in model.modules()):
                raise ValueError("Liger has nothing for this family")
    return model, None


def reference(model: Any, inputs: dict[str, torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
    """The results in float32."""
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    return step(exact, wide, mode)()


def error_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest one, of logits or of gradients."""
    if set(exact) == {"logits"}:
        return float((found["logits"].double() - exact["logits"].double()).abs().max() / exact["logits"].abs().max())
    return max(worst(found, exact))


def one(a: argparse.Namespace, family: str, mode: str) -> None:
    """A process: compile and compare, wait for the others, time."""
    torch.backends.cudnn.allow_tf32 = False
    done: list[Timed] = []
    ready: dict[str, Callable[[], object]] = {}
    signal.signal(signal.SIGALRM, _out_of_time)
    model, inputs = build(family, a.device, small=a.small)
    exact = reference(model, inputs, mode)
    for name in a.contenders:
        made = Timed(family, mode, name)
        done.append(made)
        left = a.seconds - (time.time() - a.began)
        if name == "liger" and importlib.util.find_spec("liger_kernel") is None:
            made.why = "not installed"
            continue
        if name != "eager" and left < 1:
            made.why = OUT_OF_TIME
            continue
        start = time.perf_counter()
        try:
            signal.alarm(max(1, int(left)) if name != "eager" else 0)
            own, said = contender(name, copy.deepcopy(model))
            made.error = error_of(step(own, inputs, mode)(), exact)
            call = plain(own, inputs, mode)
            call()
            _wait(a.device)
            made.compile_s = time.perf_counter() - start
            if name != "eager" and made.compile_s > left:  # the alarm was taken for a failure, and got around
                raise TimeoutError(OUT_OF_TIME)
            made.rows = [] if said is None else [f"{r.kind} {r.state} {r.path} {r.why}" for r in said.rows]
            ready[name] = call
        except Exception as err:  # hidden: nothing, the contender's row says it and the rest goes on
            made.why = f"{type(err).__name__}: {err}".splitlines()[0]
            traceback.print_exc()
        finally:
            signal.alarm(0)
            _save(a, done)
        print(f"{family} {mode} {name}: error {made.error:.1e}, {made.compile_s:.0f} s {made.why}", flush=True)
    Path(a.folder, f"ready-{family}-{mode}").touch()
    while time.time() - a.began < a.seconds and len(list(Path(a.folder).glob("ready-*"))) < a.processes:
        time.sleep(0.2)
    with _alone(Path(a.folder, "lock")):
        measure(ready, {t.contender: t for t in done}, a.device)
    _save(a, done)


def _save(a: argparse.Namespace, done: list[Timed]) -> None:
    path = Path(a.folder, f"{done[0].family}-{done[0].mode}")
    path.with_suffix(".part").write_text(json.dumps([asdict(t) for t in done]))
    path.with_suffix(".part").rename(path.with_suffix(".json"))


def _out_of_time(*_: object) -> None:
    raise TimeoutError(OUT_OF_TIME)


def measure(calls: dict[str, Callable[[], object]], into: dict[str, Timed], device: str) -> None:
    """Steps by turns, then the kernels' times. What runs regions without Python is built by then, as a minute later
    in a training run."""
    native().wait()
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(WARM_UP + ROUNDS):
        for name in in_turn(tuple(calls), k):
            _wait(device)
            start = time.perf_counter()
            calls[name]()
            _wait(device)
            if k >= WARM_UP:
                spent[name].append(time.perf_counter() - start)
    for name, call in calls.items():
        into[name].step_ms = statistics.median(spent[name]) * 1e3
        if device == "cuda":
            into[name].gpu_ms = kernels_ms(call)


def kernels_ms(call: Callable[[], object], times: int = 3) -> float:
    """The sum of the kernels' times of a call in milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in seen.key_averages()) / times / 1e3


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def table(found: list[Timed]) -> str:
    """Markdown: one line a family and mode."""
    names = list(dict.fromkeys(t.contender for t in found))
    heads = ("family", "mode", *(f"{n} ms" for n in names), *(f"error of {n}" for n in names))
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for family, mode in dict.fromkeys((t.family, t.mode) for t in found):
        row = {t.contender: t for t in found if (t.family, t.mode) == (family, mode)}
        timed = [f"{row[n].gpu_ms:.2f} / {row[n].step_ms:.2f}" if not row[n].why else "-" for n in names]
        errors = [f"{row[n].error:.1e}" if not row[n].why else row[n].why[:60] for n in names]
        lines.append(" | ".join((family, mode, *timed, *errors)))
    return "\n".join(f"| {line} |" for line in lines)


def every(a: argparse.Namespace) -> list[Timed]:
    """All the processes, and what they found."""
    pairs = [(family, mode) for family in a.families or MODELS for mode in a.modes]
    found: list[Timed] = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for family, mode in pairs:
            words = [sys.executable, __file__, family, "--one", mode, "--device", a.device, "--folder", folder]
            words += ["--began", str(a.began), "--seconds", str(a.seconds), "--processes", str(len(pairs))]
            places = {"TILEFOLD_CACHE_DIR": f"t-{family}-{mode}", "TORCHINDUCTOR_CACHE_DIR": f"i-{family}-{mode}"}
            own = {k: f"{folder}/{v}" for k, v in places.items()} | {"PYTHONPATH": os.pathsep.join(sys.path)}
            words += ["--contenders", *a.contenders, *(["--small"] if a.small else [])]
            running.append(subprocess.Popen(words, env=os.environ | own))
        for process, (family, mode) in zip(running, pairs, strict=True):
            try:
                process.wait(a.began + a.seconds + AFTER - time.time())
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # what is known by now is kept
                process.kill()
            made = Path(folder, f"{family}-{mode}.json")
            if made.exists():
                found += [Timed(**t) for t in json.loads(made.read_text())]
            else:
                why = f"the process ended with {process.returncode}"
                found += [Timed(family, mode, n, why=why) for n in a.contenders]
    return found


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("families", nargs="*", help=f"all, or some of {', '.join(MODELS)}")
    ask.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    ask.add_argument("--contenders", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--small", action="store_true", help="tiny models")
    ask.add_argument("--seconds", type=float, default=75.0, help="for compilation")
    ask.add_argument("--json", type=Path)
    ask.add_argument("--commit", default=commit_here(), help="what is measured, where git cannot tell")
    ask.add_argument("--one", help=argparse.SUPPRESS)
    ask.add_argument("--folder", help=argparse.SUPPRESS)
    ask.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    ask.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    a = ask.parse_args()
    transformers.logging.set_verbosity_error()
    if a.one:
        one(a, a.families[0], a.one)
        return 0
    found = every(a)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if importlib.util.find_spec("liger_kernel") is not None:
        versions += f", liger-kernel {metadata.version('liger-kernel')}"
    name = torch.cuda.get_device_name() if a.device == "cuda" else "a CPU"
    if a.json:
        rows = [asdict(t) for t in found]
        a.json.write_text(
            json.dumps({"device": name, "versions": versions, "commit": a.commit, "rows": rows}, indent=1)
        )
    print(f"{name}, {versions}; milliseconds: kernels / step\n\n{table(found)}")
    for t in found:
        for row in t.rows:
            print(f"{t.family} {t.mode} {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
