"""Takes the code of other devices out of a CUDA shared object.

Section `.nv_fatbin` is a sequence of fat binaries: a header (magic, version, its own size, the size
of what follows) and entries, each with a kind, an architecture and a payload. Dropping an entry
moves the others up and shortens the size in the header. Nothing else moves in the file, and what
becomes free is filled with zeros, which compress to nothing.

A fat binary that would be empty gets the smallest code for another architecture: the driver then
finds no code for this device, as in many fat binaries of vLLM's own files.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_MAGIC = 0xBA55ED50
_CODE = 2  # kind of an entry with machine code; 1 is PTX
_SECTION = b".nv_fatbin"


class BadFile(ValueError):
    """Not a 64-bit ELF file with fat binaries."""


@dataclass(frozen=True)
class Entry:
    """Bytes `begin` to `begin + size` of the file."""

    begin: int
    size: int
    code: bool
    architecture: int


@dataclass(frozen=True)
class FatBinary:
    """Entries lie from `begin` to `end`; `header` is the header's place."""

    header: int
    begin: int
    end: int
    entries: tuple[Entry, ...] = field(repr=False)


@dataclass(frozen=True)
class Thinned:
    """Bytes of GPU code that were kept and dropped, and fat binaries that kept none."""

    kept: int
    dropped: int
    emptied: int


def fat_binaries(data: bytes | bytearray) -> Iterator[FatBinary]:
    """The fat binaries of a file, in order. BadFile: it is no such file, or cut off."""
    place, size = _section(data, _SECTION)
    end = place + size
    while place + 16 <= end:
        magic, _, head, length = struct.unpack_from("<IHHQ", data, place)
        if magic != _MAGIC:
            place += 8  # padding between them
            continue
        begin = place + head
        stop = begin + length
        if stop > end:
            raise BadFile(f"the fat binary at byte {place} reaches beyond its section")
        yield FatBinary(place, begin, stop, tuple(_entries(data, begin, stop)))
        place = stop


def thin(
    data: bytearray, architecture: int, wanted: str | None = None, spare: bytes | None = None
) -> Thinned:
    """Keep, in place, the machine code for one architecture (90 for sm_90); with `wanted`, only
    entries in which this regular expression finds a kernel's mangled name. `spare`: another such
    file to take the smallest foreign code from, if this one is too small to have any."""
    pattern = re.compile(wanted.encode()) if wanted else None
    binaries = list(fat_binaries(data))
    filler = _smallest_foreign(data, binaries, architecture)
    if spare is not None:
        filler = _smallest_foreign(spare, list(fat_binaries(spare)), architecture)
    kept = dropped = emptied = 0
    for binary in binaries:
        free = binary.begin  # where the next entry that is kept goes
        for entry in binary.entries:
            stop = entry.begin + entry.size
            chosen = entry.code and entry.architecture == architecture
            if chosen and pattern is not None:
                chosen = pattern.search(data, entry.begin, stop) is not None
            if not chosen:
                dropped += entry.size
                continue
            data[free : free + entry.size] = bytes(data[entry.begin : stop])
            free += entry.size
            kept += entry.size
        if free == binary.begin:
            emptied += 1
            if len(filler) <= binary.end - binary.begin:
                data[free : free + len(filler)] = filler
                free += len(filler)
        data[free : binary.end] = bytes(binary.end - free)
        struct.pack_into("<Q", data, binary.header + 8, free - binary.begin)
    return Thinned(kept, dropped, emptied)


def _entries(data: bytes | bytearray, place: int, end: int) -> Iterator[Entry]:
    while place < end:
        kind, _, head, payload = struct.unpack_from("<HHIQ", data, place)
        architecture = struct.unpack_from("<I", data, place + 28)[0]
        size = head + payload
        if head < 32 or place + size > end:
            raise BadFile(f"the entry at byte {place} reaches beyond its fat binary")
        yield Entry(place, size, kind == _CODE, architecture)
        place += size


def _smallest_foreign(
    data: bytes | bytearray, binaries: list[FatBinary], architecture: int
) -> bytes:
    """The smallest code for another architecture; empty if there is none."""
    foreign = [
        entry
        for binary in binaries
        for entry in binary.entries
        if entry.code and entry.architecture != architecture
    ]
    if not foreign:
        return b""
    entry = min(foreign, key=lambda entry: entry.size)
    return bytes(data[entry.begin : entry.begin + entry.size])


def _section(data: bytes | bytearray, wanted: bytes) -> tuple[int, int]:
    """Place and size of an ELF section in the file."""
    if data[:5] != b"\x7fELF\x02":
        raise BadFile("not a 64-bit ELF file")
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    base = heads[names][4]
    for head in heads:
        name = base + head[0]
        if bytes(data[name : data.find(b"\0", name)]) == wanted:
            return head[4], head[5]
    raise BadFile(f"no section {wanted.decode()}")
