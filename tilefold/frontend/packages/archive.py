"""The file of a package: a zip archive, uncompressed, whose members are records, shared libraries and raw tensors.

    manifest.json          what the package requires, and the sha256 of every other member
    package.json           the graph (`form`)
    libraries/DIGEST.so    compiled kernels, or the module that runs tapes
    code/DIGEST            machine code of a GPU's kernel, or a tensor map
    tensors/N              bytes of a tensor, little-endian, packed

Nothing is unpickled and no Python is executed to read it. Considered: `torch.save` and `.pt2` (pickle inside),
safetensors (another dependency for a header in JSON and raw bytes, which records have already), a folder of the cache
(not one file that can be copied).
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch

from tilefold.errors import ParseError, TilefoldError
from tilefold.files import put
from tilefold.frontend.packages.form import (
    CLASSES,
    Manifest,
    Operators,
    Package,
    Requires,
    StoredGraph,
    StoredTensor,
)
from tilefold.runtime import records

MANIFEST, PACKAGE = "manifest.json", "package.json"
#: Before the name of a member in a zip archive; the last two numbers are bytes of the name and of the extra field.
_HEADER = struct.Struct("<4s5H3I2H")
#: Bytes that members start at multiples of, and the kind of extra field that makes them (as Android's zipalign).
ALIGNED, _PADDING = 64, 0xD935
T = TypeVar("T")
AGAIN = "package it again: tilefold.package(model, args, path)"


class Writer:
    """Collects what a package holds."""

    def __init__(self) -> None:
        self.tensors: list[StoredTensor] = []
        self._members: dict[str, bytes] = {}
        self._same: dict[tuple[object, ...], StoredTensor] = {}

    def library(self, path: Path) -> str:
        """Keep a shared library; its digest."""
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self._members[library_member(digest)] = data
        return digest

    def code(self, data: bytes) -> str:
        """Keep bytes for a GPU; their digest."""
        digest = hashlib.sha256(data).hexdigest()
        self._members[code_member(digest)] = data
        return digest

    def tensor(self, x: torch.Tensor) -> StoredTensor:
        """Keep a tensor's elements; those that share memory (tied weights) once."""
        x = x.detach()
        key = (x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), x.device.type)
        if key not in self._same or x.numel() == 0:
            strides = x.stride()
            order = tuple(sorted(range(x.ndim), key=lambda a: (-strides[a], a)))
            packed = x.cpu().permute(order).contiguous()
            member = f"tensors/{len(self._members)}"
            self._members[member] = packed.flatten().view(torch.uint8).numpy().tobytes() if packed.numel() else b""
            self._same[key] = StoredTensor(member, str(x.dtype), tuple(packed.shape), order)
        return self._same[key]

    def constant(self, x: torch.Tensor) -> int:
        """Keep a tensor that belongs to the program; its number."""
        self.tensors.append(self.tensor(x))
        return len(self.tensors) - 1

    def archive(self, requires: Requires, package: Package | Operators | StoredGraph) -> bytes:
        """The whole file."""
        members = {**self._members, PACKAGE: records.dump(package).encode()}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
        manifest = records.dump(Manifest(requires, digests)).encode()
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
            for name, data in {MANIFEST: manifest, **members}.items():
                info = zipfile.ZipInfo(name)  # of no time: equal packages are equal files
                info.extra = _padding(out.tell() + _HEADER.size + len(name.encode()))
                z.writestr(info, data)
        return out.getvalue()


class Reader:
    """An archive, read whole and compared with its digests. TilefoldError: it is no package, or was changed."""

    def __init__(self, path: Path, whole: memoryview | None = None):
        """whole: the bytes, where they are not all of the file `path`."""
        self.path = path
        try:
            whole = read(path) if whole is None else whole
            with zipfile.ZipFile(io.BytesIO(whole)) as z:
                self._members = {i.filename: _member(whole, i) for i in z.infolist()}
            self.manifest = self._record(MANIFEST, Manifest)
        except FileNotFoundError:
            hint = "tilefold.package(model, args, path) makes one"
            raise TilefoldError(f"there is no file {path}", hint=hint) from None
        except (OSError, zipfile.BadZipFile, struct.error, KeyError, ParseError) as err:
            raise TilefoldError(f"{path} is no package of Tilefold: {err}", hint=AGAIN) from None
        self.digest = hashlib.sha256(self._members[MANIFEST]).hexdigest()

    def check(self) -> None:
        """TilefoldError where a member is missing, new or changed."""
        known: Mapping[str, str] = self.manifest.members
        for name in sorted({*known, *self._members} - {MANIFEST}):
            data = self._members.get(name)
            if data is None or hashlib.sha256(data).hexdigest() != known.get(name):
                raise TilefoldError(f"{self.path} is damaged: {name} is not what was packaged", hint=AGAIN)

    def package(self, kind: type[T]) -> T:
        """The graph, or the operators. TilefoldError: it cannot be read."""
        try:
            return self._record(PACKAGE, kind)
        except (KeyError, ParseError) as err:
            raise TilefoldError(f"{self.path} cannot be read: {err}", hint=AGAIN) from None

    def tensor(self, t: StoredTensor) -> torch.Tensor:
        """A tensor in the memory that the file was read into."""
        dtype, data = torch_dtype(t.dtype), self._members[t.member]
        flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        back = [t.order.index(a) for a in range(len(t.order))]
        return flat.view(t.shape).permute(back)

    def code(self, digest: str) -> bytes:
        """Bytes for a GPU. KeyError: the file has none such."""
        return bytes(self._members[code_member(digest)])

    def libraries(self, folder: Path) -> dict[str, Path]:
        """Write the shared libraries into a folder; paths by digest."""
        found = {}
        for name, data in self._members.items():
            if name.startswith("libraries/"):
                digest = name.removeprefix("libraries/").removesuffix(".so")
                found[digest] = folder / f"{digest}.so"
                put(found[digest], bytes(data))
        return found

    def _record(self, name: str, kind: type[T]) -> T:
        found = records.load(bytes(self._members[name]), CLASSES)
        if not isinstance(found, kind):
            raise ParseError(f"{name} holds no {kind.__name__}")
        return found


def read(path: Path) -> memoryview:
    """A file's bytes, which may be written to: tensors lie in them."""
    with path.open("rb") as f:
        whole = memoryview(bytearray(os.fstat(f.fileno()).st_size))
        f.readinto(whole)
    return whole


def _padding(at: int) -> bytes:
    """An extra field behind which, from byte `at`, data are aligned for any element."""
    n = -(at + 4) % ALIGNED
    return struct.pack("<HH", _PADDING, n) + bytes(n)


def _member(whole: memoryview, i: zipfile.ZipInfo) -> memoryview:
    """The bytes of a member. BadZipFile: it is compressed, or not there."""
    if i.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("compressed members")
    *_, name, extra = _HEADER.unpack_from(whole, i.header_offset)
    start = i.header_offset + _HEADER.size + name + extra
    if start + i.file_size > len(whole):
        raise zipfile.BadZipFile(f"{i.filename} is cut off")
    return whole[start : start + i.file_size]


def torch_dtype(name: str) -> torch.dtype:
    """`torch.float32` by its name. ParseError: torch has none."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ParseError(f"this torch has no {name}")
    return found


def library_member(digest: str) -> str:
    """Where a shared library is in the archive."""
    return f"libraries/{digest}.so"


def code_member(digest: str) -> str:
    """Where bytes for a GPU are in the archive."""
    return f"code/{digest}"
