"""Tables of library times: interpolation, files, and what the planner makes of them. No table here was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.test_gpu_prices import SCORES
from tilefold.algebra.dtypes import DType
from tilefold.plan import library_rates
from tilefold.plan.gpu_library import gpu_library_products
from tilefold.plan.hardware import H100, gpu_named
from tilefold.plan.library_rates import FAR, LibraryRates, Sizes, Timed, file_of, keep, load
from tilefold.tensor.text import parse

B = DType.BF16


def timed(batch: int, rows: int, cols: int, depth: int, rate: float, kind: library_rates.Kind = "mm") -> Timed:
    s = Sizes(batch, rows, cols, depth)
    return Timed(kind, B, s, s.flops / rate)


TABLE = LibraryRates("made up", (timed(1, 64, 64, 64, 1e12), timed(1, 256, 64, 64, 4e12), timed(1, 64, 64, 256, 2e12)))


def test_a_timed_shape_has_its_own_rate() -> None:
    assert TABLE.rate("mm", B, Sizes(1, 256, 64, 64)) == pytest.approx(4e12)


def test_between_two_shapes_a_rate_is_between_theirs() -> None:
    pair = LibraryRates("made up", TABLE.points[:2])
    assert pair.rate("mm", B, Sizes(1, 128, 64, 64)) == pytest.approx(2e12)  # halfway, of logarithms
    nearer = pair.rate("mm", B, Sizes(1, 192, 64, 64))
    assert nearer is not None and 2e12 < nearer < 4e12


@pytest.mark.parametrize(
    "kind, dtype, sizes",
    [
        ("mm", DType.F32, Sizes(1, 64, 64, 64)),
        ("bmm", B, Sizes(1, 64, 64, 64)),
        ("mm", B, Sizes(1, 64, 64, int(256 * 2 ** (FAR + 1)))),
        ("mm", B, Sizes(1, 0, 64, 64)),
    ],
)
def test_nothing_is_said_of_what_is_far_from_all_that_was_timed(
    kind: library_rates.Kind, dtype: DType, sizes: Sizes
) -> None:
    assert TABLE.rate(kind, dtype, sizes) is None
    machine = replace(H100, measured=TABLE)
    assert machine.call_rate(kind, dtype, sizes) == H100.gemm_rate(dtype, library=True)


def test_a_machine_without_a_table_has_the_rates_of_its_type() -> None:
    assert H100.measured is None and H100.call_rate("mm", B, Sizes(1, 1, 1, 1)) == H100.library[B]
    assert replace(H100, measured=TABLE).call_rate("mm", B, Sizes(1, 64, 64, 64)) == pytest.approx(1e12)


def test_a_kept_table_is_read_by_the_machine_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    kept = replace(TABLE, device="NVIDIA H200", versions=(("torch", "2"),), policy="made up")
    path = keep(kept)
    assert path == file_of("NVIDIA H200") and path.parent.parent == tmp_path
    found = load(path)
    assert found is not None and replace(found, points=()) == replace(kept, points=())
    assert [(p.kind, p.dtype, p.sizes) for p in found.points] == [(p.kind, p.dtype, p.sizes) for p in kept.points]
    assert [p.seconds for p in found.points] == pytest.approx([p.seconds for p in kept.points])
    assert gpu_named("NVIDIA H200", 132).measured == found
    assert gpu_named("NVIDIA H100", 132).measured is None and gpu_named("", 132).measured is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"format": 0},
        lambda d: d | {"points": [d["points"][0] | {"microseconds": -1.0}]},
        lambda d: d | {"points": [d["points"][0] | {"kind": "fft"}]},
        lambda d: d | {"points": [d["points"][0] | {"rows": 0}]},
        lambda d: d | {"points": [{}]},
        lambda d: d | {"versions": []},
        lambda d: [],
    ],
)
def test_a_file_that_is_no_table_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change) -> None:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    path = keep(TABLE)
    assert load(path) is not None
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert load(path) is None
    path.write_text("{")
    assert load(path) is None and load(tmp_path / "nothing") is None


def test_a_slow_library_changes_what_is_left_to_it() -> None:
    routing = """
program r()
  input x: bf16[4096, 2048]
  input w: bf16[2048, 50304]
  dim i = 4096
  dim j = 50304
  dim k = 2048
  s[i, j]: f32 = sum[k] x[i, k] * w[k, j]
  m[i]: f32 = max[j] s[i, j]
  return m
"""
    p = parse(routing)
    at = Sizes(1, 4096, 50304, 2048)
    slow, fast = (
        replace(H100, measured=LibraryRates("made up", (Timed("mm", B, at, at.flops / rate),))) for rate in (5e13, 5e15)
    )
    assert gpu_library_products(p, slow) == frozenset()
    assert gpu_library_products(p, fast) == {"s"}
    scores = parse(SCORES.format(t="bf16"))
    assert gpu_library_products(scores, fast) == gpu_library_products(scores, H100)  # nothing near them was timed
