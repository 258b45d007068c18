"""Models on demand: a novel client receives the model h(g(D))."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from novel_owner import CLASSES, SIDE, N, in_order, normalised, owner, predictions
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.results.personalize import Personalized, personalize
from hyperfl_flwr.runs.checkpoint import Checkpoints


def checkpoint(run: Path) -> dict[str, Tensor]:
    return {key: torch.tensor(value) for key, value in last_checkpoint(run)[0].items()}


def layer(values: dict[str, Tensor], inputs: Tensor, name: str) -> Tensor:
    return inputs @ values[f"{name}.weight"].T + values[f"{name}.bias"]


def convolved(values: dict[str, Tensor], images: Tensor, first: str, second: str) -> Tensor:
    """Return LeNet's convolutional features, written out."""
    for name in (first, second):
        found = functional.conv2d(images, values[f"{name}.weight"], values[f"{name}.bias"])
        images = functional.max_pool2d(found.clamp(min=0), 2)
    return images.flatten(1)


def descriptor(values: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return g(D) with a standardised mean of unit vectors, written out."""
    features = convolved(values, images, "encoder/body.1", "encoder/body.4")
    phi = layer(values, features, "encoder/body.8").clamp(min=0)
    found = (phi / phi.norm(dim=1, keepdim=True)).mean(dim=0)
    found = (found - found.mean()) / (found.var(unbiased=False) + 1e-5).sqrt()
    found = layer(values, found, "encoder/head.1").clamp(min=0)
    found = layer(values, found, "encoder/head.3").clamp(min=0)
    return layer(values, found, "encoder/head.5")


SHAPES = {
    "extractor.conv1": (16, 3, 5, 5), "extractor.conv2": (32, 16, 5, 5), "extractor.fc1": (120, 32),
    "extractor.fc2": (84, 120), "classifier": (CLASSES, 84),
}  # fmt: skip


def generated(values: dict[str, Tensor], row: Tensor, prefix: str = "server/") -> dict[str, Tensor]:
    """Return the parameters h(row) of a LeNet by name, written out."""
    hidden = layer(values, layer(values, row, f"{prefix}body.0").clamp(min=0), f"{prefix}body.2")
    theta, begin, found = hidden @ values[f"{prefix}head_weight"] + values[f"{prefix}head_bias"], 0, {}
    for name, shape in SHAPES.items():
        for part, sizes in (("weight", shape), ("bias", shape[:1])):
            size = int(np.prod(sizes))
            found[f"{name}.{part}"] = theta[begin : begin + size].reshape(sizes)
            begin += size
    assert begin == len(theta)
    return found


def confidences(model: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the generated LeNet's softmax output, written out."""
    found = convolved(model, images, "extractor.conv1", "extractor.conv2")
    for name in ("extractor.fc1", "extractor.fc2"):
        found = layer(model, found, name).clamp(min=0)
    return layer(model, found, "classifier").softmax(dim=1)


def test_predictions_are_those_of_the_tuned_hypernetwork(
    serving_run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Model, descriptor and confidences equal h(g(D)) of the checkpoint's fine-tuned h, not of the one before."""
    done = personalize(serving_run, owner(photographs, tmp_path / "out"), {})
    values, images = checkpoint(serving_run), normalised(serving_run, in_order(pixels))
    row = descriptor(values, images)
    np.testing.assert_allclose(done.served.descriptor, row, rtol=1e-3, atol=1e-5)
    expected, stored = generated(values, row), load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-3, atol=1e-5)
    untuned = generated(values, row, "server/federation/")
    assert not torch.allclose(stored["classifier.weight"], untuned["classifier.weight"], rtol=1e-3, atol=1e-5)
    rows = predictions(tmp_path / "out")
    assert [line["file"] for line in rows] == sorted(f"ward-{n % 2}/private-{n}.png" for n in range(N))
    values_of, labels = confidences(expected, images).max(dim=1)
    assert [int(line["class"]) for line in rows] == labels.tolist()
    np.testing.assert_allclose([float(line["confidence"]) for line in rows], values_of, atol=1e-4)
    served = done.served
    assert (served.client, served.num_examples, served.bytes_up) == (0, N, 16)
    assert served.bytes_model == 4 * sum(value.numel() for value in expected.values())
    assert served.bytes_encoder == 4 * sum(v.numel() for key, v in values.items() if key.startswith("encoder/"))
    assert "one vector of 4 numbers (16 bytes), computed from 7 samples" in served.seen()


def test_a_file_gives_what_a_folder_gives(
    serving_run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    """The same images as an .npz file give the same results; notes say that labels are not used."""
    np.savez(tmp_path / "mine.npz", images=in_order(pixels), labels=np.zeros(N, int), ward=np.arange(N))
    of_folder = personalize(serving_run, owner(photographs, tmp_path / "a"), {})
    of_file = personalize(serving_run, owner(tmp_path / "mine.npz", tmp_path / "b"), {})
    np.testing.assert_array_equal(of_folder.served.descriptor, of_file.served.descriptor)
    assert [row["index"] for row in predictions(tmp_path / "b")] == [str(n) for n in range(N)]
    for column in ("class", "confidence"):
        assert [row[column] for row in predictions(tmp_path / "a")] == [
            row[column] for row in predictions(tmp_path / "b")
        ]
    assert any("labels, ward in mine.npz are not used" in note for note in of_file.notes)
    assert any("not read as labels" in note for note in of_folder.notes)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "a").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_the_model_is_used_without_this_package(
    serving_run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    """The exported script, run without any module of this project, gives the same predictions."""
    output = tmp_path / "out"
    personalize(serving_run, owner(photographs, output), {})
    np.save(tmp_path / "pixels.npy", in_order(pixels))
    program = (
        "import sys, json, numpy, torch\n"
        f"sys.path.insert(0, {str(output)!r})\n"
        "from use_model import load_model, predict, INPUT_SHAPE\n"
        f"pixels = torch.tensor(numpy.load({str(tmp_path / 'pixels.npy')!r}).transpose(0, 3, 1, 2) / 255).float()\n"
        "assert pixels.shape[1:] == INPUT_SHAPE\n"
        "print(json.dumps(predict(load_model(), pixels)))\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('hyperfl_flwr', 'clients', 'flwr')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    classes, found = json.loads(done.stdout)
    assert classes == [row["class"] for row in predictions(output)]
    np.testing.assert_allclose(found, [float(row["confidence"]) for row in predictions(output)], atol=2e-6)
    facts = json.loads((output / "model.json").read_text())
    with safe_open(output / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    for key in ("target", "input_shape", "mean", "std", "classes"):
        assert json.loads(metadata[key]) == facts[key]
    assert (facts["target"], facts["input_shape"], facts["classes"]) == ("lenet", [3, SIDE, SIDE], ["0", "1", "2"])


def test_feature_vectors_get_a_model_too(tmp_path: Path) -> None:
    """With `mlp-500`, whose dropout is off, the exported script gives the predictions in the table."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "run.npz", features=rng.normal(3, 2, (90, 6)), labels=np.arange(90) % CLASSES)
    np.savez(tmp_path / "mine.npz", features=rng.normal(3, 2, (8, 6)))
    settings = small_settings(
        method="it-pfl", target="mlp-500", dataset=f"npz:{tmp_path / 'run.npz'}", output=str(tmp_path / "run"),
        **{"data.partition": "iid", "data.train-samples": 12, "data.test-samples": 4, "it-pfl.pooling": "mean"},
    )  # fmt: skip
    output = tmp_path / "out"
    personalize(trained(settings), owner(tmp_path / "mine.npz", output, 1.0), {})
    script = runpy.run_path(str(output / "use_model.py"))
    with np.load(tmp_path / "mine.npz") as file:
        classes, found = script["predict"](script["load_model"](), torch.tensor(file["features"]).float())
    assert classes == [row["class"] for row in predictions(output)]
    np.testing.assert_allclose(found, [float(row["confidence"]) for row in predictions(output)], atol=2e-6)


def test_noise_moves_the_descriptor_and_one_sample_gets_none(
    serving_run: Path, photographs: Path, tmp_path: Path
) -> None:
    """With epsilon 1e12 the descriptor is the exact one; with 0.1 it is not."""
    exact = descriptors(personalize(serving_run, owner(photographs, tmp_path / "a"), {}))
    near = descriptors(personalize(serving_run, owner(photographs, tmp_path / "b", 1e12), {}))
    far = descriptors(personalize(serving_run, owner(photographs, tmp_path / "c", 0.1), {}))
    np.testing.assert_allclose(near, exact, atol=1e-4)
    assert np.abs(far - exact).max() > 1e-3


def descriptors(done: Personalized) -> np.ndarray:
    return done.served.descriptor


def test_an_unfinished_run_serves_from_its_last_checkpoint(
    federate: Federate, photographs: Path, serving_run: Path, tmp_path: Path
) -> None:
    """A note gives its progress; without a checkpoint of the second phase, no client is served."""
    settings = json.loads((serving_run / "manifest.json").read_text())["settings"]
    settings |= {"num-rounds": 3, "it-pfl.fine-tune-rounds": 2, "checkpoint-every": 1}
    own = federate("it-pfl", 1, **{key: value for key, value in settings.items() if key not in ("output", "method")})
    checkpoints = Checkpoints(own / "checkpoints")
    checkpoints.path(3).unlink()
    done = personalize(own, owner(photographs, tmp_path / "out"), {})
    assert any("round 2 of 3" in note and "1 of 2 rounds of fine-tuning" in note for note in done.notes)
    checkpoints.path(2).unlink()
    with pytest.raises(RunDirectoryError, match="after round 1, is of the first phase; resume the run to its end"):
        open_run(own)
    checkpoints.path(1).unlink()
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        open_run(own)
