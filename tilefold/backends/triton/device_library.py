"""The part of CUDA's library of device functions that kernels call.

Triton reads the whole library, 350 functions, for each kernel that calls one of them: 60 ms of the processor, where
all else of a small kernel takes 100, and two kernels in three of a model's training call one (`tl.rsqrt`, `tl.exp2`).
Here those few are linked once, by Triton, into a module that does nothing else; its text is kept beside the kernels'
(`known`) and is the library of kernels that call no others. The functions are the same, and so is the machine code.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tilefold.backends.triton import known
from tilefold.files import read_trusted

try:
    from triton._C.libtriton import ir, llvm
except ImportError:  # without Triton nothing is compiled
    ir = llvm = None

#: What the library has of Triton's own functions (all but the sine and the cosine, which are long), and their types.
USUAL = {f"{n}f": ("f32", 1) for n in ("ceil", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sqrt")}
USUAL["umulhi"] = ("i32", 2)
#: What may need others: a name of the library, another function of Triton's, 64 bits.
_OTHERS = re.compile(r"\blibdevice\.|\b[tg]l\.(?:sin|cos|math|extra)\b|uint64|float64|fp64")
_IMPORT = "from triton.language.extra import libdevice\n"


def suffices(source: str, types: Iterable[str]) -> bool:
    """Whether a kernel, with arguments of these types, seems to call no others: where it does, the assembler says
    so."""
    return _OTHERS.search(" ".join((source.replace(_IMPORT, ""), *types))) is None


def usual(library: str) -> str | None:
    """The file with the usual functions of the library in this file; None where it cannot be made or kept."""
    try:
        facts = os.stat(library)
        parts = (library, facts.st_size, facts.st_mtime_ns, *USUAL)
        path = known.folder() / f"device_{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.ll"
        if not path.exists():
            known.keep(path.name, _taken(library))
        return str(path) if read_trusted(path).startswith(b";") else None
    except (OSError, AttributeError, TypeError, ValueError, RuntimeError):  # other versions of Triton may have none
        return None


@lru_cache
def _taken(library: str) -> str:
    """The usual functions as text: what is linked into a module that calls each."""
    calls = [_call(f"__nv_{n}", kind, count) for n, (kind, count) in USUAL.items()]
    context = ir.context()
    ir.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        asked = os.path.join(folder, "calls.mlir")
        with open(asked, "w") as file:
            file.write("module {\n" + "".join(calls) + "}\n")
        module: Any = ir.parse_mlir_module(asked, context)
    own = llvm.context()
    made = llvm.to_module(module, own)
    llvm.link_extern_libs(made, [library])
    text = str(made)
    text = text.replace("define internal ", "define ")
    if any(re.search(rf"^define .*@__nv_{n}\(", text, re.MULTILINE) is None for n in USUAL):
        raise RuntimeError("a function is not there")
    return text


def _call(name: str, kind: str, count: int) -> str:
    """A function, declared, and one that calls it."""
    types = ", ".join([kind] * count)
    given = ", ".join(f"%x{n}: {kind}" for n in range(count))
    handed = ", ".join(f"%x{n}" for n in range(count))
    body = f"  %0 = llvm.call @{name}({handed}) : ({types}) -> {kind}\n  llvm.return %0 : {kind}\n"
    return f"llvm.func @{name}({types}) -> {kind}\nllvm.func @calls_{name}({given}) -> {kind} {{\n{body}}}\n"
