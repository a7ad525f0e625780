"""A tile kernel as readable C++: the public entry is `render`."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra.expr import Expr
from tilefold.backends.cpp.contract import GemmTypes, gemm_name, write_gemm
from tilefold.backends.cpp.in_results import in_results
from tilefold.backends.cpp.loops import NestWriter
from tilefold.backends.cpp.nests import Step, groups, step_of
from tilefold.backends.cpp.scope import MEMORY, Facts, Scope, Tile, const_int, product
from tilefold.backends.cpp.select import write_select
from tilefold.backends.cpp.values import Values
from tilefold.errors import BackendError
from tilefold.tile.ir import Alloc, For, Gemm, Kernel, Select, Stmt

#: Bytes of tiles that a thread keeps on its stack; larger and dynamic ones go to its arena.
STACK_BYTES = 256 * 1024
ENTRY = "tilefold_kernel"
#: What tells, once, that data chose an index that does not exist.
OUTSIDE = "tilefold_outside"
TAKE_OUTSIDE = (
    f'extern "C" TF_EXPORT int32_t {OUTSIDE}() {{ return __atomic_exchange_n(&tf::outside, 0, __ATOMIC_RELAXED); }}'
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Source of a kernel, and the matrix multiplications whose addresses it takes after its other arguments."""

    source: str
    gemms: tuple[GemmTypes, ...]


def render(kernel: Kernel, wide: bool = False) -> str:
    """C++ source of `kernel`. `wide`: for launches with sizes of `affine.SIZE_LIMIT` and above.

    The entry is `void tilefold_kernel(const int64_t* args, int64_t threads)`; args holds the address
    of every tensor, then the strides (elements) of every tensor, the values of `kernel.syms` and the
    addresses of the multiplications. BackendError: a statement that C++ cannot express.
    """
    return render_linked(kernel, wide).source


def render_linked(kernel: Kernel, wide: bool = False) -> Rendered:
    """As `render`, with what the kernel needs beside its source."""
    r = _Renderer(kernel, wide)
    source = r.source()
    return Rendered(source, tuple(r.facts.gemms))


class _Renderer:
    def __init__(self, kernel: Kernel, wide: bool):
        self.kernel = kernel
        self.facts = Facts(kernel, wide)
        self.stack = 0
        self.arguments_end = 0
        self.arena: list[str] = []  # C++ texts of the bytes of each arena tile
        self.head: list[str] = []

    # ------------------------------------------------------------ the whole file
    def source(self) -> str:
        head, body = self.arguments(), self.grid_body()
        headers = ["math", "parallel"] + (["select"] if any("tf::Slots" in x or "tf::Best" in x for x in body) else [])
        gemms = [
            f"const auto {gemm_name(types)} = (tf::gemm_fn)args[{self.arguments_end + n}];"
            for n, types in enumerate(self.facts.gemms)
        ]
        return "\n".join(
            [
                *self.comment(),
                *(f"#include <tilefold_{h}.h>" for h in headers),
                "",
                f'extern "C" TF_EXPORT void {ENTRY}(const int64_t* args, int64_t threads) {{',
                *(f"  {x}" for x in head + gemms + self.head + body),
                "}",
                *([TAKE_OUTSIDE] if any("tf::within(" in x for x in self.head + body) else []),
                "",
            ]
        )

    def comment(self) -> list[str]:
        k = self.kernel
        lines = [f"{k.name}: {k.note}" if k.note else k.name]
        if k.listing:
            lines += ["", *k.listing.rstrip().splitlines()]
        return [f"// {x}".rstrip() for x in lines]

    def arguments(self) -> list[str]:
        f, lines, at = self.facts, [], 0
        for s in self.kernel.syms:
            f.names[s] = f.name(s)
        for d in self.kernel.sizes:
            f.used |= {d, f"{d}_0", f"{d}_1"}
            f.names[f"size {d}"] = f.name(f"N_{d}")
        for t in self.kernel.tensors:
            var = f.names[t.name] = f.name(t.name)
            const = "const " if t.role == "in" else ""
            lines.append(f"{const}{MEMORY[t.dtype]}* const {var} = ({const}{MEMORY[t.dtype]}*)args[{at}];")
            at += 1
        for t in self.kernel.tensors:
            for axis in range(len(t.shape)):
                if axis != t.unit_axis:
                    stride = f"{f.names[t.name]}_s{axis}"
                    f.used.add(stride)
                    lines.append(f"[[maybe_unused]] const int64_t {stride} = args[{at}];")
                at += 1
        for s in self.kernel.syms:
            lines.append(f"[[maybe_unused]] const int64_t {f.names[s]} = args[{at}];")
            at += 1
        for d, e in self.kernel.sizes.items():
            lines.append(f"[[maybe_unused]] const int64_t {f.names[f'size {d}']} = {self.integer(e)};")
            f.ranges[d] = ("0", f.names[f"size {d}"])
            f.static[d] = const_int(e)
        self.arguments_end = at
        return lines

    def integer(self, e: Expr) -> str:
        """An integer over sizes, symbols and tile bounds."""
        return Values(self.facts, [Scope(frozenset())]).address(e)

    def grid_body(self) -> list[str]:
        f, inner = self.facts, Scope(frozenset())
        counts = []
        for g in self.kernel.grid:
            size = f.ranges[g.dim][1]
            counts.append(size if g.tile == 1 else f"tf::tiles({size}, {g.tile})")
            f.ranges[g.dim] = (f"{g.dim}_0", f"{g.dim}_1")
            f.static[g.dim] = self.bound(g.dim, g.tile)
        if len(counts) > 0:
            inner.lines.append("int64_t item_rest = item;")
        for g, count in reversed(list(zip(self.kernel.grid, counts, strict=True))):
            at = f"item_rest % ({count})" if g is not self.kernel.grid[0] else "item_rest"
            size = f.names[f"size {g.dim}"]
            inner.lines.append(f"const int64_t {g.dim}_0 = {product(f'({at})', str(g.tile))};")
            inner.lines.append(f"[[maybe_unused]] const int64_t {g.dim}_1 = tf::min64({g.dim}_0 + {g.tile}, {size});")
            if g is not self.kernel.grid[0]:
                inner.lines.append(f"item_rest /= {count};")
        self.body(in_results(self.kernel).body, inner)
        memory = []
        if self.arena:
            self.head.append(f"const int64_t mem_bytes = {' + '.join(self.arena)};")
            memory = ["static thread_local tf::Arena arena;", "char* mem = arena.reserve(mem_bytes);"]
        empty = [f"{self.facts.names[f'size {g.dim}']} <= 0" for g in self.kernel.grid]
        guard = [f"if ({' || '.join(empty)}) return;"] if empty else []
        return [
            *guard,
            f"tf::parallel_for({product(*counts) if counts else '1'}, threads, [&](int64_t item) {{",
            *(["  (void)item;"] if not counts else []),
            *(f"  {x}" for x in memory + inner.lines),
            "});",
        ]

    def bound(self, dim: str, tile: int) -> int:
        whole = const_int(self.kernel.sizes[dim])
        return tile if whole is None else min(tile, whole)

    # ------------------------------------------------------------ statements
    def body(self, stmts: tuple[Stmt, ...], scope: Scope) -> None:
        run: list[Step] = []

        def flush() -> None:
            for g in groups(run, self.facts):
                NestWriter(self.facts, Scope(frozenset(), scope.lines), g).write()
            run.clear()

        for s in stmts:
            if isinstance(s, Alloc):
                self.alloc(s, scope)
                continue
            step = step_of(s, self.facts)
            if step is not None:
                run.append(step)
                continue
            flush()
            match s:
                case For():
                    self.loop(s, scope)
                case Gemm():
                    write_gemm(self.facts, scope, s)
                case Select():
                    write_select(self.facts, scope, s)
                case _:
                    raise BackendError(f"kernel {self.kernel.name}: no C++ for {type(s).__name__}")
        flush()

    def alloc(self, s: Alloc, scope: Scope) -> None:
        f, b = self.facts, s.buffer
        var = f.names[b.name] = f.name(b.name)
        extents = [self.integer(e) for e in b.extents]
        pitch = []
        for n in range(len(extents)):
            known = [const_int(e) for e in b.extents[n + 1 :]]
            if all(k is not None for k in known):
                pitch.append(str(_product([k or 0 for k in known])))
            else:
                pitch.append(f"({product(*extents[n + 1 :])})")
        f.tiles[b.name] = Tile(b, tuple(f.ranges[d][0] for d in b.dims), tuple(pitch))
        kind, nbytes = MEMORY[b.dtype], b.dtype.nbytes
        static = [const_int(e) for e in b.extents]
        count = _product([k or 0 for k in static])
        if all(k is not None for k in static) and self.stack + count * nbytes <= STACK_BYTES:
            self.stack += count * nbytes + 128
            scope.lines.append(f"alignas(64) {kind} {var}[{count} + {64 // nbytes}];")
        else:
            size = f"tf::padded({product(*extents, str(nbytes))})"
            scope.lines.append(f"{kind}* const {var} = ({kind}*)(mem + {' + '.join(self.arena) or '0'});")
            self.arena.append(size)

    def loop(self, s: For, scope: Scope) -> None:
        f, d = self.facts, s.dim
        outer = f.ranges[d], f.static[d]
        start = self.integer(s.start) if s.start is not None else "0"
        stop = self.integer(s.stop) if s.stop is not None else f.names[f"size {d}"]
        end = f.name(f"{d}_end")
        scope.lines.append(f"const int64_t {end} = {stop};")
        f.ranges[d] = (f"{d}_0", f"{d}_1")
        f.static[d] = self.bound(d, s.tile)
        inner = Scope(frozenset())
        inner.lines.append(f"[[maybe_unused]] const int64_t {d}_1 = tf::min64({d}_0 + {s.tile}, {end});")
        self.body(s.body, inner)
        scope.lines.append(f"for (int64_t {d}_0 = {start}; {d}_0 < {end}; {d}_0 += {s.tile}) {{")
        scope.lines += [f"  {x}" for x in inner.lines] + ["}"]
        f.ranges[d], f.static[d] = outer


def _product(numbers: list[int]) -> int:
    out = 1
    for n in numbers:
        out *= n
    return out
