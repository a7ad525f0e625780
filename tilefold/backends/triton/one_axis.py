"""Whether a map runs over its dims as they are, or over some of them as one axis (`block.one_axis`): what takes less
time by forecast (`warps`), where lanes or vectors are lost as they are.

A shuffle of pixels by three took 62 us on an H100 over its dims and 21 over one axis, Inductor's kernel, which is over
one axis, 35.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import VECTOR
from tilefold.backends.triton.views import Seen
from tilefold.block.collapse import Merge, Neighbours
from tilefold.block.ir import Block, Loop, walk
from tilefold.block.one_axis import on_one_axis
from tilefold.tile.pieces import power_of_two

#: Lanes over elements from which idle lanes are worth a look.
IDLE = 1.08
#: Share of the time of dims as they are that one axis may take, and of that over more dims that one over fewer may:
#: idle lanes cost less than forecast where memory is waited for (batch norm of images of 56 x 56 in inference, 121 us
#: forecast, 73 measured; over one axis 103 and 81).
WORTH, CLEAR = 0.8, 0.97
#: Times the least time beyond which no more dims are tried.
FAR = 1.3


def best_axes(
    b: Block, near: Neighbours, seconds: Callable[[Block, tuple[Merge, ...]], float], worth: float = WORTH
) -> tuple[Block, tuple[Merge, ...]]:
    """`b` with its dims as they are, or some as one axis: what takes the least time, as `seconds` says. worth: share of
    the time as they are that one axis may take (`worth_of`)."""
    best: tuple[Block, tuple[Merge, ...]] = (b, ())
    least = math.inf
    for found in on_one_axis(b, near):
        if least == math.inf:
            least = worth * seconds(b, ())
        own = seconds(*found)
        if own < least:
            best, least = found, CLEAR * own
        elif own > FAR * least:
            break  # more digits are no better
    return best


def loses(b: Block, config: TritonConfig, sizes: Mapping[str, int], xs: Sequence[Seen]) -> bool:
    """Whether tiles of these dims have many idle lanes, or rows of some tensor begin between two vectors."""
    lanes = 1.0
    for d in dict.fromkeys(n.dim for n in walk(b.body) if isinstance(n, Loop)):
        tile = config.tiles.get(d, 1)
        lanes *= -(-sizes[d] // tile) * power_of_two(tile) / max(1, sizes[d])
    return lanes >= IDLE or any(_between(x) for x in xs)


def worth_of(results: Sequence[Seen]) -> float:
    """Share of the time of dims as they are that one axis may take: all of it where rows of a result begin between two
    vectors, for then they are stored in parts of sectors, which memory feels and forecasts do not."""
    return 1.0 if any(map(_between, results)) else WORTH


def _between(x: Seen) -> bool:
    """Whether some rows of a tensor begin at no multiple of a vector."""
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s > 1]
    return any(s * x.element_size() % VECTOR for s in strides)
