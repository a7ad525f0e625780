"""In which order thread blocks start.

Under a causal mask later rows have longer loops. Thread blocks start in order, so within a head the longest go first.
Heads one after the other read their keys together, out of the nearest cache; but the last heads' longest blocks would
start when most others have ended, and run on alone. So the last heads start side by side, the longest of all first.
"""

from __future__ import annotations

from tilefold.backends.triton.tiles import FULL

#: Thread blocks of each multiprocessor that are started by length, of all heads at once.
TURNS = 3


def interleaved(blocks: int) -> int:
    """Heads (or what else is parallel) that start side by side at the end, each with this many thread blocks."""
    return -(-TURNS * FULL // max(1, blocks))
