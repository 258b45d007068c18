"""`hyperfl features`: published splits and folders of images become an `npz:` data set of feature vectors."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call
from natural_images import CLASSES, USERS, Natural, image_id, make_natural, picture, write_csv
from PIL import Image
from torchvision.models import mobilenet_v2
from torchvision.transforms._presets import ImageClassification

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.data.features import parts
from hyperfl_flwr.data.features.images import prepared
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.models.pretrained import features as networks


class Stub:
    """Takes MobileNetV2's place where its values do not matter; counts the images that it is given."""

    device = torch.device("cpu")

    def __init__(self, sha256: str = "0" * 64, stops_after: int = 1000) -> None:
        self.sha256, self.stops_after, self.seen = sha256, stops_after, 0

    def __call__(self, images: np.ndarray) -> np.ndarray:
        if self.seen >= self.stops_after:
            raise KeyboardInterrupt
        self.seen += len(images)
        return images[:, :, ::8, ::8].reshape(len(images), -1)[:, :1280].astype(np.float32) / 255


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> Natural:
    return make_natural(tmp_path_factory.mktemp("natural"))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Replace the network by a `Stub`, and make parts of 8 images."""
    stub = Stub()
    monkeypatch.setattr(networks, "load_mobilenet", lambda weights, device: stub)
    monkeypatch.setattr(parts, "PART", 8)
    return stub


def arguments(natural: Natural, output: Path, *, layout: str = "authors", images: str = "anywhere") -> list[str]:
    split = {"authors": ["federated_train.csv"], "tff": ["tff.csv", "--column", "geo_300"]}[layout]
    split[0] = str(natural.root / split[0])
    test = ["--test", str(natural.root / "test.csv"), "--images", str(natural.root / images)]
    return ["features", "--split", *split, *test, "--output", str(output), "--batch", "5"]


def content(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return dict(archive)


@pytest.mark.parametrize(
    ("layout", "images"), [("authors", "anywhere"), ("authors", "nested"), ("tff", "anywhere"), ("tff", "nested")]
)
def test_both_layouts_of_splits_and_of_images(
    call: Call, network: Stub, natural: Natural, tmp_path: Path, layout: str, images: str
) -> None:
    """All give the same data: users by name, also one with a comma and a slash, without test users."""
    path = tmp_path / "x.npz"
    code, out, err = call(*arguments(natural, path, layout=layout, images=images))
    assert (code, out) == (0, f"36 training images of 12 users, 4 test images\n{path}.json\n{path}\n")
    arrays = content(path)
    assert list(arrays) == ["features", "labels", "clients", "test_features", "test_labels"]
    assert arrays["clients"].tolist() == [user for user, _, _ in natural.usable]
    assert arrays["labels"].tolist() == [label for _, _, label in natural.usable]
    assert arrays["test_labels"].tolist() == [label for _, label in natural.test]
    assert (arrays["features"].dtype, arrays["features"].shape) == (np.float32, (36, 1280))
    folder = natural.root / "nested"
    for name, ids in (
        ("features", [row[1] for row in natural.usable]),
        ("test_features", [i for i, _ in natural.test]),
    ):
        whole = np.stack([prepared(folder / i[0] / i[1] / i[2] / f"{i}.jpg") for i in ids])
        np.testing.assert_array_equal(arrays[name], Stub()(whole))
    dataset = load_dataset(f"npz:{path}")
    assert dataset.client_ids == tuple(sorted(USERS))
    report = json.loads((tmp_path / "x.npz.json").read_text())
    assert report["missing"] == {"count": 1, "images": [natural.missing]}
    assert (report["broken"]["count"], report["broken"]["images"]) == (1, [natural.broken])
    assert "must be an image, but reading it failed" in report["broken"]["reasons"][0]
    assert report["rows_without_user"] == (layout == "tff")
    assert (report["users"], report["smallest_user_images"], report["classes"]) == (12, 3, CLASSES)
    assert set(report["inputs"]) >= {"split", "test", "column", "weights", "network", "batch", "versions", "images"}
    assert f"1 of 42 images are missing and left out, the first is {natural.missing}" in err
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_interrupted_call_is_continued_and_makes_the_same_bits(
    call: Call, network: Stub, natural: Natural, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "x.npz"
    assert call(*arguments(natural, whole))[0] == 0
    network.seen, network.stops_after = 0, 12
    assert call(*arguments(natural, path))[0] == 130
    done = network.seen
    assert done == 13  # a part of 8 images, and a batch of the second one, which counts for nothing
    assert not path.exists()
    network.stops_after = 1000
    assert call(*arguments(natural, path))[0] == 0
    assert network.seen == done + 40 - 8
    assert path.read_bytes() == whole.read_bytes()


def test_unfinished_parts_of_other_inputs_are_refused(
    call: Call, network: Stub, natural: Natural, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npz"
    network.stops_after = 10
    assert call(*arguments(natural, path))[0] == 130
    code, _, err = call(*arguments(natural, path, layout="tff"))
    assert code == 2
    assert re.search(r"x\.npz\.parts has features that .* from other inputs: column, split; repeat that call", err)
    monkeypatch.setattr(networks, "load_mobilenet", lambda weights, device: Stub("1" * 64))
    assert "from other inputs: weights; " in call(*arguments(natural, path))[2]
    shutil.rmtree(tmp_path / "x.npz.parts")
    assert call(*arguments(natural, path))[0] == 0


def test_a_damaged_part_is_computed_again(call: Call, network: Stub, natural: Natural, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    assert call(*arguments(natural, path))[0] == 0
    before = path.read_bytes()
    path.unlink()
    damaged = tmp_path / "x.npz.parts" / "part-000002.npz"
    damaged.write_bytes(damaged.read_bytes()[:-50])
    network.seen = 0
    assert call(*arguments(natural, path))[0] == 0
    assert (network.seen, path.read_bytes()) == (8, before)


def test_images_that_are_added_later(call: Call, network: Stub, tmp_path: Path) -> None:
    """Parts are kept while images are missing or broken; a further call computes only the parts of new files."""
    natural = make_natural(tmp_path)
    path = tmp_path / "x.npz"
    assert call(*arguments(natural, path))[0] == 0
    code, _, err = call(*arguments(natural, path))
    assert (code, err) == (2, f"error: {path} exists; choose another --output, or delete it\n")
    path.unlink()
    for number, image in enumerate((natural.missing, natural.broken)):
        picture(tmp_path / "anywhere" / f"{image}.jpg", 3, number)
    (tmp_path / "anywhere" / "Plantae" / "species 3" / f"{natural.broken}.jpg").unlink()
    network.seen = 0
    code, out, err = call(*arguments(natural, path))
    assert (code, network.seen, err.strip()) == (0, 8, "")
    assert out.startswith("38 training images of 12 users")
    assert not (tmp_path / "x.npz.parts").exists()
    assert json.loads((tmp_path / "x.npz.json").read_text())["missing"] == {"count": 0, "images": []}


def test_missing_and_broken_images_can_be_an_error(call: Call, network: Stub, tmp_path: Path) -> None:
    natural = make_natural(tmp_path)
    words = [*arguments(natural, tmp_path / "x.npz"), "--fail-on-missing"]
    code, _, err = call(*words)
    assert (code, network.seen) == (2, 0)  # before anything is computed
    assert f"1 of 42 images are missing, the first is {natural.missing}; add or replace them" in err
    picture(tmp_path / "anywhere" / f"{natural.missing}.jpg", 3, 0)
    code, _, err = call(*words)
    assert f"1 of 42 images are broken, the first is {natural.broken}; add or replace them" in err
    assert (code, (tmp_path / "x.npz").exists()) == (2, False)


def test_users_with_few_images_are_left_out(call: Call, network: Stub, natural: Natural, tmp_path: Path) -> None:
    """The user with a missing image counts its three others."""
    split = tmp_path / "split.csv"
    rows = [row for row in natural.rows if row[0] in USERS[:3]] + [("single", image_id(5), 1)]
    write_csv(split, [("user_id", "image_id", "class"), *rows])
    words = ["features", "--split", split, "--images", natural.root / "nested", "--output", tmp_path / "x.npz"]
    code, out, err = call(*words, "--min-images", "3")
    assert (code, out.splitlines()[0]) == (0, "9 training images of 3 users, 0 test images")
    assert "1 users have too few usable images and are left out" in err
    assert "test_features" not in content(tmp_path / "x.npz")
    (tmp_path / "x.npz").unlink()
    code, _, err = call(*words, "--min-images", "4")
    assert (code, "none of the 12 training images can be used" in err) == (2, True)
    assert "belong to users with fewer than 4" in err


def test_an_image_of_several_files_and_of_both_parts(call: Call, network: Stub, tmp_path: Path) -> None:
    natural = make_natural(tmp_path)
    picture(tmp_path / "anywhere" / "a" / f"{natural.rows[0][1]}.JPG", 0, 0)
    write_csv(tmp_path / "test.csv", [("image_id", "class"), (natural.rows[0][1], 0)])
    code, _, err = call(*arguments(natural, tmp_path / "x.npz"))
    assert code == 0
    assert "1 images have several files of their name; the first in alphabetical order is used" in err
    assert "1 images are in the training data and in the test data" in err


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("clients", [("client-0", "client-1"), ()])
def test_folders_of_images(call: Call, network: Stub, tmp_path: Path, divided: bool, clients: tuple[str, ...]) -> None:
    """Class folders, as `folder:` takes them; those of several clients, as `hyperfl image-folders` writes them."""
    counts = {"train": 2, "test": 1} if divided else {".": 3}
    root, number = tmp_path / "images", 0
    for client in clients or (".",):
        for part, count in counts.items():
            for label, name in enumerate(("ant", "bee")):
                for _ in range(count):
                    picture(root / client / part / name / f"{number}.jpeg", label, number)
                    number += 1
    code, _, err = call("features", "--images", root, "--output", tmp_path / "x.npz")
    assert (code, err.strip()) == (0, "")
    arrays = content(tmp_path / "x.npz")
    names = ["features", "labels", *(["clients"] if clients else [])]
    assert list(arrays) == names + [f"test_{name}" for name in names if divided]
    assert np.bincount(arrays["labels"]).tolist() == [len(clients or ".") * counts.get("train", 3)] * 2
    report = json.loads((tmp_path / "x.npz.json").read_text())
    assert report["classes"] == ["ant", "bee"]
    dataset = load_dataset(f"npz:{tmp_path / 'x.npz'}")
    assert dataset.client_ids == (clients or None)


def test_clients_are_divided_in_one_way(call: Call, network: Stub, tmp_path: Path) -> None:
    picture(tmp_path / "images" / "client-0" / "ant" / "0.jpg", 0, 0)
    for part in ("train", "test"):
        picture(tmp_path / "images" / "client-1" / part / "ant" / "0.jpg", 0, 0)
    code, _, err = call("features", "--images", tmp_path / "images", "--output", tmp_path / "x.npz")
    assert (code, "train and test for all clients, or for none, but client-1 differs" in err) == (2, True)


BAD_SPLITS = {
    "no column": ("user,image_id,class\n", "lacks user_id; it has user, image_id, class; choose the column"),
    "no rows": ("user_id,image_id,class\n", "must have images with a user in the column user_id, but has none"),
    "only NA": ("user_id,image_id,class\nNA,a,1\n", "must have images with a user in the column user_id"),
    "short row": ("user_id,image_id,class\nann,abc\n", "line 2: image_id, class, user_id must be given"),
    "name of a class": ("user_id,image_id,class\nann,abc,cat\n", "must be a number from 0 to 999999; got 'abc', 'cat'"),
    "large class": ("user_id,image_id,class\nann,abc,1000000\n", "line 2: image_id, class, user_id must be given"),
    "20 digits": (f"user_id,image_id,class\nann,abc,{10**19}\n", "must be a number from 0 to 999999; got 'abc', '100"),
    "5,000 digits": (f"user_id,image_id,class\nann,abc,{'9' * 5000}\n", f"got 'abc', '{'9' * 50}...', 'ann'; correct"),
    "no text": (b"user_id,image_id,class\n\xff\xfe,abc,1\n", "must be a CSV file in UTF-8"),
    "missing": (None, "cannot be read: No such file or directory; check the path"),
}


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_bad_splits_are_refused(call: Call, natural: Natural, tmp_path: Path, name: str) -> None:
    text, problem = BAD_SPLITS[name]
    split = tmp_path / "split.csv"
    if text is not None:
        split.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = call("features", "--split", split, "--images", natural.root, "--output", tmp_path / "x.npz")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {split}")
    assert problem in err


def test_bad_options_are_refused(call: Call, network: Stub, natural: Natural, tmp_path: Path) -> None:
    split = natural.root / "federated_train.csv"
    for words, problem in (
        (["--images", natural.root, "-o", "x.npy"], "must be a file that ends with .npz, got x.npy"),
        (["--images", natural.root, "-o", "no/x.npz"], "must lie in an existing folder"),
        (["--images", natural.root, "-o", "x.npz", "--column", "geo_300"], "belong to --split"),
        (["--images", tmp_path / "no", "-o", "x.npz"], "must be an existing folder of images; check --images"),
        (["--images", tmp_path / "no", "--split", split, "-o", "x.npz"], "must be an existing folder of images"),
        (
            ["--images", tmp_path, "--split", split, "-o", "x.npz"],
            f"has none of the 38 listed images; the image '{natural.rows[0][1]}' must be the file",
        ),
    ):
        code, out, err = call("features", *words)
        assert (code, out, err.strip().count("\n")) == (2, "", 0)
        assert problem in err


def test_wrong_weights_are_refused(call: Call, natural: Natural, tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pth")
    for file, problem in (
        ("other.pth", "for torchvision/mobilenet_v2 it lacks features.0.0.weight"),
        ("no", "No such"),
    ):
        code, _, err = call(*arguments(natural, tmp_path / "x.npz"), "--weights", tmp_path / file)
        assert (code, problem in err) == (2, True)
        assert f"--weights = {tmp_path / file}, for torchvision/mobilenet_v2: " in err
        assert not (tmp_path / "x.npz.parts").exists()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random weights of MobileNetV2 whose BatchNorm layers have the statistics of some noise."""
    torch.manual_seed(0)
    network, path = mobilenet_v2(), tmp_path_factory.mktemp("weights") / "mobilenet.pth"
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = None
        network.train()(torch.randn(4, 3, 96, 96))
    torch.save(network.state_dict(), path)
    return path


def test_features_are_torchvisions(weights: Path, natural: Natural) -> None:
    """Preparation as in torchvision's own transforms, and the mean over the positions of MobileNetV2's last maps."""
    network = networks.load_mobilenet(str(weights), torch.device("cpu"))
    whole = mobilenet_v2().eval()
    whole.load_state_dict(torch.load(weights, weights_only=True))
    transforms = ImageClassification(crop_size=224, resize_size=256)
    chosen = [
        natural.root / "nested" / i[0] / i[1] / i[2] / f"{i}.jpg" for _, i, _ in (natural.rows[0], natural.rows[35])
    ]
    ours = network(np.stack([prepared(path) for path in chosen]))
    with torch.no_grad():
        images = torch.stack([transforms(Image.open(path)) for path in chosen])
        theirs = whole.features(images).mean((2, 3)).numpy()
    assert ours.shape == (2, 1280)
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_it_pfl_trains_on_the_features_of_users(
    call: Call, federate: Federate, weights: Path, natural: Natural, tmp_path: Path
) -> None:
    """Ten users train, two are new; each is tested on images of its own that are held back."""
    path = tmp_path / "x.npz"
    assert call(*arguments(natural, path, layout="tff"), "--weights", weights)[0] == 0
    run = federate(
        "it-pfl", dataset=f"npz:{path}", num_clients=10, num_rounds=2, target="mlp-500",
        **{"novel.clients": 2, "data.partition": "natural", "data.validation-fraction": 0.15,
           "data.train-samples": "auto", "data.test-samples": "auto"},
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["novel_descriptor"] <= 1
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "completed"
