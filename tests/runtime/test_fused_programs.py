"""What was fused once is read in the next process: the same kernels, and never those of something else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilefold import files
from tilefold.block.text import show
from tilefold.errors import NotFusibleError
from tilefold.frontend.fuse import trace
from tilefold.plan import gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.hardware import H100, gpu_named
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime import fused_programs as cache
from tilefold.runtime import kept
from tilefold.suites.gpu import operators as o
from tilefold.tensor.product import product_of


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """An empty cache; the list grows by every program that is really fused."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(files, "_warned", set())
    found, fuse = [], gpu.fuse_for_gpu

    def count(p, *args, **options):
        found.append(p.name)
        return fuse(p, *args, **options)

    monkeypatch.setattr(gpu, "fuse_for_gpu", count)
    return found


def program(fn=o.attention, keys=300):
    args = [torch.empty(2, 4, n, 64, dtype=torch.float16, device="meta") for n in (200, keys, keys)]
    torch._dynamo.reset()
    return trace(fn, *args).program


def test_a_second_process_reads_the_same(asked):
    p = program()
    first = cache.fused_for_gpu(p)
    again = cache.fused_for_gpu(dataclasses.replace(p, name="another_graph"))
    assert len(asked) == 1 and again.program.name == "another_graph"
    assert [show(k.block) for k in again.kernels] == [show(k.block) for k in first.kernels]
    assert dataclasses.replace(again.program, name=p.name) == first.program and again.grouping == first.grouping
    folds = [[s.fold for s in k.plan.stages] for k in first.kernels]
    assert [[s.fold for s in k.plan.stages] for k in again.kernels] == folds
    assert all(s.fold.checks and all(c.ok for c in s.fold.checks) for k in again.kernels for s in k.plan.stages)
    assert [c.loc for c in again.program.body] == [c.loc for c in first.program.body]


def test_a_new_program_for_a_gpu_that_is_there_has_compilers_started(asked, monkeypatch):
    expected = []
    monkeypatch.setattr(cache, "expect_jobs", lambda: expected.append(True))
    cache.fused_for_gpu(program(keys=302))
    assert not expected or torch.cuda.is_available()
    expected.clear()
    p = program()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):
        cache.fused_for_gpu(p)
    assert expected == [True]


def test_whatever_decides_the_kernels_counts(asked, monkeypatch):
    p = program()
    cache.fused_for_gpu(p)
    cache.fused_for_gpu(program(keys=301))
    cache.fused_for_gpu(program(o.causal))
    cache.fused_for_gpu(p, GpuTarget(given=Given(segments=2)))
    cache.fused_for_gpu(p, calls=((p.body[0].name,),))
    moved = [dataclasses.replace(c, loc=dataclasses.replace(c.loc, line=1)) if c.loc else c for c in p.body]
    cache.fused_for_gpu(dataclasses.replace(p, body=tuple(moved)))
    monkeypatch.setattr(kept, "stamp", lambda root: "another Tilefold")
    cache.fused_for_gpu(p)
    cache.fused_for_gpu(p, GpuTarget(refuse=lambda k: None))
    cache.fused_for_gpu(p, GpuTarget(gpu_named("", 60)))
    cache.fused_for_gpu(p, GpuTarget(dataclasses.replace(H100, second_kernel=1e-3)))
    assert len(asked) == 10


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: b"", lambda d: d[:40] + bytes([d[40] ^ 1]) + d[41:]])
def test_a_damaged_file_is_made_again(damage, asked, tmp_path):
    p = program()
    cache.fused_for_gpu(p)
    (file,) = (tmp_path / "fused").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    cache.fused_for_gpu(p)
    assert len(asked) == 2 and file.read_bytes() == whole


def other_name(file):
    """A sound file, of another program."""
    other = file.with_name(f"{'0' * 32}.fused")
    cache.FUSED.write(other, cache.fused_for_gpu(program(o.causal)))
    file.write_bytes(other.read_bytes())


def with_text(file, text):
    """A file whose checksum is right."""
    file.write_bytes(kept.checksum(file, text).encode() + text)


def other_class(file):
    with_text(file, b'{"nodes": [["Popen", "touch /tmp/x"]], "root": ["n", 0]}')


def other_value(file):
    with_text(file, b'{"nodes": [], "root": 3}')


def unsound(file):
    """A block that writes to a tensor that there is not."""
    text = file.read_bytes()[kept.DIGEST :]
    assert b'"Store","' in text
    with_text(file, text.replace(b'"Store","', b'"Store","nowhere_', 1))


def pickled(file):
    with_text(file, b"cos\nsystem\n(S'touch /tmp/x'\ntR.")


@pytest.mark.parametrize("poison", [other_name, other_class, other_value, unsound, pickled])
def test_a_poisoned_file_is_made_again(poison, asked, tmp_path):
    p = program()
    first = cache.fused_for_gpu(p)
    (file,) = (tmp_path / "fused").iterdir()
    whole = file.read_bytes()
    poison(file)
    before = len(asked)
    assert cache.fused_for_gpu(p) == first
    assert len(asked) == before + 1 and file.read_bytes() == whole
    file.chmod(0o622)
    assert cache.fused_for_gpu(p) == first and len(asked) == before + 2 and file.stat().st_mode & 0o777 == 0o600


def test_library_products_are_chosen_once(asked, tmp_path, monkeypatch):
    chosen = []

    def products(self, p):
        chosen.append(p)
        return frozenset({p.body[0].name})

    monkeypatch.setattr(GpuTarget, "products", products)
    p = program()
    first = cache.products_for_gpu(p, GpuTarget())
    assert first == cache.products_for_gpu(dataclasses.replace(p, name="another"), GpuTarget()) == {p.body[0].name}
    assert len(chosen) == 1
    cache.products_for_gpu(p, GpuTarget(gpu_named("", 60)))
    cache.products_for_gpu(program(keys=301), GpuTarget())
    assert len(chosen) == 3
    for file in (tmp_path / "fused").iterdir():
        text = file.read_bytes()[kept.DIGEST :]
        with_text(file, text.replace(p.body[0].name.encode(), b"nowhere"))
    assert cache.products_for_gpu(p, GpuTarget()) == first and len(chosen) == 4


def test_orders_of_products_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    asked, own = [], cache.without_copies
    monkeypatch.setattr(cache, "without_copies", lambda *given: asked.append(given) or own(*given))
    p = trace(lambda x, w: (x.relu().transpose(0, 1) @ w.relu(),), torch.zeros(256, 64), torch.zeros(256, 32)).program
    (product,) = products = frozenset(c.name for c in p.body if product_of(c) is not None)
    machine = gpu_named("", 132)
    first = cache.turned_for_gpu(p, products, machine, (), ())
    assert cache.turned_for_gpu(dataclasses.replace(p, name="another"), products, machine, (), ())[0].name == "another"
    assert cache.turned_for_gpu(p, products, machine, (), ()) == first and len(asked) == 1
    cache.turned_for_gpu(p, products, machine, {p.body[0].name} - products, ())
    assert cache.turned_for_gpu(p, products, machine, products, ()) == (p, products)  # nothing to turn, nothing asked
    cache.turned_for_gpu(p, products, gpu_named("", 60), (), ())
    assert len(asked) == 3
    for file in (tmp_path / "fused").iterdir():
        before, _, behind = file.read_bytes()[kept.DIGEST :].rpartition(product.encode())
        with_text(file, before + b"nowhere" + behind)
    assert cache.turned_for_gpu(p, products, machine, (), ()) == first and len(asked) == 4


def test_errors_are_not_kept_and_a_full_disk_is_no_error(asked, tmp_path, monkeypatch):
    def refuses(p, *args, **options):
        raise NotFusibleError("no rule")

    p = program()
    with monkeypatch.context() as m:
        m.setattr(gpu, "fuse_for_gpu", refuses)
        with pytest.raises(NotFusibleError):
            cache.fused_for_gpu(p)
    assert not list(tmp_path.rglob("*.fused"))
    (tmp_path / "fused").write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="every process fuses"):
        assert cache.fused_for_gpu(p).kernels and len(asked) == 1


def test_stamps_follow_files(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = kept.stamp(tmp_path)
    kept.stamp.cache_clear()
    (tmp_path / "a.py").write_text("12")
    assert kept.stamp(tmp_path) != first
    kept.stamp.cache_clear()
