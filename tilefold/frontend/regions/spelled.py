"""Numbers in the code that torch.fx writes of a graph: it knows how to spell `inf` and `nan`, but no complex ones."""

from __future__ import annotations

import math

from torch.fx.graph import _register_custom_builtin


def spell_complex() -> None:
    """Let code of graphs hold complex numbers with parts that are not finite: `(nan+nanj)`, as Python prints them."""
    for name, part in (("infj", math.inf), ("nanj", math.nan)):
        _register_custom_builtin(name, f"{name} = complex(0.0, float('{name[:-1]}'))", complex(0.0, part))
