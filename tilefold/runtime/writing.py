"""Calls that write results over their arguments cannot be repeated: their errors say so.

Automatic use runs what fails once more, elsewhere (`frontend.regions.guard`). After a kernel has written over an
argument that would compute with values that are new already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "_tilefold_has_written"


@contextmanager
def writing(writes: bool = True) -> Iterator[None]:
    """Where it `writes`, an error of what runs meanwhile comes when arguments may have been written over."""
    try:
        yield
    except Exception as err:
        if writes:
            setattr(err, _MARK, True)
        raise


def has_written(err: Exception) -> bool:
    """Whether arguments may have been written over when this was raised."""
    return getattr(err, _MARK, False)
