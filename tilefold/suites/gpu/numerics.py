"""Neptune's numerical study (its appendix F): absolute errors of attention kernels against float64.

Root mean square, 90th and 99th percentile over the elements of the parts of each operator at one length, for
Tilefold, the SDPA libraries and FlexAttention. The paper's inputs were recorded in a language model; these
are normal random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.frontend.reference import reference
from tilefold.suites.gpu import neptune
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.peers import Peer, contenders
from tilefold.suites.gpu.row import FAILURES, Said, Tell, first_line

Entry = dict[str, Any]
LENGTH = 2048
CONTENDERS = frozenset({"cudnn", "flash", "flex"})
#: torch.quantile takes no more elements than this.
_MOST = 1 << 24


def cases(*, small: bool = False) -> tuple[GpuCase, ...]:
    """The ten attention operators at the study's length (small: at a short one)."""
    if small:
        return tuple(c for c in neptune.SMALL if c.attention is not None)
    return tuple(neptune.attention(v, mode, LENGTH) for v in neptune.VARIANTS for mode in v.modes)


def study(device: str, said: Said, *, small: bool = False, known: Sequence[Entry] = ()) -> Iterator[list[Entry]]:
    """The entries of each operator, one a contender: `row`, `contender`, `rms`, `p90`, `p99`, `why`.

    known: entries of an earlier process, which are not made again.
    """
    for case in cases(small=small):
        left = _left(case.row, _names(case), known)
        if left:
            yield errors_of(case, device, partial(said, case.row), left)


def blank(row: str, contender: str, why: str, *, small: bool = False) -> list[Entry]:
    """The entries of a contender that ended the process ("": of all of the row)."""
    (case,) = (c for c in cases(small=small) if c.row == row)
    return [_failed(row, name, why) for name in ((contender,) if contender else _names(case))]


def _failed(row: str, contender: str, why: str) -> Entry:
    return {"row": row, "contender": contender, "rms": None, "p90": None, "p99": None, "why": why}


def _names(case: GpuCase) -> tuple[str, ...]:
    return tuple(p.name for p in contenders(case, only=CONTENDERS))


def _left(row: str, names: Sequence[str], known: Sequence[Entry]) -> tuple[str, ...]:
    done = {e["contender"] for e in known if e["row"] == row}
    return tuple(n for n in names if n not in done)


def errors_of(case: GpuCase, device: str, tell: Tell, names: Sequence[str] | None = None) -> list[Entry]:
    """The entries of one operator; `names`: only of these contenders."""
    found = []
    with torch.no_grad():
        tell("", "computing in float64")
        args = case.args(device)
        exact = [(part.select, reference(case.fn, part.args).result) for part in case.parts(args)]
        for peer in contenders(case, only=CONTENDERS):
            if names is not None and peer.name not in names:
                continue
            tell(peer.name, "errors")
            try:
                y = _run(peer, case, args)
                errors = torch.cat([(select(y).to(torch.float64) - e).abs().flatten() for select, e in exact])
                found.append({"row": case.row, "contender": peer.name, **_summary(errors), "why": ""})
            except FAILURES as error:
                found.append(_failed(case.row, peer.name, first_line(error)))
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
