"""Calling generated kernels on CUDA tensors.

A call looks up what its shapes and strides need (`Plan`: compiled kernel, grid, all integer arguments) and hands the
launcher the addresses. No synchronisation, the current stream of the tensors' device; nothing but the launch is
recorded in a CUDA graph. In Triton's interpreter a plan is started with addresses as well.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from tilefold.algebra.expr import Const
from tilefold.backends.triton.build import DIVISOR, Job, Target, expect_jobs, has_groups, module_of, start_building
from tilefold.backends.triton.compile import compiled, job_of
from tilefold.backends.triton.config import TooLarge, TritonConfig, lighter
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.counters import counters_of
from tilefold.backends.triton.dependent import ALONE, Place
from tilefold.backends.triton.gluon import render_groups
from tilefold.backends.triton.launcher import Described, Launcher, Plan, launcher_of
from tilefold.backends.triton.one_axis import best_axes, loses, worth_of
from tilefold.backends.triton.order import interleaved
from tilefold.backends.triton.precision import matmul_precision
from tilefold.backends.triton.prepare import tile_kernel
from tilefold.backends.triton.refusals import refuse
from tilefold.backends.triton.render import Rendered, render
from tilefold.backends.triton.reuse import passing
from tilefold.backends.triton.roles import roles_of
from tilefold.backends.triton.row_groups import render_rows
from tilefold.backends.triton.row_roles import RowRoles, row_roles_of
from tilefold.backends.triton.row_tiles import owning_rows
from tilefold.backends.triton.spilled import SPILLED, eased, spilled
from tilefold.backends.triton.tiles import Shape, apart, default_config
from tilefold.backends.triton.tilings import WINDOW, window_of
from tilefold.backends.triton.views import Seen, merged, neighbours
from tilefold.backends.triton.warps import forecast
from tilefold.block.collapse import Merge, collapsed
from tilefold.block.ir import Block
from tilefold.block.one_axis import is_map
from tilefold.block.pairs import paired
from tilefold.block.split import with_even_shares
from tilefold.errors import BackendError
from tilefold.plan.hardware import H100
from tilefold.tensor.sizes import shape_function
from tilefold.tile.ir import Kernel, TensorParam
from tilefold.tile.layout import UnitAxes, single_axes_of, unit_axis
from tilefold.tile.pieces import power_of_two

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # without Triton nothing here runs
    TensorDescriptor = None

log = logging.getLogger("tilefold")

#: Addresses beyond this many elements need 64-bit arithmetic.
NARROW_LIMIT = 1 << 31
#: Plans remembered a kernel; dynamic shapes make new ones.
PLANS = 4096

#: (block program, extents of its dims) to a configuration, or None for the default.
Chooser = Callable[[Block, Mapping[str, int]], TritonConfig | None]
#: The axis of stride 1 of each tensor of a kernel, None where there is none.
Units = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One rendering: its kernel, source, configuration, whether offsets have 64 bits, tensors and their shapes."""

    kernel: Kernel
    rendered: Rendered
    config: TritonConfig
    wide: bool
    params: tuple[tuple[TensorParam, Callable[[Mapping[str, int]], tuple[int, ...]]], ...]


class TritonKernel:
    """A block program on CUDA devices. Kernels are compiled when a shape first needs them.

    interpreted: run by Triton's interpreter on CPU tensors (tests; TRITON_INTERPRET=1 before Triton is imported).
    exactly: a configuration that the device cannot hold is an error (the tuner); else lighter ones are tried.
    """

    def __init__(
        self, block: Block, choose: Chooser | None = None, *, interpreted: bool = False, exactly: bool = False
    ):
        self.block = block
        self.choose = choose
        self.interpreted = interpreted
        self.exactly = exactly
        self.tensors = tuple(i.name for i in block.inputs) + tuple(r.name for r in block.results)
        self._single = single_axes_of(block)
        self._sizes = shape_function(list(block.sizes.values()))
        self._dynamic = frozenset(d for d, e in block.sizes.items() if not isinstance(e, Const))
        self._configs: dict[tuple[object, ...], TritonConfig] = {}
        self._usual: dict[tuple[object, ...], TritonConfig] = {}
        self._spilled: dict[tuple[object, ...], tuple[TritonConfig, int]] = {}  # what ran before with more, and bytes
        self._variants: dict[tuple[object, ...], list[Variant]] = {}
        self._compiled: dict[tuple[object, ...], Launcher] = {}
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._joined: dict[tuple[object, ...], tuple[TritonKernel, tuple[Merge, ...]]] = {}

    def __call__(self, tensors: Mapping[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """Run on tensors of one CUDA device; results are written in place. BackendError: it does not compile."""
        xs = [tensors[n] for n in self.tensors]
        self.launch(xs, syms)

    def launch(self, xs: Sequence[torch.Tensor], syms: Mapping[str, int], place: Place = ALONE) -> None:
        """The same, tensors in the order of `self.tensors`. place: among kernels that follow one another."""
        pointers = [x.data_ptr() for x in xs]
        device = xs[0].device.index
        plan = self.planned(xs, syms, pointers, place)
        if device is None:
            plan.start(0, pointers)
        elif device == torch._C._cuda_getDevice():
            plan.start(torch._C._cuda_getCurrentRawStream(device), pointers)
        else:
            with torch.cuda.device(device):
                plan.start(torch._C._cuda_getCurrentRawStream(device), pointers)

    def planned(
        self, xs: Sequence[torch.Tensor], syms: Mapping[str, int], pointers: Sequence[int], place: Place = ALONE
    ) -> Plan:
        """The launch for such tensors at such addresses, planned once."""
        device = xs[0].device.index
        key = (device, place, *[(p % DIVISOR, x.shape, x.stride(), x.dtype) for p, x in zip(pointers, xs, strict=True)])
        key += tuple(syms.values())
        plan = self._plans.get(key)
        if plan is None:
            plan = self.plan(xs, syms, place)
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def sizes(self, syms: Mapping[str, int]) -> dict[str, int]:
        """Extents of the block program's dims."""
        return dict(zip(self.block.sizes, self._sizes(syms), strict=True))

    def variant(
        self,
        units: Units,
        sizes: Mapping[str, int],
        *,
        wide: bool = False,
        plain: bool = False,
        place: Place = ALONE,
        hopper: bool = False,
        **options: bool,
    ) -> Variant:
        """The rendering for unit-stride axes and extents; one serves all extents of its bin.

        plain: some tensor cannot be described by a tensor map, so none is used. place: among the kernels of its call;
        configurations serve all places. hopper: for a device of that architecture, whose warps can work in groups;
        tensor maps must then describe what they copy.
        """
        config = self._config(sizes, units, tf32=options.get("tf32", False), hopper=hopper and not wide)
        if wide or not hopper:
            config = replace(config, groups=0)
        rows = config.groups and config.own == "rows"  # what their tensor maps describe is asked for in `_bound`
        if wide or (plain and not rows):
            config = replace(config, descriptors=False)
        if config.specialize:
            place = ALONE  # only some of its warps would wait
        key = (units, config.key(), wide, place, frozenset({"tf32": False, "interpreted": False, **options}.items()))
        known = self._variants.setdefault(key, [])
        for v in known:
            if all(sizes[d] <= n for d, n in v.rendered.covers.items()):
                return v
        bins = {d: n for d, n in self._coarse(sizes).items() if d in self._dynamic}
        kernel = tile_kernel(self.block, config, dict(zip(self.tensors, units, strict=True)), bins)
        rendered = grouped(kernel, config, bins, place)
        if rendered is None and config.groups and config.own == "rows" and not self.exactly:
            return self.variant(units, sizes, wide=wide, plain=plain, place=place, **options)
        if rendered is None:
            config = replace(config, groups=0, descriptors=config.descriptors and not plain)
            side = self._interleave(kernel, sizes)
            by = passing(self.block)
            rendered = render(kernel, config, bins=bins, wide=wide, interleave=side, place=place, passing=by, **options)
        tensors = {t.name: t for t in kernel.tensors}
        if not set(self.tensors) <= tensors.keys():
            raise BackendError(f"{kernel.name} does not use all of its tensors")
        params = tuple((tensors[n], shape_function(tensors[n].shape)) for n in self.tensors)
        v = Variant(kernel, rendered, config, wide, params)
        known.append(v)
        return v

    def _interleave(self, kernel: Kernel, sizes: Mapping[str, int]) -> int:
        rows = [t for t in kernel.grid if t.tile > 1]
        if len(rows) != 1 or Shape.of(self.block).segments:
            return 1
        return interleaved(-(-self._coarse(sizes)[rows[0].dim] // rows[0].tile))

    def choose_again(self) -> None:
        """Ask for configurations anew from the next call on: the table that they are from has changed."""
        self._configs, self._variants, self._plans, self._joined, self._spilled = {}, {}, {}, {}, {}

    def _units(self, xs: Sequence[Seen]) -> Units:
        return tuple(unit_axis(x, s) for x, s in zip(xs, self._single, strict=True))

    def _coarse(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Extents with those of dynamic dims rounded up to their bins."""
        return {d: power_of_two(n) if d in self._dynamic else n for d, n in sizes.items()}

    def _bin(self, sizes: Mapping[str, int], units: Units, *, tf32: bool, hopper: bool) -> tuple[object, ...]:
        """What one configuration is for."""
        return (tf32, hopper, units, *self._coarse(sizes).values())

    def _config(self, sizes: Mapping[str, int], units: Units, *, tf32: bool, hopper: bool = False) -> TritonConfig:
        """The configuration of the extents' bin, for tensors with these axes of stride 1. hopper: for devices whose
        groups of warps may own rows."""
        coarse = self._coarse(sizes)
        key = self._bin(sizes, units, tf32=tf32, hopper=hopper)
        if key not in self._configs:
            chosen = self.choose(self.block, coarse) if self.choose is not None else None
            if chosen is not None and chosen.own == "rows" and not hopper:
                chosen = None
            unit = dict(zip(self.tensors, units, strict=True))
            self._configs[key] = chosen or self._default(coarse, unit, tf32=tf32, hopper=hopper)
        return self._configs[key]

    def _default(self, sizes: Mapping[str, int], unit: UnitAxes, *, tf32: bool, hopper: bool) -> TritonConfig:
        key = (tf32, *unit.values(), *sizes.values())
        usual = self._usual.get(key)
        if usual is None:
            usual = self._usual[key] = default_config(self.block, sizes, unit, tf32=tf32)
        return owning_rows(self.block, sizes, usual, unit) if hopper else usual

    def plan(self, xs: Sequence[torch.Tensor], syms: Mapping[str, int], place: Place = ALONE) -> Plan:
        """The launch for such tensors, compiled. ValueError: other than declared, or of several devices. BackendError
        where no configuration can be launched, which is remembered (`refusals`). place: among the kernels of a call,
        which must be launched in their order on one stream."""
        try:
            return self._launchable(xs, syms, place)
        except BackendError as err:
            if not self.exactly:
                refuse(self.block, err.message)
            raise

    def _launchable(self, xs: Sequence[torch.Tensor], syms: Mapping[str, int], place: Place) -> Plan:
        if all(x.numel() == 0 for x in xs[len(self.block.inputs) :]):
            return Plan(Launcher(_nothing, ()), 0, ())
        if len(devices := {str(x.device) for x in xs}) > 1:
            raise ValueError(f"{self.block.name}: tensors of {', '.join(sorted(devices))}")
        joined, merges = self.joined(xs, syms)
        if merges:
            given = [x for x in merged(xs, self.tensors, merges) if isinstance(x, torch.Tensor)]
            try:
                return joined._launchable(given, syms, place)
            except BackendError as err:
                self._keep_apart(xs, err)
        while True:
            try:
                return self._plan(xs, syms, place)
            except BackendError as err:
                if self.exactly or not self._simpler(xs, syms, smaller=isinstance(err, TooLarge)):
                    raise

    def start_building(self, xs: Sequence[Seen], syms: Mapping[str, int], place: Place = ALONE) -> None:
        """Have the kernel that `plan` will want for such tensors compiled meanwhile, by another process."""
        try:
            job = self.job(xs, syms, place)
        except BackendError:
            return  # `plan` says so, where something else can be tried
        if job is not None:
            start_building(job)

    def job(self, xs: Sequence[Seen], syms: Mapping[str, int], place: Place = ALONE) -> Job | None:
        """What `plan` will have compiled for such tensors; None: nothing. BackendError where no configuration can be
        rendered, as there."""
        if all(x.numel() == 0 for x in xs[len(self.block.inputs) :]):
            return None
        joined, merges = self.joined(xs, syms)
        if merges:
            try:
                return joined.job(merged(xs, self.tensors, merges), syms, place)
            except BackendError as err:
                self._keep_apart(xs, err)
        while True:
            try:
                v, _, numbers = self._bound(xs, syms, place)
            except BackendError as err:
                if self.exactly or not self._simpler(xs, syms, smaller=isinstance(err, TooLarge)):
                    raise
            else:
                return job_of(v.kernel, v.rendered, v.config, self._divisors(xs, numbers), wide=v.wide)

    def rendering(
        self, xs: Sequence[Seen], syms: Mapping[str, int], place: Place = ALONE
    ) -> tuple[Variant, dict[str, int], list[Seen]]:
        """What such tensors are launched with, extents of its dims, and the tensors as it sees them: after `job`, which
        finds a configuration that can be rendered."""
        joined, merges = self.joined(xs, syms)
        seen = merged(xs, self.tensors, merges) if merges else list(xs)
        return joined._bound(seen, syms, place)[0], joined.sizes(syms), seen

    def _keep_apart(self, xs: Sequence[Seen], err: BackendError) -> None:
        """No dims are joined any more for tensors like these: the kernel with joined ones cannot be made."""
        log.info("%s: dims that lie side by side are not joined: %s", self.block.name, err.message)
        self._joined[self._near(xs)] = (self, ())

    def _near(self, xs: Sequence[Seen]) -> tuple[frozenset[tuple[int, int]], ...]:
        return tuple(neighbours(x) for x in xs)

    def joined(self, xs: Sequence[Seen], syms: Mapping[str, int]) -> tuple[TritonKernel, tuple[Merge, ...]]:
        """The kernel with dims joined that these tensors have side by side, and how; none where a configuration is
        given."""
        key = self._near(xs)
        if key not in self._joined:
            near = dict(zip(self.tensors, key, strict=True))
            given = self.exactly or (
                self.choose is not None and self.choose(self.block, self._coarse(self.sizes(syms)))
            )
            block, merges = (self.block, ()) if given else collapsed(self.block, near, apart)
            block = with_even_shares(block) if merges else block
            plain = not given and not any(m and n for m, n, _ in Shape.of(block).products)
            views = zip(self.tensors, merged(xs, self.tensors, merges), strict=True)
            block, more = paired(block, {n: neighbours(x) for n, x in views}) if plain else (block, ())
            merges = (*merges, *more)
            if plain and not self._dynamic and is_map(block):
                block, more = self._on_one_axis(block, merged(xs, self.tensors, merges), syms)
                merges = (*merges, *more)
            made = TritonKernel(block, interpreted=self.interpreted) if merges else self
            if merges:  # joined for these tensors, once for all
                made._joined[made._near(merged(xs, self.tensors, merges))] = (made, ())
            self._joined[key] = (made, merges)
        return self._joined[key]

    def _on_one_axis(
        self, block: Block, xs: Sequence[Seen], syms: Mapping[str, int]
    ) -> tuple[Block, tuple[Merge, ...]]:
        """The block for such tensors over as few dims as is best for it (`one_axis`), and what that joins."""

        def seconds(b: Block, merges: tuple[Merge, ...]) -> float:
            k, seen = TritonKernel(b, interpreted=self.interpreted), merged(xs, self.tensors, merges)
            try:
                v = k.variant(k._units(seen), k.sizes(syms), interpreted=self.interpreted)
            except BackendError:
                return math.inf
            return forecast(v, seen, k.sizes(syms), syms, H100).seconds

        own = TritonKernel(block, interpreted=self.interpreted)
        sizes, units = own.sizes(syms), own._units(xs)
        if not loses(block, own._config(sizes, units, tf32=False), sizes, xs):
            return block, ()
        made = {r.name for r in block.results}
        worth = worth_of([x for n, x in zip(self.tensors, xs, strict=True) if n in made])
        return best_axes(block, {n: neighbours(x) for n, x in zip(self.tensors, xs, strict=True)}, seconds, worth)

    def _simpler(self, xs: Sequence[Seen], syms: Mapping[str, int], *, smaller: bool) -> bool:
        """Whether the bin of such tensors has another configuration, with which it then runs: one whose groups of warps
        have fixed shares (the assembler keeps those apart more often), without groups, else, if that is what it takes,
        a smaller one."""
        sizes, units = self.sizes(syms), self._units(xs)
        tf32, hopper = matmul_precision() == "tf32", self._groups_on(xs)
        config = self._config(sizes, units, tf32=tf32, hopper=hopper)
        found: TritonConfig | None
        if config.groups and config.draws and not smaller:
            found = replace(config, draws=False)
        elif config.groups and config.own == "rows":
            found = self._config(sizes, units, tf32=tf32)
        else:
            found = replace(config, groups=0) if config.groups else lighter(config) if smaller else None
        if found is not None:
            self._configs[self._bin(sizes, units, tf32=tf32, hopper=hopper)] = found
        return found is not None

    def _eases(self, xs: Sequence[Seen], syms: Mapping[str, int], nbytes: int) -> bool:
        """Whether the bin of such tensors has another configuration, with which it then runs, because threads of this
        one's kernel spill registers: one with fewer elements a thread, or that before, where it spilled no more."""
        sizes, units = self.sizes(syms), self._units(xs)
        tf32, hopper, coarse = matmul_precision() == "tf32", self._groups_on(xs), self._coarse(sizes)
        key = self._bin(sizes, units, tf32=tf32, hopper=hopper)
        before = self._spilled.get(key)
        found: TritonConfig | None = None
        if before is not None and nbytes >= before[1] > 0:
            found, self._spilled[key] = before[0], (before[0], 0)
        elif nbytes > SPILLED and not self.exactly and (before is None or before[1] > 0):
            chosen = self.choose(self.block, coarse) if self.choose is not None else None
            config = self._config(sizes, units, tf32=tf32, hopper=hopper)
            found = eased(config, self.block, coarse) if chosen is None else None
            self._spilled[key] = config, nbytes
        if found is not None:
            self._configs[key] = found
        return found is not None

    def _groups_on(self, xs: Sequence[Seen]) -> bool:
        """Whether groups of warps may run on the tensors' device, with offsets of 32 bits."""
        return not self.interpreted and is_hopper(xs[0].device) and not any(_span(x) >= NARROW_LIMIT for x in xs)

    def _plan(self, xs: Sequence[torch.Tensor], syms: Mapping[str, int], place: Place) -> Plan:
        v, grid, numbers = self._bound(xs, syms, place)
        if self.interpreted:
            return Plan(Launcher(_interpreter(v, self.tensors, xs), ()), grid, tuple(numbers))
        device = xs[0].device
        divisors = self._divisors(xs, numbers)
        if v.rendered.persistent:
            grid = min(grid, multiprocessors(device.index))
        key = (device.index, v.rendered.source, v.config.warps, v.config.stages, v.config.registers, tuple(divisors))
        with torch.cuda.device(device):
            launcher = self._compiled.get(key)
            if launcher is None:
                done = compiled(v.kernel, v.rendered, v.config, divisors, wide=v.wide, target=None)
                launcher = self._compiled[key] = launcher_of(done)
                if self._eases(xs, syms, spilled(done)):
                    return self._plan(xs, syms, place)
        described = tuple(
            Described(n, tuple(xs[n].shape), xs[n].stride(), tuple(box))
            for n, (_, box) in zip(self._described(v), v.rendered.descriptors.values(), strict=True)
        )
        counters = counters_of(device.index) if v.rendered.draws else None
        if counters is not None:
            counters.reserve()
        return Plan(launcher, grid, tuple(numbers), described, counters)

    def _divisors(self, xs: Sequence[Seen], numbers: Sequence[int]) -> list[int]:
        """Powers of two that arguments are multiples of: addresses, then integers. Rows of 1,000 elements of 16 bits
        begin at multiples of 16 bytes, too. 16 or nothing where sizes vary from call to call (fewer kernels), and of
        windows that are written out: a result that leaves in long vectors takes registers from their loads."""
        found, whole = [*(x.data_ptr() for x in xs), *numbers], self._dynamic or window_of(self.block)[0] >= WINDOW
        return [d if d == DIVISOR or not whole else 1 for d in (math.gcd(n, DIVISOR) for n in found)]

    def _described(self, v: Variant) -> list[int]:
        """Positions of the tensors that tensor maps describe."""
        return [self.tensors.index(t) for t, _ in v.rendered.descriptors.values()]

    def _bound(
        self, xs: Sequence[Seen], syms: Mapping[str, int], place: Place = ALONE
    ) -> tuple[Variant, int, list[int]]:
        """The variant for these tensors, thread blocks, and the integer arguments."""
        sizes = self.sizes(syms)
        units = self._units(xs)
        wide = any(_span(x) >= NARROW_LIMIT for x in xs) or max(sizes.values(), default=0) >= NARROW_LIMIT
        plain = not all(_describable(x) for x in xs)
        options = {"tf32": matmul_precision() == "tf32", "interpreted": self.interpreted}
        hopper = not self.interpreted and is_hopper(xs[0].device)
        v = self.variant(units, sizes, wide=wide, plain=plain, place=place, hopper=hopper, **options)
        if v.rendered.groups and not all(_describable(xs[n]) for n in self._described(v)):
            v = self.variant(units, sizes, wide=wide, plain=plain, place=place, **options)
        numbers: list[int] = []
        for x, (t, shape) in zip(xs, v.params, strict=True):
            if tuple(x.shape) != (want := shape(syms)):
                raise ValueError(f"{v.kernel.name}: {t.name} has shape {tuple(x.shape)}, not {want}")
            if x.dtype is not t.dtype.torch_dtype:
                raise ValueError(f"{v.kernel.name}: {t.name} is {x.dtype}, not {t.dtype.torch_dtype}")
            numbers += [s for a, s in enumerate(x.stride()) if a != t.unit_axis]
        numbers += [syms[s] for s in v.kernel.syms]
        grid = 1
        for tiled in v.rendered.grid:
            grid *= -(-sizes[tiled.dim] // tiled.tile)
        return v, grid, numbers


def grouped(kernel: Kernel, config: TritonConfig, bins: Mapping[str, int], place: Place) -> Rendered | None:
    """The rendering for groups of warps, if the configuration wants one and the kernel has one."""
    by_rows, by_columns = row_roles_of(kernel, config), roles_of(kernel, config, bins)
    if not isinstance(by_rows, RowRoles) and by_columns is None:
        return None
    context = Context(kernel, config, bins, wide=False, interpreted=False, nvidia=True)
    try:
        if isinstance(by_rows, RowRoles):
            return render_rows(kernel, by_rows, context, place)
        return None if by_columns is None else render_groups(kernel, by_columns, context, place)
    except BackendError:
        return None


@cache
def multiprocessors(device: int) -> int:
    """Of a CUDA device: a persistent kernel has a thread block on each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_hopper(device: torch.device) -> bool:
    """Whether kernels there may share their work among groups of warps."""
    target = _target_of(device)
    return target is not None and has_groups(target)


def expect_kernels(device: torch.device) -> None:
    """Have what compiles kernels for a device start meanwhile (`build.expect_jobs`)."""
    if device.type == "cuda":
        expect_jobs(_target_of(device))


def _target_of(device: torch.device) -> Target | None:
    """A CUDA device; None for others, of which Triton knows what they are."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


def _nothing(*arguments: object) -> None:
    """The launch of no thread blocks."""


def _interpreter(v: Variant, names: Sequence[str], like: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Runs a kernel in Triton's interpreter on addresses of memory that is laid out as the tensors `like`."""
    layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in like]
    boxes = [(names.index(t), list(box)) for t, box in v.rendered.descriptors.values()]

    def run(grid: int, y: int, z: int, stream: int, *arguments: int) -> None:
        fn = getattr(module_of(v.rendered.source, v.rendered.name), v.rendered.name)
        xs = [memory_at(p, *layout) for p, layout in zip(arguments, layouts, strict=False)]
        maps = [TensorDescriptor.from_tensor(xs[n], box) for n, box in boxes]
        fn[(grid, y, z)](*xs, *arguments[len(xs) :], *maps)

    return run


def memory_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of this process as a tensor; `strides` are not negative."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
    flat = torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(address), dtype=torch.uint8)
    return flat.view(dtype).as_strided(shape, strides)


def _describable(x: Seen) -> bool:
    """Whether a tensor map can describe it: aligned, rows at multiples of 16 bytes, not empty."""
    n = x.element_size()
    return (
        x.data_ptr() % DIVISOR == 0 and x.numel() > 0 and all(s * n % DIVISOR == 0 and s > 0 for s in x.stride()[:-1])
    )


def _span(x: Seen) -> int:
    """Elements from the first to the last address."""
    return sum(abs(s) * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True) if n > 0) + 1
