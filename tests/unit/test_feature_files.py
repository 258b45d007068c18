"""What `hyperfl features` does with unusual images, files and folders, called as a library with a simple network."""

import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Call
from natural_images import picture
from PIL import Image, MpoImagePlugin

from hyperfl_flwr.core.errors import DataError, FolderInUseError, RunDirectoryError
from hyperfl_flwr.core.files import folder_lock
from hyperfl_flwr.data.features import archive, images
from hyperfl_flwr.data.features.archive import Rules, Written, write_features
from hyperfl_flwr.data.features.images import prepared
from hyperfl_flwr.data.features.listing import read_folder
from hyperfl_flwr.data.features.parts import Computation
from hyperfl_flwr.data.sources.npz import read_npz


def means(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(len(pixels), 3, -1).mean(2).astype(np.float32)


def computed(folder: Path, output: Path, **rules: Any) -> Written:
    computation = Computation(network=means, batch=4, workers=1, inputs={})
    return write_features(read_folder(folder), folder, output, computation, Rules(**rules))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two images of each of two classes."""
    for number in range(4):
        picture(tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg", number % 2, number)
    return tmp_path / "images"


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000), (65_000, 1), (101, 2)])
def test_strips_are_refused_before_they_are_resized(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "strip.png")
    tracemalloc.start()
    with pytest.raises(DataError, match=f"50 times as long as wide, got {size[0]}x{size[1]}; crop it"):
        prepared(tmp_path / "strip.png")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    Image.new("RGB", (100, 2)).save(tmp_path / "long.png")
    assert prepared(tmp_path / "long.png").shape == (3, 224, 224)


def test_a_strip_is_a_broken_image(folder: Path, tmp_path: Path) -> None:
    Image.new("L", (4000, 1)).save(folder / "a" / "strip.png")
    assert computed(folder, tmp_path / "x.npz").facts["broken"]["images"] == ["a/strip.png"]


@pytest.mark.parametrize("name", ["x.tiff", "x.gif"])
def test_files_with_several_images_are_refused(tmp_path: Path, name: str) -> None:
    first, second = (Image.new("L", (50, 50), value) for value in (0, 255))
    first.save(tmp_path / name, save_all=True, append_images=[second])
    with pytest.raises(DataError, match=f"{name} must contain one image, got 2"):
        prepared(tmp_path / name)


def test_the_first_image_of_a_camera_is_the_photograph(tmp_path: Path) -> None:
    """Cameras append previews to a JPEG file, which Pillow calls MPO."""
    first, second = (Image.new("RGB", (50, 50), (value,) * 3) for value in (40, 200))
    first.save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=[second])
    with Image.open(tmp_path / "x.jpg") as opened:
        assert (type(opened), opened.n_frames) == (MpoImagePlugin.MpoImageFile, 2)
    assert set(prepared(tmp_path / "x.jpg").ravel()) == {40}


def test_dicom_files_are_broken_with_the_reason(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "scan.dcm").write_bytes(b"\0" * 128 + b"DICM")
    broken = computed(folder, tmp_path / "x.npz").facts["broken"]
    assert broken["images"] == ["a/scan.dcm"]
    assert "is a DICOM file, whose values have no agreed black and white; convert it" in broken["reasons"][0]
    for file in folder.glob("*/*.jpg"):
        file.rename(file.with_suffix(".dcm"))
    with pytest.raises(DataError, match=r"none of the 5 training images can be used: .*0\.dcm is a DICOM file"):
        computed(folder, tmp_path / "y.npz")


def divided(root: Path, client: str, train: int, test: int) -> None:
    for part, count in (("train", train), ("test", test)):
        for label, name in enumerate("ab"):
            (root / client / part / name).mkdir(parents=True)
            for number in range(count):
                picture(root / client / part / name / f"{number}.jpg", label, number)


def test_users_that_are_left_out_keep_no_test_images(tmp_path: Path) -> None:
    """Of four others, one has few training images, one broken ones, one none, and one broken test images."""
    root = tmp_path / "images"
    for client, train, test in (("whole", 2, 1), ("few", 1, 1), ("broken", 2, 1), ("none", 0, 1), ("untested", 2, 1)):
        divided(root, f"client-{client}", train, test)
    for client, part in (("broken", "train"), ("untested", "test")):
        for file in (root / f"client-{client}" / part).glob("*/*.jpg"):
            file.write_bytes(b"")
    for fewest, kept in ((1, {"client-whole", "client-few"}), (3, {"client-whole"})):
        path = tmp_path / f"{fewest}.npz"
        facts = computed(root, path, min_images=fewest).facts
        assert (facts["users"], facts["users_left_out"]) == (len(kept), 5 - len(kept))
        assert facts["test_images"] == 2 * len(kept)
        with np.load(path) as content:
            assert set(content["clients"]) == set(content["test_clients"]) == kept
        assert set(read_npz("npz:x", path).client_ids or ()) == kept


PASSING = {
    "permission": PermissionError(errno.EACCES, "Permission denied"),
    "disk": OSError(errno.EIO, "Input/output error"),
    "memory": MemoryError(),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_ends_the_call_and_not_the_image(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened, reason = Image.open, {"memory": "it does not fit into the free memory"}

    def flaky(source: Path, *_: object) -> Image.Image:
        if source.name == "1.jpg":
            raise PASSING[name]
        return opened(source)

    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", flaky)
        expected = reason.get(name) or str(PASSING[name]).partition("] ")[2]
        with pytest.raises(DataError, match=rf"1\.jpg cannot be read: {expected}; correct that"):
            computed(folder, tmp_path / "x.npz")
    assert computed(folder, tmp_path / "x.npz").facts["broken"]["count"] == 0


def test_a_wrong_position_in_an_image_is_damage(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Image.open

    def damaged(source: Path) -> Image.Image:
        if source.name == "1.jpg":
            with source.open("rb") as stream:
                stream.seek(-5)
        return opened(source)

    monkeypatch.setattr(Image, "open", damaged)
    assert computed(folder, tmp_path / "x.npz").facts["broken"]["images"] == ["b/1.jpg"]


def test_a_class_without_images_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "c").mkdir()
    with pytest.raises(DataError, match="the class c must have images, but has none; add some, or remove its folders"):
        read_folder(folder)


@pytest.mark.parametrize("step", ["write_npz", "remove_parts"])
def test_the_lock_is_held_to_the_end(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    done: Callable[..., None] = getattr(archive, step)
    seen = []

    def watched(*arguments: Any, **options: Any) -> None:
        with pytest.raises(FolderInUseError):
            folder_lock.lock_folder(tmp_path / "x.npz.parts")
        seen.append(step)
        done(*arguments, **options)

    monkeypatch.setattr(archive, step, watched)
    computed(folder, tmp_path / "x.npz")
    assert seen == [step]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "x.npz", "x.npz.json"]


def test_a_call_that_another_one_overtook_replaces_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output appears after the check of the command, and before the lock is taken."""
    (tmp_path / "x.npz").write_bytes(b"by another call")
    with pytest.raises(RunDirectoryError, match="exists; choose another --output"):
        computed(folder, tmp_path / "x.npz")
    assert (tmp_path / "x.npz").read_bytes() == b"by another call"


@pytest.mark.parametrize("content", [b"notes", b"{}", b'["inputs"]', b'{"inputs": 1}'])
def test_other_files_in_the_report_s_place_are_kept(call: Call, folder: Path, tmp_path: Path, content: bytes) -> None:
    report = tmp_path / "x.npz.json"
    report.write_bytes(content)
    code, _, err = call("features", "--images", folder, "--output", tmp_path / "x.npz")
    assert (code, err.startswith(f"error: {report} is the place of the report, but has other content; move")) == (
        2,
        True,
    )
    assert report.read_bytes() == content
    assert not (tmp_path / "x.npz.parts").exists()
    report.unlink()
    computed(folder, tmp_path / "x.npz")
    (tmp_path / "x.npz").unlink()
    before = json.loads(report.read_text())
    computed(folder, tmp_path / "x.npz")
    assert json.loads(report.read_text()) == before


def test_a_folder_of_parts_of_another_user_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.npz.parts").mkdir()
    (tmp_path / "y.npz.parts").write_text("")
    with pytest.raises(RunDirectoryError, match=r"y\.npz\.parts must be a folder of yours"):
        computed(folder, tmp_path / "y.npz")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(RunDirectoryError, match=r"x\.npz\.parts must be a folder of yours, but is none or belongs to"):
        computed(folder, tmp_path / "x.npz")
    assert list((tmp_path / "x.npz.parts").iterdir()) == []


def test_a_folder_that_cannot_be_searched_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(DataError, match=r"abc\.jpg must be .*: Permission denied; check its permissions"):
        images.locate(tmp_path, ["abc"])
