"""LLVM's code for vectors of integers, without promises about lanes that nobody reads.

LLVM packs two operations into one of two lanes where another operation is packed the same way, and reads one lane of
each: `tid & 31` and `pid << 2` become an `and` and a `shl nuw` of (tid, pid) by (31, 2). `tid << 31` is computed beside
them and keeps the promise of `pid << 2` that no bit is lost (`nuw`), which makes it poison: a value that nobody may
read. Nobody does, but the code for NVIDIA's processors (LLVM of Triton 3.6) puts both lanes into one register of 64
bits, and the lane with a promise by an instruction that keeps its lost bits (`mul.wide.u32`): they land in the lane
beside it. A convolution's two channels, offsets of a grid, were read at row `j | tid / 2`, rows of other images and
beyond the last among them: wrong on an H200, and not the same in every call.

A promise less is the same program, so the vectors of integers lose theirs before code is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from triton import knobs
except ImportError:  # Triton is optional
    knobs = None

#: Operations whose result is widened in place of what it was made of, where they lose nothing.
_PROMISES = re.compile(r"\b(shl|add|sub|mul|trunc) (?:nuw nsw|nuw|nsw) (<\d+ x i\d+>)")


def promises(llir: str) -> bool:
    """Whether operations on vectors of integers promise something in a module's text."""
    return _PROMISES.search(llir) is not None


def without_promises(llir: str) -> str:
    """The text of the module without them."""
    return _PROMISES.sub(r"\1 \2", llir)


@contextmanager
def kept_apart() -> Iterator[bool]:
    """Have Triton make code of modules without such promises. It asks a hook of all threads for its stages: kernels of
    others that are compiled meanwhile are made so too. False: this version of Triton has no such hook."""
    if knobs is None or not hasattr(knobs.runtime, "add_stages_inspection_hook"):
        yield False
        return
    theirs = knobs.runtime.add_stages_inspection_hook

    def ours(backend: Any, stages: dict[str, Any], *how: Any) -> Any:
        found = None if theirs is None else theirs(backend, stages, *how)
        if "ptx" in stages and "llir" in stages:
            made = stages["llir"]
            stages["llir"] = lambda src, metadata: without_promises(made(src, metadata))
        return found

    knobs.runtime.add_stages_inspection_hook = ours
    try:
        yield True
    finally:
        knobs.runtime.add_stages_inspection_hook = theirs
