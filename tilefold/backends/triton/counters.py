"""Counters in device memory from which the thread blocks of a persistent kernel draw their tiles.

A counter is 0 between launches: whoever draws last puts it back. Launches on one stream follow one another, so they
share one. A captured launch has one of its own, for graphs that were captured on one stream may run side by side.
"""

from __future__ import annotations

from functools import cache

import torch

from tilefold.errors import BackendError

#: Counters of a piece of memory, 4 bytes each; pieces are never given back, for graphs may still use them.
PIECE = 1 << 14


class Counters:
    """Of one device."""

    def __init__(self, device: int):
        self.device = device
        self._pieces: list[torch.Tensor] = []
        self._free: list[int] = []
        self._of_stream: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        """Whether there are as many as the launches of a capture may need."""
        return len(self._free) > PIECE // 2

    def reserve(self) -> None:
        """Have counters ready, also for launches that are captured. BackendError: a capture has begun before."""
        if self.ready:
            return
        if torch.cuda.is_current_stream_capturing():
            if self._free:
                return
            raise BackendError("a persistent kernel is first called inside of a capture", hint="call it once before")
        with torch.cuda.device(self.device):
            piece = torch.zeros(PIECE, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()  # on any stream its zeros are there
        self._pieces.append(piece)
        self._free += [piece.data_ptr() + 4 * n for n in range(PIECE)]

    def address(self, stream: int) -> int:
        """A counter for a launch on a stream, the current one."""
        if torch.cuda.is_current_stream_capturing():
            self.reserve()
            return self._free.pop()
        found = self._of_stream.get(stream)
        if found is None:
            self.reserve()
            found = self._of_stream[stream] = self._free.pop()
        return found


@cache
def counters_of(device: int) -> Counters:
    """The counters of a device."""
    return Counters(device)
