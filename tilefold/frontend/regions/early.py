"""Kernels compiled by other processes while the rest of a model is planned: an attempt to save time, and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tilefold import config
from tilefold.backends.triton.written import Launch, build_ahead
from tilefold.frontend.operators import added_rows, prefix, prefix_gradient
from tilefold.frontend.regions import rows

log = logging.getLogger("tilefold")

#: What operators with kernels that are written by hand launch, given their arguments.
_LAUNCHES: Mapping[object, Callable[..., Sequence[Launch]]] = {
    prefix.prefixes_op: prefix.launches,
    prefix_gradient.prefix_gradient_op: prefix_gradient.launches,
    added_rows.added_rows_op: added_rows.launches,
    added_rows.rows_of_sums_op: added_rows.launches_on_zeros,
    rows.scaled: rows.launches,
}


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Around what may fail: the call that needs a kernel compiles it, and fails as it would have failed without this.
    With `TILEFOLD_STRICT` errors are raised."""
    try:
        yield
    # Hidden: whatever keeps a kernel from being compiled ahead, for nothing is given up for an attempt to save time.
    except Exception as err:
        if config.load().strict:
            raise
        log.debug("%s: not compiled ahead: %s", what, err)


def build_kernels_of(n: torch.fx.Node) -> None:
    """Have the kernels of such an operator compiled. Nothing for others, on a CPU, and where sizes are only known when
    it is called."""
    if n.target not in _LAUNCHES:
        return
    with attempt(n.name):
        given: list[object] = list(torch.fx.map_arg(n.args, lambda a: a.meta["val"]))
        tensors = [v for v in given if isinstance(v, torch.Tensor)]
        if all(v.is_cuda for v in tensors) and static(tensors):
            build_ahead(_LAUNCHES[n.target](*given))


def static(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all extents and strides are numbers."""
    return all(isinstance(n, int) for v in tensors for n in (*v.shape, *v.stride()))
