"""Room for expressions that are deep: a sum of a thousand terms is a thousand operations within each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tilefold.errors import ParseError

T = TypeVar("T")
#: Of the thread that works on deep expressions: bytes of its stack, and calls within calls.
_STACK, _CALLS = 1 << 29, 50_000


def deeply(work: Callable[[], T]) -> T:
    """`work()`, in a thread with room for expressions thousands of operations deep; ParseError where they are deeper.

    The functions on expressions call themselves. The limit on such calls is the interpreter's, not the thread's:
    others have it too for as long as this takes.
    """
    if sys.getrecursionlimit() >= _CALLS:
        return work()  # in such a thread already
    before, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    sys.setrecursionlimit(_CALLS)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    except RecursionError:
        raise ParseError("an expression is nested too deeply", hint="give parts of it names: `y[l] = ...`") from None
    finally:
        sys.setrecursionlimit(before)
        threading.stack_size(size)
