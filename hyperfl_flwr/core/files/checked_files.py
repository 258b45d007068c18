"""Read zip archives and numpy arrays from untrusted files, which may be damaged or malicious.

The sizes that a file declares (of a member, of an array) are compared with the bytes it holds before any memory is
allocated. Every exception of a parser becomes a `MalformedFileError`. Nothing is unpickled.
"""

import contextlib
import functools
import io
import itertools
import math
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_ENCRYPTED = 0x1
"""Bit of a zip member's flags that marks it as encrypted."""

_EXPANSION = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""Largest expansion factor of each accepted compression method; deflate encodes at most 258 bytes in two bits.

Numpy writes no other methods. A declared size above the factor is a forgery (a "zip bomb").
"""

_KINDS = "biufcSU"
"""Numpy type kinds that are accepted: numbers, booleans and strings."""

_LONGEST_REASON = 300
"""Maximum length of a parser's message in characters; it may quote its input, which is untrusted."""

_MEGABYTE = 1e6

SMALLEST_MAPPED = 1 << 24
"""Fewest bytes of an array that is mapped from its file; smaller ones are read, and do not depend on the file then."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of a zip member in front of its data: signature, and lengths of its name and of its extra field."""

_CHUNK = 1 << 24
"""Number of bytes of which a checksum is computed at a time."""


class MalformedFileError(ValueError):
    """A file is damaged, declares more than it holds, or would not fit into memory."""


def memory_bytes() -> int:
    """Return the size of this machine's physical memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refuse_excess(num_bytes: int) -> None:
    """Check that `num_bytes` of data fit into this machine's memory.

    Raises:
        MalformedFileError: If they do not.
    """
    if num_bytes > (available := memory_bytes()):
        raise MalformedFileError(
            f"it needs {num_bytes / _MEGABYTE:,.1f} MB, but this machine has {available / _MEGABYTE:,.1f} MB of memory"
        )


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an untrusted zip archive for `read_member` and `read_array`.

    Raises:
        OSError: If the file cannot be opened.
        MalformedFileError: If it is not a zip archive, or has two members with the same name or in the same bytes.
    """
    with path.open("rb") as file, contextlib.ExitStack() as stack:
        with _malformed("the archive"):
            archive = stack.enter_context(zipfile.ZipFile(file))
            # zipfile reads the last of several members with one name, and `check_members` would count only that one.
            if repeated := [name for name, count in Counter(archive.namelist()).items() if count > 1]:
                raise MalformedFileError(f"{repeated[0]!r} occurs more than once")
            spans = sorted((info.header_offset, info.compress_size) for info in archive.infolist())
            # Older zipfile modules do not check it. `_size` refuses sizes above that of the archive.
            end = archive.start_dir
            if any(after - start < size <= end for (start, size), (after, _) in itertools.pairwise(spans)):
                raise MalformedFileError("members overlap")
        yield archive


def check_members(archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Check, before reading, that members of an archive together fit into this machine's memory.

    Raises:
        MalformedFileError: If they do not fit, or if one of them is missing or cannot be read.
    """
    refuse_excess(sum(_size(archive, name) for name in names))


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member of an archive.

    Raises:
        MalformedFileError: If it is missing, damaged or encrypted, uses a compression method other than deflate, or
            declares a size that its stored bytes cannot have.
    """
    check_members(archive, [name])
    with _malformed(name):
        return archive.read(name)


def read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array in numpy's `.npy` format from an archive.

    Raises:
        MalformedFileError: As for `read_member`, or if it is not an array of numbers or strings.
    """
    refuse_excess(array_bytes(archive, name))
    with _malformed(name), archive.open(name) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array


def map_arrays(archive: zipfile.ZipFile, names: Iterable[str]) -> list[NDArray[Any]]:
    """Return arrays of an archive; large ones that are stored without compression are mapped from the file.

    All processes that map a file share one copy of it in memory, and the arrays need not fit into memory. The file must
    not be written to while it is mapped; replacing it by another file is harmless.

    Args:
        archive: An archive of `open_archive`; mapped arrays stay valid after it is closed.
        names: Names of the members.

    Returns:
        The arrays in the order of the names. Mapped ones are read-only, and may not be aligned to their elements.

    Raises:
        MalformedFileError: As for `read_array`; also if the arrays that are not mapped do not fit into memory together.
    """
    chosen = list(names)
    mapped = {name for name in chosen if _size(archive, name) >= SMALLEST_MAPPED and _is_stored(archive, name)}
    check_members(archive, [name for name in chosen if name not in mapped])
    return [_map_array(archive, name) if name in mapped else read_array(archive, name) for name in chosen]


def array_bytes(archive: zipfile.ZipFile, name: str) -> int:
    """Return the size in bytes that an archived array takes in memory; reads only its header.

    Raises:
        MalformedFileError: As for `read_array`.
    """
    size = _size(archive, name)
    with _malformed(name), archive.open(name) as member:
        shape, _, dtype = read_header(member, size)
    return math.prod(shape) * dtype.itemsize


def read_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read and check the header of a `.npy` stream; leaves the stream at the first element.

    Args:
        stream: The array, including its header.
        size: Size of the array in bytes, including its header.

    Returns:
        The shape, True for Fortran order, and the type of the elements.

    Raises:
        MalformedFileError: If the header cannot be read, describes elements other than numbers and strings, or does
            not match the size of the array.
    """
    with _malformed("its header"):
        version = np.lib.format.read_magic(stream)
        length = stream.read(2 if version == (1, 0) else 4)
        shape, is_fortran, dtype = _parsed_header(version, length + stream.read(int.from_bytes(length, "little")))
        held = size - stream.tell()
    if dtype.kind not in _KINDS:
        raise MalformedFileError(f"it must hold numbers or strings (no pickled objects, no records), got {dtype}")
    # A negative dimension could make the product match although the shape is impossible.
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held:
        raise MalformedFileError(f"its shape {shape} of {dtype} does not fit the {held} bytes that it holds")
    return shape, is_fortran, dtype


@functools.lru_cache(maxsize=1024)
def _parsed_header(version: tuple[int, int], header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse a header, from its length on. A run reads the same few many times, and parsing one takes 35 microseconds.

    Numpy refuses a header of more than 10,000 bytes, and what raises is not kept.
    """
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    parsed: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(io.BytesIO(header))
    return parsed


def _is_stored(archive: zipfile.ZipFile, name: str) -> bool:
    return archive.getinfo(name).compress_type == zipfile.ZIP_STORED


def _map_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Map an array that is stored without compression; where the file cannot be mapped, it is read."""
    size = _size(archive, name)
    with _malformed(name):
        with archive.open(name) as member:  # compares the names in the member's two headers
            shape, is_fortran, dtype = read_header(member, size)
            header = member.tell()
        start = _data_start(archive, name)
        try:
            stored = np.memmap(archive.fp, np.uint8, "r", start, (size,))  # type: ignore[call-overload]
        except OSError:  # some file systems have no maps
            return read_array(archive, name)
        checksum = 0
        for position in range(0, size, _CHUNK):
            checksum = zlib.crc32(stored[position : position + _CHUNK], checksum)
        if checksum != archive.getinfo(name).CRC:
            raise MalformedFileError("Bad CRC-32")
        # A plain array: indexing an np.memmap is slower.
        return np.ndarray(shape, dtype, np.asarray(stored[header:]), order="F" if is_fortran else "C")


def _data_start(archive: zipfile.ZipFile, name: str) -> int:
    """Return the position in the file of a member's stored bytes, which must lie before the central directory."""
    info, file = archive.getinfo(name), archive.fp
    if file is None:
        raise ValueError("the archive must be open")
    file.seek(info.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if signature != zipfile.stringFileHeader or start + info.file_size > archive.start_dir:  # type: ignore[attr-defined]
        raise MalformedFileError("its place in the archive is wrong")
    return int(start)


def _size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the declared size of a member in bytes, after checking that its stored bytes can expand to that size.

    zipfile never reads beyond the declared size, so a checked size also bounds the memory that reading takes.
    """
    with _malformed(name):
        info = archive.getinfo(name)
        if info.flag_bits & _ENCRYPTED:
            raise MalformedFileError("it is encrypted")
        if info.compress_type not in _EXPANSION:
            raise MalformedFileError(f"its compression method is {info.compress_type}; only deflate is supported")
        # The compressed size is declared by the file, too; all members are stored before the central directory.
        held = min(info.compress_size, archive.start_dir)
        if info.compress_size > held or info.file_size > held * _EXPANSION[info.compress_type]:
            raise MalformedFileError(f"it declares {info.file_size} bytes, but stores only {held}")
    return info.file_size


@contextlib.contextmanager
def _malformed(name: str) -> Iterator[None]:
    """Convert every exception of zipfile, zlib and numpy to `MalformedFileError`.

    These parsers do not document which exceptions they raise for damaged input, so all are caught.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise MalformedFileError(f"reading {name} failed: {reason}") from error
