"""No garbage collection while a graph is planned or compiled, or a kernel is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Python's collector is off meanwhile, and on again afterwards if it was.

    It would go through all objects of the process again and again, because compilation makes so many, nearly all of
    which stay: a tenth of the time. What is garbage is found once, at the end. What stays is then old: Dynamo has the
    young collected after each compilation.
    """
    if not gc.isenabled():  # the user's choice, or a compilation around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
        if not gc.get_freeze_count():  # else that is the user's
            gc.freeze()
            gc.unfreeze()
