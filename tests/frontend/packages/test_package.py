"""Packages: loaded without a compiler in a fresh process, for all lengths, and refused where they do not fit."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import nn

import tilefold
from tilefold import TilefoldError, UnsupportedError
from tilefold.frontend.packages import load as loading
from tilefold.frontend.packages.archive import MANIFEST, PACKAGE, Reader, Writer
from tilefold.frontend.packages.form import Package
from tilefold.frontend.regions.execute import Executable
from tilefold.runtime import records
from tilefold.version import version


class Model(nn.Module):
    """An embedding, attention, a product with a bias; buffers in the state and not; a sort, which is left to torch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 7)
        self.register_buffer("shift", torch.arange(32.0) / 32)
        self.register_buffer("scale", torch.full((32,), 1.5), persistent=False)

    def forward(self, tokens, factor=2.0, *, mask=None):
        x = self.norm(self.embedding(tokens) + self.shift * self.scale)
        q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        if mask is not None:
            y = y * mask
        return {"y": self.out(y) * factor, "sorted": torch.sort(x, -1).values, "length": tokens.shape[1]}


def tokens(length, seed=0):
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("packages") / "model.tilefold"
    length = torch.export.Dim("length", min=2, max=512)
    sizes, mask = {"tokens": {1: length}, "mask": {1: length}}, torch.ones(2, 9, 1)
    return tilefold.package(model, (tokens(9),), path, kwargs={"mask": mask}, dynamic_shapes=sizes, weights="included")


def masked(length, seed=0):
    return torch.rand(2, length, 1, generator=torch.Generator().manual_seed(seed))


PROGRAM = """
import sys, torch
import tilefold
cases = torch.load(sys.argv[2])
run = tilefold.load(sys.argv[1])
for _ in range(3):  # in Python, recorded, in C++
    results = [run(tokens, mask=mask) for tokens, mask, _, _ in cases]
assert all(r._module.count(r._region) == len(cases) for r in run.regions), [r.refused for r in run.regions]
print(sorted({"triton", "sympy", "z3", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
for made, (tokens, _, y, order) in zip(results, cases):
    torch.testing.assert_close(made["y"], y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made["sorted"], order, rtol=1e-4, atol=1e-5)
    assert made["length"] == tokens.shape[1]
"""


def test_a_fresh_process_without_a_compiler(model, file, tmp_path, monkeypatch):
    """Five lengths that were not packaged; nothing that compiles is even imported."""
    cases = []
    with torch.no_grad():
        for seed, length in enumerate((9, 2, 33, 100, 512)):
            made = model(tokens(length, seed), mask=masked(length, seed))
            cases.append((tokens(length, seed), masked(length, seed), made["y"], made["sorted"]))
    torch.save(cases, tmp_path / "cases.pt")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TILEFOLD_CXX", "no-compiler")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    words = [sys.executable, "-c", PROGRAM, str(file), str(tmp_path / "cases.pt")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]" and not (tmp_path / "cache").exists()


def test_tensors_of_other_strides(model, file):
    run = tilefold.load(file)
    across = tokens(20).t().contiguous().t()
    mask = masked(40)[:, ::2]
    with torch.no_grad():
        torch.testing.assert_close(run(across, mask=mask)["y"], model(across, mask=mask)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((tokens(1),), {"mask": masked(1)}, "the size .* is 1; the package is for 2 to 512"),
        ((tokens(9).int(),), {"mask": masked(9)}, "tokens is torch.int32 on cpu; the package was made for torch.int64"),
        ((tokens(9),), {"mask": masked(8)}, r"mask has shape \(2, 8, 1\); the package was made for \(2, .*, 1\)"),
        ((tokens(9)[:1],), {"mask": masked(9)}, r"tokens has shape \(1, 9\)"),
        ((tokens(9),), {}, "takes arguments like"),
        ((tokens(9), 3.0), {"mask": masked(9)}, "takes arguments like"),
        ((tokens(9),), {"mask": masked(9).requires_grad_()}, "has no gradient, and mask needs one"),
        ((tokens(9),), {"mask": 1.0}, "mask is float"),
    ],
)
def test_calls_that_it_was_not_made_for(file, args, kwargs, message):
    with pytest.raises(TilefoldError, match=message):
        tilefold.load(file)(*args, **kwargs)


def test_steps_show_in_a_profiler(file):
    run = tilefold.load(file)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run(tokens(9), mask=masked(9))
    shown = {e.name for e in found.events() if e.name.startswith("tilefold::")}
    assert shown == {t for r in run.regions for t in r.runner.titles} and shown


# ------------------------------------------------------------------ weights by name


def scaled(w):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(w)

        def forward(self, x, n=3):
            return torch.softmax(x * self.w, -1) * n

    return Scaled()


@pytest.fixture(scope="module")
def by_name(tmp_path_factory):
    path = tmp_path_factory.mktemp("packages") / "small.tilefold"
    return tilefold.package(scaled(torch.ones(16)), (torch.ones(4, 16), 3), path)


def test_weights_are_the_callers(by_name):
    x, w = torch.randn(4, 16), torch.randn(16)
    want = scaled(w)(x).detach()
    for given in (scaled(w), {"w": w, "other": x}):
        run = tilefold.load(by_name, given)
        torch.testing.assert_close(run(x, 3), want)
        assert run.weights["w"].data_ptr() == w.data_ptr()
    with pytest.raises(TilefoldError, match="n is 4; the package was made for 3"):
        run(x, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "refers to the weight w, which is not given"),
        ({"v": torch.ones(16)}, "refers to the weight w, which is not given"),
        ({"w": torch.ones(15)}, r"w is torch.float32\[15\] on cpu, not torch.float32\[16\]"),
        ({"w": torch.ones(16).half()}, "w is torch.float16"),
    ],
)
def test_weights_that_do_not_fit(by_name, given, message):
    with pytest.raises(TilefoldError, match=message):
        tilefold.load(by_name, given)


def test_included_weights_can_be_replaced(model, file):
    other = Model().eval()
    with torch.no_grad():
        want = other(tokens(5), mask=masked(5))["y"]
        torch.testing.assert_close(
            tilefold.load(file, other)(tokens(5), mask=masked(5))["y"], want, rtol=1e-4, atol=1e-5
        )


# ------------------------------------------------------------------ files that are refused


def changed(file, path, members):
    """A copy of a package with other members."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for i in old.infolist():
            new.writestr(i.filename, members.pop(i.filename, old.read(i)))
        for name, data in members.items():
            new.writestr(name, data)
    return path


def member(file, begins):
    with zipfile.ZipFile(file) as z:
        return next((n, z.read(n)) for n in z.namelist() if n.startswith(begins))


@pytest.mark.parametrize("begins", ["libraries/", "tensors/", PACKAGE])
def test_changed_bytes(file, tmp_path, begins):
    name, data = member(file, begins)
    bad = changed(file, tmp_path / "bad", {name: data[:-1] + bytes([data[-1] ^ 1])})
    with pytest.raises(TilefoldError, match=f"is damaged: {name} is not what was packaged"):
        tilefold.load(bad)


def test_other_files(file, tmp_path):
    with pytest.raises(TilefoldError, match="damaged: extra"):
        tilefold.load(changed(file, tmp_path / "more", {"extra": b"x"}))
    (tmp_path / "text").write_text("no zip")
    shutil.copy(file, tmp_path / "cut")
    with (tmp_path / "cut").open("r+b") as f:
        f.truncate(file.stat().st_size // 2)
    for name in ("text", "cut"):
        with pytest.raises(TilefoldError, match="is no package of Tilefold"):
            tilefold.load(tmp_path / name)
    with pytest.raises(TilefoldError, match="there is no file"):
        tilefold.load(tmp_path / "none")
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(MANIFEST, "{}" * 100)
    with pytest.raises(TilefoldError, match="compressed members"):
        tilefold.load(tmp_path / "packed")


def test_what_is_loaded_can_be_pinned(file):
    digest = tilefold.load(file).digest
    assert tilefold.load(file, digest=digest).digest == digest
    with pytest.raises(TilefoldError, match=f"has the digest {digest}, not 00"):
        tilefold.load(file, digest="00")


@pytest.mark.parametrize(
    ("what", "message", "hint"),
    [
        ({"torch": "2.0.0"}, "was made with torch 2.0.0, this is", "install torch 2.0.0"),
        ({"tilefold": "0.0.1"}, "was made with Tilefold 0.0.1", "or package it again"),
        ({"format": 99}, "has format 99", "package it again"),
        ({"cpu": ("x86_64", "avx9000")}, "is for a CPU with avx9000, which this one has not", "TILEFOLD_ARCH="),
    ],
)
def test_other_places(file, what, message, hint):
    requires = Reader(file).manifest.requires
    loading.check_here(requires, "p")
    assert requires.tilefold == version() and requires.torch == torch.__version__ and requires.cpu
    with pytest.raises(TilefoldError, match=message) as err:
        loading.check_here(replace(requires, **what), "p")
    assert hint in str(err.value)


def test_records_make_no_other_objects(file, tmp_path):
    """A package whose digests are right, and whose graph names something else than a part of a package."""
    evil = b'{"nodes":[["Popen","true"]],"root":["n",0]}'
    writer, reader = Writer(), Reader(file)
    data = writer.archive(reader.manifest.requires, reader.package(Package))
    (tmp_path / "new").write_bytes(data)
    assert Reader(tmp_path / "new").package(Package) == reader.package(Package)
    manifest = reader.manifest
    digests = {**manifest.members, PACKAGE: hashlib.sha256(evil).hexdigest()}
    text = records.dump(replace(manifest, members=digests))
    with pytest.raises(TilefoldError, match="cannot be read: not a record: KeyError: 'Popen'"):
        tilefold.load(changed(file, tmp_path / "evil", {PACKAGE: evil, MANIFEST: text}))


# ------------------------------------------------------------------ what cannot be packaged


def test_refusals(tmp_path):
    path = tmp_path / "p"
    with pytest.raises(UnsupportedError, match=r"it changes .*running_mean"):
        tilefold.package(nn.BatchNorm1d(3), (torch.ones(4, 3),), path)
    with pytest.raises(UnsupportedError, match=r"torch\.export does not capture it"):
        tilefold.package(lambda x: x if x.sum() > 0 else -x, (torch.ones(3),), path)
    with pytest.raises(TilefoldError, match="unknown weights='all'"):
        tilefold.package(torch.sin, (torch.ones(3),), path, weights="all")
    with pytest.raises(TilefoldError, match="args is a Tensor, not a tuple"):
        tilefold.package(torch.sin, torch.ones(3), path)
    with pytest.raises(TilefoldError, match="package takes a function or a module, not int"):
        tilefold.package(3, (torch.ones(3),), path)
    assert not path.exists()
    with pytest.raises(TilefoldError, match="cannot be written"):
        tilefold.package(lambda x: x.exp().sum(), (torch.ones(3),), tmp_path / "none" / "p")


def test_an_argument_with_a_name_of_python_s(tmp_path):
    """`nn.Sequential.forward` calls its argument `input`."""
    m, x = nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1)), torch.randn(3, 6)
    run = tilefold.load(tilefold.package(m, (x,), tmp_path / "m"), m)
    torch.testing.assert_close(run(x), m(x).detach())
    with pytest.raises(TilefoldError, match="has shape"):
        run(x[:2])


def test_without_the_module_for_this_python_regions_run_in_python(model, file, monkeypatch):
    monkeypatch.setattr(loading, "python", lambda: "cpython-20")
    run = tilefold.load(file)
    assert {type(r) for r in run.regions} == {Executable}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(tokens(20), mask=masked(20))["y"], model(tokens(20), mask=masked(20))["y"])
