"""Groups of warps that own rows of a backward: several products in the lift, several states."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton import emulated  # noqa: E402
from tests.backends.triton.emulation import emulate, same  # noqa: E402
from tests.backends.triton.gradients import (  # noqa: E402
    GRADIENTS,
    B,
    alibi,
    arguments,
    causal,
    keys,
    of_values,
    plain,
    queries,
    softcap,
    window,
    with_heads,
)
from tests.backends.triton.kernels import made  # noqa: E402
from tests.backends.triton.rows import by_rows  # noqa: E402
from tests.backends.triton.test_compile import FEW_BYTES, HOPPER, SHARED, built, spilled  # noqa: E402
from tilefold.algebra.expr import Call, Cast, Const, DType, Index, Load, call  # noqa: E402
from tilefold.backends.triton import launch  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel  # noqa: E402
from tilefold.backends.triton.launcher import Launcher  # noqa: E402
from tilefold.backends.triton.row_apart import apart  # noqa: E402
from tilefold.backends.triton.row_lines import lines_of  # noqa: E402
from tilefold.backends.triton.row_phases import crossing, phases  # noqa: E402
from tilefold.backends.triton.row_roles import RowRoles, registers, row_roles_of, shared_bytes  # noqa: E402
from tilefold.backends.triton.simplify import NEG_INF  # noqa: E402
from tilefold.backends.triton.space import space  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402
from tilefold.tile import ir  # noqa: E402
from tilefold.tile.layout import usual_units  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


def kernel_of(fn, shapes, **how) -> TritonKernel:
    (k,) = made(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in shapes))
    return TritonKernel(k.block, by_rows(**{"tile": 64, **how}))


def variant_of(k: TritonKernel):
    return k.variant(usual_units(k.block), k.sizes({}), hopper=True)


@pytest.mark.parametrize("name", GRADIENTS)
def test_groups_together_compute_the_kernel(name):
    same(*emulate(kernel_of(*GRADIENTS[name]), most=3))


@pytest.mark.parametrize("name", [n for n in GRADIENTS if n.endswith(("dropout", "slopes"))])
def test_more_heads_than_the_arguments_of_one_number_each(name):
    """What is no matrix keeps its own shape: a seed, a slope a head."""
    fn, shapes = GRADIENTS[name]
    same(*emulate(kernel_of(fn, with_heads(shapes, 4)), most=3))


@pytest.mark.parametrize(
    "how", [{"tile": 32, "stages": 4}, {"groups": 3, "tile": 32}, {"draws": True}, {"turned": False}], ids=str
)
def test_other_groups_tiles_and_rings(how):
    name = "keys, causal, by features"
    same(*emulate(kernel_of(*GRADIENTS[name], **how), most=1 if how.get("draws") else 2))


@pytest.mark.parametrize("dim, behind", [(64, True), (128, False)])
def test_merges_are_a_tile_behind_where_registers_suffice(dim, behind):
    v = variant_of(kernel_of(keys(causal), arguments(300, 300, dim, 2), stages=3))
    r = row_roles_of(v.kernel, v.config)
    assert isinstance(r, RowRoles) and r.behind is behind and len(r.lifts) == len(r.merges) == 2
    assert registers(replace(r, behind=True)) > registers(replace(r, behind=False))
    assert merged_later(v) == ({"0", "1"} if behind else {"0"})


def merged_later(v) -> set[str]:
    """Numbers of the merges that a step leaves to the next."""
    *_, step = v.rendered.source.partition("\n\n\n@gluon.jit\ndef " + v.rendered.name + "_folds")[2].split(
        "for n in range("
    )
    return set(
        re.findall(
            r"warpgroup_mma\((?:tf_from_pairs\()?held_p(\d),.*? tile_\d\.index\(s\)", step.partition("rows_empty")[0]
        )
    )


def test_nothing_is_left_to_the_next_step_where_more_values_wait_for_the_second_product():
    """A soft-cap's slope has registers beside the probabilities."""
    v = variant_of(kernel_of(keys(softcap), arguments(300, 300, 128, 2)))
    assert v.rendered.groups == 2 and "ahead" not in v.rendered.source
    assert crossing(((_map("p", "s"), _map("u", "p"), _map("w", "s")), (_map("q", "p", "t", "w"),))) == {"p", "w"}
    assert crossing(((_map("p", "s"),), (_map("q", "t"),))) == frozenset()


def test_a_window_leaves_merges_to_the_next_step():
    same(*emulate(kernel_of(keys(window), arguments(300, 300, 128, 2)), most=2))


@pytest.mark.parametrize("score", [causal, softcap, window, plain])
def test_streams_of_whole_tiles_have_no_ragged_one(score):
    """Nor, where nothing is left to the next tile, a first one that stands before the loops."""
    k = kernel_of(keys(score), arguments(256, 256, 128, 2))
    folds = variant_of(k).rendered.source.partition("_folds(")[2]
    begins = folds.partition("rows_full.index")[2].partition("for n in range(")[0]
    if score is not window:  # its tiles end where the rows say, and no one knows that these are whole
        assert "ok_n" not in folds and ("warpgroup_mma(" in begins) == (score is not softcap)
    same(*emulate(k, most=2))


@pytest.mark.parametrize(
    "change",
    [
        ("late_empty.index(0), count=2", "late_empty.index(0), count=3"),
        ("mbarrier.arrive(rows_empty.index(GROUP), count=1)", "pass"),
        ("s, turn = tf_advance(s, turn, 2)\n        for n in range(tiles", "pass\n        for n in range(tiles"),
    ],
    ids=["a reader too many", "rows not given back", "a stage twice"],
)
def test_what_would_hang_a_device_is_found(change, monkeypatch):
    monkeypatch.setattr(emulated, "PATIENCE", 0.5)
    with pytest.raises(AssertionError):
        k = kernel_of(*GRADIENTS["keys, causal"])
        same(*emulate(k, change, most=2))


@pytest.mark.parametrize(
    "change",
    [
        ("(last_2 - 1 - n) * 64", "(last_2 - n) * 64"),
        ("GROUP * 64", "0"),
        ("block = 3 - 1 - block", "block = block * 0"),
    ],
    ids=["numbers of another tile", "rows of another group", "one block alone"],
)
def test_what_would_be_wrong_is_found(change):
    with pytest.raises(AssertionError):
        same(*emulate(kernel_of(keys(causal), arguments(333, 333, 64, 2)), change, most=2))


def test_a_last_merge_of_another_tile_is_found():
    merge = "v_view_out_s = warpgroup_mma(tf_from_pairs(held_p0, held_0, gl.bfloat16), tile_0.index(s)"
    with pytest.raises(AssertionError):
        change = (f"\n        {merge}", f"\n        {merge}".replace("index(s)", "index(1 - s)"))
        same(*emulate(kernel_of(*GRADIENTS["keys, causal"]), change, most=2))


@pytest.mark.parametrize("score", [causal, alibi])
def test_hot_loops_do_not_spill(score, tmp_path):
    """States of 128 registers, results of two lifts of 64: what is left is little, and spilled outside of loops."""
    shapes = [((2, 16, *s[2:]), d) for s, d in arguments(2048, 2048, 128, 2)]
    v = variant_of(kernel_of(keys(score), shapes))
    r, roles = built(v, HOPPER), row_roles_of(v.kernel, v.config)
    assert isinstance(roles, RowRoles) and 0 <= shared_bytes(roles, v.config) - r.shared <= 1024
    assert spilled(r.assembly["ptx"], "sm_90a", tmp_path) <= 80 and r.shared <= SHARED[90]


@pytest.mark.parametrize(
    "score, result, width, values, how, single",
    [
        (causal, 0, 256, 256, {}, True),
        (window, 0, 256, 256, {"tile": 32}, False),
        (causal, 1, 256, 256, {}, False),
        (causal, 0, 192, 128, {"stages": 3}, False),
        (causal, 0, 256, 160, {"stages": 3, "tile": 32}, False),
        (plain, 0, 192, 128, {}, False),
    ],
)
def test_a_state_of_many_columns_alone(score, result, width, values, how, single):
    """One buffer for what a lift alone reads, where there is no room for two."""
    shapes = of_values(arguments(130, 203, width, 2), values)
    k = kernel_of(lambda *x: keys(score)(*x)[result], shapes, **how)
    v = variant_of(k)
    r = row_roles_of(v.kernel, v.config)
    assert isinstance(r, RowRoles) and r.single is single
    same(*emulate(k, most=2))


@pytest.mark.parametrize("score, width, values, single", [(causal, 256, 256, True), (window, 192, 128, False)])
def test_queries_of_many_columns(score, width, values, single):
    k = kernel_of(queries(score), of_values(arguments(300, 203, width, 1, saved=True), values))
    v = variant_of(k)
    r = row_roles_of(v.kernel, v.config)
    assert isinstance(r, RowRoles) and r.single is single and not r.behind
    assert [r.parts[m.part].lanes for m in r.merges] == ([256] if width == 256 else [128, 64])
    same(*emulate(k, most=2))


@pytest.mark.parametrize(
    "change",
    [
        ("mbarrier.wait(early_full.index(0), lap)", "pass"),
        ("mbarrier.arrive(early_empty.index(0), count=1)", "pass"),
        ("lap = lap ^ 1", "pass"),
    ],
    ids=["a tile too early", "not given back", "of another lap"],
)
def test_what_is_wrong_with_one_buffer_is_found(change, monkeypatch):
    monkeypatch.setattr(emulated, "PATIENCE", 0.5)
    k = kernel_of(queries(causal), arguments(130, 203, 256, 1, saved=True))
    with pytest.raises(AssertionError):
        same(*emulate(k, change, most=2, late=True))


def test_copies_may_take_their_time():
    same(*emulate(kernel_of(queries(causal), arguments(130, 203, 256, 1, saved=True)), most=2, late=True))


@pytest.mark.parametrize("width, values", [(256, 256), (192, 128)])
def test_states_that_registers_do_not_hold_together_have_groups_each(width, values, tmp_path):
    shapes = [(4, 16, 2048, n) for n in (width, width, values, values)]
    tensors = [torch.empty(s, dtype=B, device="meta") for s in shapes]
    found = made(keys(causal), *tensors, *(torch.empty(4, 16, 2048, device="meta") for _ in range(2)))
    variants = [variant_of(TritonKernel(k.block)) for k in found]
    assert [v.rendered.groups for v in variants] == [2, 2]
    r = built(variants[0], HOPPER)
    assert spilled(r.assembly["ptx"], "sm_90a", tmp_path) <= FEW_BYTES and r.shared <= SHARED[90]


def wide_kernel(dim: int) -> TritonKernel:
    """Keys' gradients of many heads, configured as by default."""
    shapes = [((4, 16, *s[2:]), d) for s, d in arguments(2048, 2048, dim, 2)]
    return TritonKernel(kernel_of(keys(causal), shapes).block)


def test_two_states_of_many_columns_have_the_form_by_default_on_hopper_alone():
    k = wide_kernel(128)
    assert variant_of(k).rendered.groups == 2 and variant_of(k).rendered.draws
    assert not k.variant(usual_units(k.block), k.sizes({}), hopper=False).rendered.groups


def test_numbers_that_no_tensor_map_describes_do_not_matter():
    """A maximum a query, [.., 1], comes by pointers; the usual form has no tensor maps at all then."""
    k = kernel_of(*GRADIENTS["queries, causal"])
    assert k.variant(usual_units(k.block), k.sizes({}), plain=True, hopper=True).rendered.groups == 2
    usual = k.variant(usual_units(k.block), k.sizes({}), plain=True)
    assert not usual.rendered.groups and not usual.config.descriptors


@pytest.mark.parametrize("score, draws", [(causal, True), (window, False), (plain, False)])
def test_tiles_are_drawn_where_streams_are_of_unequal_length(score, draws):
    shapes = [((4, 16, *s[2:]), d) for s, d in arguments(2048, 2048, 128, 1, saved=True)]
    v = variant_of(TritonKernel(kernel_of(queries(score), shapes).block))
    assert v.rendered.groups == 2 and v.rendered.draws is draws


def test_groups_that_the_assembler_mixes_up_have_fixed_shares_then_there_are_none(monkeypatch):
    tried = []

    def compile_for(kernel, rendered, config, *a, **how):
        tried.append((config.groups, config.draws))
        if len(tried) < 3:
            raise BackendError("assembled wrongly")
        return config

    monkeypatch.setattr(launch, "compiled", compile_for)
    monkeypatch.setattr(launch, "launcher_of", lambda done: Launcher(done, ()))
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch.torch.cuda, "device", lambda index: nullcontext())
    k = wide_kernel(128)
    k.plan([torch.empty(shape({}), dtype=t.dtype.torch_dtype, device="meta") for t, shape in variant_of(k).params], {})
    assert tried == [(2, True), (2, False), (0, False)]


def test_of_few_columns_they_are_the_tuners():
    k = wide_kernel(64)
    assert not variant_of(k).rendered.groups
    found = [c for c in space(k.block, k.sizes({}), "quick") if c.own == "rows"]
    assert any(variant_of(TritonKernel(k.block, lambda b, s, c=c: c)).rendered.groups for c in found)


def test_a_sum_that_is_held_whole_is_asked_for_by_the_tuner():
    k = kernel_of(queries(causal), [((4, 16, *s[2:]), d) for s, d in arguments(2048, 2048, 64, 1, saved=True)])
    found = [c for c in space(k.block, k.sizes({}), "quick") if c.own == "rows"]
    assert found and variant_of(TritonKernel(k.block, lambda b, s: found[0])).rendered.groups


def _of(name: str) -> Load:
    return Load(name, (Index("i"), Index("j")))


def _map(name: str, *read: str) -> ir.Map:
    e = _of(read[0])
    for x in read[1:]:
        e = call("mul", e, _of(x))
    return ir.Map(name, e)


def test_statements_stand_after_the_product_that_they_need():
    p, q, both, late = _map("p", "s"), _map("q", "t"), _map("r", "p", "q"), _map("u", "p")
    assert phases((p, q, both, late), ("s", "t")) == ((p, late), (q, both))
    assert phases((p, q, both, late), ("t", "s")) == ((q,), (p, both, late))
    again = _map("p", "p", "q")  # of the second, so that what follows on p is as well
    assert phases((p, again, late), ("s", "t")) == ((p,), (again, late)) or phases((p, again), ("s", "q"))


def test_what_varies_along_the_stream_alone_is_a_line():
    size, f = Const(64, DType.I64), DType.F32
    tensors = [ir.TensorParam("m", f, (size,), "in", 0), ir.TensorParam("n", DType.I64, (size,), "in", 0)]
    m, s = Load("m", (Index("j"),)), _of("s")
    guard = ir.Map("g", call("where", call("eq", m, Const(0.0, f)), Const(1.0, f), m))
    alloc = ir.Alloc(ir.Buffer("g", ("j",), (size,), f))
    use = ir.Map("p", call("div", call("sub", s, m), Load("g", (Index("j"),))))
    kept, lines = lines_of((alloc, guard, use), "j", (), tensors)
    assert [(x.name, x.expr, x.inverse) for x in lines] == [("line_0", m, False), ("line_1", guard.expr, True)]
    (only,) = kept
    assert only.expr == call("mul", call("sub", s, Load("line_0", (Index("j"),))), Load("line_1", (Index("j"),)))
    for other in (Load("m", (Index("i"),)), Load("n", (Index("j"),)), Load("s", (Index("i"), Index("j")))):
        assert lines_of((ir.Map("p", call("mul", s, other)),), "j", (), tensors)[1] == ()


def test_a_distance_is_a_number_a_row_and_one_along_the_stream():
    f, i, j = DType.F32, Index("i"), Index("j")
    slope, line, s = Load("x", (Index("h"),)), Load("m", (Index("h"), j)), _of("s")
    first = call("tile_start", j)
    along = Cast(call("mul", call("sub", j, first), Const(-1, DType.I64)), f)
    wanted = call(
        "sub",
        call("add", s, call("mul", Cast(call("sub", i, first), f), slope)),
        call("sub", line, call("mul", along, slope)),
    )
    distance = call("mul", slope, call("sub", i, j))
    score = ir.Map("p", call("sub", call("add", s, distance), line))
    assert apart((score,), "i", "j") == (ir.Map("p", wanted),)
    named = (ir.Map("d", distance), ir.Map("p", call("sub", call("add", s, _of("d")), line)))
    assert apart(named, "i", "j") == (ir.Map("p", wanted),)
    seen = call("le", i, j)
    masked = call("sub", call("where", seen, call("add", s, distance), NEG_INF), line)
    (found,) = apart((ir.Map("p", masked),), "i", "j")
    assert isinstance(found, ir.Map) and found.expr == Call(
        "sub", (call("where", seen, wanted.args[0], NEG_INF), wanted.args[1])
    )
    other = call("where", seen, call("add", s, distance), Const(0.0, f))  # 0 - x is not 0
    per_row = call("sub", call("add", s, distance), Load("m", (Index("h"), i)))
    near = call("sub", call("add", s, call("mul", slope, call("abs", call("sub", i, j)))), line)
    own = call("sub", call("add", s, call("mul", Load("x", (i,)), call("sub", i, j))), line)
    for e in (call("sub", other, line), per_row, near, own):
        assert apart((ir.Map("p", e),), "i", "j") == (ir.Map("p", e),)
