"""C functions that launch kernels, shared by them, and compiled before a call waits for them.

Triton writes and compiles a C function for every list of types of arguments, a quarter of a second each, while the
first call waits. Here kernels share two that take words, few or many: the driver is handed the address of each argument
and reads as many bytes there as the kernel declares. Kernels with tensor maps have their own. Processes that compile
kernels (`serve`) compile these functions too: they leave them in Triton's cache, where the call finds them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tilefold.backends.triton.driver import SCRATCH

try:
    from triton.backends.nvidia.driver import CudaLauncher
except ImportError:  # without Triton nothing here runs
    CudaLauncher = None

#: Arguments of the C functions that kernels share, the two for scratch memory among them; what may be one.
WORDS = (32, 128)
WORD = re.compile(r"\*.+|[iu](1|8|16|32|64)")


@dataclass(frozen=True, slots=True)
class _Words:
    """What Triton makes a shared C function of so many words from, in place of the source of a kernel of so many
    arguments."""

    arguments: int
    words: int

    @property
    def signature(self) -> Mapping[int, str]:
        """Types of the arguments."""
        return dict.fromkeys(range(self.words), "u64")


def as_words(done: Any) -> tuple[int, ...]:
    """Have a kernel that is not loaded yet launched by a shared C function; the zeros that follow its arguments, of
    which the first two say that it has no scratch memory. Empty for kernels that need a C function of their own: they
    take tensor maps, scratch memory or too much."""
    src, about = getattr(done, "src", None), getattr(done, "metadata", None)
    if CudaLauncher is None or src is None or about is None or about.target.backend != "cuda":
        return ()
    if not isinstance(src, _Words):
        types = list(src.signature.values())
        scratch = about.global_scratch_size or about.profile_scratch_size
        words = next((n for n in WORDS if len(types) + len(SCRATCH) <= n), None)
        if scratch or words is None or not all(isinstance(t, str) and WORD.fullmatch(t) for t in types):
            return ()
        src = done.src = _Words(len(types), words)
    return (0,) * (src.words - src.arguments)


def build_shared() -> None:
    """Have Triton's cache hold the functions that kernels share."""
    nothing = dict.fromkeys(("scratch_size", "scratch_align"), 0)
    memory = {f"{of}_{what}": n for of in ("global", "profile") for what, n in nothing.items()}
    about = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, **memory)
    for n in WORDS:
        _build(_Words(0, n), about)


def build_own(done: Any) -> None:
    """The same of the function that a compiled kernel has for itself, if it has one."""
    if not as_words(done):
        _build(done.src, done.metadata)


def _build(src: Any, about: Any) -> None:
    """Nothing where there is no compiler, or no driver: the call that needs the function says so."""
    if CudaLauncher is not None:
        with contextlib.suppress(Exception):
            CudaLauncher(src, about)
