"""Names of generated code: valid in Python, and not those of what it calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence

from tilefold.names import fresh

#: Characters of arithmetic on integer literals.
ARITHMETIC = frozenset("0123456789 ()+*/-%")


def identifier(name: str) -> str:
    """The name with what Python does not allow replaced."""
    out = re.sub(r"\W", "_", name)
    return f"{out}_" if keyword.iskeyword(out) or out[0].isdigit() or out in ("tl", "triton", "libdevice") else out


def python_names(names: Sequence[str]) -> dict[str, str]:
    """Distinct names of arguments for tensors."""
    taken: set[str] = set()
    return {n: fresh(identifier("p_" + n), taken) for n in names}


def python_value(code: str) -> int:
    """The value of an arithmetic expression of literals; SyntaxError for any other."""
    if not set(code) <= ARITHMETIC:
        raise SyntaxError(code)
    return int(eval(code, {"__builtins__": {}}))
