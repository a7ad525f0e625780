"""What a row of the GPU suites is: an operator, its arguments, its floor, and the parts it is checked on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilefold.frontend.hostile import Args
from tilefold.suites.case import Maker

Suite = Literal["redfuser", "neptune", "neighbours", "programs", "models"]
#: Which matrix product rate bounds the operator's arithmetic; "" where none does.
Peak = Literal["f16", "f8", ""]
#: Elements (scores, or of an input) that a part has at most: its float64 reference then fits a GPU's memory.
PART_ELEMENTS = 1 << 24
#: Query rows of a part of attention.
PART_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Work:
    """What any implementation must do: flops at the rate `peak`, and bytes of memory, each counted once."""

    flops: float
    nbytes: float
    peak: Peak = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The operator on `args` gives what `select` takes out of each of the row's results."""

    args: Args
    select: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """What the attention libraries must be told. `window`: keys that a query sees; `cap`: of the scores."""

    causal: bool = False
    alibi: bool = False
    cap: float | None = None
    window: int | None = None

    @property
    def plain(self) -> bool:
        """Whether SDPA has it without a bias tensor."""
        return not self.alibi and self.cap is None and self.window is None

    def pairs(self, queries: int, keys: int) -> int:
        """Pairs of a query and a key that it sees; the last query stands at the last key."""
        if not self.causal and self.window is None:
            return queries * keys
        most = keys if self.window is None else min(self.window, keys)
        first = keys - queries + 1  # keys that the first query sees, the next one more and so on
        growing = max(0, min(queries, most - first))
        return growing * first + growing * (growing - 1) // 2 + (queries - growing) * most


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One row. `make` draws the arguments on its generator's device.

    `parts` are what results are compared with float64 on: the whole, or slices of it where that would not
    fit. `peers` are names of `suites.gpu.peers`. `length`: the x of plots. `planned`: compiled as
    torch.compile(backend="tilefold") does, which may leave a product to the library. `work`: None where nobody
    counted it. `module`: makes what is called, in place of `fn` (see `placed`); `exact` prepares a copy of it for
    float64. `steps`: plain calls and the host's part of them are timed as well, of contenders that are wrong too.
    `train`: the module gives a loss; a call includes the backward and gives the gradients as well.
    """

    suite: Suite
    row: str
    family: str
    shape: str
    fn: Callable[..., Any]
    make: Maker
    work: Work | None
    parts: Callable[[Args], tuple[Part, ...]]
    peers: tuple[str, ...] = ("eager", "compile")
    length: int = 0
    planned: bool = False
    attention: Attention | None = None
    module: Callable[[], nn.Module] | None = None
    exact: Callable[[nn.Module], None] | None = None
    steps: bool = False
    train: bool = False

    def placed(self, device: torch.device | str, seed: int = 0) -> GpuCase:
        """With its module, where it is one, made on the device with random parameters."""
        if self.module is None:
            return self
        with torch.device(device), torch.random.fork_rng(_others(device)):
            torch.manual_seed(seed)
            return replace(self, fn=self.module().train(self.train), module=None)

    def args(self, device: torch.device | str = "cpu", seed: int = 0) -> Args:
        """Random arguments on the device."""
        return self.make(torch.Generator(device).manual_seed(seed))


def _others(device: torch.device | str) -> list[torch.device]:
    """Devices whose generators a seed on `device` changes, the CPU's aside."""
    return [torch.device("cuda", torch.cuda.current_device())] if torch.device(device).type == "cuda" else []


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    """A maker of normally distributed numbers on the generator's device."""
    drawn = torch.float32 if dtype.itemsize == 1 else dtype

    def make(gen: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=gen, device=gen.device, dtype=drawn)
        return (x if scale == 1.0 else x * scale).to(dtype)

    return make


def uniform(
    *shape: int, low: float, high: float, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Generator], Tensor]:
    """A maker of uniformly distributed numbers on the generator's device."""
    return lambda gen: torch.rand(shape, generator=gen, device=gen.device, dtype=dtype) * (high - low) + low


def whole(args: Args) -> tuple[Part, ...]:
    """The row itself."""
    return (Part(args, lambda y: y),)


def leading(*which: int) -> Callable[[Args], tuple[Part, ...]]:
    """The first and the last entries along the leading axis of the arguments `which`, and of all results."""

    def parts(args: Args) -> tuple[Part, ...]:
        count = args[which[0]].shape[0]
        entry = max(args[n].numel() // max(count, 1) for n in which)
        n = max(1, min(256, PART_ELEMENTS // max(entry, 1)))
        if 2 * n >= count:
            return whole(args)

        def at(s: slice) -> Part:
            return Part(tuple(a[s] if i in which else a for i, a in enumerate(args)), lambda y: y[s])

        return at(slice(0, n)), at(slice(count - n, count))

    return parts


def attended(spec: Attention) -> Callable[[Args], tuple[Part, ...]]:
    """Blocks of queries of some heads: at the start, at 3/7 (on no tile's edge) and at the end of [B, H, Sq, D].

    Under a causal mask the block's last query sees no key after its own position, so the part ends there and
    the operator, which puts the last query at the last key, computes the same rows.
    """

    def parts(args: Args) -> tuple[Part, ...]:
        q, k, v, *rest = args
        batch, kv_heads, keys = k.shape[:3]
        queries, group = q.shape[2], q.shape[1] // k.shape[1]
        rows = min(queries, PART_QUERIES)
        heads = max(1, min(kv_heads, PART_ELEMENTS // (rows * keys * group)))
        found: dict[tuple[int, int, int], Part] = {}
        for b, h, s in (
            (0, 0, 0),
            (batch // 2, (kv_heads - heads) // 2, (queries - rows) * 3 // 7),
            (batch - 1, kv_heads - heads, queries - rows),
        ):
            stop = keys - queries + s + rows if spec.causal else keys
            own, shared = slice(h * group, (h + heads) * group), slice(h, h + heads)
            part = (
                q[b : b + 1, own, s : s + rows],
                k[b : b + 1, shared, :stop],
                v[b : b + 1, shared, :stop],
                *[slopes[own] for slopes in rest],
            )
            found[b, h, s] = Part(part, _block(b, own, slice(s, s + rows)))
        return tuple(found.values())

    return parts


def _block(b: int, heads: slice, rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda y: y[b : b + 1, heads, rows]
