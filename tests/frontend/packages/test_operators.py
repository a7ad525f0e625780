"""`.pt2` files with Tilefold's operators: of torch.export and of AOTInductor, in a process that never compiled them."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

import tilefold
from tilefold import TilefoldError
from tilefold.frontend.packages.operators import MEMBER


def scores(x, w):
    return torch.softmax(x @ w, -1)


def rows(n, seed=0):
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """An operator of Tilefold between operators of torch."""

    def __init__(self, op):
        super().__init__()
        self.op, self.w = op, nn.Parameter(torch.eye(16)[:, :8] + 0.1)

    def forward(self, x):
        return self.op(x * 2, self.w) + 1


@pytest.fixture(scope="module")
def exported():
    """A model exported with a free number of rows."""
    x = rows(5)
    torch._dynamo.mark_dynamic(x, 0)
    model = Model(tilefold.custom_op(scores, x, torch.ones(16, 8)))
    with torch.no_grad():
        return torch.export.export(model, (rows(5),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=1000)}})


PROGRAM = """
import sys, torch
import tilefold
run = tilefold.load_pt2(sys.argv[1])
with torch.no_grad():
    for x, y in torch.load(sys.argv[2]):
        torch.testing.assert_close(run(x), y)
"""


@pytest.mark.parametrize("aot", [False, True])
def test_another_process_without_a_compiler(exported, aot, tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    if aot:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    else:
        torch.export.save(exported, path)
    with pytest.raises(TilefoldError, match=r"holds no operators of Tilefold\n  hint: tilefold.keep_operators"):
        tilefold.load_pt2(path)
    (name,) = tilefold.keep_operators(path)
    assert name.startswith("scores_")
    with pytest.raises(TilefoldError, match="has its operators already"):
        tilefold.keep_operators(path)
    model = Model(scores)
    cases = [(x, model(x).detach()) for x in (rows(n, n) for n in (2, 5, 300))]
    torch.save(cases, tmp_path / "cases.pt")
    monkeypatch.setenv("TILEFOLD_CXX", "no-compiler")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    words = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "cases.pt")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_in_the_same_process_the_operator_is_the_one_that_is_there(exported, tmp_path):
    torch.export.save(exported, path := tmp_path / "model.pt2")
    tilefold.keep_operators(path)
    run = tilefold.load_pt2(path)
    torch.testing.assert_close(run(rows(7)), exported.module()(rows(7)))


def test_files_that_have_nothing_to_keep(tmp_path):
    plain = torch.export.export(nn.Linear(3, 2), (torch.ones(4, 3),))
    torch.export.save(plain, tmp_path / "plain.pt2")
    with pytest.raises(TilefoldError, match=r"calls no operator that tilefold\.custom_op has made"):
        tilefold.keep_operators(tmp_path / "plain.pt2")
    (tmp_path / "text").write_text("no zip")
    for path in (tmp_path / "text", tmp_path / "none"):
        with pytest.raises(TilefoldError, match=r"is no \.pt2 file"):
            tilefold.keep_operators(path)
        with pytest.raises(TilefoldError, match=r"is no \.pt2 file"):
            tilefold.load_pt2(path)


def test_kept_operators_that_were_changed(exported, tmp_path):
    torch.export.save(exported, path := tmp_path / "model.pt2")
    tilefold.keep_operators(path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as new:
        for i in old.infolist():
            data = old.read(i)
            if i.filename.endswith(MEMBER):
                at = data.index(b"\x7fELF") + 5000
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            new.writestr(i.filename, data)
    with pytest.raises(TilefoldError, match="is damaged: libraries/"):
        tilefold.load_pt2(tmp_path / "bad.pt2")
