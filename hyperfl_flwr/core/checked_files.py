"""Reading zip archives and numpy arrays from files that may be damaged or malicious.

What a file declares (the size of a member, the shape of an array) is compared with what it holds before anything is
allocated, and whatever a parser raises becomes one exception. Nothing is unpickled.
"""

import contextlib
import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_ENCRYPTED = 0x1
"""The bit of a member's flags."""

_EXPANSION = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""How many bytes at most come out of one: of deflate, 258 bytes of two bits. Numpy writes in no other way."""

_KINDS = "biufcSU"
"""Numpy's kinds of numbers and strings."""

_LONGEST_REASON = 300
"""Characters of a parser's message, which may repeat what it was given."""

_MEGABYTE = 1e6


class MalformedFileError(ValueError):
    """A file is damaged, declares more than it holds, or would not fit into memory."""


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refuse_excess(num_bytes: int) -> None:
    """Check that data fit into this machine's memory.

    Raises:
        MalformedFileError: If they do not.
    """
    if num_bytes > (available := memory_bytes()):
        raise MalformedFileError(
            f"it takes {num_bytes / _MEGABYTE:,.1f} MB, this machine has {available / _MEGABYTE:,.1f} MB of memory"
        )


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, to be read by the functions below.

    Raises:
        OSError: If the file cannot be opened.
        MalformedFileError: If it is no archive, or has two members of one name.
    """
    with path.open("rb") as file, contextlib.ExitStack() as stack:
        with _malformed("the archive"):
            archive = stack.enter_context(zipfile.ZipFile(file))
            if repeated := [name for name, count in Counter(archive.namelist()).items() if count > 1]:
                raise MalformedFileError(f"{repeated[0]!r} occurs more than once")
        yield archive


def check_members(archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Check that members of an archive fit into this machine's memory together, before they are read.

    Raises:
        MalformedFileError: If they do not, or if one of them cannot be read.
    """
    refuse_excess(sum(_size(archive, name) for name in names))


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member of an archive.

    Raises:
        MalformedFileError: If it is missing, damaged, encrypted, compressed in another way than deflate, or declares a
            size that what is stored of it cannot have.
    """
    check_members(archive, [name])
    with _malformed(name):
        return archive.read(name)


def read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array that numpy has written to an archive.

    Raises:
        MalformedFileError: As for `read_member`, or if it is no array of numbers or strings.
    """
    refuse_excess(array_bytes(archive, name))
    with _malformed(name), archive.open(name) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array


def array_bytes(archive: zipfile.ZipFile, name: str) -> int:
    """Return the size of an array in an archive, in memory; only its header is read.

    Raises:
        MalformedFileError: As for `read_array`.
    """
    size = _size(archive, name)
    with _malformed(name), archive.open(name) as member:
        shape, _, dtype = read_header(member, size)
    return math.prod(shape) * dtype.itemsize


def read_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in numpy's format; the stream is left at its first element.

    Args:
        stream: The array, header included.
        size: Of the array in bytes, header included.

    Returns:
        Shape, whether it is in Fortran order, and type.

    Raises:
        MalformedFileError: If the header cannot be read, is of something else than numbers or strings, or declares
            another size than the array has.
    """
    with _malformed("its header"):
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        held = size - stream.tell()
    if dtype.kind not in _KINDS:
        raise MalformedFileError(f"it must hold numbers or strings (no pickled objects, no records), got {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held:
        raise MalformedFileError(f"its shape {shape} of {dtype} does not fit the {held} bytes that it holds")
    return shape, is_fortran, dtype


def _size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the declared size of a member, beyond which zipfile does not read; it must be one that it can have."""
    with _malformed(name):
        info = archive.getinfo(name)
        if info.flag_bits & _ENCRYPTED:
            raise MalformedFileError("it is encrypted")
        if info.compress_type not in _EXPANSION:
            raise MalformedFileError(f"it is compressed by method {info.compress_type}, only deflate is read")
        held = min(info.compress_size, archive.start_dir)
        if info.compress_size > held or info.file_size > held * _EXPANSION[info.compress_type]:
            raise MalformedFileError(f"it declares {info.file_size} bytes, but holds {held}")
    return info.file_size


@contextlib.contextmanager
def _malformed(name: str) -> Iterator[None]:
    """Turn whatever zipfile, zlib and numpy raise for bytes without meaning, of which there is no list, into one."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise MalformedFileError(f"reading {name} failed: {reason}") from error
