"""The page in a browser: nothing is wider than a telephone, large drawings are whole (skipped where there is none)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

import tilefold

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH = 390
FRAME = """<iframe id="page" src="page.html" width="{width}" height="900"></iframe><p id="found"></p><script>
document.getElementById("page").onload = e => {{
  document.getElementById("found").textContent = e.target.contentDocument.documentElement.scrollWidth + " pixels"; }};
</script>"""


def softmax(x):
    return torch.softmax(x, -1)


def tower(x):
    for n in range(1, 40):  # no two alike, so that all are drawn
        x = x.sin() * n
    return x


def shown(page, *words) -> str:
    """The document as it is when its scripts have run."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000", *words, "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600, check=True)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_nothing_is_wider_than_a_narrow_window(tmp_path):
    tilefold.explain(softmax, torch.randn(8, 300)).to_html(tmp_path / "page.html")
    (tmp_path / "frame.html").write_text(FRAME.format(width=WIDTH))
    dom = shown(tmp_path / "frame.html")
    found = re.search(r"(\d+) pixels", dom)
    assert found is not None, dom[-500:]
    assert int(found[1]) <= WIDTH


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_drawing_larger_than_its_frame_is_whole_at_first(tmp_path):
    for fn in (softmax, tower):
        tilefold.explain(fn, torch.randn(8, 300)).to_html(tmp_path / f"{fn.__name__}.html")
    assert 'class="canvas zooms whole"' in shown(tmp_path / "tower.html", "--window-size=1280,900")
    assert 'class="canvas zooms' not in shown(tmp_path / "softmax.html", "--window-size=1280,900")
