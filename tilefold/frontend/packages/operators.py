"""`tilefold.keep_operators` and `tilefold.load_pt2`: graphs of others with Tilefold's operators, in other processes.

A `.pt2` of `torch.export.save` or AOTInductor names the operators of `tilefold.custom_op` that it calls, and fails in a
process that does not have them. `keep_operators` adds them to the file (a member of its own: programs and kernels, as
`tilefold.package` writes them); `load_pt2` registers them and has torch load the rest.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tilefold.errors import ParseError, TilefoldError
from tilefold.frontend.packages.archive import Reader, Writer, torch_dtype
from tilefold.frontend.packages.form import Argument, Operators, Relation, StoredOperator
from tilefold.frontend.packages.load import check_here, folder_of_libraries, region_of
from tilefold.frontend.packages.package import region, requires
from tilefold.frontend.registered.fused import fused, fused_gradient
from tilefold.frontend.registered.operator import NAMESPACE, Checked, Guard, Made, made, register

#: Where a `.pt2` holds the operators, below the folder named after the archive (`extra` is for text).
MEMBER = "data/tilefold/operators"
#: The operators of `tilefold.fuse`, which this module registers by loading them.
FUSED = {x._name for x in (fused, fused_gradient)}
AGAIN = "tilefold.keep_operators(path) in the process that made the file"
_NAMES = re.compile(rb"\b" + NAMESPACE.encode() + rb"(?:::|\.)([A-Za-z_][A-Za-z0-9_]*)")


def keep_operators(path: str | Path) -> tuple[str, ...]:
    """Add to a `.pt2` the operators of `tilefold.custom_op` that it calls; their names.

    TilefoldError: no such file, or one that calls none of this process. UnsupportedError: operators for GPUs.
    """
    place = Path(path)
    with _opened(place) as z:
        members, named = z.namelist(), _named(z)
    found = {name: m for name, m in made().items() if name in named}
    if not found:
        hint = "functions of tilefold.fuse need nothing kept: tilefold.load_pt2" if named & FUSED else None
        raise TilefoldError(f"{place} calls no operator that tilefold.custom_op has made in this process", hint=hint)
    member = str(PurePosixPath(PurePosixPath(members[0]).parts[0], MEMBER))
    if member in members:
        raise TilefoldError(f"{place} has its operators already", hint="save it anew")
    writer = Writer()
    kept = tuple(_stored(name, m, writer) for name, m in sorted(found.items()))
    data = writer.archive(requires(), Operators(kept, tuple(writer.tensors)))
    with zipfile.ZipFile(place, "a", zipfile.ZIP_STORED) as z:
        z.writestr(zipfile.ZipInfo(member), data)
    return tuple(o.name for o in kept)


def load_pt2(path: str | Path) -> Any:
    """A `.pt2` with the operators that it calls, as a callable: `torch.export.load(path).module()`, or the model of
    AOTInductor. Of operators of `tilefold.custom_op` nothing is compiled; functions of `tilefold.fuse` are found by
    their module, and compile on their first call; torch's own loaders find them too.

    TilefoldError: no operators were kept in it, or it is for another machine, torch or Tilefold.
    """
    place = Path(path)
    with _opened(place) as z:
        members = z.namelist()
        member = next((m for m in members if m.endswith(f"/{MEMBER}")), None)
        if member is None and not _named(z) & FUSED:
            raise TilefoldError(f"{place} holds no operators of Tilefold", hint=AGAIN)
        data = None if member is None else memoryview(bytearray(z.read(member)))
    if data is not None:
        _register(Reader(place, data))
    if any("/data/aotinductor/" in m for m in members):
        from torch._inductor import aoti_load_package  # noqa: PLC0415 (slow to load)

        return aoti_load_package(str(place))
    return torch.export.load(place).module()


def _named(z: zipfile.ZipFile) -> set[str]:
    """Names of Tilefold's operators that a `.pt2` calls."""
    return {n.decode() for m in z.namelist() for n in _NAMES.findall(z.read(m))}


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as err:
        hint = "torch.export.save or torch._inductor.aoti_compile_and_package makes one"
        raise TilefoldError(f"{path} is no .pt2 file: {err}", hint=hint) from None


def _stored(name: str, m: Made, writer: Writer) -> StoredOperator:
    run = m.run
    arguments = tuple(Argument(f"a{n}", str(dtype), shape) for n, (shape, dtype, _) in enumerate(run.wanted))
    guards = tuple(Relation(g.text, g.relation, g.left, g.right) for g in run.guards)
    return StoredOperator(name, m.digest, arguments, guards, region(run.run, writer))


def _register(reader: Reader) -> None:
    check_here(reader.manifest.requires, str(reader.path))
    reader.check()
    found = reader.package(Operators)
    try:
        tensors, files = [reader.tensor(t) for t in found.tensors], reader.libraries(folder_of_libraries())
        for o in found.operators:
            wanted = [(a.shape, torch_dtype(str(a.dtype)), reader.manifest.requires.device) for a in o.arguments]
            guards = [Guard(g.text, g.relation, g.left, g.right) for g in o.guards]
            register(Checked(o.name, region_of(o.region, tensors, files), wanted, guards), o.digest)
    except (ParseError, KeyError, ValueError) as err:
        raise TilefoldError(f"the operators in {reader.path} cannot be read: {err}", hint=AGAIN) from err
