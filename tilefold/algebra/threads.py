"""One thread for arithmetic on small tensors: derivations and forecasts are thousands of operations on some thousand
elements each, which torch shares out among all of its threads. Those wait for one another after each operation, and
where other processes have the cores they wait for their turn: 36 checks of Folds took 3.2 s so, of two threads on two
busy cores 34 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread meanwhile."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
