"""Kernels that are written by hand: what is compiled for a launch, before there are tensors, and how it is started."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import meta
from tilefold.backends.triton import added_rows, scale, written
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.launcher import Launcher
from tilefold.backends.triton.words import as_words

B = torch.bfloat16


def launches(width=768, **how):
    given = meta(50_000, width, dtype=B), meta(4096, dtype=torch.int64), meta(4096, width, dtype=B)
    return added_rows.launches(*given, -1, checked=True, **how)


def test_types_and_multiples_of_sixteen():
    begun = launches()[1].job()
    assert list(begun.types.values()) == ["*i64", "*i32", "*i32", "*bf16", "*bf16", "*fp32", *["i32"] * 5]
    assert begun.vectors == tuple((n, 16) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 10))  # -1 is no multiple
    assert (9, 16) not in launches(width=770)[1].job().vectors
    assert list(scale.launches(meta(1 << 40, dtype=B), meta(), 132)[0].job().types.values())[2] == "i64"


def test_an_address_that_is_no_multiple_takes_another_kernel():
    x, factor = torch.empty(64, dtype=B), torch.ones(1)
    jobs = [scale.launches(t, factor, 132)[0].job() for t in (x[:32], x[1:33])]
    assert [dict(j.vectors).get(0) for j in jobs] == [16, None]
    assert {**vars_of(jobs[0]), "vectors": ()} == {**vars_of(jobs[1]), "vectors": ()}


def vars_of(job):
    return {n: getattr(job, n) for n in job.__slots__}


def test_a_launch_starts_what_was_compiled_through_a_shared_c_function(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in launches():
        assert set(as_words(built(launch.job(), Target("cuda", 90)))) == {0}


def test_kernels_are_asked_for_before_there_are_tensors(monkeypatch):
    asked, calls = [], []
    monkeypatch.setattr(written, "start_building", asked.append)
    written.build_ahead(launches())
    assert [job.name for job in asked] == ["counted", "begun", "gathered", "ended"]
    wanted = []
    monkeypatch.setattr(written, "built", lambda job: wanted.append(job) or job)
    monkeypatch.setattr(written, "launcher_of", lambda job: Launcher(lambda *a: calls.append((job.name, *a)), (5,)))
    monkeypatch.setattr(written, "_launchers", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    for _ in range(2):
        for launch in launches():
            launch.run()
    assert wanted == asked  # each once
    assert calls[0] == ("counted", 16, 1, 1, 99, 5, 0, 0, 0, 4096, 50_000, -1)
