"""The page on a telephone: nothing is wider than the window (a browser measures; skipped where there is none)."""

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


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_nothing_is_wider_than_a_narrow_window(tmp_path):
    tilefold.explain(softmax, torch.randn(8, 300)).to_html(tmp_path / "page.html")
    (tmp_path / "frame.html").write_text(FRAME.format(width=WIDTH))
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*words, (tmp_path / "frame.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"(\d+) pixels", done.stdout)
    assert found is not None, done.stdout[-500:]
    assert int(found[1]) <= WIDTH
