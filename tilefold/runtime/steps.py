"""Of what a compiled program runs one after the other (`runtime.step`), the steps that are kernels of ours.

Kernels are compiled under canonical
names: equal layers of a model share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import WeakValueDictionary

import torch

from tilefold.algebra.evaluate import identity_of
from tilefold.backends.cpp.launch import CppKernel
from tilefold.backends.cpp.render import render
from tilefold.backends.triton.dependent import ALONE, Place, enabled
from tilefold.backends.triton.launch import TritonKernel, Variant
from tilefold.backends.triton.refusals import refusal
from tilefold.backends.triton.views import Like
from tilefold.backends.triton.warps import forecast
from tilefold.block.canonical import canonical, nameless_text
from tilefold.block.fuse import FusedKernel
from tilefold.block.interchange import interchanged
from tilefold.block.ir import Block, Store, walk
from tilefold.errors import BackendError
from tilefold.plan.gpu_forms import Given, Predict, Predicted, Refuse, packed
from tilefold.plan.hardware import Gpu
from tilefold.runtime.executor import load_kernel
from tilefold.runtime.gpu_configs import chooser
from tilefold.runtime.gpu_program import Launch
from tilefold.runtime.launches import launch_of
from tilefold.runtime.orders import strides_in
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.reuse import overwritable
from tilefold.runtime.step import Code, Result, Units
from tilefold.tensor.sizes import TYPICAL_EXTENT, shape_function
from tilefold.tile import ir as tile
from tilefold.tile.layout import single_axes_of, unit_axis, usual_units
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.text import show
from tilefold.tile.verify import verify as verify_tile


class FusedStep:
    """What kernels of all devices have in common: the fused block program, its canonical names, its results.

    order: of the parallel loops by canonical dim, outermost first, where the planner chose it.
    """

    def __init__(self, fused: FusedKernel, order: Sequence[str] = ()):
        self.fused = fused
        self.canonical = canonical(fused.block)
        if order:
            self.canonical = replace(self.canonical, block=interchanged(self.canonical.block, order))
        block, named = self.canonical.block, self.canonical.tensors
        self.name = fused.block.name
        self.members = fused.plan.group.members
        self.reads = tuple(named[i.name] for i in block.inputs)
        self.results: tuple[Result, ...] = tuple(
            (named[r.name], r.dtype.torch_dtype, shape_function([fused.block.sizes[d] for d in dims]))
            for r, dims in zip(block.results, [r.dims for r in fused.block.results], strict=True)
        )
        self._tensors = tuple(named.items())
        self._syms = tuple(self.canonical.syms.items())
        #: Result -> its axes in the order in which memory has them, where that is another (`runtime.orders`).
        self.orders: dict[str, tuple[int, ...]] = {}

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """See `Step`."""
        self._allocate(tensors, syms)
        self._start(tensors, syms)

    def record(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
        """`run`, and say what it called: no operator of torch that the recorder would see."""
        self._allocate(tensors, syms)
        with recorder.aside():
            self._start(tensors, syms)
        self._started(tensors, syms, recorder)

    def _allocate(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        read = tensors[self.reads[0]] if self.reads else next(iter(tensors.values()), None)
        device = None if read is None else read.device
        for name, dtype, shape in self.results:
            if name not in tensors:
                extents = shape(syms)
                strides = strides_in(self.orders.get(name), extents)
                tensors[name] = torch.empty_strided(extents, strides, dtype=dtype, device=device)

    def _start(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Compute the results, which are there."""
        raise NotImplementedError

    def _started(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
        """Say what `_start` has called for these tensors."""
        raise NotImplementedError

    def usual_units(self) -> Units:
        """Of inputs that are row-major."""
        return usual_units(self.canonical.block)[: len(self.reads)]

    def _units(self, known: Mapping[str, int | None]) -> Units:
        return tuple(known.get(t, usual) for t, usual in zip(self.reads, self.usual_units(), strict=True))


class KernelStep(FusedStep):
    """A kernel of the CPU, lowered and loaded once per pattern of unit strides. tiles: by canonical dim, if chosen."""

    def __init__(self, fused: FusedKernel, tiles: Mapping[str, int] | None = None, order: Sequence[str] = ()):
        super().__init__(fused, order)
        self.tiles = tiles
        self._loaded: dict[Units, Callable[..., None]] = {}
        self.kernels: dict[Units, tile.Kernel] = {}
        self._single = single_axes_of(self.canonical.block)[: len(self.reads)]

    def kernel(self, units: Units | None = None) -> tile.Kernel:
        """The tile kernel for the axes of stride 1 of `reads` (default: each last axis)."""
        units = self.usual_units() if units is None else units
        found = self.kernels.get(units)
        if found is None:
            block = self.canonical.block
            unit = dict(zip((i.name for i in block.inputs), units, strict=True))
            options = LowerOptions(unit=unit, tiles=self.tiles)
            found = self.kernels[units] = verify_tile(lower(block, options))
        return found

    def load(self, units: Units | None = None) -> Callable[..., None]:
        """Compile (or find in the cache) the kernel for these unit axes."""
        units = self.usual_units() if units is None else units
        launch = self._loaded.get(units)
        if launch is None:
            launch = self._loaded[units] = load_kernel(self.kernel(units))
        return launch

    @property
    def loaded(self) -> Mapping[Units, Callable[..., None]]:
        """The kernels that have been compiled, the usual one first."""
        return self._loaded

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `run` needs; what is not among the tensors yet will be row-major."""
        known = zip(self.reads, self._single, self.usual_units(), strict=True)
        self.load(tuple(unit_axis(tensors[t], s) if t in tensors else usual for t, s, usual in known))

    def _start(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        units = self._units_of(tensors)
        launch = self._loaded.get(units) or self.load(units)
        launch({new: tensors[old] for new, old in self._tensors}, {new: syms[old] for new, old in self._syms})

    def _units_of(self, tensors: Mapping[str, torch.Tensor]) -> Units:
        return tuple([unit_axis(tensors[t], s) for t, s in zip(self.reads, self._single, strict=True)])

    def _started(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
        launch = self.load(self._units_of(tensors))
        if not isinstance(launch, CppKernel):
            recorder.refused = "the interpreter of kernels runs in Python"
            return
        own = {new: tensors[old] for new, old in self._tensors}
        bound, xs = launch.bound(own, {new: syms[old] for new, old in self._syms})
        recorder.kernel(bound.address, bound.outside, bound.numbers, xs)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """The tile kernel and its C++."""
        kernel = self.kernel(self._units(units))
        return Code(_grid(kernel), show(kernel), render(kernel), language="C++")


_kernels: WeakValueDictionary[tuple[str, Given | None, bool], TritonKernel] = WeakValueDictionary()


def triton_kernel(block: Block, given: Given | None = None, *, interpreted: bool = False) -> TritonKernel:
    """The kernel of a canonical block program; equal ones (the layers of a model) are one, rendered and compiled once,
    whatever the names of their tensors, which come by their places."""
    key = (nameless_text(block), given, interpreted)
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = TritonKernel(block, chooser(given), interpreted=interpreted)
    return found


def usual_variant(k: TritonKernel, units: Units | None = None) -> Variant | str:
    """The rendering for typical values of symbols, and these unit axes of inputs (default: the last); or why not."""
    usual = usual_units(k.block)
    units = usual if units is None else (*units, *usual[len(units) :])
    try:
        return k.variant(units, k.sizes(dict.fromkeys(k.block.syms, TYPICAL_EXTENT)))
    except BackendError as err:
        return err.message


def refuser(given: Given | None, *, interpreted: bool) -> tuple[Refuse, list[TritonKernel]]:
    """What says why a kernel cannot be rendered, or could not be launched before; and the kernels it looked at, which
    live as long as the list. One that is too large as it is may be none as it is launched on tensors without gaps."""
    looked_at: list[TritonKernel] = []

    def refuse(k: FusedKernel) -> str | None:
        block = canonical(k.block).block
        known = refusal(block)
        found = known or tried(block)
        if known is None and isinstance(found, str):
            joined = packed(block)
            found = found if joined == block else tried(joined)
        return found if isinstance(found, str) else None

    def tried(block: Block) -> Variant | str:
        looked_at.append(triton_kernel(block, given, interpreted=interpreted))
        return usual_variant(looked_at[-1])

    return refuse, looked_at


def predictor(gpu: Gpu) -> Predict:
    """What forecasts the time of a kernel on tensors without gaps (`backends.triton.warps`). What was forecast of a
    kernel holds for all that differ from it in names."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known: dict[TritonKernel, Predicted | None] = {}

    def predict(k: FusedKernel) -> Predicted | None:
        block = canonical(k.block).block
        kernel = triton_kernel(block)
        if kernel not in known:
            known[kernel] = predicted(block, kernel)
        return known[kernel]

    def predicted(block: Block, kernel: TritonKernel) -> Predicted | None:
        syms = dict.fromkeys(block.syms, TYPICAL_EXTENT)
        shapes = [(i.dtype, i.shape) for i in block.inputs]
        shapes += [(r.dtype, tuple(block.sizes[d] for d in r.dims)) for r in block.results]
        xs = [Like.packed(shape_function(list(s))(syms), t.torch_dtype, device) for t, s in shapes]
        try:
            if kernel.job(xs, syms) is None:
                return None
            v, sizes, seen = kernel.rendering(xs, syms)
        except BackendError:
            return None
        found = forecast(v, seen, sizes, syms, gpu)
        return Predicted(found.seconds, found.floor, len(v.rendered.source))

    return predict


class GpuStep(FusedStep):
    """A kernel of a CUDA device: `backends.triton` chooses tiles and compiles a shape at a time."""

    def __init__(self, fused: FusedKernel, given: Given | None = None, *, interpreted: bool = False):
        super().__init__(fused)
        #: (result, what it may be written over): `runtime.program` knows what is needed no more.
        self.over = overwritable(fused.block)
        self.triton = triton_kernel(self.canonical.block, given, interpreted=interpreted)
        #: Among kernels that are launched one after the other (`runtime.program` knows them), where a device has that.
        self.place = ALONE
        self._places: dict[torch.device, Place] = {}

    def launch(self) -> Launch:
        """The kernel with the program's names of its tensors."""
        syms = tuple((new, old) for new, old in self._syms)
        return Launch(self.triton, tuple(old for _, old in self._tensors), syms, self.results)

    def _start(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        xs = [tensors[old] for _, old in self._tensors]
        self.triton.launch(xs, {new: syms[old] for new, old in self._syms}, self._place(xs))

    def _started(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder) -> None:
        xs = [tensors[old] for _, old in self._tensors]
        own = {new: syms[old] for new, old in self._syms}
        plan = self.triton.planned(xs, own, pointers := [x.data_ptr() for x in xs], self._place(xs))
        recorder.add(launch_of(plan, recorder.slots(xs), pointers, *recorder.at))

    def start_building(self, tensors: Mapping[str, Like], syms: Mapping[str, int]) -> None:
        """Have compiled meanwhile, by another process, what `run` needs for such tensors, its results among them."""
        own, xs = {new: syms[old] for new, old in self._syms}, [tensors[old] for _, old in self._tensors]
        self.triton.start_building(xs, own, self._place(xs))

    def _place(self, xs: Sequence[torch.Tensor | Like]) -> Place:
        device = xs[0].device
        if device not in self._places:  # asked once: that reads the environment
            self._places[device] = self.place if self.place != ALONE and enabled(device) else ALONE
        return self._places[device]

    def code(self, units: Mapping[str, int | None]) -> Code:
        """The tile kernel and its Triton, for typical values of symbols; why there is none where it is refused."""
        v = usual_variant(self.triton, self._units(units))
        if isinstance(v, str):
            return Code(source=f"# {v}\n", language="Triton")
        source = v.rendered.source
        language = "Gluon" if "@gluon.jit" in source else "Triton"
        return Code(_grid(v.kernel), show(v.kernel), source, language=language)


class AddedStep(GpuStep):
    """A kernel that adds to its result (`block.added`), which is zeros before (`zeroed`: by a step of their own), or
    that raises it (maxima), which is -inf before."""

    zeroed = False

    def __init__(self, fused: FusedKernel, given: Given | None = None, *, interpreted: bool = False):
        super().__init__(fused, given, interpreted=interpreted)
        self.how = next(n.added for n in walk(fused.block.body) if isinstance(n, Store))

    def _allocate(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        super()._allocate(tensors, syms)
        for name, dtype, _ in () if self.zeroed else self.results:
            if self.how == "sum":
                tensors[name].zero_()
            else:
                tensors[name].fill_(identity_of(self.how, dtype))


def _grid(kernel: tile.Kernel) -> str:
    return " ".join(f"{t.dim}:{t.tile}" for t in kernel.grid)


def load_all(steps: Sequence[KernelStep]) -> None:
    """Compile kernels side by side (the compiler runs in processes of its own), equal ones once."""
    first = {show(s.kernel()): s for s in reversed(steps)}
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        list(pool.map(KernelStep.load, first.values()))
