"""`tilefold bench curve`: a small decoder learns real text, and its losses are those of eager mode but for rounding.

Everybody trains from the same weights on the same windows of text. What rounding does to a curve is measured: float64
is what the curves are compared with, and eager mode runs several times, the windows of each batch in another order,
which changes nothing but the order of sums. A contender passes where its mean distance from float64 is at most
`LIMIT` times the largest of eager's. The optimizer is gradient descent with momentum: AdamW would not see a gradient
that is wrong by a factor.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn

from tilefold.runtime.native.load import native
from tilefold.suites.gpu.environment import commit_here, device_facts
from tilefold.suites.gpu.report import grid
from tilefold.suites.models.decoder import BIG, SMALL, Decoder, Sizes, batches, text
from tilefold.suites.page import write_report

PART = "curve"
STEPS, EAGERS, LIMIT, MOMENTUM = 200, 3, 2.0, 0.9
#: The rate of gradient descent times the columns of the embedding: at 0.1, losses of 512 rose again from 3 to 8.
RATE = 6.4
#: Back ends of torch.compile that train beside eager mode.
CONTENDERS = ("tilefold", "inductor")
#: Steps whose losses the page shows.
SHOWN = (1, 10, 50, 100, 200)


@dataclass(frozen=True, slots=True)
class Curve:
    """One training. `losses`: in nats, one a step; `seconds`: of a step in the median of the second half; `distance`:
    mean |loss - loss in float64|."""

    name: str
    losses: tuple[float, ...]
    seconds: float
    distance: float


@dataclass(frozen=True, slots=True)
class Report:
    """Curves of one device: float64's, eager's with each order, and the contenders'."""

    exact: Curve
    eager: tuple[Curve, ...]
    others: tuple[Curve, ...]
    sizes: Sizes
    dtype: str
    device: str
    commit: str
    torch: str

    @property
    def noise(self) -> float:
        """How far rounding takes eager mode's curve from float64's."""
        return max(c.distance for c in self.eager)

    def passes(self, curve: Curve) -> bool:
        """Whether a contender's curve is eager's but for rounding."""
        return curve.distance <= LIMIT * self.noise


def run(
    device: str = "cpu",
    *,
    contenders: Sequence[str] = CONTENDERS,
    sizes: Sizes | None = None,
    steps: int = STEPS,
    commit: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Train on a device: float32 on a CPU, bfloat16 by autocast on a GPU. `contenders`: back ends of torch.compile."""
    native().wait()  # built once a machine: meanwhile steps are called from Python, beside a compiler at work
    sizes = sizes or (SMALL if device == "cpu" else BIG)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = Decoder(sizes).to(device)
    data = batches(text(), sizes, steps).to(device)
    progress("float64")
    exact = train("float64", copy.deepcopy(start).double(), data)
    eager = []
    for k in range(EAGERS):
        progress(f"eager, order {k}")
        order = torch.roll(torch.arange(sizes.batch, device=device), k * sizes.batch // EAGERS)
        eager.append(train(f"eager, order {k}", copy.deepcopy(start), data[:, order], dtype, exact.losses))
    others = []
    for name in contenders:
        progress(name)
        model = copy.deepcopy(start)
        model.compile(backend=name)
        others.append(train(name, model, data, dtype, exact.losses))
    where = str(device_facts(device)["name"])
    return Report(
        exact, tuple(eager), tuple(others), sizes, str(dtype).removeprefix("torch."), where, commit or commit_here(),
        torch.__version__,
    )  # fmt: skip


def train(
    name: str,
    model: nn.Module,
    data: Tensor,
    dtype: torch.dtype = torch.float32,
    exact: Sequence[float] = (),
) -> Curve:
    """Gradient descent on data [steps, batch, length + 1], one batch a step; `model` gives the loss. 16 bits are
    autocast's."""
    width = next(model.parameters()).shape[-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / width, momentum=MOMENTUM)
    losses, seconds = [], []
    for tokens in data:
        begin = time.perf_counter()
        with _precision(data.device.type, dtype):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    distance = fmean(abs(a - b) for a, b in zip(losses, exact or losses, strict=True))
    return Curve(name, tuple(losses), median(seconds[len(seconds) // 2 :]), distance)


def _precision(device: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


HEADS = ("", *(f"step {n}" for n in SHOWN), "distance from float64", "ms a step", "")


def cells(report: Report) -> list[tuple[str, ...]]:
    """A line a curve; of eager's the one furthest from float64."""
    furthest = max(report.eager, key=lambda c: c.distance)
    lines = []
    for curve in (report.exact, furthest, *report.others):
        verdict = "" if curve in (report.exact, furthest) else "as eager" if report.passes(curve) else "NOT as eager"
        shown = (f"{curve.losses[n - 1]:.5f}" if n <= len(curve.losses) else "-" for n in SHOWN)
        lines.append((curve.name, *shown, f"{curve.distance:.1e}", f"{curve.seconds * 1e3:.2f}", verdict))
    return lines


def markdown(*reports: Report) -> str:
    """This part of the page: a table a device."""
    lines = ["## A small decoder learns text", "", " ".join(_HOW.split())]
    for r in reports:
        s = r.sizes
        what = f"{s.layers} layers of {s.width} columns, {s.batch} windows of {s.length} bytes, {r.dtype}"
        lines += ["", f"{r.device}, torch {r.torch}, commit {r.commit}: {what}.", "", *grid(HEADS, cells(r))]
    return "\n".join(lines)


_HOW = f"""
Losses in nats a byte, gradient descent with momentum, the same weights and windows for everybody; the text is this
package's own code. *Distance* is the mean over all steps; eager mode runs {EAGERS} times with the windows of each batch
in another order, and its furthest curve is shown. Bar: at most {LIMIT:g} times that. A step's time has the optimizer
in it, which nobody compiles.
"""


def write(report: Report, *, json_path: Path | None = None, docs_path: Path | None = None) -> None:
    """Write the JSON and, with those of other devices beside it, the part of the page."""
    write_report(
        report, PART, json_path, docs_path, lambda folder: markdown(*(load_all(folder) if folder else (report,)))
    )


def load_all(folder: Path) -> tuple[Report, ...]:
    """The reports of a folder, a file a device."""
    return tuple(map(load, sorted(folder.glob("*.json"))))


def load(path: Path) -> Report:
    """A report as `write` left it."""
    data = json.loads(path.read_text(encoding="utf-8"))
    exact, *curves = (_curve(c) for c in (data.pop("exact"), *data["eager"], *data["others"]))
    count = len(data.pop("eager"))
    del data["others"]
    sizes = Sizes(**data.pop("sizes"))
    return Report(exact=exact, eager=tuple(curves[:count]), others=tuple(curves[count:]), sizes=sizes, **data)


def _curve(data: dict[str, object]) -> Curve:
    return Curve(**{**data, "losses": tuple(data["losses"])})  # type: ignore[arg-type]
