"""Large arrays of npz files are mapped: they hold the same values, use no memory of their own, and are checked."""

import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files import checked_files
from hyperfl_flwr.core.files.checked_files import MalformedFileError, map_arrays, open_archive
from hyperfl_flwr.core.files.storage import Pieces, write_npz
from hyperfl_flwr.data.digests import data_digest
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sources import npz_samples
from hyperfl_flwr.data.sources.npz import read_npz, read_samples

VECTORS = np.random.default_rng(0).standard_normal((60, 7)).astype(np.float32)
LABELS = np.arange(60) % 4


@pytest.fixture
def map_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "SMALLEST_MAPPED", 1)


def base_of(array: np.ndarray) -> object:
    """Return the object that owns an array's memory."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    return base


def is_mapped(array: np.ndarray) -> bool:
    return isinstance(base_of(array), np.memmap)


@pytest.mark.usefixtures("map_all")
@pytest.mark.parametrize("array", [
    VECTORS, np.asfortranarray(VECTORS), VECTORS.astype(">f4"), LABELS, np.array(["a", "bc"] * 4), np.zeros((3, 0)),
    np.float64(3.5),
])  # fmt: skip
def test_every_kind_of_array_is_the_same(tmp_path: Path, array: np.ndarray) -> None:
    np.savez(tmp_path / "x.npz", before=np.arange(3, dtype=np.uint8), array=array)
    with open_archive(tmp_path / "x.npz") as archive:
        found = map_arrays(archive, ["array.npy"])[0]
    assert (found.dtype, found.shape) == (np.asarray(array).dtype, np.shape(array))
    np.testing.assert_array_equal(found, array)
    assert is_mapped(found)
    assert type(found) is np.ndarray
    assert not found.flags.writeable


@pytest.mark.usefixtures("map_all")
def test_only_arrays_without_compression_are_mapped(tmp_path: Path) -> None:
    for save, mapped in ((np.savez, True), (np.savez_compressed, False)):
        save(tmp_path / "x.npz", features=VECTORS)
        with open_archive(tmp_path / "x.npz") as archive:
            found = map_arrays(archive, ["features.npy"])[0]
        assert is_mapped(found) == mapped
        np.testing.assert_array_equal(found, VECTORS)


def test_small_arrays_are_read(tmp_path: Path) -> None:
    """A file of them may be written anew while a data set is in use."""
    np.savez(tmp_path / "x.npz", features=VECTORS, labels=LABELS)
    assert not is_mapped(read_npz("npz:x", tmp_path / "x.npz").train.images)


@pytest.mark.usefixtures("map_all")
def test_a_data_set_uses_the_map_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"features": VECTORS, "labels": LABELS, "test_features": VECTORS[:8], "test_labels": LABELS[:8]}
    np.savez(tmp_path / "x.npz", **content)
    mapped = load_dataset(f"npz:{tmp_path / 'x.npz'}")
    assert is_mapped(mapped.train.images)
    assert is_mapped(mapped.test.images)
    monkeypatch.setattr(checked_files, "SMALLEST_MAPPED", 1 << 30)
    read = read_npz("npz:x", tmp_path / "x.npz")
    assert not is_mapped(read.train.images)
    assert (mapped.mean, mapped.std) == (read.mean, read.std)
    assert data_digest(mapped) == data_digest(read)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 5)).astype(np.uint8)
    images = {"images": pixels, "labels": LABELS[:20], "test_images": pixels, "test_labels": LABELS[:20]}
    monkeypatch.setattr(checked_files, "SMALLEST_MAPPED", 1)
    np.savez(tmp_path / "y.npz", **images)
    assert is_mapped(load_dataset(f"npz:{tmp_path / 'y.npz'}").train.images)


@pytest.mark.usefixtures("map_all")
def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(19, "No such device")

    np.savez(tmp_path / "x.npz", features=VECTORS)
    monkeypatch.setattr(np, "memmap", refuse)
    with open_archive(tmp_path / "x.npz") as archive:
        np.testing.assert_array_equal(map_arrays(archive, ["features.npy"])[0], VECTORS)


@pytest.mark.usefixtures("map_all")
def test_mapped_arrays_need_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", features=VECTORS)
    np.savez_compressed(tmp_path / "y.npz", features=VECTORS)
    monkeypatch.setattr(checked_files, "memory_bytes", lambda: VECTORS.nbytes // 2)
    with open_archive(tmp_path / "x.npz") as archive:
        assert len(map_arrays(archive, ["features.npy"])[0]) == 60
    with open_archive(tmp_path / "y.npz") as archive, pytest.raises(MalformedFileError, match="MB of memory"):
        map_arrays(archive, ["features.npy"])


@pytest.mark.usefixtures("map_all")
@pytest.mark.parametrize("field", [26, 28])  # lengths of the name and of the extra field in the local header
def test_a_member_outside_its_place_is_refused(tmp_path: Path, field: int) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, features=VECTORS)
    data = bytearray(path.read_bytes())
    data[field : field + 2] = struct.pack("<H", 65_000)
    path.write_bytes(data)
    with open_archive(path) as archive, pytest.raises(MalformedFileError):
        map_arrays(archive, ["features.npy"])
    with pytest.raises(DataError, match=r"must be an \.npz archive of plain arrays, but reading features\.npy failed"):
        read_npz("npz:x", path)


@pytest.mark.usefixtures("map_all")
def test_an_archive_behind_other_bytes(tmp_path: Path) -> None:
    """Zip archives may follow other content, which moves all places."""
    np.savez(tmp_path / "x.npz", features=VECTORS)
    (tmp_path / "y.npz").write_bytes(b"#!/bin/sh\n" * 7 + (tmp_path / "x.npz").read_bytes())
    with open_archive(tmp_path / "y.npz") as archive:
        np.testing.assert_array_equal(map_arrays(archive, ["features.npy"])[0], VECTORS)


def test_arrays_are_written_in_pieces(tmp_path: Path) -> None:
    """`numpy.load` reads them; equal arrays make equal files; a wrong number of rows leaves no file."""

    def pieces(rows: int) -> Pieces:
        return Pieces((rows, 7), np.float32, (VECTORS[start : start + 25] for start in (0, 25, 50)))

    write_npz(tmp_path / "x.npz", {"features": pieces(60), "labels": LABELS})
    with np.load(tmp_path / "x.npz") as archive:
        np.testing.assert_array_equal(archive["features"], VECTORS)
        np.testing.assert_array_equal(archive["labels"], LABELS)
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    write_npz(tmp_path / "y.npz", {"features": VECTORS, "labels": LABELS})
    assert (tmp_path / "y.npz").read_bytes() == (tmp_path / "x.npz").read_bytes()
    with pytest.raises(ValueError, match="features must have 61 rows, got 60"):
        write_npz(tmp_path / "z.npz", {"features": pieces(61)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "y.npz"]


BIG = np.random.default_rng(1).random((400, 3, 10, 10)).astype(np.float32)
PIXELS = (BIG * 255).astype(np.uint8)
WITHOUT_COPIES = {
    "features": (VECTORS, "features"),
    "uint8": (PIXELS, "images"),
    "uint8 without channels": (PIXELS[:, 0].copy(), "images"),
    "one channel at the end": (PIXELS[:, 0, :, :, None].copy(), "images"),
    "floats": (BIG, "images"),
}
WITH_COPIES = {
    "float64": (VECTORS.astype(np.float64), "features"),
    "Fortran order": (np.asfortranarray(VECTORS), "features"),
    "other byte order": (VECTORS.astype(">f4"), "features"),
    "channels at the end": (PIXELS.transpose(0, 2, 3, 1).copy(), "images"),
    "float16": (BIG.astype(np.float16), "images"),
}


@pytest.mark.usefixtures("map_all")
@pytest.mark.parametrize("name", [*WITHOUT_COPIES, *WITH_COPIES])
def test_copies_of_mapped_samples_must_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    array, kind = (WITHOUT_COPIES | WITH_COPIES)[name]
    labels = np.zeros(len(array), np.int8)
    labels[::2] = 1
    path, size = tmp_path / "x.npz", array.size * (1 if array.dtype == np.uint8 else 4)
    np.savez(path, **{kind: array, "labels": labels, f"test_{kind}": array[:8], "test_labels": labels[:8]})
    if name in WITHOUT_COPIES:
        monkeypatch.setattr(checked_files, "memory_bytes", lambda: 1000)
        assert is_mapped(read_npz("npz:x", path).train.images)
        assert is_mapped(read_samples(path)[0])
    else:
        monkeypatch.setattr(checked_files, "memory_bytes", lambda: size - 1)
        problem = f"a copy of {kind} and test_{kind} is needed, but it needs .* MB of memory; store float32 features"
        with pytest.raises(DataError, match=problem):
            read_npz("npz:x", path)
        with pytest.raises(DataError, match=f"a copy of {kind} is needed"):
            read_samples(path)
        monkeypatch.setattr(checked_files, "memory_bytes", lambda: size)
        assert len(read_samples(path)[0]) == len(array)  # it does not copy the test data
    path.unlink()  # a mapped file must not be overwritten
    np.savez(path, **{kind: array, "labels": labels})
    copies = 1 + (name in WITH_COPIES)
    monkeypatch.setattr(checked_files, "memory_bytes", lambda: copies * size - 1)
    with pytest.raises(DataError, match=f"a copy of {kind} is needed"):
        read_npz("npz:x", path)
    monkeypatch.setattr(checked_files, "memory_bytes", lambda: copies * size)
    assert 0 < len(read_npz("npz:x", path).train) < len(array)


@pytest.mark.usefixtures("map_all")
def test_floats_of_images_are_checked_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds a value in any chunk, and takes no memory of the size of the images."""
    monkeypatch.setattr(npz_samples, "CHUNK", 16)
    np.savez(tmp_path / "x.npz", images=BIG)
    tracemalloc.start()
    read_samples(tmp_path / "x.npz")
    assert tracemalloc.get_traced_memory()[1] < BIG.nbytes / 4
    tracemalloc.stop()
    wrong = BIG.copy()
    wrong[399, 2, 9, 9] = 1.5
    np.savez(tmp_path / "y.npz", images=wrong)
    with pytest.raises(DataError, match=r"must be in \[0, 1\] if they are floats, got 1\.5"):
        read_samples(tmp_path / "y.npz")


@pytest.mark.usefixtures("map_all")
def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    """Several members in the same bytes could expand to far more than the file."""
    path = tmp_path / "x.npz"
    np.savez(path, features=VECTORS, others=VECTORS)
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    with pytest.raises(MalformedFileError, match="members overlap"), open_archive(path):
        pass
