"""A model on demand: what the novel client gets is h(g(D)), and nothing but one vector of d numbers leaves it."""

import csv
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Federate, last_checkpoint, small_settings, trained
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_to_proto
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from test_contract_privacy import leaks
from torch import Tensor
from torch.nn import functional

from clients.on_demand import Owner
from experiments.personalize import Personalized, personalize
from hyperfl_flwr.agreement import greet, handshake
from hyperfl_flwr.arrays import SharedArrays, pack_arrays, unpack_arrays
from hyperfl_flwr.checkpoint import Checkpoints
from hyperfl_flwr.client_app import app
from hyperfl_flwr.data.datasets import load_dataset
from hyperfl_flwr.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.in_process import InProcessGrid
from hyperfl_flwr.messages import ARRAYS, CLIENTS, OWN_ARRAYS, PROPERTIES, Report, record_of
from hyperfl_flwr.personalize import open_run
from hyperfl_flwr.queries import DESCRIBE, PERSONALIZE, RECIPE
from hyperfl_flwr.scalars import Scalar

N, SIDE, CLASSES = 7, 16, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of it-pfl with LeNets for noise in three classes, whose encoder takes means of unit vectors."""
    folder, rng = tmp_path_factory.mktemp("personalize"), np.random.default_rng(0)
    images = rng.integers(0, 256, (120, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(folder / "noise.npz", images=images, labels=np.arange(120) % CLASSES)
    settings = small_settings(
        method="it-pfl", target="lenet", dataset=f"npz:{folder / 'noise.npz'}", output=str(folder / "run"),
        **{"data.partition": "iid", "data.train-samples": 16, "data.test-samples": 4, "it-pfl.pooling": "mean"},
        **{"pfedhn.embedding-dim": 4},
    )  # fmt: skip
    return trained(settings)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """The novel client's images [N, H, W, 3]."""
    return np.random.default_rng(1).integers(0, 256, (N, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture
def photographs(tmp_path: Path, pixels: np.ndarray) -> Path:
    """A folder with them as private-0.png to private-6.png, in two folders."""
    folder = tmp_path / "photographs"
    for number, image in enumerate(pixels):
        path = folder / f"ward-{number % 2}" / f"private-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def owner(data: Path, output: Path, epsilon: float | None = None) -> Owner:
    return Owner(data=data, output=output, device=CPU, epsilon=epsilon, delta=None if epsilon is None else 0.01)


def in_order(pixels: np.ndarray) -> np.ndarray:
    """Return the images in the order of their files: ward-0 before ward-1."""
    return np.concatenate([pixels[::2], pixels[1::2]])


def normalised(run: Path, pixels: np.ndarray) -> Tensor:
    """Return images [n, 3, H, W] with the mean and standard deviation of the run's training images."""
    dataset = load_dataset(json.loads((run / "manifest.json").read_text())["settings"]["dataset"])
    train = dataset.train.images.astype(np.float64) / 255
    mean, std = train.mean(axis=(0, 2, 3)), train.std(axis=(0, 2, 3))
    return torch.tensor((pixels.transpose(0, 3, 1, 2) / 255 - mean[:, None, None]) / std[:, None, None]).float()


def checkpoint(run: Path) -> dict[str, Tensor]:
    return {key: torch.tensor(value) for key, value in last_checkpoint(run)[0].items()}


def layer(values: dict[str, Tensor], inputs: Tensor, name: str) -> Tensor:
    return inputs @ values[f"{name}.weight"].T + values[f"{name}.bias"]


def convolved(values: dict[str, Tensor], images: Tensor, first: str, second: str) -> Tensor:
    """LeNet's convolutions, written out."""
    for name in (first, second):
        found = functional.conv2d(images, values[f"{name}.weight"], values[f"{name}.bias"])
        images = functional.max_pool2d(found.clamp(min=0), 2)
    return images.flatten(1)


def descriptor(values: dict[str, Tensor], images: Tensor) -> Tensor:
    """g(D) with means of unit vectors, standardised, written out."""
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
    """h(row), written out: the parameters of a LeNet by name."""
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
    """The generated LeNet's softmax, written out."""
    found = convolved(model, images, "extractor.conv1", "extractor.conv2")
    for name in ("extractor.fc1", "extractor.fc2"):
        found = layer(model, found, name).clamp(min=0)
    return layer(model, found, "classifier").softmax(dim=1)


def predictions(output: Path) -> list[dict[str, str]]:
    with (output / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_tuned_hypernetwork(
    run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Model, descriptor and confidences equal h(g(D)) from the checkpoint, written out; not the un-tuned h's."""
    done = personalize(run, owner(photographs, tmp_path / "out"), {})
    values, images = checkpoint(run), normalised(run, in_order(pixels))
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
    assert "one vector of 4 numbers (16 bytes), made of 7 samples" in served.seen()


def test_a_file_gives_what_a_folder_gives(run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path) -> None:
    """The same images in an .npz with labels, which are told to be unused; rows are named by number."""
    np.savez(tmp_path / "mine.npz", images=in_order(pixels), labels=np.zeros(N, int), ward=np.arange(N))
    of_folder = personalize(run, owner(photographs, tmp_path / "a"), {})
    of_file = personalize(run, owner(tmp_path / "mine.npz", tmp_path / "b"), {})
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
    run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    """A script beside the model, in a Python that sees no module of this project, predicts the same."""
    output = tmp_path / "out"
    personalize(run, owner(photographs, output), {})
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
    """With `mlp-500`, whose dropout does nothing any more: the script beside the model predicts what the table says."""
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


class HearingGrid(InProcessGrid):
    """Keeps the bytes of every message and reply."""

    def __init__(
        self, node: dict[str, Scalar], run_config: dict[str, Scalar] | None = None, num_nodes: int = 1
    ) -> None:
        super().__init__(app, num_nodes, run_config or {}, node)
        self.down: list[bytes] = []
        self.up: list[bytes] = []

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        kept = list(messages)
        self.down += [recorddict_to_proto(message.content).SerializeToString() for message in kept]
        return super().push_messages(kept)

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        text = str(reply.error.reason).encode() if reply.has_error() else b""
        self.up.append(text or recorddict_to_proto(reply.content).SerializeToString())
        return reply


def node_of(data: Path, output: Path, **more: Scalar) -> dict[str, Scalar]:
    """Return the node config of a novel client with an owner."""
    return {"novel-data": str(data), "novel-output": str(output), "device": "cpu", **more}


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_nothing_but_the_descriptor_leaves(
    run: Path, photographs: Path, pixels: np.ndarray, tmp_path: Path, epsilon: float | None
) -> None:
    """No 16 bytes of the images as bytes or floats, or of what was pooled, are in any message; the model's are.

    Names of files, folders and the words of the predictions are not either.
    """
    noise: dict[str, Scalar] = {} if epsilon is None else {"novel-epsilon": epsilon, "novel-delta": 0.01}
    grid = HearingGrid(node_of(photographs, tmp_path / "out", **noise))
    (served,) = open_run(run).serve(grid)
    planar, floats = pixels.transpose(0, 3, 1, 2), normalised(run, pixels).numpy()
    with np.load(tmp_path / "out" / "release.npz") as release:
        pooled = release["vector"][release["vector"] != 0]  # windows of zeros are found in any encoder
    secrets = {
        "pixels": pixels.tobytes(), "planes": planar.tobytes(), "scaled": (planar / np.float32(255)).tobytes(),
        "normalised": floats.tobytes(), "pooled": pooled.tobytes(), "pooled32": pooled.astype(np.float32).tobytes(),
        "predictions": (tmp_path / "out" / "predictions.csv").read_bytes(),
    }  # fmt: skip
    messages = {f"message {number}": data for number, data in enumerate([*grid.down, *grid.up])}
    assert leaks(secrets, messages) == []
    assert not [word for word in (b"private", b"ward", b"photographs", b"confidence") for m in grid.up if word in m]
    sent = {"model": load_file(tmp_path / "out" / "model.safetensors")["classifier.weight"].numpy().tobytes()}
    assert leaks(sent, messages)
    assert any(served.descriptor.tobytes() in message for message in grid.up)
    assert max(map(len, grid.up)) < 1200  # 16 bytes of it the descriptor, the rest names and numbers of the report


def descriptor_message(run: Path, change: Callable[[SharedArrays], SharedArrays] = lambda arrays: arrays) -> Message:
    source = open_run(run)
    arrays = change({key: value.copy() for key, value in unpack_arrays(source.encoder).items()})
    content = RecordDict({ARRAYS: pack_arrays(arrays), RECIPE: ConfigRecord(source.recipe.values())})
    return Message(content, dst_node_id=1000, message_type=DESCRIBE)


def reply_to(grid: InProcessGrid, message: Message) -> RecordDict:
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error(), reply.error
    return reply.content


def described(content: RecordDict) -> bytes:
    return unpack_arrays(record_of(content, OWN_ARRAYS, ArrayRecord))["0/embedding/weight"].tobytes()


def failure(content: RecordDict) -> str:
    assert OWN_ARRAYS not in content
    return Report.from_record(record_of(content, CLIENTS, ConfigRecord)).failures[0].reason


def test_a_message_that_is_sent_again_gets_the_same_noise(run: Path, photographs: Path, tmp_path: Path) -> None:
    """Bit by bit, also from a new process of the node; another folder draws anew."""
    node = node_of(photographs, tmp_path / "out", **{"novel-epsilon": 1.0, "novel-delta": 0.01})
    first = described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(run)))
    assert described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(run))) == first
    other = node | {"novel-output": str(tmp_path / "other")}
    assert described(reply_to(InProcessGrid(app, 1, {}, other), descriptor_message(run))) != first


def test_a_second_release_needs_the_owners_will(run: Path, photographs: Path, tmp_path: Path) -> None:
    """Another encoder, other data, or another epsilon: refused while the output folder is the same."""
    node = node_of(photographs, tmp_path / "out", **{"simulated": True, "novel-epsilon": 1.0, "novel-delta": 0.01})
    first = described(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(run)))

    def changed(arrays: SharedArrays) -> SharedArrays:
        arrays["encoder/body.8.bias"][0] += 1
        return arrays

    assert "with other encoder" in failure(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(run, changed)))
    dearer = InProcessGrid(app, 1, {}, node | {"novel-epsilon": 2.0})
    assert "with other epsilon" in failure(reply_to(dearer, descriptor_message(run)))
    (photographs / "ward-0" / "private-0.png").unlink()
    assert "with other samples" in failure(reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(run)))
    elsewhere = InProcessGrid(app, 1, {}, node | {"novel-output": str(tmp_path / "b")})
    assert described(reply_to(elsewhere, descriptor_message(run))) != first


def test_the_server_cannot_name_data_of_a_node_with_an_owner(run: Path, photographs: Path, tmp_path: Path) -> None:
    """Settings of the run are read by simulated nodes only; an owner's data win over them everywhere."""
    asked: dict[str, Scalar] = small_settings(
        **{
            "personalize.run": str(run), "personalize.data": str(photographs),
            "personalize.output": str(tmp_path / "out"),
        }
    )  # fmt: skip
    grid = InProcessGrid(app, 1, asked, {})
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type="query.hello")])
    assert "novel" not in record_of(reply.content, PROPERTIES, ConfigRecord)
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type=PERSONALIZE)])
    assert "no novel client" in reply.error.reason
    missing = InProcessGrid(app, 1, asked, node_of(tmp_path / "gone", tmp_path / "out", simulated=True))
    assert "gone does not exist" in failure(reply_to(missing, descriptor_message(run)))
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_stays_on_a_node_with_an_owner(run: Path, tmp_path: Path) -> None:
    """The server learns the kind of an error, not the text with its paths."""
    grid = HearingGrid(node_of(tmp_path / "secret-place", tmp_path / "out"))
    assert failure(reply_to(grid, descriptor_message(run))) == "DataError, see the node's log"
    assert not [message for message in grid.up if b"secret-place" in message]


def test_messages_that_are_no_good_are_answered_with_a_failure(run: Path, photographs: Path, tmp_path: Path) -> None:
    grid = InProcessGrid(app, 1, {}, node_of(photographs, tmp_path / "out", simulated=True))
    recipe = open_run(run).recipe.values()
    for bad in (
        {"target": "../x"},
        {"std": [0.0] * 3},
        {"std": [1e-38] * 3},
        {"mean": [1e30] * 3},
        {"input_shape": [10**9, 1, 1]},
        {"pooling": "max"},
    ):
        message = descriptor_message(run)
        message.content[RECIPE] = ConfigRecord(recipe | bad)
        assert failure(reply_to(grid, message)).startswith("ValueError")
    fewer = descriptor_message(run, lambda arrays: {k: v for k, v in arrays.items() if "head.5" not in k})
    assert "arrays are missing: encoder/head.5.bias" in failure(reply_to(grid, fewer))
    broken = descriptor_message(run, lambda arrays: {k: v * np.float32("nan") for k, v in arrays.items()})
    assert "not finite" in failure(reply_to(grid, broken))
    assert not (tmp_path / "out" / "release.npz").exists()


def test_several_novel_nodes_are_served_at_once(run: Path, photographs: Path, tmp_path: Path) -> None:
    """Each node's folder is its own: here two nodes share one owner's data, and both get the same descriptor."""
    grid = HearingGrid(node_of(photographs, tmp_path / "out"), num_nodes=2)
    one, other = open_run(run).serve(grid)
    assert (one.client, other.client) == (0, 1)
    np.testing.assert_array_equal(one.descriptor, other.descriptor)


def test_a_novel_node_neither_trains_nor_evaluates(photographs: Path, tmp_path: Path) -> None:
    """Whatever the run's settings call the data: here a set that the node could load."""
    node = node_of(photographs, tmp_path / "out") | {"partition-id": 0, "num-partitions": 1}
    grid = InProcessGrid(app, 1, small_settings(method="fedavg"), node)
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type=kind)])
        assert "this node is a novel client" in reply.error.reason


def test_a_node_that_names_another_ones_client_is_refused(run: Path, photographs: Path, tmp_path: Path) -> None:
    """It would be sent the other one's model."""
    grid = HearingGrid(node_of(photographs, tmp_path / "out"), num_nodes=2)
    answer = grid.answer

    def lying(message: Message) -> Message:
        reply = answer(message)
        if message.metadata.message_type == "query.hello":
            reply.content[PROPERTIES]["clients"] = [0, 1]  # type: ignore[index]
        return reply

    grid.answer = lying  # type: ignore[method-assign]
    with pytest.raises(RunFailedError, match=r"the novel nodes \[0, 1\] name other clients than themselves"):
        open_run(run).serve(grid)


class MixedGrid(InProcessGrid):
    """One ordinary node of a federation and two novel ones."""

    def __init__(self, settings: dict[str, Scalar], photographs: Path, output: Path) -> None:
        super().__init__(app, 3, settings, {"simulated": True})
        ordinary, *novel = self._contexts.values()
        ordinary.node_config["num-partitions"] = 1
        for number, context in enumerate(novel):
            folder = node_of(photographs, output / f"node-{number}")
            context.node_config = {"partition-id": number, "num-partitions": 2, **folder}


def test_novel_nodes_and_others_are_left_alone_by_each_others_servers(
    run: Path, photographs: Path, tmp_path: Path
) -> None:
    """The federation's handshake finds its one node with all clients, the other server the two novel ones."""
    grid = MixedGrid(json.loads((run / "manifest.json").read_text())["settings"], photographs, tmp_path)
    (node,) = handshake(grid, 5, timeout=5.0).nodes
    assert node.clients == [0, 1, 2, 3, 4]
    assert [served.client for served in open_run(run).serve(grid)] == [0, 1]
    assert predictions(tmp_path / "node-0") == predictions(tmp_path / "node-1")
    lonely = InProcessGrid(app, 1, dict(grid._contexts[1000].run_config), {"simulated": True})
    with pytest.raises(RunFailedError, match="only 0 of an unknown number of novel nodes answered"):
        greet(lonely, 0.1, novel=True)


def test_noise_moves_the_descriptor_and_one_sample_gets_none(run: Path, photographs: Path, tmp_path: Path) -> None:
    """With epsilon 1e12 the descriptor is the exact one; with 0.1 it is not."""
    exact = descriptors(personalize(run, owner(photographs, tmp_path / "a"), {}))
    near = descriptors(personalize(run, owner(photographs, tmp_path / "b", 1e12), {}))
    far = descriptors(personalize(run, owner(photographs, tmp_path / "c", 0.1), {}))
    np.testing.assert_allclose(near, exact, atol=1e-4)
    assert np.abs(far - exact).max() > 1e-3


def descriptors(done: Personalized) -> np.ndarray:
    return done.served.descriptor


def test_an_unfinished_run_serves_from_its_last_checkpoint(
    federate: Federate, photographs: Path, run: Path, tmp_path: Path
) -> None:
    """A note says how far it has come; without a checkpoint of the second phase it serves nobody."""
    settings = json.loads((run / "manifest.json").read_text())["settings"]
    settings |= {"num-rounds": 3, "it-pfl.fine-tune-rounds": 2, "checkpoint-every": 1}
    own = federate("it-pfl", 1, **{key: value for key, value in settings.items() if key not in ("output", "method")})
    checkpoints = Checkpoints(own / "checkpoints")
    checkpoints.path(3).unlink()
    done = personalize(own, owner(photographs, tmp_path / "out"), {})
    assert any("round 2 of 3 only: 1 of 2 rounds of fine-tuning" in note for note in done.notes)
    checkpoints.path(2).unlink()
    with pytest.raises(RunDirectoryError, match="after round 1, is of the first phase; resume the run to its end"):
        open_run(own)
    checkpoints.path(1).unlink()
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        open_run(own)
