"""Imports what torch's capture imports when it first runs, so that a first call does not wait for it.

Any compilation needs these modules; a version of torch that has no module of such a name does without.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = (
    "torch.fx.experimental.validator",
    "torch.distributed.tensor.experimental",
    "torch._dynamo.repro.after_dynamo",
    "torch.export._trace",
    "torch._inductor.sizevars",
)

for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
