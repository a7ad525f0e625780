"""Schedules: a user applies the laws of `block.laws` to a named program, one step after the other.

    sch = Schedule.of(program)                     # one kernel for each definition
    sch = sch.fuse("s", "score", "m").tile("m", i=128, j=64)
    sch = sch.rolling_update("t", "j").rolling_update("o", "j")

A schedule is a value: every step returns a new one, whose `block` means the same. An illegal step raises
ScheduleError with the dependency that forbids it, where that is defined, and the line of the step. Values are
addressed by their names, loops by their dims. What the names of the steps mean is Neptune's (sections 3 and 4,
Figure 13) and Blockbuster's; `block.laws` states each as an equation.

Sizes of blocks, grid axes, memory and pipelining do not change what a program means: they are hints that
`kernels` hands to the back ends with each block program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeVar

from tilefold.block.fuse import Fused, FusedKernel
from tilefold.block.ir import Block
from tilefold.block.laws.follow import Step, steps_of
from tilefold.block.laws.law import Law
from tilefold.block.laws.loops import check_parallel
from tilefold.block.laws.nests import NamedBlock, Nest, block, nest_kernels, unfused
from tilefold.block.laws.table import LAWS
from tilefold.block.split import SEGMENTS
from tilefold.errors import ScheduleError, SourceLoc
from tilefold.tensor.ir import Program

T = TypeVar("T")
#: Where a value may be placed.
Tier = Literal["register", "shared", "cluster", "global"]
TIERS: tuple[Tier, ...] = ("register", "shared", "cluster", "global")
#: Axes of a launch grid, fastest first.
GRID = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class ScheduledKernel:
    """A kernel and its hints. `tiles`: dim -> indices a block; `grid`: parallel dim -> axis of the launch;
    `placement`: value or tensor -> tier; `stages`: serial loop -> blocks in flight; `warps` a block.
    """

    fused: FusedKernel
    tiles: Mapping[str, int]
    grid: Mapping[str, str]
    placement: Mapping[str, Tier]
    stages: Mapping[str, int]
    warps: int | None

    @property
    def block(self) -> Block:
        """The kernel's block program."""
        return self.fused.block


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints by (a name in the kernel, what they are about); later ones win."""

    tiles: Mapping[tuple[str, str], int] = field(default_factory=dict)
    grid: Mapping[tuple[str, str], str] = field(default_factory=dict)
    placement: Mapping[tuple[str, str], Tier] = field(default_factory=dict)
    stages: Mapping[tuple[str, str], int] = field(default_factory=dict)
    warps: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named program in its present arrangement, and the steps that led there; `before`: without the last one."""

    named: NamedBlock
    hints: Hints = field(default_factory=Hints)
    steps: tuple[str, ...] = ()
    before: Schedule | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(p: Program) -> Schedule:
        """The unfused program: a kernel for each definition."""
        return Schedule(unfused(p))

    @staticmethod
    def following(p: Program, fused: Fused) -> Schedule:
        """What made `fused` of `p` (without dead definitions), as a schedule to read and to change."""
        out = Schedule.of(p)
        for step in steps_of(fused):
            out = out._apply(step)
        return out

    # -- what it stands for ---------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The definitions."""
        return self.named.program

    @property
    def block(self) -> Block:
        """The whole program as one block program."""
        return block(self.named)

    @property
    def kernels(self) -> tuple[ScheduledKernel, ...]:
        """The kernels in execution order, each with its hints."""
        return tuple(self._kernel(n, k) for n in self.named.nests for k in nest_kernels(self.named, n))

    def _kernel(self, n: Nest, k: FusedKernel) -> ScheduledKernel:
        def here(hints: Mapping[tuple[str, str], T]) -> Mapping[str, T]:
            return MappingProxyType({what: v for (anchor, what), v in hints.items() if anchor in n.members})

        h = self.hints
        warps = [count for anchor, count in h.warps.items() if anchor in n.members]
        return ScheduledKernel(
            k, here(h.tiles), here(h.grid), here(h.placement), here(h.stages), warps[-1] if warps else None
        )

    def loops(self, name: str) -> tuple[str, ...]:
        """Loops of the kernel that computes `name`: the parallel dims, outermost first, then the serial ones."""
        n = self.named.nest_of(name)
        serial = [p.loop for p in n.passes if p.loop is not None] + [d for _, d in n.rows]
        return (*n.parallel, *dict.fromkeys(serial))

    def script(self) -> str:
        """The steps, one a line."""
        return "\n".join(self.steps)

    def history(self) -> tuple[Schedule, ...]:
        """The program at the start and after each step."""
        return (*(self.before.history() if self.before is not None else ()), self)

    # -- steps that rewrite the program -----------------------------------------------------

    def fuse(self, *names: str, at: str | None = None) -> Schedule:
        """The kernels of `names` as one over their common parallel dims; at: independent reductions over
        that axis share a pass.
        """
        return self._apply(Step("fuse", names, at))

    def rolling_update(self, name: str, loop: str) -> Schedule:
        """The reduction `name` in the loop of the reductions that it depends on, with the derived repair."""
        return self._apply(Step("rolling_update", (name, loop)))

    def split_k_update(self, name: str, loop: str, segments: int = SEGMENTS) -> Schedule:
        """The pass of `name` in `segments` independent parts along `loop`, and a kernel that repairs and combines."""
        return self._apply(Step("split_k_update", (name, loop, segments)))

    def privatize(self, name: str, loop: str, segments: int = SEGMENTS) -> Schedule:
        """The pass of `name`, which needs no repair, in partial results that a second kernel combines."""
        return self._apply(Step("privatize", (name, loop, segments)))

    def tile(self, name: str, *dims: str, **sizes: int) -> Schedule:
        """The kernel of `name` in blocks along `dims`, or along a dim in blocks of that many indices; an axis of
        its pass becomes a serial loop.
        """
        out = self
        for dim in dims:
            out = out._apply(Step("tile", (name, dim)))
        for dim, size in sizes.items():
            if size < 1:
                raise ScheduleError(f"tile({name!r}, {dim}={size}): a block has at least one index", loc=_line())
            out = out._apply(Step("tile", (name, dim)), f"tile({name!r}, {dim}={size})")
            out = out._hint("tiles", {(name, dim): size})
        return out

    def reorder(self, name: str, *dims: str) -> Schedule:
        """The parallel loops of `name`'s kernel in this order, outermost first."""
        return self._apply(Step("reorder", (name, *dims)))

    def extend(self, name: str, dim: str) -> Schedule:
        """The kernel of `name` parallel over `dim` too; what lacks the dim is computed in every block."""
        return self._apply(Step("extend", (name, dim)))

    def peel(self, name: str, loop: str) -> Schedule:
        """The blocks of `loop` that a mask leaves whole in a loop of their own, without the mask."""
        return self._apply(Step("peel", (name, loop)))

    def recompute(self, name: str, consumer: str) -> Schedule:
        """A copy of `name` (called `name_consumer`) for `consumer` alone."""
        return self._apply(Step("recompute", (name, consumer)))

    def swap_scale_dot(self, name: str) -> Schedule:
        """What does not vary along the axes of the sum `name` taken out of it; `name_dot` is the sum."""
        return self._apply(Step("swap_scale_dot", (name,)))

    # -- hints ------------------------------------------------------------------------------

    def bind(self, name: str, **axes: str) -> Schedule:
        """Parallel dims of `name`'s kernel to axes of the launch grid: `bind("o", i="x", h="y")`."""
        text = f"bind({name!r}, {', '.join(f'{d}={a!r}' for d, a in axes.items())})"
        self._checked(text, lambda: check_parallel(self.named, name, tuple(axes)))
        for axis in axes.values():
            if axis not in GRID:
                raise ScheduleError(f"{text}: a grid has no axis {axis}", loc=_line(), hint="x, y or z")
        return self._hint("grid", {(name, d): a for d, a in axes.items()}, text)

    def place(self, value: str, tier: Tier, *, at: str | None = None) -> Schedule:
        """Keep `value` in a memory tier in the kernel of `at` (default: its own). A tensor needs `at`."""
        text = f"place({value!r}, {tier!r}{f', at={at!r}' if at else ''})"
        if tier not in TIERS:
            raise ScheduleError(f"{text}: no tier is called {tier}", loc=_line(), hint=", ".join(TIERS))
        inputs = {i.name for i in self.program.inputs}
        anchor = at if at is not None else value
        if at is None and value in inputs:
            raise ScheduleError(f"{text}: {value} is an argument", loc=_line(), hint="name the kernel: at=...")
        n = self._checked(text, lambda: self.named.nest_of(anchor))
        read = {r for m in n.members for r in self.named.graph.producers[m]} | set(n.members)
        arguments = {i.name for k in nest_kernels(self.named, n) for i in k.block.inputs}
        if value not in read | arguments:
            raise ScheduleError(f"{text}: the kernel of {anchor} has no {value}", loc=_line())
        if tier == "global" and value in n.members and not self.named.graph.escapes(value, n.members):
            user = self.named.graph.consumers[value][0]
            raise ScheduleError(
                f"{text}: {value} is never written, {user} uses it in its block",
                dependency=f"{value} -> {user}",
                loc=_line(),
            )
        return self._hint("placement", {(anchor, value): tier}, text)

    def pipeline(self, name: str, loop: str, stages: int) -> Schedule:
        """Load the blocks of a serial loop of `name`'s kernel `stages` - 1 blocks ahead."""
        text = f"pipeline({name!r}, {loop!r}, {stages})"
        n = self._checked(text, lambda: self.named.nest_of(name))
        if loop not in self.loops(name) or loop in n.parallel:
            raise ScheduleError(
                f"{text}: the kernel of {name} has no serial loop over {loop}",
                loc=_line(),
                hint=f"tile({name!r}, {loop}=...)",
            )
        if stages < 1:
            raise ScheduleError(f"{text}: at least one stage", loc=_line())
        return self._hint("stages", {(name, loop): stages}, text)

    def warps(self, name: str, count: int) -> Schedule:
        """Warps that run a block of `name`'s kernel."""
        text = f"warps({name!r}, {count})"
        self._checked(text, lambda: self.named.nest_of(name))
        if count < 1 or count & (count - 1):
            raise ScheduleError(f"{text}: a power of two is needed", loc=_line())
        hints = replace(self.hints, warps={**self.hints.warps, name: count})
        return replace(self, hints=hints, steps=(*self.steps, text), before=self)

    def portable(self) -> Schedule:
        """The same without `bind`, `place`, `pipeline` and `warps`, which not every back end can do."""
        return replace(self, hints=Hints(tiles=self.hints.tiles))

    # -- machinery ----------------------------------------------------------------------------

    def _apply(self, step: Step, text: str | None = None) -> Schedule:
        law = _LAWS[step.law]
        extra = {"at": step.at} if step.at is not None else {}
        text = text or str(step)
        return replace(
            self,
            named=self._checked(text, lambda: law.apply(self.named, *step.args, **extra)),
            steps=(*self.steps, text),
            before=self,
        )

    def _hint(self, kind: str, values: Mapping[tuple[str, str], object], text: str | None = None) -> Schedule:
        """With more hints; without `text` they belong to the step before."""
        hints = replace(self.hints, **{kind: {**getattr(self.hints, kind), **values}})
        if text is None:
            return replace(self, hints=hints)
        return replace(self, hints=hints, steps=(*self.steps, text), before=self)

    @staticmethod
    def _checked(text: str, run: Callable[[], T]) -> T:
        """What `run` gives; a refusal is raised again with the step and the user's line."""
        try:
            return run()
        except ScheduleError as why:
            where = f" (defined at {why.loc})" if why.loc is not None else ""
            raise ScheduleError(
                f"{text}: {why.message}{where}", dependency=why.dependency, loc=_line(), hint=why.hint
            ) from why


def _line() -> SourceLoc | None:
    """The line of the user's schedule."""
    return SourceLoc.of_caller(__file__)


_LAWS: Mapping[str, Law] = MappingProxyType({law.name: law for law in LAWS})
