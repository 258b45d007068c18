"""Images with more than 8 bits: 16-bit PNG and TIFF, float TIFF and DICOM, and the window that maps them to 8 bits."""

import builtins
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.pixels.processing import convert_color_space
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.data.features.images import prepared
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.data.sources.dicom import open_dicom
from hyperfl_flwr.models.model_spec import TargetRecipe

VALUES = np.array([[0, 1000, 2000], [3000, 4000, 60000]])
"""Of a 16-bit image; with the window 1000/4000 they are 0, 0, 85, 170, 255 and 255."""
WINDOW = (1000.0, 4000.0)
EXPECTED = np.array([[0, 0, 85], [170, 255, 255]])


def write_dicom(path, pixels, **tags):
    """Write grey [H, W] or RGB [H, W, 3] pixels as a DICOM file."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    found.PatientName = "Doe^Jane"
    found.Rows, found.Columns = pixels.shape[:2]
    found.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    found.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        found.PlanarConfiguration = 0
    bits = 8 * pixels.dtype.itemsize
    found.BitsAllocated, found.BitsStored, found.HighBit = bits, bits, bits - 1
    found.PixelRepresentation = int(pixels.dtype.kind == "i")
    found.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(found, name, value)
    found.save_as(path, enforce_file_format=True)
    return path


def write_png(path, values):
    Image.fromarray(values.astype(np.uint16)).save(path)


def write_deep_colour(path, values, kind=2):
    """Write 16-bit values [H, W] to each channel of a PNG file: of the kind 2 RGB, 4 grey with alpha, 6 RGBA."""
    pixels = np.repeat(values[..., None], {2: 3, 4: 2, 6: 4}[kind], axis=2).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ))  # fmt: skip


def folder_of(tmp_path, write, suffix, count=4):
    """Write `count` equal images of each of two classes."""
    for label in ("calm", "sick"):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(count):
            write(tmp_path / "scans" / label / f"{number}{suffix}", VALUES)
    return tmp_path / "scans"


def read(folder, tmp_path, **changes):
    sample_format = SampleFormat(cache=tmp_path / "cache", **changes)
    return load_dataset(f"folder:{folder}", None, sample_format)


@pytest.mark.parametrize("kind", [2, 4, 6])
@pytest.mark.parametrize("changes", [{}, {"window": WINDOW}, {"input_shape": (1, 2, 3)}])
def test_colour_and_alpha_of_16_bits_are_refused(kind, changes, tmp_path):
    """Pillow would keep the upper 8 bits; a window is for grey images without alpha."""
    folder = folder_of(tmp_path, lambda path, values: write_deep_colour(path, values, kind), ".png")
    with pytest.raises(DataError, match=r"the first is .*, 2x3 with [234] channels of more than 8"):
        read(folder, tmp_path, **changes)
    with pytest.raises(DataError, match=r"must have 8 bits per channel, got the mode .* with more; convert it"):
        prepared(folder / "calm" / "0.png")


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".png", write_png),
        (".tif", write_png),
        (".tiff", lambda path, values: Image.fromarray(values.astype(np.float32)).save(path)),
        (".tif", lambda path, values: Image.fromarray(values.astype(np.int32)).save(path)),
        (".dcm", lambda path, values: write_dicom(path, values.astype(np.uint16))),
        (".DCM", lambda path, values: write_dicom(path, (values - 1000).astype(np.int32), RescaleIntercept=1000)),
        (".dcm", lambda path, values: write_dicom(path, (values // 2).astype(np.uint16), RescaleSlope=2)),
    ],
)
def test_a_window_maps_values_to_8_bits(suffix, write, tmp_path):
    dataset = read(folder_of(tmp_path, write, suffix), tmp_path, window=WINDOW)
    assert dataset.input_shape == (1, 2, 3)
    for image in (*dataset.train.images, *dataset.test.images):
        np.testing.assert_array_equal(image[0], EXPECTED)


def test_another_window_is_read_anew(tmp_path):
    folder = folder_of(tmp_path, write_png, ".png")
    first = read(folder, tmp_path, window=WINDOW).train.images
    second = read(folder, tmp_path, window=(0.0, 60000.0)).train.images
    assert first[0].max() == second[0].max() == 255
    assert not np.array_equal(first, second)


def test_it_is_converted_to_the_agreed_shape_as_others_are(tmp_path):
    folder = folder_of(tmp_path, write_png, ".png")
    Image.fromarray(EXPECTED.astype(np.uint8)).save(folder / "calm" / "eight.png")
    found = read(folder, tmp_path, window=WINDOW, input_shape=(3, 4, 6)).train.images
    assert found.shape[1:] == (3, 4, 6)
    assert (found == found[0]).all()  # the image with 8 bits equals those with 16, after the window


@pytest.mark.parametrize("suffix", [".png", ".dcm"])
@pytest.mark.parametrize("shape", [None, (1, 2, 3)])
def test_without_a_window_they_are_refused_with_their_range(suffix, shape, tmp_path):
    write = write_png if suffix == ".png" else lambda path, values: write_dicom(path, values.astype(np.uint16))
    folder = folder_of(tmp_path, write, suffix)
    with pytest.raises(DataError, match=r"data\.window to the values .* as LOW/HIGH .* are 0/60000\)") as caught:
        read(folder, tmp_path, input_shape=shape)
    assert "more than 8 bits" in str(caught.value)
    assert caught.value.public == "its images do not fit data.input-shape and data.window, see the node's log"


def test_inverted_and_coloured_files(tmp_path):
    def write(path, values):
        write_dicom(path, values.astype(np.uint16), PhotometricInterpretation="MONOCHROME1")

    found = read(folder_of(tmp_path, write, ".dcm"), tmp_path, window=WINDOW).train.images
    np.testing.assert_array_equal(found[0, 0], 255 - EXPECTED)
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    image = open_dicom(write_dicom(tmp_path / "colour.dcm", pixels))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), pixels)
    stored = convert_color_space(np.full((2, 3, 3), (200, 30, 60), np.uint8), "RGB", "YBR_FULL")
    image = open_dicom(write_dicom(tmp_path / "ybr.dcm", stored, PhotometricInterpretation="YBR_FULL"))
    np.testing.assert_allclose(np.asarray(image).astype(int), np.full((2, 3, 3), (200, 30, 60)), atol=2)
    with pytest.raises(DataError, match="must have colours of 8 bits, got uint16"):
        open_dicom(write_dicom(tmp_path / "deep.dcm", pixels.astype(np.uint16)))


def test_files_of_8_bits_need_no_window(tmp_path):
    image = open_dicom(write_dicom(tmp_path / "a.dcm", EXPECTED.astype(np.uint8), RescaleSlope=None))
    assert image.mode == "L"
    np.testing.assert_array_equal(np.asarray(image), EXPECTED)
    inverted = write_dicom(tmp_path / "b.dcm", EXPECTED.astype(np.uint8), PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(np.asarray(open_dicom(inverted)), 255 - EXPECTED)


def test_files_that_are_no_image_are_named(tmp_path):
    (tmp_path / "broken.dcm").write_bytes(b"no DICOM")
    with pytest.raises(DataError, match=r"broken\.dcm must be a DICOM image, but reading it failed"):
        open_dicom(tmp_path / "broken.dcm")
    several = write_dicom(tmp_path / "several.dcm", VALUES.astype(np.uint16), NumberOfFrames=2)
    with pytest.raises(DataError, match=r"several\.dcm must contain one image, got 2"):
        open_dicom(several)
    palette = write_dicom(tmp_path / "palette.dcm", VALUES.astype(np.uint8), PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(DataError, match=r"must be a grey or colour image, got one of the kind PALETTE COLOR"):
        open_dicom(palette)


def test_without_pydicom_the_error_says_what_to_install(tmp_path, monkeypatch):
    file, real = write_dicom(tmp_path / "scan.dcm", VALUES.astype(np.uint16)), builtins.__import__

    def refuse(name, *others):
        if name.partition(".")[0] == "pydicom":
            raise ImportError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match=r"needs pydicom; install it: python -m pip install 'pydicom>=3,<4'"):
        open_dicom(file)


@pytest.mark.parametrize("text", ["", "4095", "1/0", "1/1", "a/b", "0/1e999", "0/nan"])
def test_wrong_windows_are_refused(text):
    with pytest.raises(ConfigError, match=r"data\.window must be auto or LOW/HIGH"):
        RunConfig.from_flat(default_settings() | {"data.window": text})


def test_wrong_windows_of_a_description_are_refused():
    facts = {"target": "mlp", "input_shape": [1, 4, 4], "mean": [0.5], "std": [0.5], "classes": ["0", "1"]}
    assert TargetRecipe.of(facts | {"window": [0, 4095.0]}).window == (0, 4095.0)
    for wrong in ([1.0], [2.0, 1.0], [0.0, float("inf")], "ab", 3, [0.0, "x"]):
        with pytest.raises(ValueError, match=r"window must be two numbers|description of the model is invalid"):
            TargetRecipe.of(facts | {"window": wrong})


def test_the_exported_model_predicts_files_with_the_runs_window(call, tmp_path):
    """Digits as DICOM files of 12 bits: train, export, and predict the same files with the window of the run."""
    digits = load_dataset("digits").train
    folder = tmp_path / "scans"
    for label in range(3):
        (folder / str(label)).mkdir(parents=True)
        for row in np.flatnonzero(digits.labels == label)[:20]:
            write_dicom(folder / str(label) / f"{row}.dcm", 16 * digits.images[row, 0].astype(np.uint16))
    run, model = tmp_path / "run", tmp_path / "model.safetensors"
    words = ["--method", "local", "--dataset", f"folder:{folder}", "--num-clients", "1", "--num-rounds", "2", "--quiet"]
    words += ["--set", "data.window=0/4080", "--set", "target=mlp", "--set", "data.partition=iid", "--output", run]
    code, _, problem = call("run", *words)
    assert code == 0, problem
    code, _, problem = call("export", run, "--client", "0", "-o", model)
    assert code == 0, problem
    table = tmp_path / "predictions.csv"
    code, _, problem = call("predict", model, "--data", folder, "-o", table)
    assert code == 0, problem
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert len(rows) == 61
    right = [row[0].strip('"').split("/")[0] == row[1].strip('"') for row in rows[1:]]
    assert np.mean(right) > 0.8
    facts = json.loads(Path(model).with_suffix(".json").read_text())
    assert facts["window"] == [0, 4080]


def test_nothing_but_pixels_is_read(tmp_path):
    """The image of a file holds no name of a patient."""
    file = write_dicom(tmp_path / "scan.dcm", VALUES.astype(np.uint16))
    assert pydicom.dcmread(file).PatientName == "Doe^Jane"
    assert "Doe" not in repr(open_dicom(file).info)
