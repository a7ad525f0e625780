"""The subcommands. A user's mistake ends with a message and status 2; a failed verification with status 1."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tilefold.cli import doctor as examination
from tilefold.cli import target
from tilefold.cli.friendly import console, friendly
from tilefold.demo import embed
from tilefold.errors import TilefoldError
from tilefold.explanation.report import explain as explain_function
from tilefold.frontend.verify import verify as verify_function
from tilefold.suites import verify_suite
from tilefold.suites.blocks import run as blocks_suite
from tilefold.tensor import formula
from tilefold.user_file import checked

Target = Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function in a Python file")]
Args = Annotated[
    str | None,
    typer.Option(
        help='what to call it with, such as "q=f32[2, 8, 128, 64], labels=i64[128] < 1000, scale=0.5"; '
        "without it, the file's <function>_inputs() or example_inputs() is called"
    ),
]
Seed = Annotated[int, typer.Option(help="of the random arguments", min=0, max=2**63 - 1)]


def run(
    file: Annotated[Path, typer.Argument(help="a text file; its lines are embedded")] = Path("README.md"),
    report: Annotated[Path, typer.Option(help="where the explanation is written")] = Path("report.html"),
    inductor: Annotated[bool, typer.Option(help="also time torch.compile's default back end")] = True,
) -> None:
    """Embed the lines of a text file with a pretrained encoder compiled by Tilefold."""
    with friendly():
        embed.run(file, report, console, inductor=inductor)


def explain(
    function: Target,
    args: Args = None,
    seed: Seed = 0,
    html: Annotated[Path | None, typer.Option(help="also write the explanation as a web page")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda: whose kernels are shown; no GPU is needed")] = None,
    code: Annotated[bool, typer.Option(help="also print the generated code")] = False,
    measure: Annotated[bool, typer.Option(help="run the kernels, and say how long each takes")] = False,
) -> None:
    """What is fused in a function, why, and what it saves."""
    with friendly("compiling"):
        fn, module = target.load(function)
        given = target.arguments(fn, module, args, seed=seed)
        with checked(fn, given, module):
            page = explain_function(fn, *given, device=device, measure=measure)
        if html is not None:
            page.to_html(html)
    console.print(page.text(code=code), markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        console.print(f"written: {html}")


def verify(
    function: Annotated[str | None, typer.Argument(metavar="FILE:FUNCTION", help="a function in a Python file")] = None,
    args: Args = None,
    seed: Seed = 0,
    suite: Annotated[str | None, typer.Option(help="a packaged suite instead of a function: cascades, blocks")] = None,
) -> None:
    """Compare a compiled function, or a suite, with float64; status 1 if anything is less right than eager."""
    with friendly():
        if (function is None) == (suite is None):
            what = "needs FILE:FUNCTION or --suite" if function is None else "takes FILE:FUNCTION or --suite, not both"
            raise TilefoldError(f"verify {what}", hint="tilefold verify --suite cascades")
        if suite is not None:
            ok = _verify_suite(suite)
        else:
            assert function is not None
            ok = _verify_function(function, args, seed)
    raise typer.Exit(0 if ok else 1)


def _verify_blocks() -> bool:
    with console.status("") as status:
        shown = blocks_suite.run(lambda name: status.update(f"showing {name}"))
    console.print(blocks_suite.table(shown))
    failed = sum(not s.outcome.ok for s in shown)
    console.print(f"{len(shown) - failed} of {len(shown)} shown")
    return failed == 0


def _verify_suite(suite: str) -> bool:
    if suite == "blocks":
        return _verify_blocks()
    with console.status("") as status:
        rows = verify_suite.run_suite(suite, progress=lambda name: status.update(f"verifying {name}"))
    console.print(verify_suite.table(rows))
    console.print(verify_suite.summary(rows))
    return all(row.ok for row in rows)


def _verify_function(function: str, args: str | None, seed: int) -> bool:
    with console.status("compiling and comparing"):
        fn, module = target.load(function)
        given = target.arguments(fn, module, args, seed=seed)
        with checked(fn, given, module):
            result = verify_function(fn, *given)
    console.print(str(result), markup=False, highlight=False, soft_wrap=True)
    return result.ok


def doctor() -> None:
    """What this machine can run, and why not."""
    with console.status("looking"):
        findings = examination.examine()
    console.print(examination.table(findings))


def derive(
    formula_text: Annotated[
        str, typer.Argument(metavar="FORMULA", help="index notation, a file that holds it, or - for standard input")
    ],
    latex: Annotated[bool, typer.Option("--latex", help="print LaTeX")] = False,
) -> None:
    """Derive the fold of a cascade, such as "m = max[l] x[l]; t = sum[l] exp(x[l] - m)"."""
    with friendly():
        with console.status("deriving"):
            found = formula.derive(_formula(formula_text))
        console.print(found.latex() if latex else str(found), markup=False, highlight=False, soft_wrap=True)


def _formula(text: str) -> str:
    """The text itself, or that of a file or of standard input."""
    if text == "-":
        return sys.stdin.read()
    if "=" not in text:
        path = Path(text)
        if not path.is_file():
            raise TilefoldError(f"neither a formula nor a file: {text!r}", hint='for example "s = sum[l] x[l]"')
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TilefoldError(f"{text} is no text", hint="a file of statements such as s = sum[l] x[l]") from None
        except OSError as err:
            raise TilefoldError(f"cannot read {text}: {err.strerror}") from None
    return text
