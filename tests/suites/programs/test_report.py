"""Losers first, failures before them; means of what was timed; the page keeps its other parts."""

from __future__ import annotations

import math

from tests.suites.gpu.fixtures import record, results
from tilefold.suites.page import MARKS, write_part
from tilefold.suites.programs import report


def rec(row, contender, us=None, **more):
    return record(row, contender, us, suite="programs", family="norms", **more)


FOUND = results(
    rec("norm: good", "tilefold", 10.0, peak_bytes=2.0**20, first_cpu=1.0),
    rec("norm: good", "compile", 20.0, over=2.0, peak_bytes=2.0**21, first_cpu=2.0),
    rec("norm: good", "eager", 40.0, over=4.0),
    rec("norm: slow", "tilefold", 10.0, left="aten.sort.default"),
    rec("norm: slow", "compile", 5.0, over=0.5),
    rec("norm: slow", "eager", 10.0, over=1.0),
    rec("norm: wrong", "tilefold", why="wrong: error 1"),
    rec("norm: wrong", "compile", 5.0),
    rec("norm: wrong", "eager", 5.0),
    rec("norm: nobody", "tilefold", why="no"),
    rec("norm: nobody", "compile", why="no"),
    rec("norm: nobody", "eager", why="no"),
)


def test_failures_then_losers_then_the_rest():
    found = report.outcomes(FOUND)
    assert [o.any.row for o in found] == ["norm: wrong", "norm: slow", "norm: good", "norm: nobody"]
    assert [o.failed for o in found] == [True, False, False, False], "where eager fails, nobody has to work"
    assert [o.lost for o in found] == [False, True, False, False]


def test_wrong_results_are_failures_where_eager_was_not_asked():
    found = report.outcomes(
        results(rec("norm: wrong", "tilefold", why="wrong: error 1"), rec("norm: wrong", "compile", 5.0))
    )
    assert [o.failed for o in found] == [True]


def test_means_of_a_class():
    (norms, all_) = report.means(report.outcomes(FOUND))
    assert norms[1:] == all_[1:] == ("4", "1", "1", "1.00x", "0.50x", "2.00x", "0.50x", "0.50x")
    assert report.means([]) == []


def test_cells_say_what_went_wrong():
    wrong, slow, good, _ = (report.cells(o) for o in report.outcomes(FOUND))
    assert wrong[:4] == ("wrong", "norms", "-", "5.0 (-)") and wrong[-1] == "tilefold: wrong: error 1"
    assert slow[3] == "5.0 (0.50x)" and slow[-1] == "left to others: aten.sort.default"
    assert good[5:8] == ("1.0 / 2.0", "1 / 2", "- / -")


def test_a_part_that_failed_has_its_reason_in_the_cells():
    failed = rec("norm: slow", "tilefold", 4.0, left="graph0_1", left_why="graph0_1: BackendError: too large")
    (outcome,) = report.outcomes(results(failed, rec("norm: slow", "compile", 2.0)))
    assert report.cells(outcome)[-1] == "left to others: graph0_1: BackendError: too large"


def test_programs_of_a_class_that_is_in_no_list_have_their_lines():
    other = record("mine", "tilefold", 4.0, suite="programs", family="others")
    found = report.outcomes(results(other, record("mine", "compile", 2.0, suite="programs", family="others", over=0.5)))
    assert [m[0] for m in report.means(found)] == ["others", "all"] and report.cells(found[0])[0] == "mine"


def test_page_and_log(tmp_path):
    page = tmp_path / "page.md"
    write_part(page, "gpu", "the last part\n")
    write_part(page, "programs", report.markdown(FOUND))
    write_part(page, "planner", "planned\n")
    text = page.read_text()
    order = [MARKS["planner"], "planned", MARKS["programs"], "### Programs on a GPU", MARKS["gpu"], "the last part"]
    assert [text.index(s) for s in order] == sorted(text.index(s) for s in order)
    log = report.plain(FOUND)
    assert log.index("wrong | norms") < log.index("slow | norms") < log.index("good | norms")
    assert not math.isnan(report.outcomes(FOUND)[2].speed) and "nan" not in log


def test_rows_of_other_commits_are_named():
    new, old = "1a2b3c4d5e6f", "0000aaaa1111"
    rows = [rec(f"norm: {n}", "tilefold", 10.0, commit=new) for n in ("a", "b")]
    assert report.commits(results(*rows)) == "1a2b3c4d"
    mixed = results(*rows, rec("norm: d", "tilefold", 9.0, commit=old), rec("norm: c", "tilefold", 9.0, commit=old))
    assert report.commits(mixed) == "1a2b3c4d, 0000aaaa (norm: c, norm: d)"
    assert "commit: 1a2b3c4d, 0000aaaa (norm: c, norm: d)" in report.where(mixed)
    assert report.commits(FOUND) == ""
