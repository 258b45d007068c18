"""`hyperfl predict` writes one row for each sample, with the exported model's prediction, with and without labels."""

import csv
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call, small_settings, trained
from PIL import Image
from safetensors.torch import load_file, save_file

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.runs.run_directory import read_metrics, settings_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of HyperFL on scikit-learn's digits."""
    return trained(small_settings(output=str(tmp_path_factory.mktemp("runs") / "run")))


@pytest.fixture(scope="module")
def samples(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return client 3's test images [n, 1, 8, 8] with values of 0 to 255, and their labels."""
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings())
    chosen = data.test_indices(3)
    return data.dataset.test.images[chosen], data.dataset.test.labels[chosen]


@pytest.fixture
def model(run: Path, call: Call) -> Path:
    """Export client 3's personalized model and return its folder."""
    code, _, err = call("export", run, "--client", "3", "-o", "mine/model.safetensors")
    assert code == 0, err
    return Path("mine").absolute()


@pytest.fixture
def images(samples: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> Path:
    """Write the samples as files in folders named after their class, and return the folder above."""
    for number, (image, label) in enumerate(zip(*samples, strict=True)):
        path = tmp_path / "images" / str(label) / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(path)
    return tmp_path / "images"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_file_with_labels(run: Path, model: Path, samples: tuple[np.ndarray, np.ndarray], call: Call) -> None:
    """The accuracy is the client's recorded one; classes and confidences are those of the exported script."""
    pixels, labels = samples
    np.savez("mine.npz", images=pixels, labels=labels)
    code, out, err = call("predict", model, "--data", "npz:mine.npz", "-o", "out/predictions.csv")
    assert code == 0
    assert err.startswith("note: it is not known which of these samples the model was trained on")
    (row,) = [row for row in read_metrics(run) if (row["kind"], row["round"], row.get("client")) == ("client", 2, 3)]
    path = Path("out/predictions.csv").absolute()
    first, *table, last = out.splitlines()
    assert first.startswith(
        f"accuracy {100 * row['personalized_accuracy']:.2f} % of {len(labels)} samples (95 % interval "
    )
    assert f"; balanced accuracy {100 * row['personalized_balanced_accuracy']:.2f} %, macro F1 " in first
    assert first.endswith(f"; the most common class has {100 * row['majority_share']:.2f} %)")
    assert last == str(path)
    assert sum(f" {label} " in " ".join(line.split()) for label in set(labels) for line in table) >= len(set(labels))
    assert path.stat().st_mode & 0o777 == 0o600
    script = runpy.run_path(str(model / "use_model.py"))
    classes, confidences = script["predict"](script["load_model"](), torch.tensor(pixels / 255).float())
    for wrong, text in ((pixels[:, 0], "must have the shape"), (pixels, "pixels must be from 0 to 1")):
        with pytest.raises(ValueError, match=text):
            script["predict"](script["load_model"](), torch.tensor(wrong).float())
    found = rows(path)
    assert [(r["index"], r["class"], r["label"]) for r in found] == [
        (str(number), name, str(label)) for number, (name, label) in enumerate(zip(classes, labels, strict=True))
    ]
    np.testing.assert_allclose([float(r["confidence"]) for r in found], confidences, atol=2e-6)
    shares = np.array([[float(r[f"p({digit})"]) for digit in range(10)] for r in found])
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    assert [str(best) for best in shares.argmax(axis=1)] == classes


def test_a_run_is_asked_directly(run: Path, model: Path, images: Path, call: Call) -> None:
    """A run's model predicts the same as its export; folders named after classes are the labels.

    Only the run knows that none of these samples was trained on.
    """
    code, out, err = call("predict", run, "--client", "3", "--data", f"folder:{images}", "-o", "a.csv")
    assert code == 0, err
    assert "client 3's model of hyperfl" in err
    assert out.startswith("accuracy ")
    assert call("predict", model / "model.safetensors", "--data", images, "-o", "b.csv")[0] == 0
    found = rows(Path("a.csv"))
    assert {row.pop("part") for row in found} == {"other"}
    assert found == rows(Path("b.csv"))
    assert all(row["file"].startswith(f"{row['label']}/") for row in found)
    code, _, _ = call("predict", run, "--client", "3", "--state", "aggregate", "--data", images, "-o", "c.csv")
    assert code == 0
    assert Path("c.csv").read_text() != Path("b.csv").read_text()


@pytest.mark.parametrize("words", [("--client", "2"), ("--state", "aggregate"), ("--run", "x"), ("--data-root", ".")])
def test_an_exported_model_leaves_no_choice(words: tuple[str, str], model: Path, images: Path, call: Call) -> None:
    code, out, err = call("predict", model, *words, "--data", images)
    assert (code, out) == (2, "")
    assert f"is one exported model, so there is no choice; leave out {words[0]}" in err
    assert not Path("predictions.csv").exists()


def test_samples_without_labels_get_a_table_without_them(model: Path, images: Path, call: Call) -> None:
    """The table has no labels for a flat folder, a file without labels, or folders not named after classes."""
    flat = next(folder for folder in sorted(images.iterdir()))
    code, out, err = call("predict", model, "--data", flat, "-o", "flat.csv")
    assert (code, err, out) == (0, "", f"{Path('flat.csv').absolute()}\n")
    assert list(rows(Path("flat.csv"))[0])[:4] == ["file", "class", "confidence", "p(0)"]
    np.savez("bare.npz", images=np.asarray(Image.open(next(flat.iterdir())))[None])
    code, out, err = call("predict", model, "--data", "bare.npz", "-o", "bare.csv")
    assert (code, err, len(rows(Path("bare.csv")))) == (0, "", 1)
    flat.rename(images / "ward")
    code, out, err = call("predict", model, "--data", images, "-o", "wards.csv")
    assert code == 0
    assert "are not read as labels: ward is not a class" in err
    assert "label" not in rows(Path("wards.csv"))[0]


def test_images_are_converted_on_request_only(model: Path, tmp_path: Path, call: Call) -> None:
    """With --convert, a larger image is reduced; without it, an error says the size that is needed.

    Reducing a uniform grey gives the same grey with any filter, so the rows of both sizes are equal.
    """
    for name, side, mode in (("small", 8, "L"), ("large", 32, "RGB")):
        (tmp_path / name).mkdir()
        Image.new("L", (side, side), 128).convert(mode).save(tmp_path / name / "0.png")
    code, _, err = call("predict", model, "--data", tmp_path / "large", "-o", "large.csv")
    assert (code, "must have 8x8 pixels" in err, Path("large.csv").exists()) == (2, True, False)
    for name in ("small", "large"):
        assert call("predict", model, "--data", tmp_path / name, "--convert", "-o", f"{name}.csv")[0] == 0
    assert Path("large.csv").read_text() == Path("small.csv").read_text()
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(tmp_path / "large" / "1.png")
    code, _, err = call("predict", model, "--data", tmp_path / "large", "--convert", "-o", "deep.csv")
    assert (code, "the run was trained on images of 8 bits" in err) == (2, True)


def test_predict_refuses_bad_input(run: Path, model: Path, samples: tuple[np.ndarray, np.ndarray], call: Call) -> None:
    pixels, labels = samples
    np.savez("mine.npz", images=pixels, labels=labels + 5)
    np.savez("short.npz", images=pixels, labels=labels[1:])
    Path("used.csv").write_text("")
    cases = [
        ((model, "--data", "mine.npz"), f"labels must be 0 to 9, got {labels.max() + 5}"),
        ((model, "--data", "short.npz"), f"labels must be {len(labels)} integers, one per sample"),
        ((model, "--data", "gone"), "does not exist; give a folder of images, an .npz or a .csv file"),
        ((model, "--data", "mine.npz", "-o", "used.csv"), "used.csv exists; choose another --output"),
        ((model, "--data", "mine.npz", "--device", "tpu"), "device must be auto, cpu or cuda"),
        ((run, "--data", "mine.npz"), "has no model that is the same for all clients; name one with --client"),
        (("gone.safetensors", "--data", "mine.npz"), "gone.safetensors cannot be read"),
    ]
    for words, expected in cases:
        code, out, err = call("predict", *words)
        assert (code, out) == (2, ""), words
        assert expected in err
    assert not Path("predictions.csv").exists()


def test_a_file_that_is_no_model_is_refused(model: Path, samples: tuple[np.ndarray, np.ndarray], call: Call) -> None:
    """A truncated file, one of another program, and ones with missing values or an unknown network are refused."""
    np.savez("mine.npz", images=samples[0])
    tensors = load_file(model / "model.safetensors")
    facts = json.loads((model / "model.json").read_text())
    told = {name: json.dumps(facts[name]) for name in ("target", "input_shape", "mean", "std", "classes")}
    save_file(tensors, "bare.safetensors")
    save_file({name: value for name, value in tensors.items() if "bias" not in name}, "part.safetensors", told)
    save_file(tensors, "odd.safetensors", {**told, "target": json.dumps("no-network")})
    Path("torn.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-10])
    for name, expected in (
        ("bare", "is damaged or not a model of this project"), ("part", "does not hold the values of a cnn network"),
        ("odd", "unknown target network"), ("torn", "is damaged or not a model of this project"),
    ):  # fmt: skip
        code, _, err = call("predict", f"{name}.safetensors", "--data", "mine.npz")
        assert code == 2
        assert expected in err
    code, _, err = call("predict", ".", "--data", "mine.npz")
    assert (code, "holds several models (bare.safetensors, odd.safetensors, part.safetensors" in err) == (2, True)
