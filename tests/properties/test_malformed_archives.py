"""Any change of an archive's bytes either has no effect or leads to an error meant for users."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files import checked_files
from hyperfl_flwr.data.sources.image_files import decode
from hyperfl_flwr.data.sources.npz import read_npz, read_samples

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 4, 3)).astype(np.uint8)
LABELS = np.arange(12) % 3
CLIENTS = np.array(["a", "b"] * 6)

Edit = tuple[float, int]


def archive(method: int) -> bytes:
    file = io.BytesIO()
    save = np.savez if method == zipfile.ZIP_STORED else np.savez_compressed
    save(file, images=IMAGES, labels=LABELS, clients=CLIENTS)
    return file.getvalue()


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, kind)
    return file.getvalue()


ARCHIVES = {method: archive(method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)}
PICTURES = {kind: picture(kind) for kind in ("PNG", "GIF", "BMP", "JPEG", "PPM", "WEBP")}

EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6)
"""Positions, as fractions of the length, and the new bytes."""


def edited(data: bytes, edits: list[Edit], kept: float) -> bytes:
    changed = bytearray(data)
    for place, value in edits:
        changed[int(place * len(changed))] = value
    return bytes(changed[: round(kept * len(changed))])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("malformed") / "own.npz"


def replace(path: Path, data: bytes) -> None:
    """Write another file of this name: one that is mapped must not be changed."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def loaded(path: Path) -> NDArray[Any] | None:
    """Read a file as a data set and as samples; return its images, or None if a one-line error refuses it."""
    images, problem = None, ""
    for read in (lambda: read_npz("npz:own", path).train.images, lambda: read_samples(path)[0]):
        try:
            images = read()
        except DataError as error:
            images, problem = None, str(error)
        assert "\n" not in problem
    return images


@settings(max_examples=400, deadline=None)
@given(method=st.sampled_from(list(ARCHIVES)), edits=EDITS, kept=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.98]),
       mapped=st.booleans())  # fmt: skip
@example(method=zipfile.ZIP_STORED, edits=[(0.0, 80)], kept=1.0, mapped=False)
@example(method=zipfile.ZIP_STORED, edits=[(0.0, 80)], kept=1.0, mapped=True)
def test_an_archive_with_changed_bytes(path: Path, method: int, edits: list[Edit], kept: float, mapped: bool) -> None:
    replace(path, edited(ARCHIVES[method], edits, kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_files, "SMALLEST_MAPPED", 1 if mapped else 1 << 30)
        images = loaded(path)
    assert images is None or images.tobytes() == IMAGES.tobytes()  # checksums detect every other change


@settings(max_examples=400, deadline=None)
@given(header=st.one_of(st.text(max_size=200), st.fixed_dictionaries({
    "descr": st.one_of(st.sampled_from(["|u1", "<f4", "|O", "<U0", "|V0", ">U99999999", "<M8[s]", "x", "", 3, None]),
                       st.lists(st.tuples(st.text(max_size=2), st.sampled_from(["|u1", "|O"])), max_size=2)),
    "fortran_order": st.sampled_from([True, False, 1, None]),
    "shape": st.one_of(st.lists(st.integers(-(2**70), 2**70), max_size=4).map(tuple), st.just([1]), st.just((True,)),
                       st.sampled_from([(0, 2**70), (12, 4, 3), (2**32, 2**32), (-1, -144), (10**13,)])),
}).map(repr)), version=st.sampled_from([1, 2, 3]))  # fmt: skip
def test_an_array_with_any_header(path: Path, header: str, version: int) -> None:
    text = header.encode("utf-8", "replace")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("images.npy", b"\x93NUMPY" + bytes([version, 0]) + length + text + IMAGES.tobytes())
    loaded(path)


@settings(max_examples=400, deadline=None)
@given(kind=st.sampled_from(list(PICTURES)), edits=EDITS, kept=st.sampled_from([1.0, 1.0, 0.5]))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of unknown tags
def test_an_image_with_changed_bytes(path: Path, kind: str, edits: list[Edit], kept: float) -> None:
    file = path.with_suffix(".png")
    file.write_bytes(edited(PICTURES[kind], edits, kept))
    problem = ""
    try:
        decode(path.parent, [file], (1, 4, 3), convert=True)
    except DataError as error:
        problem = str(error)
    assert "\n" not in problem
