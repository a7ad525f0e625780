"""Packages for GPUs: loaded in a process without a compiler and without Triton's cache."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tilefold
from tests.gpu.blocks import close, made, x
from tilefold import TilefoldError, UnsupportedError
from tilefold.frontend.packages import load as loading

pytestmark = pytest.mark.gpu

LOADED = """
import sys, time
import torch
torch.ones(1, device="cuda")
import tilefold
begin = time.perf_counter()
run = tilefold.load({path!r})
given, want = torch.load({data!r})
got = run(given)
torch.cuda.synchronize()
print("seconds", time.perf_counter() - begin, "triton" in sys.modules)
torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)
for _ in range(3):
    assert torch.equal(run(given), got)
print("the same")
"""


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    m = made("cuda").eval()
    path = tmp_path_factory.mktemp("packages") / "model.tilefold"
    return m, tilefold.package(m, (x("cuda"),), path, weights="included")


def test_a_fresh_process_without_a_compiler(packaged, tmp_path):
    m, path = packaged
    with torch.no_grad():
        torch.save((x("cuda", seed=3), m(x("cuda", seed=3))), tmp_path / "data.pt")
    code = LOADED.format(path=str(path), data=str(tmp_path / "data.pt"))
    (tmp_path / "empty").mkdir()
    place = {"PATH": str(tmp_path / "empty"), "TRITON_CACHE_DIR": str(tmp_path / "triton"), "HOME": str(tmp_path)}
    place |= {"TILEFOLD_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout and not (tmp_path / "triton").exists()
    print(done.stdout)


def test_in_the_same_process(packaged):
    m, path = packaged
    run = tilefold.load(path)
    with torch.no_grad():
        for seed in range(3):
            close(run(x("cuda", seed=seed)), m(x("cuda", seed=seed)))
        wide = torch.randn(64, 512, device="cuda", dtype=torch.float16)
        for other in (wide[:, ::2], wide.flatten()[1 : 1 + 64 * 256].view(64, 256)):
            close(run(other), m(other))
    with pytest.raises(TilefoldError, match="has shape"):
        run(x("cuda", 32))
    with pytest.raises(TilefoldError, match=r"on cpu; the package was made for torch\.float16 on cuda"):
        run(x("cuda").cpu())


def test_another_device_is_refused(packaged, monkeypatch):
    _, path = packaged
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (8, 0))
    with pytest.raises(TilefoldError, match=r"is for GPUs of capability \d+\.\d+, this one has 8\.0"):
        loading.load(path)


def test_sizes_that_are_left_free_are_refused(cuda, tmp_path):
    rows = torch.export.Dim("rows", min=2, max=512)
    with pytest.raises(UnsupportedError, match="fixed sizes"):
        tilefold.package(made(cuda).eval(), (x(cuda),), tmp_path / "m", dynamic_shapes=({0: rows},))
