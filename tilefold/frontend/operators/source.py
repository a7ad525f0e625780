"""The user's source line behind an FX node."""

from __future__ import annotations

import linecache
import os
import re
from functools import lru_cache

import torch

from tilefold.errors import SourceLoc

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = os.path.dirname(torch.__file__) + os.sep
#: What runs users' functions: attention, functions that have no code of their own.
FRONTEND = os.path.dirname(os.path.dirname(__file__)) + os.sep


def location(node: torch.fx.Node) -> SourceLoc | None:
    """The innermost frame of the node's stack trace outside of torch and of the front end; None without one."""
    return _innermost(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1 << 12)
def _innermost(trace: str) -> SourceLoc | None:
    """Operators of one line share their trace, and each is asked for it several times."""
    frames = [(m[1], int(m[2])) for m in _FRAME.finditer(trace)]
    users = [f for f in frames if not f[0].startswith((TORCH, FRONTEND))]
    if not users:
        return None
    file, line = users[-1]
    return SourceLoc(file, line, linecache.getline(file, line).strip())
