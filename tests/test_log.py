"""The line of progress: on a terminal, after a while, one at a time, and gone at the end."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time

import pytest

from tilefold import log


class Terminal(io.StringIO):
    def __init__(self, terminal=True):
        super().__init__()
        self.terminal, self.shown = terminal, threading.Event()

    def isatty(self):
        return self.terminal

    def write(self, text):
        if "tilefold:" in text:
            self.shown.set()
        return super().write(text)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(log, "PATIENCE_S", 0.0)
    monkeypatch.setattr(log, "EVERY_S", 0.001)
    monkeypatch.delenv("TILEFOLD_QUIET", raising=False)


def test_where_a_compilation_is(soon, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with log.progress("graph0"):
        log.at_part("part 2 of 3")
        log.at_step("planning")
        with log.progress("graph0_backward"):  # a part of it: one line
            assert len(log._shown) == 1
            out.shown.clear()
            assert out.shown.wait(30)
    text = out.getvalue()
    assert "tilefold: compiling graph0, part 2 of 3, planning (" in text and "backward" not in text
    assert text.endswith("\r\x1b[K") and "\n" not in text and not log._shown


def test_a_short_one_shows_nothing(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with log.progress("graph0"):
        assert log._shown
    assert out.getvalue() == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_nothing_where_it_is_not_wanted(soon, monkeypatch, quiet):
    out = Terminal(terminal=quiet)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TILEFOLD_QUIET", str(int(quiet)))
    with log.progress("graph0"):
        assert not log._shown
        time.sleep(0.02)
    assert out.getvalue() == ""


def test_an_error_ends_it(soon, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="no"), log.progress("graph0"):
        raise ValueError("no")
    assert not log._shown


@pytest.mark.parametrize(
    ("before", "settings", "wanted"),
    [
        ("", {}, "tilefold: graph0: 1 region\n"),
        ("", {"TILEFOLD_QUIET": "1"}, ""),
        ("import torch", {"TORCH_LOGS": "tilefold"}, "] graph0: 1 region\n"),
        ("import logging; logging.basicConfig()", {}, ""),
        ("import logging; logging.basicConfig(level=20)", {}, "INFO:tilefold:graph0: 1 region\n"),
    ],
)
def test_who_hears_of_a_model(before, settings, wanted, monkeypatch):
    """Standard error, where nobody has set up logging; else the logger, at level INFO."""
    for name in ("TORCH_LOGS", "TILEFOLD_QUIET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    code = f"{before}\nfrom tilefold.log import tell\ntell('graph0: 1 region')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stderr.endswith(wanted) and done.stderr.count("graph0") == bool(wanted) and done.stdout == ""


@pytest.mark.parametrize(
    ("setup", "line"),
    [
        ("", "tilefold: graph0 runs alone: a reason"),
        ("logging.basicConfig(); ", "WARNING:tilefold:graph0 runs alone: a reason"),
        ("logging.getLogger('tilefold').setLevel('ERROR'); ", ""),
    ],
)
def test_warnings_say_whose_they_are(setup, line):
    code = f"import logging; {setup}from tilefold import log; log.warn('%s runs alone: %s', 'graph0', 'a reason')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == line
