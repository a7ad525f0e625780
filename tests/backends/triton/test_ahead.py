"""Kernels compiled in other processes, for a GPU that is not here."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels, variant  # noqa: E402
from tilefold.backends.triton import ahead, known  # noqa: E402
from tilefold.backends.triton import build as build_module  # noqa: E402
from tilefold.backends.triton.build import DIVISOR, LINES, Job, Target, built, expect_jobs, key_of, start_building  # noqa: E402
from tilefold.backends.triton.compile import job_of  # noqa: E402
from tilefold.backends.triton.serve import longest  # noqa: E402
from tilefold.backends.triton.views import Like  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402

HOPPER = Target("cuda", 90)
BROKEN = """
import triton
import triton.language as tl

@triton.jit
def broken(x, n):
    tl.store(x, tl.load(x) + undefined_name)
"""


@pytest.fixture(autouse=True)
def own_server(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))
    monkeypatch.setenv("TILEFOLD_COMPILE_PROCESSES", "2")
    server = ahead.Server()
    monkeypatch.setattr(ahead, "_server", server)
    yield server
    server.close()


def job(name: str) -> Job:
    v = variant(kernels(name)[0])
    return job_of(v.kernel, v.rendered, v.config, [DIVISOR] * len(v.rendered.arguments), wide=False)


def key(j: Job) -> str:
    found = key_of(j, HOPPER)
    assert found is not None
    return found


def begun(*keys: str) -> None:
    """Wait until the server has begun these jobs."""
    with ahead._server._lock:
        assert ahead._server._lock.wait_for(lambda: ahead._server._begun.issuperset(keys), timeout=120)


def test_others_compile_what_is_then_only_loaded(monkeypatch):
    jobs = [job(n) for n in ("softmax", "routing", "grouped decode")]
    broken = Job("broken", BROKEN, {"x": "*fp32", "n": "i32"}, ((0, 16),), {"num_warps": 4, "num_stages": 3})
    for j in (*jobs, jobs[0], broken):
        start_building(j, HOPPER)
    begun(*map(key, (*jobs, broken)))
    with monkeypatch.context() as m:
        m.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled here"))
        for j in jobs:
            assert "cubin" in built(j, HOPPER).asm
    assert all(known.exists(key(j)) for j in jobs)
    with pytest.raises(BackendError, match="does not compile broken"):
        built(broken, HOPPER)
    assert not known.exists(key(broken))


def test_a_server_that_is_expected_to_work_takes_few_kernels_as_well(monkeypatch):
    expect_jobs(HOPPER)
    process = ahead._server._process
    assert process is not None
    expect_jobs(HOPPER)
    assert ahead._server._process is process
    softmax = job("softmax")
    start_building(softmax, HOPPER)
    begun(key(softmax))
    monkeypatch.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled here"))
    assert "cubin" in built(softmax, HOPPER).asm


def test_what_else_is_done_with_a_kernel_is_done_once_it_is_compiled():
    found = []
    softmax = job("softmax")
    done = built(softmax, HOPPER, beside=found.append)
    assert found == [done]
    built(softmax, HOPPER, beside=found.append)  # it is there already
    assert found == [done]


def test_the_longest_source_comes_first_and_of_equal_ones_the_latest():
    jobs = [{"job": {"source": "x" * n}} for n in (3, 9, 1, 9, 3)]
    order = []
    while jobs:
        order.append(longest(jobs))
        jobs.pop(order[-1])
    assert order == [3, 1, 2, 0, 0]


def test_a_server_compiles_what_launches_kernels(tmp_path, monkeypatch):
    """Without a GPU: an empty library stands for CUDA's driver."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    command = [compiler, "-shared", "-o", str(tmp_path / "libcuda.so.1"), "-x", "c", "/dev/null"]
    ahead.subprocess.run(command, check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    expect_jobs(HOPPER)
    softmax = job("softmax")
    start_building(softmax, HOPPER)
    begun(key(softmax))
    assert ahead.waited(key(softmax))  # its child is not the only one
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(tmp_path.glob("triton_cache/*/__triton_launcher*.so"))) < 2:
        time.sleep(0.1)
    assert len(list(tmp_path.glob("triton_cache/*/__triton_launcher*.so"))) == 2


def test_a_server_does_as_the_process_is_told_that_asks(tmp_path, monkeypatch):
    """An assembler that is named after the server started (as Inductor does): the same key in both processes. One that
    is named after the job was given: what was made before is taken."""
    expect_jobs(HOPPER)
    ptxas = shutil.copy2(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas", tmp_path / "ptxas")
    softmax, routing = job("softmax"), job("routing")
    start_building(routing, HOPPER)
    before = key(routing)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    start_building(softmax, HOPPER)
    begun(before, key(softmax))
    monkeypatch.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled here"))
    assert "cubin" in built(softmax, HOPPER).asm and known.exists(key(softmax))
    assert key(routing) != before
    assert "cubin" in built(routing, HOPPER).asm


def test_kernels_are_compiled_to_the_same_code_without_lines_of_the_source(monkeypatch, tmp_path):
    """Unless the environment asks for them. The environment is as it was afterwards."""
    before, softmax = dict(os.environ), job("softmax")
    without = built(softmax, HOPPER).asm["ptx"]
    assert dict(os.environ) == before
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other triton"))
    monkeypatch.setenv(LINES, "0")
    usual = built(softmax, HOPPER).asm["ptx"]
    assert ".loc" in usual and ".loc" not in without
    assert instructions(without) == instructions(usual)


def instructions(ptx: str) -> list[str]:
    """Lines of the kernel's body that are code."""
    body = ptx[ptx.index(".entry") : ptx.index("// -- End function")]
    found = (line.split("//")[0].strip() for line in body.splitlines())
    return [x for x in found if x and not x.startswith((".loc", "$L", ".section"))]


def test_what_else_the_server_prints_is_no_answer(monkeypatch):
    """Triton prints a page of text with empty lines where the assembler fails."""
    start = ahead.subprocess.Popen
    said = "begun a\n\n=====\nerror in a kernel\ndone a"
    answers = f"import sys; sys.stdin.readline(); print({said!r}, flush=True); sys.stdin.read()"
    talking = [sys.executable, "-c", answers]
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda _, **how: start(talking, **how))
    monkeypatch.setattr(ahead, "FEW", 0)
    ahead.submit("a", {"job": {}, "target": []})
    begun("a")
    assert ahead.waited("a")


def test_nothing_is_expected_without_a_device(monkeypatch):
    def none(target):
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(build_module, "_where", none)
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    expect_jobs()
    start_building(Job("broken", BROKEN, {"x": "*fp32", "n": "i32"}, (), {}))
    monkeypatch.setenv("TILEFOLD_COMPILE_PROCESSES", "0")
    ahead.expect(["cuda", 90, 32])
    assert ahead._server._process is None and not ahead._server._waiting


def test_few_kernels_start_no_server(monkeypatch):
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    for n in range(ahead.FEW):
        ahead.submit(f"key {n}", {})
    assert not ahead.waited("key 0")


@pytest.mark.parametrize("command", [["false"], ["/nowhere/python"]], ids=lambda c: c[0])
def test_a_server_that_dies_costs_nothing_but_time(command, monkeypatch):
    start = ahead.subprocess.Popen
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda _, **how: start(command, **how))
    for n in range(ahead.FEW + 3):
        ahead.submit(f"key {n}", {})
    assert not any(ahead.waited(f"key {n}") for n in range(ahead.FEW + 3))
    ahead.submit("another", {})
    assert not ahead.waited("another")


def test_no_processes_where_none_are_wanted(monkeypatch):
    monkeypatch.setenv("TILEFOLD_COMPILE_PROCESSES", "0")
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    for n in range(ahead.FEW + 3):
        ahead.submit(f"key {n}", {})
    assert not ahead.waited("key 0")


def test_a_kernel_is_compiled_for_tensors_that_do_not_exist(monkeypatch):
    monkeypatch.setattr(ahead, "FEW", 0)
    where = build_module._where
    monkeypatch.setattr(build_module, "_where", lambda target: where(HOPPER))
    k = kernels("softmax")[0]
    device = torch.device("cpu")
    like = [Like((8192, 32768), (32768, 1), torch.bfloat16, device) for _ in range(2)]
    k.start_building(like, {})
    v = k.variant((1, 1), k.sizes({}), tf32=False, interpreted=False)
    wanted = key_of(job_of(v.kernel, v.rendered, v.config, [DIVISOR] * len(v.rendered.arguments), wide=False), HOPPER)
    assert wanted is not None
    begun(wanted)
    assert ahead.waited(wanted)
    assert known.exists(wanted)


def test_nothing_is_compiled_for_results_without_elements(monkeypatch):
    k = kernels("softmax")[0]
    monkeypatch.setattr(ahead, "submit", lambda *a: pytest.fail("submitted"))
    k.start_building([Like((0, 32768), (32768, 1), torch.bfloat16, torch.device("cpu")) for _ in range(2)], {})


def test_what_no_child_has_begun_is_taken_back_and_compiled_here(monkeypatch):
    """The server says that it begins a job when it does; until then whoever needs the kernel does not wait."""
    start = ahead.subprocess.Popen
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda _, **how: start(silent, **how))
    for n in range(ahead.FEW + 3):
        ahead.submit(f"key {n}", {"job": {}, "target": []})
    assert not ahead.waited("key 0")
