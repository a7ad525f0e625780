"""Programmatic dependent launch (Hopper and later): a kernel's blocks wait on the device while the kernel ahead ends.

A further kernel of a call is launched with the attribute, so that it may start once every block of the kernel ahead has
ended or given leave (`griddepcontrol.launch_dependents`, at its start). Before it touches memory it waits
(`griddepcontrol.wait`) until the kernel ahead is complete and all that this wrote is visible. Why that is safe:

- The wait covers the kernel ahead alone, but every kernel with the attribute waits, whatever it reads. None ends before
  the one ahead of it has, so when a wait returns all kernels of the call before are complete: results may be read, and
  scratch memory that they read may be written.
- The first kernel of a call has no attribute: it starts when all before it on the stream is complete. Memory that
  the allocator took back from an earlier call is free by then.
- The last kernel gives no leave, and what others launch without the attribute starts when it is complete.
- Between two kernels of a call nothing of ours is launched. A launch that another thread puts between them on the same
  stream is waited for as the kernel ahead; it has itself waited for that one, or, with the attribute, must.

In a program with calls of the library in between each run of kernels is such a call (`runtime.program`); where sizes
vary, so that a kernel may have no thread blocks, its kernels are launched plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilefold import config
from tilefold.backends.triton.build import Target, has_dependent_launch


@dataclass(frozen=True, slots=True)
class Place:
    """A kernel among those of a call. follows: another is launched before it; followed: another after it."""

    follows: bool = False
    followed: bool = False

    def lines(self) -> list[str]:
        """The kernel's first statements. The wait comes first: who follows starts when all before this is complete."""
        waits = ["tl.extra.cuda.gdc_wait()"] * self.follows
        return waits + ["tl.extra.cuda.gdc_launch_dependents()"] * self.followed


#: Of a kernel that is launched plainly.
ALONE = Place()


def places(launched: Sequence[bool]) -> list[Place]:
    """Of the kernels of a call in order; `launched`: which have thread blocks. The others are not there at all."""
    return [Place(any(launched[:n]), any(launched[n + 1 :])) if on else ALONE for n, on in enumerate(launched)]


def enabled(device: torch.device) -> bool:
    """Whether kernels on a device are launched so: it has the instructions, and TILEFOLD_PDL is not 0."""
    if device.type != "cuda" or torch.version.hip is not None or not config.load().dependent_launch:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return has_dependent_launch(Target("cuda", 10 * major + minor))
