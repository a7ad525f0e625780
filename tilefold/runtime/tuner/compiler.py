"""A process that compiles candidates for the current GPU: a line of JSON each, answered by why it cannot serve."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch

from tilefold.backends.triton.build import Target, has_groups
from tilefold.backends.triton.compile import compiled
from tilefold.backends.triton.config import SHARED, TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.block.ir import Block
from tilefold.block.text import parse
from tilefold.errors import BackendError
from tilefold.runtime.tuner.table import from_json
from tilefold.tile.layout import usual_units

#: Seconds for one candidate.
LIMIT = 25


class _Late(Exception):
    pass


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise _Late


def _always(c: TritonConfig, block: Block, sizes: Mapping[str, int]) -> TritonConfig:
    return c


def main() -> None:
    """Compile what comes on standard input, a candidate a line, until it ends."""
    signal.signal(signal.SIGALRM, _alarm)
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    target = Target("cuda", 10 * major + minor)
    for line in sys.stdin:
        print(json.dumps(compile_one(json.loads(line), target)), flush=True)


def compile_one(job: Mapping[str, Any], target: Target) -> str:
    """Compile `candidate` for `block` at `sizes`, into Triton's cache; why it cannot serve, empty if it can."""
    block, c = parse(job["block"]), from_json(job["candidate"])
    signal.alarm(LIMIT)
    try:
        kernel = TritonKernel(block, partial(_always, c))
        hopper = has_groups(target)
        v = kernel.variant(usual_units(block), job["sizes"], hopper=hopper, tf32=False, interpreted=False)
        arguments = [True] * len(v.rendered.arguments)
        done = compiled(v.kernel, v.rendered, v.config, arguments, wide=False, target=target)
        return f"needs {done.metadata.shared} bytes of shared memory" if done.metadata.shared > SHARED else ""
    except BackendError as err:
        return err.message
    except _Late:
        return "compiling takes too long"
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
