"""Runs one row of a GPU suite so that Nsight Compute can look at its kernels.

    ncu --profile-from-start off --clock-control none --set full -o H2 python bench/profile_gpu.py H2
    ncu -i H2.ncu-rep --csv --page raw > H2.csv
    python bench/ncu_table.py H2.csv

Compilation, warm-up and the check of the results happen before the profiler is switched on; then come the calls, one
after the other. ncu empties the caches before each kernel (`--cache-control none` leaves them as they are).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from tilefold.errors import TilefoldError
from tilefold.frontend.verify import compare
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.cases import SUITES, select
from tilefold.suites.gpu.peers import OURS, contenders

WARM_UP = 3


def find(row: str, *, small: bool) -> GpuCase:
    """The row of that very name, of either suite. TilefoldError where there is none."""
    for suite in SUITES:
        found = [c for c in select(suite, small=small) if c.row.lower() == row.lower()]
        if found:
            return found[0]
    raise TilefoldError(
        f"no row is called {row}", hint=", ".join(c.row for s in SUITES for c in select(s, small=small))
    )


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", help="H2, gqa-decode-4096 ...")
    parser.add_argument("--contender", default=OURS, help="tilefold, or a peer of the row")
    parser.add_argument("--calls", type=int, default=1, help="that are profiled")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="of the small rows")
    given = parser.parse_args(words)

    case = find(given.row, small=given.small)
    args = case.args(given.device)
    peers = {p.name: p for p in contenders(case)}
    if given.contender not in peers:
        raise TilefoldError(f"{case.row} has no {given.contender}", hint=", ".join(peers))
    with torch.no_grad():
        run = peers[given.contender].build(case, args)
        for _ in range(WARM_UP):
            run(*args)
        if given.contender == OURS:
            part = case.parts(args)[0]
            checked = compare(case.row, case.fn, run, part.args)
            print(checked)
            run(*args)
        on_gpu = given.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for _ in range(given.calls):
            run(*args)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    print(f"{case.row}, {case.shape}: {given.calls} calls of {given.contender}")


if __name__ == "__main__":
    main()
