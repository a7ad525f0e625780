"""Long straight lines of code are compiled without Triton's search for neighbours, and read them side by side."""

from __future__ import annotations

import re
import time

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tilefold.backends.triton import build, straight  # noqa: E402
from tilefold.backends.triton.build import Job, Target, built  # noqa: E402

HOPPER = Target("cuda", 90)
STEPS = 40


def scan(steps: int, at: str = "{t} * 4096 + r_i", last: str = "") -> Job:
    """`s = a[t] * s + b[t]`, written out: all states are stored."""
    lines = ["import triton", "import triton.language as tl", "", "", "@triton.jit", "def scan(p_a, p_b, p_y):"]
    lines += [f"r_i = tl.arange(0, 64){last}", "r_j = tl.arange(0, 16)", "v_0 = tl.load(p_a + r_i)"]
    for t in range(1, steps + 1):
        place = at.format(t=t)
        lines += [f"x_a_{t} = tl.load(p_a + {place})", f"x_b_{t} = tl.load(p_b + {place})"]
        lines += [f"v_{t} = x_a_{t} * (v_{t - 1} + 1.0) * 0.5 + x_b_{t} * x_b_{t} - v_{t - 1} * 0.25 + x_a_{t} * 3.0"]
        lines += [f"tl.store(p_y + {place}, v_{t})"]
    source = "\n".join([*lines[:6], *(f"    {line}" for line in lines[6:])]) + "\n"
    types = dict.fromkeys(("p_a", "p_b", "p_y"), "*fp32")
    options = {"num_warps": 2, "num_stages": 2}
    return Job("scan", source, types, ((0, 16), (1, 16), (2, 16)), options)


pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_long_scan_is_compiled_in_a_fraction_of_the_time(monkeypatch, tmp_path):
    """With lanes of one element each nothing is read otherwise; and Triton's pass is there again afterwards."""
    own = build.triton._C.libtriton.passes.ttgpuir.add_coalesce
    job = scan(STEPS)
    monkeypatch.setattr(straight, "LONG", 1.0)
    assert not straight.laid_out(job.source, job.name)
    begin = time.process_time()
    quick = built(job, HOPPER).asm["ptx"]
    seconds = time.process_time() - begin
    assert build.triton._C.libtriton.passes.ttgpuir.add_coalesce is own
    monkeypatch.setattr(straight, "LONG", 1e9)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other triton"))
    begin = time.process_time()
    usual = built(job, HOPPER).asm["ptx"]
    assert 2 * seconds < time.process_time() - begin
    accesses = [sorted(re.findall(r"(?:ld|st)\.global\S*", ptx)) for ptx in (quick, usual)]
    assert accesses[0] == accesses[1] and len(accesses[0]) == 3 * STEPS + 1


def test_what_has_its_neighbours_elsewhere_is_laid_out(monkeypatch):
    """Along another axis than the last, or in loops, whose copies run ahead; short kernels in any case."""
    assert straight.laid_out(scan(3).source, "scan")
    monkeypatch.setattr(straight, "LONG", 0.0)
    plain = scan(3, "(r_j * 8)[:, None] + r_i[None, :]").source
    across = scan(3, "r_j[:, None] + (r_i * 8)[None, :]").source
    looping = scan(3).source.replace(
        "    v_0 =", "    for n in tl.range(0, 4):\n        tl.store(p_y + r_i, n)\n    v_0 ="
    )
    assert [straight.laid_out(s, "scan") for s in (plain, across, looping)] == [False, True, True]
