"""Lines of models: failures first, figures in milliseconds, means by mode."""

from __future__ import annotations

from tests.suites.gpu.fixtures import record, results
from tilefold.suites.models import report


def rec(row, contender, us=None, **more):
    return record(row, contender, us, suite="models", family=row.split()[1], **more)


FOUND = results(
    rec("llama infer", "tilefold", 2000.0, step_us=2500.0, host_us=500.0),
    rec("llama infer", "compile", 3000.0, over=1.5, step_us=3500.0, host_us=250.0),
    rec("llama infer", "eager", 4000.0, over=2.0),
    rec("llama infer", "compile-cg", 1000.0, step_us=3100.0, host_us=80.0, how="plain calls outside the rounds"),
    rec("llama infer", "tilefold-cg", 1000.0, step_us=2100.0, host_us=60.0),
    rec("bert infer", "tilefold", 1000.0, why="wrong: less right than eager"),
    rec("bert infer", "compile", 1000.0, over=1.0),
    rec("bert infer", "eager", 1000.0, over=1.0),
)


def test_lines():
    bert, llama = (report.cells(o) for o in report.outcomes(FOUND, "models"))
    assert bert[0] == "bert infer" and bert[-1] == "tilefold: wrong: less right than eager", "timed, but failed"
    assert llama[:8] == (
        "llama infer", "2.000", "3.000 (1.50x)", "4.000", "2.500 / 3.500", "0.50 / 0.25", "2.100 / 3.100", "0.06 / 0.08"
    )  # fmt: skip
    assert llama[-1] == ""


def test_means_and_page():
    (line,) = report.means(report.outcomes(FOUND, "models"))
    assert "1.22x" in line and "least 1.00x" in line and line.endswith("failed: 1.")
    assert "### Models on a GPU" in report.markdown(FOUND) and "| llama infer |" in report.markdown(FOUND)
    assert report.plain(FOUND).count("infer |") == 2
