"""The tuner without a GPU: keys, tables and bins, spaces of configurations, workers that hang, crash or are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from tilefold import files
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.space import space
from tilefold.backends.triton.tiles import default_config
from tilefold.block.canonical import canonical
from tilefold.block.text import show
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.tuner import table as tables
from tilefold.runtime.tuner import tune as tuner
from tilefold.runtime.tuner.compiler import compile_one
from tilefold.runtime.tuner.table import Table, Tuned, from_json, key_of, kin, structure, to_json
from tilefold.runtime.tuner.worker import difference
from tilefold.suites.gpu import operators as o
from tilefold.suites.gpu import redfuser


def block(fn, *shapes):
    args = [torch.empty(s, dtype=torch.float16, device="meta") for s in shapes]
    torch._dynamo.reset()  # it makes sizes dynamic that it saw change
    (kernel,) = fuse_for_gpu(trace(fn, *args).program).kernels
    torch._dynamo.reset()
    found = canonical(kernel.block).block
    return found, TritonKernel(found).sizes({})


def heads(n, dim=64):
    return [(2, 32, n, dim)] * 3


@pytest.fixture
def own(tmp_path, monkeypatch):
    """No shipped tables, a cache of its own."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    return tmp_path


CONFIG = TritonConfig({"i": 64, "l": 32}, {"i": 16}, warps=8, stages=3, descriptors=True)


@pytest.mark.parametrize("c", [TritonConfig(), CONFIG, TritonConfig({"a": 1}, specialize=True, registers=168)])
def test_configurations_survive_json(c):
    data = json.loads(json.dumps(to_json(c)))
    assert from_json(data).key() == c.key()


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError):
        from_json({"tiles": {}, "colour": 3})


def test_keys_are_of_the_kernel_and_of_bins():
    at = {n: key_of(*block(o.causal, *heads(n))) for n in (1000, 1024, 1025)}
    assert at[1000] == at[1024] != at[1025]
    assert at[1024].split(" ")[0] == at[1025].split(" ")[0]
    assert key_of(*block(o.attention, *heads(1024))).split(" ")[0] != at[1024].split(" ")[0]


def segmented(fn, segments, *shapes):
    """The first kernel of a fold that is cut into so many segments."""
    args = [torch.empty(s, dtype=torch.float16, device="meta") for s in shapes]
    torch._dynamo.reset()
    kernel = fuse_for_gpu(trace(fn, *args).program, GpuTarget(given=Given(segments=segments))).kernels[0]
    torch._dynamo.reset()
    found = canonical(kernel.block).block
    return found, TritonKernel(found).sizes({})


def test_numbers_that_follow_from_sizes_do_not_count():
    """Segments, the scale of a head's dim, the offset of a mask: the kernel is the same."""
    decode = [(2, 8, 1, 64), (2, 8, 8192, 64), (2, 8, 8192, 64)]
    eight, sixteen = (segmented(o.attention, n, *decode) for n in (8, 16))
    assert "// 8)" in show(eight[0]) and "// 16)" in show(sixteen[0])
    assert structure(eight[0]) == structure(sixteen[0]) and key_of(*eight) != key_of(*sixteen)
    narrow, wide = (structure(block(o.attention, *heads(1024, d))[0]) for d in (64, 128))
    assert narrow == wide
    chunks = [[(2, 32, 1024, 64), *[(2, 32, n, 64)] * 2] for n in (2048, 4096)]
    short, long = (block(o.causal, *c)[0] for c in chunks)
    assert "1024" in show(short) and "3072" in show(long) and structure(short) == structure(long)


def test_what_is_computed_counts():
    groups = [structure(block(o.gqa, (1, 16, 256, 64), *[(1, n, 256, 64)] * 2)[0]) for n in (2, 4)]
    assert groups[0] != groups[1]  # heads that share keys are packed by it
    kinds = [o.attention, o.causal, o.softcap(30.0)]
    assert len({structure(block(f, *heads(1024))[0]) for f in kinds}) == 3
    assert structure(block(o.softcap(30.0), *heads(256))[0]) == structure(block(o.softcap(50.0), *heads(256))[0])


def entry(c):
    return {"config": to_json(c), "microseconds": 1, "default": 1, "note": ""}


def test_the_devices_own_table_then_its_kins_then_none(own):
    """Exact bins before near ones, and among each the device's own; no other chip's."""
    a, b, c, d = (TritonConfig({"i": n}) for n in (16, 32, 64, 128))
    h100 = {"k i64": entry(a), "k i128": entry(a), "m i64": entry(d)}
    h200 = {"k i64": entry(b), "k i1024": entry(c)}
    for name, data in (("H100", h100), ("H200", h200), ("A100", {"n i64": entry(a)})):
        file = own / "shipped" / f"nvidia-{name.lower()}.json"
        file.write_text(json.dumps({f"NVIDIA {name}": {"triton 1": data}}))
    there, here = Table("NVIDIA H100", "triton 1"), Table("NVIDIA H200", "triton 1")
    assert here.find("k i64").key() == b.key() and there.find("k i64").key() == a.key()
    assert here.find("k i128").key() == a.key()  # the kin's exact bin before an own near one
    assert here.find("k i512").key() == c.key()
    assert here.find("m i64").key() == d.key() == here.find("m i128").key()
    assert there.find("k i1024").key() == c.key()
    assert here.find("n i64") is None and here.find("other i64") is None
    assert here.exact("k i64") and not here.exact("k i128")  # what was tuned on the kin is tuned here too
    assert kin("NVIDIA H200") and "NVIDIA H200" not in kin("NVIDIA H200") and kin("NVIDIA A100") == ()
    assert Table("NVIDIA H200", "triton 2").find("k i64").key() == b.key()  # another toolchain's are better than none
    there.add("k i64", Tuned(CONFIG, 1.0, 2.0))
    there.add("k i128", Tuned(CONFIG, 1.0, 2.0))
    again = Table("NVIDIA H200", "triton 1")  # the user's own of the kin: after the device's, before what was shipped
    assert again.find("k i64").key() == b.key() and again.find("k i128").key() == CONFIG.key()


@pytest.mark.parametrize("device", ["NVIDIA H100", "NVIDIA H200"])
def test_shipped_entries_serve_the_kernels_of_the_suites(device, tmp_path, monkeypatch):
    """Keys of the file are those of today's kernels: a change of the compiler that moves them needs the file again."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    t = Table(device, "triton 3.6.0")
    x, w = (torch.empty(n, dtype=torch.float16, device="meta") for n in ((2048, 4096), (4096, 64)))
    _, last = fuse_for_gpu(trace(o.moe_routing(8), x, w).program).kernels
    found = canonical(last.block).block
    routing = key_of(found, TritonKernel(found).sizes({}))
    assert t.find(routing) is not None
    # groups of warps that own rows are faster than what was tuned before them
    assert t.find(key_of(*block(o.causal, *[(1, 32, 4096, 128)] * 3))) is None
    files = [json.loads(path.read_text()) for path in tables.SHIPPED.glob("*.json")]
    shipped = {key for f in files for by_tool in f.values() for entries in by_tool.values() for key in entries}
    assert routing in shipped


def test_every_shipped_entry_is_of_a_kernel_that_there_is():
    """What the compiler no longer makes is found by none: an entry tuned for it is gone without a word."""
    rows = {c.row: c for c in redfuser.ROWS}
    made = set()
    for name in ("R4", "R7", "L7"):
        args = [x.to("meta") for x in rows[name].args("cpu")]
        kernels = fuse_for_gpu(trace(rows[name].fn, *args).program).kernels
        made |= {structure(canonical(k.block).block) for k in kernels}
    files = [json.loads(path.read_text()) for path in tables.SHIPPED.glob("*.json")]
    shipped = {key.split()[0] for f in files for tools in f.values() for entries in tools.values() for key in entries}
    assert shipped and shipped <= made


def test_tables_find_the_nearest_bin_on_disk_too(own):
    first = Table("GPU", "triton 1")
    first.add("k i64 l1024", Tuned(CONFIG, 5.0, 9.0))
    first.add("k i64 l8192", Tuned(TritonConfig({"i": 128}), 5.0, 9.0))
    again = Table("GPU", "triton 1")
    for t in (first, again):
        assert t.exact("k i64 l1024") and not t.exact("k i64 l2048")
        assert t.find("k i64 l2048").key() == CONFIG.key()
        assert t.find("k i64 l4096").key() == TritonConfig({"i": 128}).key()
        assert t.find("k i64 l1048576") is None and t.find("other i64 l1024") is None
        assert t.find("k i64 m1024") is None


def test_the_users_table_goes_before_the_shipped(own):
    shipped = entry(TritonConfig({"i": 16}))
    data = {"GPU": {"triton 1": {"k i64": shipped, "k i128": shipped}}}
    (own / "shipped" / "gpu.json").write_text(json.dumps(data))
    Table("GPU", "triton 1").add("k i64", Tuned(CONFIG, 1.0, 2.0))
    t = Table("GPU", "triton 1")
    assert t.find("k i64").key() == CONFIG.key()
    assert t.find("k i128").key() == TritonConfig({"i": 16}).key()


def malformed():
    """Texts that are no tables, one for each way to be none."""
    good = entry(CONFIG)
    yield from ("", "{", "null", "[]", "3", '"x"', "\0", "[" * 10**5, '{"GPU": 3}', '{"GPU": {"triton 1": []}}')
    wrong = [
        {"tiles": {"i": 0}},
        {"tiles": {"i": "64"}},
        {"tiles": {"i": 1.5}},
        {"tiles": ["i"]},
        {"tiles": {}, "warps": 3},
        {"tiles": {}, "warps": True},
        {"tiles": {}, "warps": 64},
        {"tiles": {}, "stages": -1},
        {"tiles": {}, "descriptors": "no"},
        {"tiles": {}, "registers": "many"},
        {"tiles": {}, "groups": -1},
        {"tiles": {"i": 2**40}},
        {"tiles": {}, "lanes": {"i": 2**40}},
        {"tiles": {}, "stages": 2**70},
        {"tiles": {}, "registers": 256},
        {"tiles": {}, "groups": 9},
        {"tiles": {}, "draws": 1},
        {"tiles": {}, "own": ["rows"]},
        {"tiles": {}, "own": "all"},
        {"tiles": {}, "colour": 1},
        "tiles",
        None,
    ]
    for config in wrong:
        yield json.dumps({"GPU": {"triton 1": {"k i64": good, "m i64": {**good, "config": config}}}})
    yield json.dumps({"GPU": {"triton 1": {"k i64": {}}}})
    yield json.dumps({"GPU": {"triton 1": {"k i": good}}})
    yield json.dumps({"another": {"triton 1": {"k i64": 3}}})


@pytest.mark.parametrize("text", tuple(malformed()))
def test_a_malformed_table_is_set_aside(text, own):
    file = tables.user_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match="no table of tuned kernels"):
        t = Table("GPU", "triton 1")
    assert t.find("k i64") is None and not file.exists()
    assert file.with_name("tuned.json.malformed").read_text() == text
    t.add("k i64", Tuned(CONFIG, 1.0, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Table("GPU", "triton 1").exact("k i64")
    assert file.stat().st_mode & 0o777 == 0o600


def test_bytes_that_are_no_text_are_no_table(own):
    tables.user_file().parent.mkdir(parents=True)
    tables.user_file().write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="no table of tuned kernels"):
        Table("GPU", "triton 1")


def test_a_table_that_others_can_write_is_not_used(own, monkeypatch):
    monkeypatch.setattr(files, "_warned", set())
    Table("GPU", "triton 1").add("k i64", Tuned(CONFIG, 1.0, 2.0))
    tables.user_file().chmod(0o666)
    with pytest.warns(RuntimeWarning, match="may be written by others"):
        assert Table("GPU", "triton 1").find("k i64") is None


def test_a_winner_that_cannot_be_written_is_known_to_this_process(own, monkeypatch):
    monkeypatch.setattr(files, "_warned", set())
    (own / "cache").write_text("no folder")
    t = Table("GPU", "triton 1")
    with pytest.warns(RuntimeWarning, match="known to this process alone"):
        t.add("k i64", Tuned(CONFIG, 1.0, 2.0))
    assert t.exact("k i64") and Table("GPU", "triton 1").find("k i64") is None


@pytest.mark.parametrize("fn, shapes", [(o.causal, heads(2048)), (o.softmax, [(64, 5000)])], ids=["causal", "softmax"])
def test_spaces_begin_with_the_default_and_have_no_duplicates(fn, shapes):
    b, sizes = block(fn, *shapes)
    default = default_config(b, sizes).key()
    assert [c.key() for c in space(b, sizes, "none")] == [default]
    counts = []
    for effort in ("quick", "full"):
        keys = [c.key() for c in space(b, sizes, effort)]
        assert keys[0] == default and len(set(keys)) == len(keys)
        counts.append(len(keys))
    assert 4 < counts[0] < counts[1]


def test_wrong_results_are_told_from_rounding():
    r = torch.randn(64, dtype=torch.float64)
    ok = (r * (1 + 1e-4)).half()
    assert difference([ok], [r], 2**-10) == ""
    off = ok.clone()
    off[3] += 0.2
    assert "differs" in difference([off], [r], 2**-10)
    holes = ok.clone()
    holes[3] = float("nan")
    assert "NaN" in difference([holes], [r], 2**-10)


#: A worker that does to candidate n what the n-th word says.
STAND_IN = """
import json, sys, time
job = json.load(sys.stdin)
for n, c in enumerate(job["candidates"]):
    print(json.dumps({"start": n}), flush=True)
    do = sys.argv[1:][c["tiles"]["n"]]
    if do == "hang":
        time.sleep(60)
    if do == "crash":
        sys.exit(3)
    said = {"why": "wrong: differs"} if do == "wrong" else {"microseconds": float(do)}
    print(json.dumps({"done": n, **said}), flush=True)
"""


def tuned(monkeypatch, *words: str):
    """The tuner's verdict on candidates that behave as the words say; progress as it was told."""

    def worker(_: str):
        command = [sys.executable, "-c", STAND_IN, *words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    candidates = tuple(TritonConfig({"n": n}) for n in range(len(words)))
    monkeypatch.setattr(tuner, "_process", worker)
    monkeypatch.setattr(tuner, "space", lambda block, sizes, effort: candidates)
    failed = {n: "needs too much shared memory" for n, w in enumerate(words) if w == "large"}
    monkeypatch.setattr(tuner, "compile_all", lambda *args: failed)
    monkeypatch.setattr(tuner, "SILENCE", 1.5)
    monkeypatch.setattr(tuner, "START", 5.0)
    told = []
    b, sizes = block(o.softmax, (4, 300))
    won, trials = tuner.tune(b, sizes, {}, "quick", lambda done, of, what: told.append((done, of)))
    tuner.dismiss()
    return won, trials, told


def test_the_fastest_right_candidate_wins_among_ones_that_fail(monkeypatch):
    won, trials, told = tuned(monkeypatch, "10", "large", "hang", "4", "crash", "wrong", "7")
    assert (won.config.tiles["n"], won.microseconds, won.default_microseconds) == (3, 4.0, 10.0)
    why = {t.config.tiles["n"]: t.why for t in trials}
    assert len(trials) == 7 and told
    assert "hangs" in why[2] and "ended" in why[4] and "wrong" in why[5] and "shared memory" in why[1]
    assert [n for n, t in ((t.config.tiles["n"], t) for t in trials) if t.microseconds is not None] == [0, 3, 6]


def test_the_default_stays_where_nothing_is_faster(monkeypatch):
    won, _, _ = tuned(monkeypatch, "5", "9", "wrong")
    assert won.config.tiles["n"] == 0 and won.microseconds == won.default_microseconds == 5.0


def test_without_a_reference_nothing_else_may_win(monkeypatch):
    won, trials, _ = tuned(monkeypatch, "crash", "1")
    assert won.config.tiles["n"] == 0
    assert all(t.microseconds is None for t in trials)


#: A compiler whose answer to a candidate is in the candidate.
COMPILER = """
import json, sys
for line in sys.stdin:
    c = json.loads(line)["candidate"]["tiles"]["n"]
    if c == 2:
        sys.exit(1)
    print(json.dumps("too large" if c == 1 else ""), flush=True)
"""


def test_a_compiler_that_dies_is_replaced_and_processes_are_kept(monkeypatch):
    started = []

    def compiler(_: str):
        started.append(1)
        command = [sys.executable, "-c", COMPILER]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(tuner, "_process", compiler)
    monkeypatch.setattr(tuner.os, "cpu_count", lambda: 2)  # one at a time
    b, sizes = block(o.softmax, (4, 300))
    candidates = [TritonConfig({"n": n}) for n in (0, 1, 2, 3)]
    try:
        for _ in range(2):
            found = tuner.compile_all(b, sizes, candidates, lambda done, of, what: None)
            assert found == {1: "too large", 2: "the compiler died"}
        assert len(started) == 3  # the first, and one after each death
    finally:
        tuner.dismiss()


def test_the_compiler_says_why_a_candidate_cannot_serve():
    b, sizes = block(o.softmax, (4, 300))
    good = default_config(b, sizes)
    job = {"block": show(b), "sizes": sizes, "candidate": to_json(good)}
    assert compile_one(job, Target("cuda", 90)) == ""
    bad = {**job, "candidate": to_json(replace(good, tiles={**good.tiles, "i": 1 << 14}))}
    assert compile_one(bad, Target("cuda", 90)) != ""
