"""Embed the lines of a text file with a pretrained encoder that Tilefold compiled.

Prints nearest neighbours, what was fused, the error against float64 next to eager's, the time
next to eager's and torch.compile's, and writes the explanation as a web page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilefold import config
from tilefold.demo import encoder, lines
from tilefold.demo.encoder import Batch, Pretrained
from tilefold.errors import TilefoldError
from tilefold.explanation.report import explain
from tilefold.runtime.native.load import native
from tilefold.suites.timing import Series, interleave

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCH = 8  # small, so that a page gives several batches of different lengths
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Neighbour:
    """`row`'s most similar other sentence, and the cosine."""

    row: int
    other: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run the encoder. `error`: max |y - float64| / max |float64|; `compile_s`: first pass, seconds."""

    name: str
    vectors: torch.Tensor
    error: float
    compile_s: float


def embed(forward: Forward, batches: Sequence[Batch]) -> torch.Tensor:
    """Sentence vectors in the order of the file: [N, hidden]."""
    with torch.no_grad():
        parts = [forward(b.input_ids, b.attention_mask) for b in batches]
    place = torch.tensor([row for b in batches for row in b.rows])
    return torch.cat(parts)[torch.argsort(place)]


def neighbours(vectors: torch.Tensor) -> tuple[Neighbour, ...]:
    """The nearest other sentence of each; vectors: [N, hidden], unit rows, N >= 2."""
    cosine = vectors @ vectors.T
    cosine.fill_diagonal_(-torch.inf)
    best = cosine.max(dim=1)
    return tuple(Neighbour(i, int(j), float(c)) for i, (j, c) in enumerate(zip(best.indices, best.values, strict=True)))


def run(path: Path, report: Path, console: Console, *, inductor: bool = True) -> None:
    """The whole demonstration on one text file; TilefoldError if it cannot be read or a package is missing."""
    text = lines.read(path)
    with console.status("loading the encoder"):
        model = encoder.load()
        batches = model.batches(text, BATCH)
    lengths = [b.input_ids.shape[1] for b in batches]
    console.print(
        f"[bold]all-MiniLM-L6-v2[/] on {len(text)} lines of {path}: {len(batches)} batches, "
        f"{min(lengths)} to {max(lengths)} tokens, {torch.get_num_threads()} threads"
    )
    ways: dict[str, Forward] = {"eager": model.encoder}
    if inductor:
        ways["torch.compile"] = torch.compile(model.encoder, dynamic=True)
    ways["tilefold"] = torch.compile(model.encoder, backend="tilefold", dynamic=True)
    results = _first_passes(model, ways, batches, console)
    ours = results["tilefold"].vectors
    console.print(_neighbour_table(text, ours))
    agree = sum(a.other == b.other for a, b in zip(neighbours(ours), neighbours(results["eager"].vectors), strict=True))
    console.print(f"same nearest neighbour as eager for {agree} of {len(text)} lines\n")
    _explain(model, batches[len(batches) // 2], report, console)
    _without_python(console)
    with console.status("timing: the contenders take turns"):
        passes = {name: lambda f=f: embed(f, batches) for name, f in ways.items()}  # type: ignore[misc]
        times = interleave(passes, budget=20.0, rounds=15)
    console.print(_contender_table(results, times, len(text)))


def _first_passes(
    model: Pretrained, ways: dict[str, Forward], batches: Sequence[Batch], console: Console
) -> dict[str, Contender]:
    """Run every way once (which compiles it) and compare with float64."""
    with console.status("float64 reference"):
        exact = embed(model.exact, batches)
    scale = exact.abs().max()
    results = {}
    for name, forward in ways.items():
        begin = time.perf_counter()
        with console.status(f"{name}: first pass (compiles)"):
            vectors = embed(forward, batches)
        seconds = time.perf_counter() - begin
        console.print(f"{name}: first pass in {seconds:.1f} s")
        results[name] = Contender(name, vectors, float((vectors - exact).abs().max() / scale), seconds)
    return results


def _without_python(console: Console) -> None:
    """Wait for what lets C++ call the steps, which is built in the background since the first pass, once a machine:
    the timings are of calls that have it, as all but the first do."""
    if config.load().runner == "python":
        return
    begin = time.perf_counter()
    with console.status("waiting for what calls the steps from C++ (built once a machine)"):
        built = native().wait() is not None
    seconds = time.perf_counter() - begin
    if not built:
        console.print(f"the steps are called from Python: {native().reason}", highlight=False)
    elif seconds >= 0.1:
        console.print(f"tilefold: what calls the steps from C++ took another {seconds:.1f} s, once a machine\n")


def _explain(model: Pretrained, batch: Batch, report: Path, console: Console) -> None:
    with console.status("explaining what was fused"), torch.no_grad():
        page = explain(model.encoder, batch.input_ids, batch.attention_mask)
        page.to_html(report)
    console.print(str(page), markup=False, highlight=False, soft_wrap=True)
    console.print(f"the whole explanation, with derivations and code: [bold]{report}[/]\n")


def _neighbour_table(text: Sequence[str], vectors: torch.Tensor) -> Table:
    """The most similar pairs, each pair once."""
    table = Table("cosine", "line", "nearest", title="Nearest neighbours", title_justify="left")
    seen: set[frozenset[int]] = set()
    for n in sorted(neighbours(vectors), key=lambda n: -n.cosine):
        pair = frozenset((n.row, n.other))
        if pair not in seen and len(seen) < SHOWN:
            seen.add(pair)
            table.add_row(f"{n.cosine:.3f}", escape(text[n.row]), escape(text[n.other]))
    return table


def _contender_table(results: dict[str, Contender], times: dict[str, Series], count: int) -> Table:
    table = Table(
        "", "ms", "lines/s", "vs eager", "error", "first pass",
        title=f"{len(times['eager'].seconds)} rounds, the contenders taking turns; medians", title_justify="left",
        caption="vs eager: above 1 is faster than eager; error: against float64, relative to the largest element",
        caption_justify="left",
    )  # fmt: skip
    for name, t in times.items():
        table.add_row(
            name, f"{t.median * 1e3:.1f}", f"{count / t.median:.0f}", f"{times['eager'].over(t):.2f}x",
            f"{results[name].error:.1e}", f"{results[name].compile_s:.1f} s",
        )  # fmt: skip
    return table


def main(
    file: Annotated[Path, typer.Argument(help="a text file; its lines are embedded")] = Path("README.md"),
    report: Annotated[Path, typer.Option(help="where the explanation is written")] = Path("report.html"),
    inductor: Annotated[bool, typer.Option(help="also time torch.compile's default back end")] = True,
) -> None:
    """Embed the lines of a text file with a pretrained encoder compiled by Tilefold."""
    try:
        run(file, report, Console(), inductor=inductor)
    except TilefoldError as err:
        typer.echo(f"error: {err}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    typer.run(main)
