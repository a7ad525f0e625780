"""Groups of warps that own rows (`row_roles`) as Gluon source.

Two functions run side by side in a thread block. `copies`, one warp, brings each group's rows, and tiles of the stream
through a ring; what lifts read and what merges read has barriers of its own, full and empty, in the order of use.
`folds`, once a group, goes through the stream from its end, so that a last ragged tile and those at the edge of a mask
come first. The first tile is lifted; then each step starts the lifts of a tile and the merges of the one before, and
while those run computes the elementwise part; the last merges follow the loop. Only tiles that need a mask have one.
Thread blocks are persistent: each goes through its share of the tiles of the grid.
Sums of a row are kept per thread until the end.

Expressions, masks, addresses and stores come from the usual renderer: values of [row, stream] lie in the layout `mma`,
states in one of their own, a value a row crosses from one to the other in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilefold.backends.triton.context import Context
from tilefold.backends.triton.dependent import ALONE, Place
from tilefold.backends.triton.gluon_text import (
    COPYING,
    DRAWN,
    HEADER,
    PAGES,
    PAIRS,
    SUMS,
    TRAP,
    WALK,
    WARPS,
    in_gluon,
    mentions,
)
from tilefold.backends.triton.parts import ROWS
from tilefold.backends.triton.prelude import functions, needed
from tilefold.backends.triton.render import Rendered
from tilefold.backends.triton.row_draws import DRAWS
from tilefold.backends.triton.row_folds import Folds
from tilefold.backends.triton.row_roles import RowRoles
from tilefold.backends.triton.row_room import REGISTERS
from tilefold.backends.triton.row_scores import scored_once
from tilefold.backends.triton.row_walk import DRAWN_BY, Copies, Shared
from tilefold.backends.triton.values import TRITON_TYPE
from tilefold.tile import ir

#: Barriers: of each group's rows, of the ring's early and late parts.
_OF_ROWS, _OF_RING = ("rows_full", "rows_empty"), ("early_full", "early_empty", "late_full", "late_empty")


def render_rows(kernel: ir.Kernel, roles: RowRoles, context: Context, place: Place = ALONE) -> Rendered:
    """The Gluon source of a kernel; `context` as for `render`, not yet used. BackendError: not expressible there."""
    return _Rows(scored_once(kernel), roles, context, place).render()


class _Rows:
    def __init__(self, kernel: ir.Kernel, roles: RowRoles, context: Context, place: Place):
        self.of = Shared(kernel, roles, context)
        self.kernel, self.r, self.c, self.place = kernel, roles, context, place

    def render(self) -> Rendered:
        copies = Copies(self.of, self.of.context(())).lines()
        folds = Folds(self.of, self.of.context((self.r.row, self.r.loop.dim))).lines()
        args = [self.c.names[t.name] for t in self.kernel.tensors]
        for t in self.kernel.tensors:
            args += [self.c.stride(t, a) for a in range(len(t.shape)) if a != t.unit_axis]
        args += [*(f"sym_{s}" for s in self.kernel.syms), *(["counter"] if self.of.draws else []), *self.of.maps]
        shared = [*self.of.parts, *self.of.rows, *self.of.planes, *self.of.outs, *_OF_ROWS, *_OF_RING, *DRAWN_BY]
        passed = {
            role: [a for a in (*args, *shared) if mentions("\n".join(lines), a)]
            for role, lines in (("copies", copies), ("folds", folds))
        }
        parts = [
            self._function("copies", passed["copies"], copies),
            self._function("folds", [*passed["folds"], "GROUP"], folds),
            *(self._group(n, passed["folds"]) for n in range(self.r.groups)),
            self._entry(args, passed),
        ]
        code = "\n\n\n".join(parts) + "\n"
        source = (
            HEADER
            + needed(WALK, SUMS, DRAWN, PAIRS, PAGES, TRAP, code=code)
            + in_gluon(functions(code, DRAWS))
            + "\n\n"
            + code
        )
        grid = tuple(replace(t, tile=t.tile * self.r.groups) if t.tile > 1 else t for t in self.kernel.grid)
        return Rendered(
            source,
            self.of.name,
            tuple(args),
            grid,
            {},
            self.of.maps,
            self.place,
            groups=self.r.groups,
            persistent=True,
            draws=self.of.draws,
        )

    def _function(self, role: str, args: Sequence[str], lines: Sequence[str]) -> str:
        head = [f"@gluon.jit\ndef {self.of.name}_{role}({', '.join(args)}):"]
        if role == "folds":
            head += [f"    # {line}" for line in self.kernel.listing.splitlines()]
        return "\n".join(head + ["    " + in_gluon(line) for line in lines])

    def _group(self, n: int, passed: Sequence[str]) -> str:
        """What group n does. Its number is a value to `folds`, which Triton so reads once for all groups; it is a
        constant as soon as calls are inlined."""
        folds, given = f"{self.of.name}_folds", ", ".join(passed)
        return f"@gluon.jit\ndef {folds}_{n}({given}):\n    {folds}({', '.join([*passed, f'gl.to_tensor({n})'])})"

    def _entry(self, args: Sequence[str], passed: Mapping[str, Sequence[str]]) -> str:
        """Memory and barriers, then all roles at once, each with what it uses (`passed`)."""
        r, groups = self.r, self.r.groups
        kind = in_gluon(TRITON_TYPE[r.dtype])
        lines = self.place.lines()
        for names, parts, tile in ((self.of.parts, r.parts, r.loop.tile), (self.of.rows, r.rows, ROWS)):
            for n, (name, p) in enumerate(zip(names, parts, strict=True)):
                d, count = self.of.map_of(p, tile), self.of.buffers(n) if p.streamed else groups
                shape, layout = list(self.of.maps[d][1]), f"{d}.layout"
                if p.piece(tile) < tile:  # several copies: how the matrix unit reads a tile
                    shape = [tile, p.lanes]
                    layout = f"gl.NVMMASharedLayout.get_default_for({shape}, {kind})"
                lines.append(f"{name} = gl.allocate_shared_memory({kind}, {[count, *shape]}, {layout})")
        for name, plane in zip(self.of.planes, r.planes, strict=True):
            d, of = self.of.map_of(plane.part, ROWS), in_gluon(TRITON_TYPE[plane.dtype])
            shape = [self.of.stages * groups, *self.of.maps[d][1]]
            lines.append(f"{name} = gl.allocate_shared_memory({of}, {shape}, {d}.layout)")
        for name, o in zip(self.of.outs, r.stored, strict=True):
            d = self.of.map_out(o)
            of = in_gluon(TRITON_TYPE[self.c.tensors[o.part.tensor].dtype])
            lines.append(f"{name} = gl.allocate_shared_memory({of}, {[groups, *o.box]}, {d}.layout)")
        for b in (*_OF_ROWS, *_OF_RING):
            count = groups if b in _OF_ROWS else 1 if r.single and b.startswith("early") else self.of.stages
            readers = groups if b in ("early_empty", "late_empty") else 1
            lines.append(f"{b} = gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())")
            lines += [f"mbarrier.init({b}.index({n}), count={readers})" for n in range(count)]
        if self.of.draws:
            line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
            lines.append(f"drawn = gl.allocate_shared_memory(gl.int32, [2, 1], {line})")
            for b, readers in (("drawn_full", 1), ("drawn_empty", groups)):
                lines.append(f"{b} = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())")
                lines += [f"mbarrier.init({b}.index({n}), count={readers})" for n in range(2)]
        lines += ["fence_async_shared()", "gl.warp_specialize(["]
        for g in range(groups):
            lines.append(f"    ({self.of.name}_folds_{g}, ({''.join(f'{a}, ' for a in passed['folds'])})),")
        lines += [
            f"    ({self.of.name}_copies, ({''.join(f'{a}, ' for a in passed['copies'])})),",
            f"], {[WARPS] * (groups - 1) + [1]}, {[REGISTERS[groups]] * (groups - 1) + [COPYING]})",
        ]
        return "\n".join([f"@gluon.jit\ndef {self.of.name}({', '.join(args)}):", *("    " + line for line in lines)])
