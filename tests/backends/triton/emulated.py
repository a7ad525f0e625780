"""Runs generated Gluon kernels on a CPU: torch for values, a thread for each group of warps, barriers that block.

What is checked is what the source says: positions, phases and counts of barriers, bytes that copies bring, who reads
which part when. Layouts, registers and instructions are the assembler's part (`test_groups`), speed the device's.
"""

from __future__ import annotations

import math
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilefold.algebra import philox

#: Seconds after which a wait counts as a deadlock.
PATIENCE = 20.0
_ADDING = threading.Lock()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self, count: int):
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0
        self.changed = threading.Condition(threading.RLock())
        self.waiting, self.under_way = 0, list[Callable[[], None]]()

    def _settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.changed.notify_all()

    def arrive(self, n: int = 1, expected: int = 0) -> None:
        with self.changed:
            self.missing -= n
            assert self.missing >= 0, "more arrivals than the barrier counts"
            self.bytes += expected
            self._settle()

    def landed(self, n: int) -> None:
        with self.changed:
            self.bytes -= n
            assert self.bytes >= 0, "more bytes than were expected"
            self._settle()

    def brings(self, copy: Callable[[], None]) -> None:
        """A copy that takes until someone waits for it."""
        with self.changed:
            if self.waiting:
                copy()
            else:
                self.under_way.append(copy)

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is complete; the one before the first is."""
        with self.changed:
            self.waiting += 1
            while (self.phase & 1) == parity & 1 and self.under_way:
                self.under_way.pop(0)()
            done = self.changed.wait_for(lambda: (self.phase & 1) != parity & 1, PATIENCE)
            self.waiting -= 1
        assert done, "deadlock"


class Shared:
    """Shared memory. Fresh memory is NaN; barriers are cells of their own."""

    layout = None

    def __init__(self, data: torch.Tensor, bars: list[Barrier | None] | None = None, at: int = 0):
        self.data, self.bars, self.at = data, bars, at

    def index(self, n: int) -> Shared:
        return Shared(self.data[n], self.bars, int(n)) if self.bars is not None else Shared(self.data[n])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Pieces:
        assert self.bars is None and dtype == self.data.dtype and math.prod(shape) == self.data.numel()
        return Pieces(self.data, shape[1:])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.data.dtype and value.shape == self.data.shape
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()

    @property
    def bar(self) -> Barrier:
        assert self.bars is not None
        found = self.bars[self.at]
        assert found is not None, "a barrier that was not initialised"
        return found


class Pieces:
    """A tile of rows and columns as boxes: of its first columns one below the other, then of the next."""

    def __init__(self, data: torch.Tensor, box: Sequence[int]):
        assert data.dim() == 2
        self.data, self.box, self.rows = data, box, math.prod(box[:-1])

    def index(self, n: int) -> Shared:
        c, r = divmod(n, len(self.data) // self.rows)
        columns = self.box[-1]
        part = self.data.narrow(0, r * self.rows, self.rows).narrow(1, c * columns, columns)
        return Shared(part.view(self.box))


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, x: torch.Tensor, at: Any = 0):
        self.x, self.at = x, at

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.x, self.at + n)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.x, self.at[key])

    def elements(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The memory, positions and which of them count; an error where one that counts lies outside."""
        flat = self.x.as_strided((self.x.untyped_storage().nbytes() // self.x.element_size(),), (1,), 0)
        at = torch.as_tensor(self.at)
        on = (
            torch.ones_like(at, dtype=torch.bool)
            if mask is None
            else torch.broadcast_to(torch.as_tensor(mask), at.shape)
        )
        assert bool(((at >= 0) & (at < flat.numel()) | ~on).all()), "an address outside of the tensor"
        return flat, at, on


class Described:
    """A tensor map: what lies beyond the tensor reads as 0."""

    layout = None

    def __init__(self, x: torch.Tensor, box: Sequence[int]):
        self.x, self.box = x, tuple(box)

    def read(self, at: Sequence[int]) -> torch.Tensor:
        out = torch.zeros(self.box, dtype=self.x.dtype)
        from_ = [slice(int(a), min(int(a) + b, n)) for a, b, n in zip(at, self.box, self.x.shape, strict=True)]
        part = self.x[tuple(from_)]
        out[tuple(slice(0, n) for n in part.shape)] = part
        return out

    def write(self, at: Sequence[int], value: torch.Tensor) -> None:
        """What lies beyond the tensor is dropped."""
        assert value.shape == self.box and value.dtype == self.x.dtype
        to = tuple(slice(int(a), min(int(a) + b, n)) for a, b, n in zip(at, self.box, self.x.shape, strict=True))
        part = self.x[to]
        part.copy_(value[tuple(slice(0, n) for n in part.shape)])


def _where(c: Any, a: Any, b: Any) -> Any:
    if not isinstance(c, torch.Tensor):
        return a if c else b
    kind = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float32)
    return torch.where(c, *(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=kind) for x in (a, b)))


def _pick(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], plain: Callable[[int, int], int]) -> Callable:
    def op(a: Any, b: Any, **how: object) -> Any:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            like = a if isinstance(a, torch.Tensor) else b
            return of(*(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like.dtype) for x in (a, b)))
        return plain(a, b)

    return op


def _load(p: Pointer, mask: Any = None, other: float = 0, **how: object) -> Any:
    flat, at, on = p.elements(mask)
    return torch.where(on, flat[torch.where(on, at, 0)], torch.tensor(other, dtype=flat.dtype))


def _store(p: Pointer, value: Any, mask: Any = None, **how: object) -> None:
    flat, at, on = p.elements(mask)
    flat[at[on]] = torch.broadcast_to(torch.as_tensor(value), at.shape)[on].to(flat.dtype)


def _add(p: Pointer, value: torch.Tensor, mask: Any = None, **how: object) -> None:
    flat, at, on = p.elements(mask)
    with _ADDING:  # torch's own is no atomic operation
        flat.index_add_(0, at[on], torch.broadcast_to(value, at.shape)[on])


def _reduce(x: torch.Tensor, axis: int, combine: Callable) -> torch.Tensor:
    first, *rest = x.unbind(axis)
    for y in rest:
        first = combine(first, y)
    return first


def _product(a: Any, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    left = a.data if isinstance(a, Shared) else a
    assert left.dtype == b.data.dtype and left.dtype.itemsize == 2
    return left.float() @ b.data.float() + (acc if use_acc else 0)


def _trap(exists: Any) -> None:
    if not bool(exists):
        raise IndexError("index out of range")


def _fused(a: Any, b: Any, c: Any) -> torch.Tensor:
    """Rounded once."""
    return (torch.as_tensor(a).double() * b + c).float()


class _Layout:
    """A layout of shared memory: any."""

    def __init__(self, **how: int):
        self.how = how

    @staticmethod
    def get_default_for(*of: object) -> None:
        return None


def _language(block: threading.local) -> types.SimpleNamespace:
    bare = {n: getattr(torch, n) for n in ("exp", "exp2", "log", "log2", "abs", "sqrt", "rsqrt", "sigmoid", "floor")}
    types_ = {n: getattr(torch, n) for n in ("float32", "float16", "bfloat16", "int32", "int64")}
    return types.SimpleNamespace(
        **bare, **types_, constexpr=None, PropagateNan=types.SimpleNamespace(ALL=None),
        program_id=lambda axis: block.number, num_programs=lambda axis: block.programs,
        cdiv=lambda a, b: -(-a // b), where=_where, load=_load, store=_store, reduce=_reduce, atomic_add=_add,
        maximum=_pick(torch.maximum, max), minimum=_pick(torch.minimum, min), fma=_fused,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
        arange=lambda lo, hi, layout=None: torch.arange(lo, hi),
        full=lambda shape, v, dtype, layout=None: torch.full(shape, v, dtype=dtype),
        broadcast_to=lambda x, shape: torch.broadcast_to(x, shape),
        convert_layout=lambda x, layout: x, DotOperandLayout=lambda **k: None,
        SliceLayout=lambda *a: None, BlockedLayout=lambda *a: None, NVMMADistributedLayout=lambda **k: None,
        NVMMASharedLayout=_Layout, SwizzledSharedLayout=lambda *a: None,
    )  # fmt: skip


def _gluon(block: threading.local, groups: list[int]) -> types.SimpleNamespace:
    gl = _language(block)

    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        if dtype is torch.int64:
            return Shared(torch.zeros(shape), [None] * shape[0])
        if dtype is torch.int32:
            return Shared(torch.full(shape, -(1 << 30), dtype=dtype))
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def specialize(roles: Sequence[tuple[Callable, tuple]], warps: Sequence[int], registers: Sequence[int]) -> None:
        assert len(warps) == len(registers) == len(roles) - 1
        groups.append(len(roles))
        number, programs, failed = block.number, block.programs, list[Exception]()

        def run(role: Callable, args: tuple) -> None:
            block.number, block.programs = number, programs
            try:
                role(*args)
            except Exception as err:  # whatever it is, it is raised again below, in the thread of the test
                failed.append(err)

        threads = [threading.Thread(target=run, args=r, daemon=True) for r in roles]
        for t in threads:
            t.start()
        for t in threads:
            t.join(2 * PATIENCE)
        if failed:
            raise failed[0]
        assert not any(t.is_alive() for t in threads), "deadlock"

    gl.allocate_shared_memory, gl.warp_specialize, gl.to_tensor = allocate, specialize, lambda n: n
    return gl


def run(source: str, name: str, blocks: int, arguments: Mapping[str, Any], late: bool = False) -> None:
    """Run a generated kernel: tensors as `Pointer`, tensor maps as `Described`. AssertionError: a deadlock, say.

    late: a copy takes until someone waits for it. Whoever does not then finds what was there before.
    """
    block, groups = threading.local(), list[int]()
    block.programs = blocks
    gl, tl = _gluon(block, groups), _language(block)

    def init(s: Shared, count: int) -> None:
        assert s.bars is not None
        s.bars[s.at] = Barrier(count)

    def copy(d: Described, at: Sequence[int], bar: Shared, to: Shared) -> None:
        part = d.read(at)
        assert part.shape == to.data.shape, "a box and its memory differ"

        def land() -> None:
            to.data.copy_(part)
            bar.bar.landed(part.numel() * part.element_size())

        if late:
            bar.bar.brings(land)
        else:
            land()

    def draw(counter: Pointer, total: int) -> int:
        n = int(counter.x)
        counter.x.fill_(0 if n == total - 1 else n + 1)
        return n

    space: dict[str, Any] = {
        "gl": gl,
        "tl": tl,
        "gluon": types.SimpleNamespace(jit=lambda fn: fn),
        "libdevice": types.SimpleNamespace(tanh=torch.tanh, exp=torch.exp),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else tuple(deps),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=copy,
            async_copy_shared_to_global=lambda d, at, x: d.write(at, x.data),
            store_wait=lambda n: None,
        ),
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=init,
            wait=lambda s, phase: s.bar.wait(int(phase)),
            arrive=lambda s, count: s.bar.arrive(count),
            expect=lambda s, n: s.bar.arrive(1, n),
        ),
    }
    body = source[source.index("@gluon.jit") :]
    exec(compile(body, name, "exec"), space)
    space |= {
        "tf_tanh_approx": torch.tanh,
        "tf_tanh_by_exp": torch.tanh,
        "tf_tanh_single": torch.tanh,
        "tf_log1p_single": torch.log1p,
        "tf_log1p_unit": torch.log1p,
        "tf_erf_by_exp": torch.erf,
        "tf_reciprocal": torch.reciprocal,
        "tf_times": torch.mul,
        "tf_pow_of_positive": torch.pow,
        "tf_sqrt": torch.sqrt,
        "tf_sqrt_of_normal": torch.sqrt,
        "tf_pow": torch.pow,
        "tf_sigmoid": torch.sigmoid,
        "tf_apart": lambda: 0,
        "tf_put": lambda slot, value: slot.data.fill_(int(value)),
        "tf_trap": _trap,
        "tf_get": lambda slot: int(slot.data),
        "tf_draw": draw,
        "tf_no_sums": lambda like: torch.zeros(like.shape[0], 4),
        "tf_by_row": lambda row, like: row[:, None],
        "tf_in_pairs": lambda x, kind: x.to({"bf16": torch.bfloat16, "f16": torch.float16}[kind]),
        "tf_from_pairs": lambda x, like, kind: x.to(kind),
        "tf_random16": lambda seed, *place: philox.random16(torch.as_tensor(seed), *map(torch.as_tensor, place)),
        "tf_floordiv": operator.floordiv,
        "tf_mod": operator.mod,
    }
    for n in range(blocks):
        block.number = n
        space[name](**arguments)
    assert len(groups) == blocks
