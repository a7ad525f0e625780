"""What Triton's launcher does at every call, done once.

Triton wraps the C function that launches a kernel in Python: scratch memory is asked for, tensor maps
are encoded anew. Here the C function is called directly where a kernel needs no scratch, and tensor maps
are kept by the addresses that they describe. On other devices than NVIDIA's, Triton's own launcher runs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilefold.backends.triton.config import TooLarge
from tilefold.backends.triton.counters import Counters
from tilefold.backends.triton.driver import (
    SCRATCH,
    Address,
    Counter,
    Handle,
    Image,
    Launched,
    Parameter,
    TensorMap,
    handle_of,
    template_of,
)
from tilefold.backends.triton.words import as_words

try:
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
    from triton.runtime.errors import OutOfResources
except ImportError:  # without Triton nothing here runs
    CudaLauncher = None

#: Sets of addresses whose tensor maps a plan keeps; results come from a few blocks of the allocator.
MAPS = 64
#: Stands for the stream among the arguments of a launch.
STREAM = object()


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a compiled kernel is started: `call(grid, 1, 1, stream, *head, *arguments)`.

    encodings: how Triton encodes each tensor map, where `call` takes them encoded; None: it takes them as `Operand`.
    handle: the kernel for the driver itself, where it can be launched without `call`. tail: what `call` takes after the
    kernel's arguments.
    """

    call: Callable[..., None]
    head: tuple[object, ...]
    encodings: tuple[object, ...] | None = None
    handle: Handle | None = None
    tail: tuple[int, ...] = ()


def launcher_of(done: Any) -> Launcher:
    """The launcher of a kernel that Triton compiled for the current device. TooLarge: the device cannot hold it."""
    tail = as_words(done)
    try:
        run = done.run
    except OutOfResources as err:
        what = f"{done.name} takes {err.required} of {err.name}, the device has {err.limit}"
        raise TooLarge(what, hint="smaller tiles, fewer stages, or fewer operators in the kernel") from err
    plain = Launcher(run, (done.function, done.packed_metadata, None, None, None), tail=tail)
    if CudaLauncher is None or type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return plain
    head = (
        *(done.function, run.launch_cooperative_grid, run.launch_pdl, None, None),
        *(done.packed_metadata, None, None, None),
    )
    handle = handle_of(head, Image(done.name, done.kernel) if isinstance(done.kernel, bytes) else None)
    if not inspect.isfunction(run.launch):
        return Launcher(run.launch, head, (), handle, tail)
    wrapped = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in wrapped or "tensordesc_meta" not in wrapped:
        return plain
    return Launcher(wrapped["launcher"], head, tuple(wrapped["tensordesc_meta"]), handle)


def picker(positions: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """What takes the elements at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: tuple([items[n] for n in positions])


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as Triton's encoding of tensor maps wants it: extents and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str = "zero"

    @property
    def base(self) -> Operand:
        """What has the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@dataclass(frozen=True, slots=True)
class Described:
    """Argument `position` of a kernel, which it reads in boxes through a tensor map."""

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """Everything about a launch but the addresses and the stream. `grid`: thread blocks, 0 for none. `counters`: what
    the kernel takes a counter of."""

    launcher: Launcher
    grid: int
    numbers: tuple[int, ...]
    described: tuple[Described, ...] = ()
    counters: Counters | None = None
    _maps: dict[tuple[int, ...], tuple[object, ...]] = field(default_factory=dict)
    _key: Callable[[Sequence[int]], tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._key = picker([d.position for d in self.described])

    def start(self, stream: int, pointers: Sequence[int]) -> None:
        """Launch on a stream of the current device."""
        if self.grid == 0:
            return
        launcher = self.launcher
        more = self._encoded(pointers) if self.described else ()
        if self.counters is not None:
            more = (self.counters.address(stream), *more)
        launcher.call(self.grid, 1, 1, stream, *launcher.head, *pointers, *self.numbers, *more, *launcher.tail)

    def replayed(self) -> tuple[Callable[..., object], tuple[object, ...], tuple[object, ...]]:
        """A callable that launches, and its arguments before and after the addresses. The stream is the fourth, or,
        where a launch needs more than its addresses, the first."""
        if self.described or self.counters is not None:
            return lambda stream, *pointers: self.start(stream, pointers), (STREAM,), ()
        after = (*self.numbers, *self.launcher.tail)
        return self.launcher.call, (self.grid, 1, 1, STREAM, *self.launcher.head), after

    def launched(self, pointers: Sequence[int]) -> Launched | None:
        """The same for the driver itself; None where only Triton's launcher will do. pointers: of some call."""
        if self.launcher.handle is None:
            return None
        found: list[Parameter] = [Address(n) for n in range(len(pointers))]
        found += self.numbers
        if self.counters is not None:
            found.append(Counter())
        for d in self.described:
            for a in self._encoded_one(d, pointers[d.position]):
                if isinstance(a, Operand):
                    found.append(Address(d.position))
                elif isinstance(a, int):
                    found.append(int(a))
                elif (template := template_of(a)) is not None:
                    found.append(TensorMap(d.position, template))
                else:
                    return None
        return Launched(self.launcher.handle, self.grid, (*found, *SCRATCH))

    def _encoded_one(self, d: Described, address: int) -> Sequence[object]:
        assert self.launcher.encodings is not None
        how = self.launcher.encodings[self.described.index(d)]
        return make_tensordesc_arg(Operand(address, d.shape, d.strides, d.box), how)  # type: ignore[no-any-return]

    def _encoded(self, pointers: Sequence[int]) -> tuple[object, ...]:
        key = self._key(pointers)
        found = self._maps.get(key)
        if found is None:
            if self.launcher.encodings is None:
                found = tuple(Operand(p, d.shape, d.strides, d.box) for p, d in zip(key, self.described, strict=True))
            else:
                found = tuple(a for p, d in zip(key, self.described, strict=True) for a in self._encoded_one(d, p))
            if len(self._maps) >= MAPS:
                self._maps.clear()
            self._maps[key] = found
        return found
