"""`hyperfl personalize`: its output; bad input gets one clear error and leaves nothing behind."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from federations import Call, small_settings, trained
from PIL import Image


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs on scikit-learn's digits (8x8 grey): `mean`, `maximum`, `untuned`, `fedavg`, `begun`."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "mean": {"method": "it-pfl", "it-pfl.pooling": "mean"},
        "maximum": {"method": "it-pfl", "it-pfl.pooling": "mean-max"},
        "untuned": {"method": "it-pfl", "it-pfl.fine-tune-rounds": 0, "num-rounds": 1},
        "fedavg": {"method": "fedavg", "num-rounds": 1},
    }
    for name, changes in settings.items():
        trained(small_settings(target="mlp", output=str(folder / name), **changes))
    (folder / "begun").mkdir()
    shutil.copy(folder / "mean" / "manifest.json", folder / "begun")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images in `digits` (5 of 8x8, grey), `one`, `small` (7x8), `colour`, `none`; labelled.npz."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    shapes = {"digits": (5, 8, 8), "one": (1, 8, 8), "small": (2, 7, 8), "colour": (2, 8, 8, 3)}
    for name, shape in shapes.items():
        (folder / name).mkdir()
        for number, pixels in enumerate(rng.integers(0, 256, shape, dtype=np.uint8)):
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    (folder / "none").mkdir()
    (folder / "none" / "readme.txt").write_text("nothing to see")
    images = rng.integers(0, 256, (4, 8, 8), dtype=np.uint8)
    np.savez(folder / "labelled.npz", images=images, labels=[0, 1, 2, 3])
    return folder


def test_what_is_printed_and_written(runs: Path, data: Path, call: Call) -> None:
    """The vector has d = 2 numbers for 5 clients, of 4 bytes each; --verbose also prints the numbers."""
    code, out, err = call("personalize", runs / "mean", "--data", data / "digits", "--output", "mine", "--verbose")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith(
        "the server received one vector of 2 numbers (8 bytes), computed from 5 samples; it sent the encoder"
    )
    assert len([float(number) for number in lines[1].split()]) == 2
    assert lines[2:] == [
        str(Path.cwd() / "mine" / name) for name in ("predictions.csv", "model.safetensors", "use_model.py")
    ]
    assert "note: the descriptor has no noise" in err
    with Path(lines[2]).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [f"{number}.png" for number in range(5)]
    assert all(0.1 <= float(row["confidence"]) <= 1 for row in rows)


def test_noise_is_named_and_the_numbers_are_not_printed(runs: Path, data: Path, call: Call) -> None:
    words = ("--data", data / "labelled.npz", "--epsilon", "2", "--delta", "0.001")
    code, out, err = call("personalize", runs / "mean", *words)
    assert code == 0, err
    lines = out.splitlines()
    assert "computed from 4 samples" in lines[0]
    assert lines[1] == "its noise makes it (2, 0.001)-differentially private for each sample"
    assert Path(lines[2]).parent.parent == Path.cwd() / "runs"
    assert "note: labels in labelled.npz are not used" in err
    assert "no noise" not in err


def test_the_data_may_have_a_prefix(runs: Path, data: Path, call: Call) -> None:
    """As for `hyperfl predict`; a path that does not exist is named without it."""
    for number, named in enumerate((f"npz:{data / 'labelled.npz'}", f"folder:{data / 'digits'}")):
        code, _, err = call("personalize", runs / "mean", "--data", named, "--output", f"{number}")
        assert code == 0, err
    code, _, err = call("personalize", runs / "mean", "--data", f"csv:{data / 'gone.csv'}", "--output", "mine")
    assert (code, err.startswith(f"error: {data / 'gone.csv'}")) == (2, True)


def test_one_sample_is_noted_and_refused_with_noise(runs: Path, data: Path, call: Call) -> None:
    words = ("personalize", runs / "mean", "--data", data / "one", "--output")
    code, _, err = call(*words, "a")
    assert code == 0
    assert "note: there is only one sample" in err
    code, out, err = call(*words, "b", "--epsilon", "1", "--delta", "0.01")
    assert (code, out) == (2, "")
    assert "one holds one sample: noise that hides the only sample leaves no information" in err
    assert not Path("b").exists()


BAD = {
    "no images": ("mean", "none", (), ["none contains no images (.bmp, "]),
    "another size": ("mean", "small", (), ["must have 8x8 pixels", "2 of 2 do not, the first is 0.png, 7x8"]),
    "other channels": ("mean", "colour", (), ["1 channels of 8 bits (grey)", "3 channels (mode RGB)"]),
    "no data": ("mean", "gone", (), ["gone does not exist; give a folder of images, an .npz or a .csv file"]),
    "another method": ("fedavg", "digits", (), ["is a run of fedavg; only it-pfl makes models on demand"]),
    "no run": ("gone", "digits", (), ["gone does not exist; give the folder of a run"]),
    "no checkpoint": ("begun", "digits", (), ["begun has no checkpoint yet"]),
    "no fine-tuning": ("untuned", "digits", (), ["has not tuned its hypernetwork", "it-pfl.fine-tune-rounds above 0"]),
    "epsilon alone": ("mean", "digits", ("--epsilon", "1"), ["got epsilon without delta; give both or neither"]),
    "delta alone": ("mean", "digits", ("--delta", "0.1"), ["got delta without epsilon; give both or neither"]),
    "epsilon of 0": ("mean", "digits", ("--epsilon", "0", "--delta", "0.1"), ["epsilon must be above 0", "got 0"]),
    "delta of 1": ("mean", "digits", ("--epsilon", "1", "--delta", "1"), ["delta must be above 0 and below 1, got 1"]),
    "a maximum": (
        "maximum", "digits", ("--epsilon", "1", "--delta", "0.1"),
        ["epsilon cannot be used with this run", "uses a maximum", "it-pfl.pooling = mean"],
    ),
    "an unknown device": ("mean", "digits", ("--device", "tpu"), ["device must be auto, cpu or cuda, got 'tpu'"]),
}  # fmt: skip


@pytest.mark.parametrize(("run", "folder", "more", "parts"), BAD.values(), ids=BAD)
def test_personalize_refuses_bad_input(run, folder, more, parts, runs: Path, data: Path, call: Call) -> None:
    code, out, err = call("personalize", runs / run, "--data", data / folder, "--output", "mine", *more)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert all(part in err for part in parts), err
    assert not list(Path.cwd().iterdir())


def test_a_folder_with_a_model_of_another_command_is_refused(runs: Path, data: Path, call: Call) -> None:
    """An exported or joined model has the file names of a request that was interrupted, but no stored release."""
    assert call("export", runs / "mean", "--client", "1", "-o", "mine/model.safetensors")[0] == 0
    for names in (["model.json", "model.safetensors", "use_model.py"], ["model.safetensors", "privacy.jsonl"]):
        for path in Path("mine").iterdir():
            if path.name not in names:
                path.unlink()
        Path("mine", names[-1]).touch()
        before = {path.name: path.read_bytes() for path in Path("mine").iterdir()}
        code, out, err = call("personalize", runs / "mean", "--data", data / "digits", "--output", "mine")
        assert (code, out) == (2, "")
        assert "mine holds model.safetensors" in err
        assert "of another command, which would be replaced; choose another one" in err
        assert {path.name: path.read_bytes() for path in Path("mine").iterdir()} == before


def test_a_finished_folder_is_refused_and_a_begun_one_goes_on(runs: Path, data: Path, call: Call) -> None:
    """After an interruption, simulated by deleting the model, the command sends the same descriptor again."""
    words = ("--data", data / "digits", "--output", "mine", "--epsilon", "1", "--delta", "0.1", "--verbose")
    code, first, err = call("personalize", runs / "mean", *words)
    assert code == 0, err
    code, out, err = call("personalize", runs / "mean", *words)
    assert (code, out) == (2, "")
    assert "mine exists and is not empty; choose another one" in err
    for name in ("predictions.csv", "model.safetensors", "model.json", "use_model.py"):
        Path("mine", name).unlink()
    code, second, err = call("personalize", runs / "mean", *words)
    assert (code, second) == (0, first)


def test_a_run_is_not_started_with_settings_of_another_command(runs: Path, call: Call) -> None:
    code, _, err = call("run", "--set", f"personalize.run={runs / 'mean'}", "--dry-run")
    assert code == 2
    assert "use `hyperfl personalize`" in err
    code, _, err = call("run", "--set", "personalize.data=/x", "--dry-run")
    assert code == 2
    assert "personalize.output goes with personalize.data" in err
