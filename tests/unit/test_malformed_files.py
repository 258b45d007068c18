"""Malformed archives and images from users: one error of one line, before anything large is allocated."""

import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Call
from PIL import Image

from hyperfl_flwr.core.errors import DataError, HyperFLError, StateError
from hyperfl_flwr.core.files import checked_files
from hyperfl_flwr.core.files.storage import read_arrays, stored_bytes
from hyperfl_flwr.data import cache
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sources.npz import read_samples
from hyperfl_flwr.data.unlabelled import read_unlabelled
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.standalone import read_model, write_model

META = json.dumps({"arrays": ["images", "labels"], "meta": {}})
MEGABYTE = 1_000_000
LOCAL, CENTRAL = b"PK\3\4", b"PK\1\2"
DEEP = "(" * 9000

Members = Mapping[str, bytes]


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def declared(shape: Any, descr: Any = "|u1", payload: bytes = b"") -> bytes:
    """Return an array's file with a header that declares this shape and type."""
    return headed(repr({"descr": descr, "fortran_order": False, "shape": shape}), payload)


def headed(header: str, payload: bytes = b"") -> bytes:
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header.encode() + payload


IMAGES = npy(np.zeros((40, 6, 5), np.uint8))
LABELS = npy(np.arange(40) % 4)


def archive(images: bytes = IMAGES, method: int = zipfile.ZIP_STORED, more: Members | None = None) -> bytes:
    """Return an archive that, with valid images, could be read as a user's data and as a store of arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in {"images.npy": images, "labels.npy": LABELS, "meta.json": META, **(more or {})}.items():
            made.writestr(name, content)
    return file.getvalue()


def patched(local: int, central: int, value: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with a field replaced in both headers of its first member, at these offsets."""
    data = bytearray(archive(method=method))
    for position in (data.index(LOCAL) + local, data.index(CENTRAL) + central):
        data[position : position + len(value)] = value
    return bytes(data)


def twice() -> bytes:
    file = io.BytesIO(archive())
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "a") as made:
        made.writestr("images.npy", IMAGES)
    return file.getvalue()


def damaged() -> bytes:
    data = bytearray(archive())
    data[data.index(IMAGES) + len(IMAGES) - 1] ^= 1
    return bytes(data)


MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "encrypted": (lambda: patched(6, 8, b"\1\0"), "images.npy failed: it is encrypted"),
    "method": (lambda: patched(8, 10, b"\x63\0"), "its compression method is 99; only deflate is supported"),
    "lzma": (lambda: archive(method=zipfile.ZIP_LZMA), "its compression method is 14; only deflate is supported"),
    "version": (lambda: patched(4, 6, b"\x63\0"), "reading the archive failed: zip file version 9.9"),
    "size": (lambda: patched(22, 24, b"\xf0\xff\xff\xff"), "it declares 4294967280 bytes, but stores only 1328"),
    "compressed size": (lambda: patched(18, 20, b"\xf0\xff\xff\xff"), "it declares 1328 bytes, but stores only"),
    "deflated size": (
        lambda: patched(22, 24, b"\xf0\xff\xff\xff", zipfile.ZIP_DEFLATED), "4294967280 bytes, but stores only"
    ),
    "terabytes": (lambda: archive(declared((10**13,), "<f2")), "shape (10000000000000,) of float16 does not fit the 0"),
    "gigabytes": (lambda: archive(declared((3 * 10**9,))), "shape (3000000000,) of uint8 does not fit the 0 bytes"),
    "negative": (lambda: archive(declared((-2, 6, 5))), "shape (-2, 6, 5) of uint8 does not fit"),
    "negatives": (lambda: archive(declared((-2, -3), payload=b"123456")), "shape (-2, -3) of uint8 does not fit"),
    "overflow": (lambda: archive(declared((2**62, 2**62))), "does not fit the 0 bytes"),
    "empty overflow": (lambda: archive(declared((2**70, 0))), "images.npy failed"),
    "short": (lambda: archive(IMAGES[:-1]), "does not fit the 1199 bytes that it holds"),
    "long": (lambda: archive(IMAGES + b"1"), "does not fit the 1201 bytes that it holds"),
    "checksum": (damaged, "Bad CRC-32"),
    "objects": (
        lambda: archive(npy(np.zeros(40, object))), "must hold numbers or strings (no pickled objects, no records)"
    ),
    "records": (lambda: archive(npy(np.zeros(40, "u1,f4"))), "must hold numbers or strings (no pickled objects, no"),
    "vectors of vectors": (lambda: archive(declared((1,), ("<f4", (10**6,)))), "must hold numbers or strings"),
    "dates": (lambda: archive(npy(np.zeros(40, "M8[s]"))), "must hold numbers or strings"),
    "no array": (lambda: archive(b"images"), "reading its header failed"),
    "no header": (lambda: archive(headed("")), "reading its header failed"),
    "deep header": (lambda: archive(headed(DEEP)), "reading its header failed"),
    "long header": (lambda: archive(headed(" " * 20_000)), "reading its header failed: Header info length (20000)"),
    "unknown format": (lambda: archive(b"\x93NUMPY\7\0" + IMAGES[8:]), "reading its header failed"),
    "twice": (twice, "'images.npy' occurs more than once"),
    "cut": (lambda: archive()[:-300], "reading the archive failed: "),
    "array": (lambda: IMAGES, "reading the archive failed: "),
    "empty": (lambda: b"", "reading the archive failed: "),
    "text": (lambda: b"images and labels", "reading the archive failed: "),
}  # fmt: skip


def refused(read: Callable[[], object], kind: type[HyperFLError], reason: str) -> None:
    """Check that reading raises an error of one line and allocates less than 10 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert peak < 10 * MEGABYTE


@pytest.mark.parametrize("smallest_mapped", [1, checked_files.SMALLEST_MAPPED])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_archives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, smallest_mapped: int
) -> None:
    monkeypatch.setattr(checked_files, "SMALLEST_MAPPED", smallest_mapped)
    make, reason = MALFORMED[name]
    path = tmp_path / "own.npz"
    path.write_bytes(make())
    refused(lambda: load_dataset(f"npz:{path}"), DataError, reason)
    refused(lambda: read_samples(path), DataError, reason)
    refused(lambda: read_arrays(path), StateError, reason)


@pytest.mark.parametrize("name", ["encrypted", "version", "terabytes", "gigabytes", "long header", "cut"])
def test_commands_end_with_one_line(tmp_path: Path, call: Call, name: str) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(MALFORMED[name][0]())
    code, out, err = call("run", "--method", "fedavg", "--dataset", f"npz:{path}", "--dry-run")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}: must be an .npz archive of plain arrays, but reading ")
    assert err.count("\n") == 1


def test_an_archive_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to more than the memory of 10 MB is refused, even if each array alone would fit."""
    monkeypatch.setattr(checked_files, "memory_bytes", lambda: 10 * MEGABYTE)
    path = tmp_path / "own.npz"
    for images, labels in (((20_000, 1000), 1), ((8_000, 1000), 1_000_000)):
        np.savez_compressed(path, images=np.zeros(images, np.uint8), labels=np.zeros(labels, int))
        assert path.stat().st_size < MEGABYTE
        refused(lambda: load_dataset(f"npz:{path}"), DataError, "MB of memory")
    np.savez_compressed(path, features=np.zeros((20_000, 1000), np.uint8), unknown=np.zeros(1))
    refused(lambda: read_samples(path), DataError, "it needs 20.0 MB, but this machine has 10.0 MB of memory")


def test_arrays_of_other_names_are_not_read(tmp_path: Path) -> None:
    """They may hold anything; a member `images`, without the suffix that NumPy gives, is such an array."""
    path = tmp_path / "own.npz"
    path.write_bytes(archive(more={"notes.npy": declared((10**13,)), "images": b"no array"}))
    assert len(load_dataset(f"npz:{path}").train) == 32
    assert read_samples(path)[1] == ["labels", "meta.json", "notes"]


def test_compressed_and_fortran_arrays_are_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 5)).astype(np.uint8)
    np.savez_compressed(tmp_path / "own.npz", images=np.asfortranarray(images), labels=np.arange(40) % 4)
    np.testing.assert_array_equal(read_samples(tmp_path / "own.npz")[0][:, 0], images)


@pytest.mark.parametrize("meta", ["", "[]", "null", '{"arrays": []}', '{"arrays": 3, "meta": {}}', "[" * 100_000,
                                  '{"arrays": [], "meta": []}', '{"arrays": [["a"]], "meta": {}}'])  # fmt: skip
def test_a_store_with_other_meta_data_is_refused(tmp_path: Path, meta: str) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(archive(more={"meta.json": meta}))
    for read in (read_arrays, stored_bytes):
        with pytest.raises(StateError, match="is damaged"):
            read(path)


@pytest.mark.parametrize("content", [declared((10**13,)), declared((-1,)), headed(DEEP), IMAGES[:-1], b"", IMAGES])
def test_a_damaged_cache_is_built_again(tmp_path: Path, content: bytes) -> None:
    names = ("train_images", "train_labels")
    built = {"train_images": np.ones((4, 1, 2, 2), np.uint8), "train_labels": np.arange(4)}
    cache.load_or_build("key", lambda: built, names, base=tmp_path)
    (tmp_path / "decoded" / "key" / "train_images.npy").write_bytes(content)
    found = cache.load_or_build("key", lambda: built, names, base=tmp_path)
    np.testing.assert_array_equal(found["train_images"], built["train_images"])
    assert not found["train_images"].flags.writeable


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    """Return an image file that declares a size but has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


PICTURES = {
    "huge": png(60_000, 60_000),
    "no pixels": png(28, 28),
    "no size": png(0, 28),
    "text": b"no image",
    "broken chunk": png(28, 28)[:8] + chunk(b"IHDR", b"1"),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_malformed_images_are_refused(tmp_path: Path, name: str) -> None:
    """The image is refused in a user's folder of classes, and as a file of CINIC-10; all classes have the same file."""
    for part in ("train", "test"):
        for label in ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"):
            folder = tmp_path / "CINIC-10" / part / label
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(PICTURES[name])
    for dataset in (f"folder:{tmp_path / 'CINIC-10'}", "cinic10"):
        refused(lambda dataset=dataset: load_dataset(dataset, tmp_path), DataError, "a.png must be an image, but")


def test_images_that_do_not_fit_into_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first image has the required size; the memory for 20 such images is checked before the other sizes."""
    monkeypatch.setattr(checked_files, "memory_bytes", lambda: 10 * MEGABYTE)
    for number in range(20):
        side = 28 if number else 1000
        Image.new("L", (side, side)).save(tmp_path / f"{number:02d}.png")
    with pytest.raises(DataError, match=r"20 images of 1000x1000 .* it needs 20\.0 MB, but this machine has 10\.0 MB"):
        read_unlabelled(tmp_path, (1, 1000, 1000))


def test_a_model_with_deeply_nested_metadata_is_refused(tmp_path: Path) -> None:
    recipe = TargetRecipe(target="mlp", input_shape=(1, 4, 4), mean=(0.5,), std=(0.5,), classes=("0", "1"))
    state = recipe.new_target().to_empty(device="cpu").state_dict()
    path = write_model(tmp_path, state, recipe, {})[0]
    read_model(path)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["classes"] = "[" * 100_000
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    refused(lambda: read_model(path), StateError, "is damaged")


def test_the_factor_of_deflate_is_its_largest() -> None:
    """Zeros, the best case of compression, come close to the factor 1032 and do not exceed it."""
    zeros = 50 * MEGABYTE
    compressed = len(zlib.compress(bytes(zeros), 9))
    assert 1000 < zeros / compressed <= 1032
