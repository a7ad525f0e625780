"""Imports what the first compilation would: what torch's capture imports when it first runs, and sympy in a proof.

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
    "sympy.tensor.tensor",  # at sympy's first subtraction, which is in a proof
)

for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
