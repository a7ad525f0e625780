"""Memory of a call: lifetimes, arenas against allocating as the call goes on, what is freed when; what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from weakref import ref

import pytest
import torch

from tilefold.runtime.arena import ALIGNED, packed, peak
from tilefold.runtime.native.load import native
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import ARENA, SMALL, Instruction, Kind, Op, Slot, Tape, finished

LIKE = torch.empty(0)


def own(n):
    return Slot(Kind.OWN, sizes=(n,), strides=(1,), like=LIKE)


def step(*slots):
    return Instruction(Op.COPY, "copy", "", slots)


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_what_a_simulation_finds(seed):
    rng = random.Random(seed)
    lives = {str(n): tuple(sorted((rng.randrange(12), rng.randrange(12)))) for n in range(9)}
    sizes = {n: rng.randrange(100) for n in lives}
    by_step = [sum(sizes[n] for n, (a, b) in lives.items() if a <= at <= b) for at in range(12)]
    assert peak(sizes, lives) == max(by_step) <= packed(sizes, lives)[1]


def chain(n, length):
    """x -> 1 -> 2 -> ... of n floats each; the last is returned."""
    slots = [Slot(Kind.ARGUMENT, 0), *(own(n) for _ in range(length))]
    return slots, [step(k + 1, k) for k in range(length)], [length]


def test_values_between_steps_share_an_arena():
    tape = finished(*chain(1000, 6), LIKE)
    assert [s.kind for s in tape.slots] == [Kind.ARGUMENT, *[Kind.ARENA] * 5, Kind.OWN]
    assert 2 * 4000 <= tape.arena < 3 * 4096 and [i.release for i in tape.code] == [
        (0,),
        (1,),
        (2,),
        (3,),
        (4,),
        (5, ARENA),
    ]
    for a, b in zip(tape.slots[1:5], tape.slots[2:6], strict=True):  # read and written by one step
        assert abs(a.offset - b.offset) >= 4000


def test_an_arena_that_would_cost_memory_is_without_large_values():
    """A large value that is gone before as large a result is made, by a step or by the library."""
    n = SMALL  # floats
    slots = [Slot(Kind.ARGUMENT, 0), own(n), own(8), own(n)]
    code = [step(1, 0), step(2, 1), step(3, 2)]
    tape = finished(slots, code, [3], LIKE)
    assert tape.arena == ALIGNED and [s.kind for s in tape.slots] == [Kind.ARGUMENT, Kind.OWN, Kind.ARENA, Kind.OWN]
    assert [i.release for i in tape.code] == [(0,), (1,), (2, ARENA)]
    library = [*slots[:3], Slot(Kind.RESULT), own(8)]
    code = [*code, step(4, 3)]
    tape = finished(library, code, [4], LIKE, (), {3: 4 * n})
    assert [s.kind for s in tape.slots[1:]] == [Kind.OWN, Kind.ARENA, Kind.RESULT, Kind.OWN]
    code = code[:3]
    small = finished([slots[0], own(8), own(8), own(8)], code, [3], LIKE)
    assert small.arena > 0


def test_an_arena_is_let_go_before_what_is_large():
    """What lies in it costs nothing where a result is made after its last step, and no byte where it is still there."""
    n = SMALL // 4  # floats
    slots = [Slot(Kind.ARGUMENT, 0), own(n), own(n), own(8 * n), own(9 * n)]
    code = [step(1, 0), step(2, 1), step(3, 2), step(4, 3)]
    tape = finished(slots, code, [4], LIKE)
    assert [s.kind for s in tape.slots[1:]] == [Kind.ARENA, Kind.ARENA, Kind.OWN, Kind.OWN]
    assert [i.release for i in tape.code] == [(0,), (1,), (2, ARENA), (3,)]


@pytest.mark.parametrize("seed", range(20))
def test_an_arena_costs_no_memory_at_the_worst_moment(seed):
    rng = random.Random(seed)
    slots = [Slot(Kind.ARGUMENT, 0), *(own(rng.choice((8, SMALL, 3 * SMALL))) for _ in range(12))]
    code = [step(k, *{rng.randrange(k) for _ in range(2)}) for k in range(1, 13)]
    tape = finished(slots, code, [12], LIKE)
    spans = {
        str(n): (n - 1, max([12 * (n == 12), *(k for k, i in enumerate(code) if n in i.slots)])) for n in range(1, 13)
    }
    least = peak({n: -(-slots[int(n)].nbytes // ALIGNED) * ALIGNED for n in spans}, spans)
    assert peak_of(tape) <= least + (tape.arena if tape.arena <= SMALL else 0)


def peak_of(tape: Tape) -> int:
    """Bytes of a call at its worst moment, by running through the tape."""
    made, most = set[int](), 0
    for i in tape.code:
        made |= {n if tape.slots[n].kind is Kind.OWN else ARENA for n in i.touched if tape.slots[n].kind in MADE}
        most = max(most, sum(tape.arena if n == ARENA else tape.slots[n].nbytes for n in made))
        made -= set(i.release)
    return most


MADE = (Kind.OWN, Kind.ARENA)


def test_views_are_let_go_with_what_they_show():
    slots = [Slot(Kind.ARGUMENT, 0), Slot(Kind.RESULT), Slot(Kind.VIEW, 1, 0, (2,), (1,)), own(2), own(2)]
    tape = finished(slots, [step(1, 0), step(3, 2), step(4, 3)], [4], LIKE)
    assert tape.code[1].release == (1, 2)
    kept = finished(slots, [step(1, 0), step(3, 2)], [3, 2], LIKE)
    assert [i.release for i in kept.code] == [(0,), ()]


def test_arguments_that_are_handed_over_are_freed_after_their_last_use():
    module = native().wait()
    assert module is not None, native().reason
    alive = []

    def first(x):
        return (x + 1,)

    def second(y):
        alive.append(seen() is not None)
        return (y + 1,)

    calls = [Instruction(Op.CALL, "", "", (k,), (k + 1,), call=f) for k, f in enumerate((first, second))]
    tape = finished([Slot(Kind.ARGUMENT, 0), Slot(Kind.RESULT), Slot(Kind.RESULT)], calls, [2], LIKE)
    region = module.region(False, None)
    assert module.add(region, (torch.ones(3),), *tape.packed())
    for kind in (tuple, list):
        x = torch.ones(3)
        seen, given = ref(x), kind([x])
        del x
        (y,) = module.run(region, given)
        assert y.tolist() == [3, 3, 3] and len(given) == (kind is tuple)
    assert alive == [True, False]
    assert module.run(region, other := [torch.ones(4)]) is None and len(other) == 1


def recorded(fn, *args):
    recorder = Recorder(args, [])
    recorder.step("step", "")
    with recorder:
        made = fn(*args)
    return recorder.tape(made), recorder


def test_views_become_numbers_and_copies_copies():
    x = torch.randn(4, 6)
    tape, _ = recorded(lambda x: [x[1:, 2:].T.contiguous()], x)
    assert [i.op for i in tape.code] == [Op.COPY]
    source = tape.slots[tape.code[0].slots[1]]
    assert (source.kind, source.source, source.offset, source.sizes, source.strides) == (
        Kind.VIEW,
        0,
        8,
        (4, 3),
        (1, 6),
    )


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: [x + x.sum().item()], "depends on values"),
        (lambda x: [x[x > 0]], "depends on values"),
        (lambda x: [x + torch.from_numpy(x.numpy().copy())], "no recorded operator made"),
        (lambda x: [x.view(torch.int32)], "another type"),
    ],
)
def test_refusals(fn, why):
    tape, recorder = recorded(fn, torch.ones(4, 6))
    assert tape is None and why in recorder.refused


def test_results_that_are_views_or_no_tensors():
    """Several views are views; sizes are the same in every call; None is None."""
    x = torch.randn(4, 6)
    tape, recorder = recorded(lambda x: [*torch.sin(x).split(3), x.shape[0], None, 2.5], x)
    assert not recorder.refused and tape.fixed == (4, 2.5) and [i.op for i in tape.code] == [Op.NAMED]
    module = native().wait()
    region = module.region(False, None)
    assert module.add(region, (x,), *tape.packed())
    y = torch.randn(4, 6)
    first, second, *others = module.run(region, (y,))
    assert torch.equal(torch.cat((first, second)), torch.sin(y)) and others == [4, None, 2.5]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_places_pick_as_many_elements_as_there_are_places():
    """A mask of the elements does not (`test_refusals`)."""
    x, at = torch.randn(4, 6), torch.tensor([3, 0, 3])
    tape, recorder = recorded(lambda x, at: [x[at] * 2], x, at)
    assert not recorder.refused
    module = native().wait()
    region = module.region(False, None)
    assert module.add(region, (x, at), *tape.packed())
    assert torch.equal(module.run(region, (x, at - 1))[0], x[at - 1] * 2)


aten = torch.ops.aten
AT = torch.tensor([[2, 0, 1, 1, 0, 2]] * 4)
OPERATORS = {
    "several results": lambda x: list(torch.sort(x, -1, descending=True)),
    "a result of two that is used": lambda x: [torch.topk(x, 2, -1)[1]],
    "a dtype": lambda x: [torch.cumsum(x, 0, dtype=torch.float64)],
    "a list of tensors": lambda x: [torch.cat([x, x[1:], torch.sin(x)])],
    "a list of tensors or none": lambda x: [aten.index.Tensor(torch.sin(x), [None, AT[0, :3]])],
    "writing at places": lambda x: [aten.index_put.default(torch.sin(x), [AT[0, :3]], x[:3] * 2, True)],
    "numbers of two types": lambda x: [aten.add.Tensor(x, torch.sin(x), alpha=2), aten.clamp.default(x, 0, 1.5)],
    "lists of numbers": lambda x: [aten.constant_pad_nd.default(x, [1, 2, 0, 1], 2), torch.flip(x, [0, 1])],
    "floats that are integers": lambda x: [aten.native_layer_norm.default(x, [6], None, None, 1)[0]],
    "a number or a list": lambda x: list(torch.ops.aten.max_pool2d_with_indices.default(x[None], [2], [1], [0])),
    "words": lambda x: [aten.gelu.default(x, approximate="tanh"), aten.index_reduce(x, 0, AT[0, :4], x, "prod")],
    "no tensor": lambda x: [aten.arange.default(5, dtype=torch.int32, device=torch.device("cpu")) + x[0, :5]],
    "numbers for tensors": lambda x: [torch.sin(x).mul(2), x.to(torch.int32).mul(2), x.half() / 3, 1.5 * (x > 0)],
    "no correction": lambda x: [aten.var.correction(x, [0], correction=0, keepdim=True)],
    "gradients": lambda x: [aten.embedding_dense_backward.default(torch.sin(x), AT[0, :4], 3, -1, False)],
    "histogram": lambda x: [aten.histc.default(x, bins=4, min=-1, max=1)],
    "scatter": lambda x: [aten.scatter.src(torch.sin(x), 1, AT % 3, x), aten.scatter_add(x, 1, AT, x)],
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators_by_their_names(case):
    """In C++, without Python's lock."""
    fn, x = OPERATORS[case], torch.randn(4, 6)
    recorder = Recorder((x,), [AT])
    with recorder:
        made = fn(x)
    tape = recorder.tape(made)
    assert tape is not None, recorder.refused
    assert Op.NAMED in {i.op for i in tape.code} and Op.CALL not in {i.op for i in tape.code}
    module = native().wait()
    region = module.region(False, None)
    assert module.add(region, (x,), *tape.packed())
    for seed in range(2):
        y = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        for got, want in zip(module.run(region, (y,)), fn(y), strict=True):
            assert got.dtype is want.dtype and got.stride() == want.stride() and torch.equal(got, want)


@torch.library.custom_op("tilefold_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: [torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(1))], "a generator"),
        (lambda x: [doubled(x)], "another library's"),
        (lambda x: [torch.mul(x, 1j)], "a complex number"),
    ],
)
def test_operators_without_a_form_are_called_from_python(fn, name):
    tape, recorder = recorded(fn, torch.randn(4, 6))
    assert not recorder.refused and Op.CALL in {i.op for i in tape.code}, name


def test_an_operators_error_is_raised_with_the_users_line():
    x, at = torch.randn(3, 4), torch.tensor([0, 2])
    recorder = Recorder((x, at), [])
    recorder.step("index", "in index, from model.py:7")
    with recorder:
        made = [torch.sin(x)[at]]
    tape = recorder.tape(made)
    module = native().wait()
    region = module.region(False, None)
    assert module.add(region, (x, at), *tape.packed())
    with pytest.raises(IndexError, match="out of bounds") as caught:
        module.run(region, (x, at + 1))
    assert "in index, from model.py:7" in caught.value.__notes__
    assert torch.equal(module.run(region, (x, at))[0], torch.sin(x)[at])


def test_a_callable_is_called_as_it_is():
    """Of what it does inside nothing is written down; what shows an argument's memory is refused."""
    x = torch.randn(4, 6)
    seen = []

    def other(x, n, none):
        seen.append((n, none))
        return [torch.sin(x) * n, x.sum()]

    recorder = Recorder([x], [])
    with recorder:
        a, b = recorder.opaque(other, (x, 3, None))
        made = [a + b]
    tape = recorder.tape(made)
    assert [i.op for i in tape.code] == [Op.CALL, Op.NAMED]
    module = native().wait()
    region = module.region(False, None)
    assert module.add(region, (x,), *tape.packed())
    y = torch.randn(4, 6)
    assert torch.equal(module.run(region, (y,))[0], torch.sin(y) * 3 + y.sum()) and seen == [(3, None)] * 2
    recorder = Recorder([x], [])
    with recorder:
        made = recorder.opaque(lambda x: [x[1:]], (x,))
    assert recorder.tape(made) is None and "views" in recorder.refused


def test_what_runs_aside_is_not_written_down():
    x = torch.randn(3)
    recorder = Recorder([x], [])
    with recorder:
        with recorder.aside():
            x.add(1)
        y = x.add(2)
    tape = recorder.tape([y])
    assert [i.op for i in tape.code] == [Op.NAMED]


def test_memory_of_another_device_is_none_of_the_arena():
    """A number that the host converts, among the steps of a GPU."""
    slots, code, out = chain(1000, 6)
    other = [replace(s, like=torch.empty(0, device="meta")) if s.kind is Kind.OWN else s for s in slots]
    assert any(s.kind is Kind.ARENA for s in finished(slots, code, out, LIKE).slots)
    assert not any(s.kind is Kind.ARENA for s in finished(other, code, out, LIKE).slots)
