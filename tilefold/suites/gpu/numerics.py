"""Neptune's numerical study (its appendix F): absolute errors of attention kernels against float64.

Root mean square, 90th and 99th percentile over the elements of the parts of each operator at one length, for
Tilefold, the SDPA libraries and FlexAttention. The paper's inputs were recorded in a language model; these
are normal random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.frontend.reference import reference
from tilefold.suites.gpu import neptune
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.peers import Peer, contenders
from tilefold.suites.gpu.row import FAILURES, Tell, first_line

LENGTH = 2048
CONTENDERS = frozenset({"cudnn", "flash", "flex"})
#: torch.quantile takes no more elements than this.
_MOST = 1 << 24


def cases(*, small: bool = False) -> tuple[GpuCase, ...]:
    """The ten attention operators at the study's length (small: at a short one)."""
    if small:
        return tuple(c for c in neptune.SMALL if c.attention is not None)
    return tuple(neptune.attention(v, mode, LENGTH) for v in neptune.VARIANTS for mode in v.modes)


def study(device: str, tell: Tell, *, small: bool = False) -> tuple[dict[str, Any], ...]:
    """An entry for each operator and contender: `row`, `contender`, `rms`, `p90`, `p99`, `why`."""
    return tuple(entry for case in cases(small=small) for entry in errors_of(case, device, tell))


def errors_of(case: GpuCase, device: str, tell: Tell) -> list[dict[str, Any]]:
    """The entries of one operator."""
    found = []
    with torch.no_grad():
        args = case.args(device)
        exact = [(part.select, reference(case.fn, part.args).result) for part in case.parts(args)]
        for peer in contenders(case, only=CONTENDERS):
            tell(peer.name, f"errors of {case.row}")
            entry: dict[str, Any] = {"row": case.row, "contender": peer.name}
            try:
                y = _run(peer, case, args)
                errors = torch.cat([(select(y).to(torch.float64) - e).abs().flatten() for select, e in exact])
                found.append(entry | _summary(errors) | {"why": ""})
            except FAILURES as error:
                nan = {"rms": None, "p90": None, "p99": None}
                found.append(entry | nan | {"why": first_line(error)})
    torch._dynamo.reset()
    return found


def _run(peer: Peer, case: GpuCase, args: tuple[Any, ...]) -> Tensor:
    y = peer.build(case, args)(*args)
    assert isinstance(y, Tensor)
    return y


def _summary(errors: Tensor) -> dict[str, float]:
    """Of absolute errors [n]."""
    few = errors[:: -(-errors.numel() // _MOST)]
    p90, p99 = torch.quantile(few, torch.tensor([0.9, 0.99], dtype=few.dtype, device=few.device)).tolist()
    return {"rms": float(errors.square().mean().sqrt()), "p90": p90, "p99": p99}
