"""Lines of elements that end inside a vector.

A thread loads 16 bytes at once where their mask is one for all of them. Triton 3.6 takes that from divisors: `i < n` is
the same for as many neighbours as the largest power of two that divides n. A map over an odd number of elements is so
made of loads and stores of one element each, though all tiles but the last need no mask. Such a map has its body twice,
without masks for tiles that the line fills (`render.Renderer.tiles`). softsign(x) - tanhshrink(x) of 9,999 x 1,777 in
bf16: eight loads of 2 bytes and eight stores a thread (63 us on an H100) where one of 16 bytes each is enough.
"""

from __future__ import annotations

from tilefold.algebra.expr import Call, Load, walk
from tilefold.backends.triton.traffic import VECTOR
from tilefold.tile import ir
from tilefold.tile.uses import expressions

#: Most operations of a body that is rendered twice: the assembler's time is that of both.
MOST = 256


def line_of(kernel: ir.Kernel) -> str | None:
    """The one dim that a kernel's thread blocks have tiles of, if it only maps; rows of several dims begin where the
    row before ends, between two vectors, whatever their masks."""
    plain = all(isinstance(s, ir.Alloc | ir.Map | ir.Fill | ir.Store) for s in kernel.body)
    if not plain or len(kernel.grid) != 1 or kernel.grid[0].tile == 1:
        return None
    size = sum(isinstance(x, Call | Load) for e in expressions(kernel.body) for x in walk(e))
    return kernel.grid[0].dim if size <= MOST else None


def ends_inside_vector(kernel: ir.Kernel, stop: str) -> bool:
    """Whether a line of so many elements ends inside half a vector of some tensor; of a number that only calls know,
    it may."""
    least = min((t.dtype.nbytes for t in kernel.tensors), default=VECTOR)
    return not stop.isdigit() or (int(stop) & -int(stop)) * least < VECTOR // 2
