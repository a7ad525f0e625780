"""Torch as it is outside of a compilation: while AOTAutograd traces, operators make fake tensors, and each goes through
Python first, which takes 9 us in place of 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Operators compute: no mode of torch's, nor its dispatcher in Python, sees them."""
    with _disable_current_modes(), no_python_dispatcher():
        yield
