"""Convolutions of one channel a group that kernels of ours compute, and their gradients, where that takes less time.

Every product is of its own, so that no matrix unit helps: the library reads its operand and writes its result, which
what follows reads again. Written out it is a map, and what follows is in the same kernel. An image's gradient is such a
map as well, and a weight's a sum a tap (`tensor.taps`).

The library has kernels for images whose windows have odd edges, and one for the others, lines among them: 4 taps of
bf16 over 4 x 2048 x 3328 took 287 us on an H200, the gradients 252 and 165 (0.38, 0.43 and 0.66 T products a second);
with contiguous channels 1,090 and 183, and 520 more for copies. Memory takes 25 of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.expr import tensors_read
from tilefold.plan.gpu_streams import multiplies
from tilefold.plan.gpu_taps import summed_of_channels
from tilefold.plan.hardware import H100, Gpu
from tilefold.plan.memory_orders import seconds_of_copies
from tilefold.tensor.analysis import Graph, is_static
from tilefold.tensor.convolution import IMAGE, convolution, is_channels_last
from tilefold.tensor.convolution_gradients import gradient, is_last
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product
from tilefold.tensor.windows import AT_ONCE

#: How many times as fast a kernel of ours has to be that gains nothing from what is around it.
DOUBT = 2.0


def gpu_windows(p: Program, machine: Gpu = H100) -> frozenset[str]:
    """Statements that are written out: convolutions and images' gradients of one channel a group, and products of few
    elements that the library would copy."""
    g = Graph.of(p)
    wins = (_window_wins, _image_wins, _sums_win)
    return frozenset(c.name for c in p.body if any(f(g, c, machine) for f in wins))


def gpu_taps(p: Program, machine: Gpu = H100) -> Mapping[str, tuple[str, ...]]:
    """Gradients of weights of one channel a group that are a sum a tap, and the dims of their taps: where the library
    has its general kernel, of so few that a thread has a sum of each."""
    g, found = Graph.of(p), dict[str, tuple[str, ...]]()
    for c in p.body:
        of = gradient(c, p)
        if of is None or of.of != "weight" or not of.groups:
            continue
        taps = tuple(w.out for w in of.ways if w.out is not None)
        window = _Window.of(g, c, taps, len(of.ways), is_last(c, of), machine)
        if 1 < window.taps <= AT_ONCE and window.general and window.far_faster(machine):
            found[c.name] = taps
    return found


@dataclass(frozen=True, slots=True)
class _Window:
    """Sums over windows: elements of one, products of all, seconds of memory for what is read and for what is written;
    whether channels are contiguous, and whether the library has its general kernel alone for them."""

    taps: float
    products: float
    read: float
    written: float
    last: bool
    general: bool

    @staticmethod
    def of(g: Graph, c: Compute, taps: Sequence[str], axes: int, last: bool, machine: Gpu) -> _Window:
        """Of a statement, whose windows are of these dims, over so many axes of space."""
        memory = machine.reached * machine.bandwidth
        read, written = g.nbytes(tensors_read(c.body)), g.points(c.dims) * c.dtype.nbytes
        # lines of more taps and contiguous channels were not measured
        line = axes < IMAGE and (not last or g.points(taps) <= AT_ONCE)
        general = line or not all(g.points((d,)) % 2 for d in taps)
        products = g.points((*c.dims, *c.rdims))
        return _Window(g.points(taps), products, read / memory, written / memory, last, general)

    def at(self, rate: float) -> float:
        """Seconds of so many products a second."""
        return max(self.read + self.written, self.products / rate)

    def library(self, machine: Gpu) -> float:
        """Seconds of the library."""
        if self.general:
            return self.at(machine.even_rate if self.last else machine.line_rate)
        return self.at(machine.alone_rate if self.last else machine.apart_rate)

    def far_faster(self, machine: Gpu) -> bool:
        """Whether kernels of ours are faster than the library's general one."""
        return self.general and DOUBT * self.at(machine.tap_rate) <= self.library(machine)

    def wins(self, g: Graph, c: Compute, machine: Gpu) -> bool:
        """Whether it takes less time written out: in one kernel with what follows, or by far."""
        rate = machine.summed_tap_rate if summed_of_channels(g, c) else machine.tap_rate
        return self.far_faster(machine) or self.at(rate) <= self.library(machine) + self.written + machine.call


def _window_wins(g: Graph, c: Compute, machine: Gpu) -> bool:
    p = g.program
    form = convolution(c, p)
    if form is None or not form.depthwise(p.sizes) or not _few(g, c, machine):
        return False
    return _Window.of(g, c, c.rdims, len(form.space), is_channels_last(c, form), machine).wins(g, c, machine)


def _image_wins(g: Graph, c: Compute, machine: Gpu) -> bool:
    """The gradient of an image, of a convolution without a stride: its windows all have the same taps."""
    of = gradient(c, g.program)
    if of is None or of.of != "image" or not of.groups or not _few(g, c, machine):
        return False
    window = _Window.of(g, c, c.rdims, len(of.ways), is_last(c, of), machine)
    return window.general and all(w.stride == 1 for w in of.ways) and window.wins(g, c, machine)


def _few(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether what is summed is few enough to be written out."""
    return all(is_static(g.program.sizes[d]) for d in c.rdims) and g.points(c.rdims) <= machine.window


def _sums_win(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether a product of few elements, of which operands or the result lie as the library cannot take them (weights
    of each pixel times what is around it), takes less time written out than copies of those for the library."""
    found = library_product(c, g.program.sizes)
    if found is None or not found.batch or not multiplies(g, c):
        return False
    if not all(is_static(g.program.sizes[d]) for d in c.rdims):
        return False
    taps, made = g.points(c.rdims), g.points(c.dims)
    copies = seconds_of_copies(g.program, c, machine) if taps <= machine.window else 0.0
    moved = g.nbytes({c.name, *tensors_read(c.body)}) / (machine.reached * machine.bandwidth)
    return copies > 0 and max(moved, taps * made / machine.tap_rate) <= moved + copies
