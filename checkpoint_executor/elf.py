"""PURE. Two questions to a shared library's file, without loading it: is a symbol exported, and what is in a section.

Loading a library to ask it would run its constructors, in a process that should stay as it is. Only the tables that
answer are read: libnccl has 250 MB, and its symbols 20 kB.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

__all__ = ["exported", "section"]

Image = bytes | mmap.mmap

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, little endian: every machine that has CUDA
_NO_BITS, _DYNAMIC_SYMBOLS = 8, 11


class _Section(Struct, frozen=True):
    name: int
    kind: int
    offset: int
    size: int
    link: int


def exported(image: Image, names: Iterable[str]) -> frozenset[str]:
    """Those of the names that the library defines and exports.

    Raises:
        ValueError: not a 64-bit ELF file, or a damaged one.
    """
    wanted = {name.encode(): name for name in names}
    sections = _sections(image)
    found: set[str] = set()
    for table in sections:
        if table.kind != _DYNAMIC_SYMBOLS or table.link >= len(sections):
            continue
        strings = _contents(image, sections[table.link])
        for name, _, _, defined_in, _, _ in _entries(_SYMBOL, _contents(image, table)):
            if defined_in and (end := strings.find(b"\0", name)) >= 0:
                found |= {wanted[text] for text in [strings[name:end]] if text in wanted}
    return frozenset(found)


def section(image: Image, name: str) -> bytes | None:
    """The contents of a section; None if there is none of this name.

    Raises:
        ValueError: not a 64-bit ELF file, or a damaged one.
    """
    sections = _sections(image)
    index = _HEADER.unpack_from(image)[13]
    if index >= len(sections):
        return None
    names = _contents(image, sections[index])
    for candidate in sections:
        if names[candidate.name : names.find(b"\0", candidate.name)] == name.encode():
            return _contents(image, candidate)
    return None


def _sections(image: Image) -> list[_Section]:
    if len(image) < _HEADER.size or image[: len(_IDENTITY)] != _IDENTITY:
        raise ValueError("not a 64-bit little-endian ELF file")
    fields = _HEADER.unpack_from(image)
    offset, size, count = fields[6], fields[11], fields[12]
    if count and (size != _SECTION.size or offset + size * count > len(image)):
        raise ValueError("the ELF file is cut off")
    found = []
    for index in range(count):
        name, kind, _, _, start, length, link, _, _, _ = _SECTION.unpack_from(image, offset + index * size)
        found.append(_Section(name, kind, start, length, link))
    return found


def _contents(image: Image, part: _Section) -> bytes:
    if part.kind == _NO_BITS:
        return b""
    if part.offset + part.size > len(image):
        raise ValueError("the ELF file is cut off")
    return image[part.offset : part.offset + part.size]


def _entries(layout: struct.Struct, table: bytes) -> Iterator[tuple[int, ...]]:
    return layout.iter_unpack(table[: len(table) // layout.size * layout.size])
