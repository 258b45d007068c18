"""The command line without Flower: bad input gets one clear error, exit code 2, and leaves nothing behind."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from federations import Call

from hyperfl_flwr import __version__
from hyperfl_flwr.cli.groups import SUBJECTS
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.launch.settings import without_effect
from hyperfl_flwr.methods import METHODS


def write_npz(path: Path, **changes: object) -> None:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), "labels": np.arange(40) % 4} | changes
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})


BAD = {
    "an unknown method": (["--method", "hyperfll"], ["method", "did you mean hyperfl?"]),
    "an unknown data set": (["--dataset", "mnst"], ["dataset", "did you mean mnist?"]),
    "an unknown key": (["--set", "num-cliens=3"], ["num-cliens is unknown", "did you mean num-clients?"]),
    "another program's name of a setting": (["--set", "lr=0.1"], ["lr is unknown", "did you mean learning-rate?"]),
    "a part of a key": (["--set", "mu=1"], ["mu is unknown", "did you mean fedprox.mu or moon.mu?"]),
    "a method as papers write it": (["--method", "HyperFL"], ["method", "did you mean hyperfl?"]),
    "a data set as torchvision writes it": (["--dataset", "FashionMNIST"], ["did you mean fashion-mnist?"]),
    "a folder without its prefix": (["--dataset", "./images"], ["for data of your own write folder:./images"]),
    "a file without its prefix": (["--dataset", "x.npz"], ["for data of your own write npz:x.npz"]),
    "an unknown network": (["--model", "cn"], ["resnet18", "lpm:timm/NAME or a function of yours as package.module"]),
    "the file of a network": (["--model", "nets/my.py"], ["package.module:factory", "write my:build"]),
    "an unknown key below a known one": (["--set", "seed.x=3"], ["seed.x is unknown"]),
    "a misspelt section": (["--set", "fedproxx.mu=0.1"], ["fedproxx.mu is unknown; did you mean fedprox.mu?"]),
    "a setting of an own method": (["--set", "xyz.qqq=1"], ["xyz.qqq is unknown", "with method = module:NAME"]),
    "a wrong type": (["--set", "num-rounds='many'"], ["num-rounds must be a valid integer", "got 'many'"]),
    "a value out of range": (["--set", "momentum=1.5"], ["momentum must be less than 1", "got 1.5"]),
    "a unit of another section": (["--set", "privacy.unit=record"], ["none or client", "is that of dp.epsilon"]),
    "a negative rate": (["--set", "learning-rate=-1"], ["learning-rate", "greater than 0", "got -1"]),
    "several problems": (["--method", "x", "--seed", "-1", "--set", "device=a"], ["3 settings", "seed", "device"]),
    "more clients than samples": (["--num-clients", "5000"], ["at most the number of training samples 1347", "5000"]),
    "a file that is not there": (["--dataset", "npz:gone.npz"], ["gone.npz", "must be an existing .npz file"]),
    "no value": (["--set", "seed"], ["--set must be KEY=VALUE, got 'seed'"]),
    "a configuration that is not there": (["--config", "gone.toml"], ["gone.toml", "cannot be read"]),
    "no run to resume": (["--resume", "gone"], ["gone does not exist; give the folder of a run"]),
    "an index of a GPU": (["--set", "device=cuda:1"], ["CUDA_VISIBLE_DEVICES=1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_run_refuses_bad_input(name: str, call: Call) -> None:
    words, expected = BAD[name]
    code, out, err = call("run", *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for text in expected:
        assert text in err
    assert not list(Path.cwd().iterdir())


def test_the_help_lists_every_command_by_subject(call: Call) -> None:
    """None is left for the last heading, and no text is cut."""
    code, out, _ = call("--help")
    assert code == 0
    for subject, names in SUBJECTS.items():
        (section,) = re.findall(rf"^{subject}:\n((?:  .*\n)*)", f"{out}\n", re.MULTILINE)
        assert tuple(re.findall(r"^  (\S+)", section, re.MULTILINE)) == names
    assert "Other commands" not in out
    assert "..." not in out.partition("\n\n")[2]  # in the usage it stands for more arguments


@pytest.mark.parametrize("words", [["deploy"], ["audit"], ["deploy", "init"]])
def test_the_help_of_a_command_is_plain_and_whole(words: list[str], call: Call) -> None:
    """Brackets are not escaped, as typer does it for rich, and lists of commands are not cut."""
    code, out, _ = call(*words, "--help")
    assert code == 0
    assert "\\" not in out
    assert "..." not in out.partition("\n\n")[2]


def test_an_unknown_command_has_one_suggestion(call: Call) -> None:
    code, _, err = call("runn")
    assert code == 2
    assert err.count("Did you mean") == 1


@pytest.mark.parametrize(
    ("option", "keys"),
    [
        ("--learning-rate", ["learning-rate"]),
        ("--lr", ["learning-rate"]),
        ("--local_epochs", ["local-epochs"]),
        ("--alpha", ["data.dirichlet-alpha", "apfl.alpha", "feddyn.alpha"]),
    ],
)
def test_an_option_with_the_name_of_a_setting_is_refused_with_the_one_that_sets_it(
    option: str, keys: list[str], call: Call
) -> None:
    code, out, err = call("run", option, "0.1")
    assert (code, out) == (2, "")
    wanted = " or ".join(f"--set {key}=VALUE" for key in keys)
    assert err.splitlines()[-1] == f"Error: No such option: {option}. It is a setting: {wanted}"


def test_an_option_that_is_no_settings_has_the_suggestions_of_the_command(call: Call) -> None:
    """A command without `--set` names no setting, either."""
    _, _, err = call("run", "--datset", "digits")
    assert "It is a setting" not in err
    assert "--dataset" in err.splitlines()[-1]
    _, _, err = call("methods", "--learning-rate", "0.1")
    assert "It is a setting" not in err


def test_a_folder_of_runs_is_refused_with_their_names(tmp_path: Path, call: Call) -> None:
    for name in "abcde":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "manifest.json").write_text("{}")
    code, _, err = call("report", tmp_path / "runs")
    assert code == 2
    named = ", ".join(str(tmp_path / "runs" / name) for name in "abc")
    assert f"runs is not a run's folder: it holds those of runs; give one of them: {named} and 2 more\n" in err
    (tmp_path / "empty").mkdir()
    assert "it has no manifest.json; give the folder of a run" in call("report", tmp_path / "empty")[2]


def test_the_help_of_run_has_the_defaults_of_the_settings(call: Call) -> None:
    """Those of which the option itself has none, so that a file of settings can have others."""
    text = " ".join(call("run", "--help")[1].split())
    defaults = default_settings()
    for option, key in (
        ("--method", "method"), ("--dataset", "dataset"), ("--model", "target"), ("--num-clients", "num-clients"),
        ("--num-rounds", "num-rounds"), ("--seed", "seed"),
    ):  # fmt: skip
        (described,) = re.findall(rf" {option} [A-Z]+ (.*?) --[a-z]", text)
        assert described.endswith(f"default: {defaults[key]}."), option


def test_the_version_is_printed_alone(call: Call) -> None:
    assert call("--version") == (0, f"{__version__}\n", "")


def test_settings_of_other_methods_are_named() -> None:
    """Not those of a method that shares the section, nor settings that all methods have."""
    changes: dict[str, Scalar] = {"fedrep.clip-norm": 1.0, "momentum": 0.1, "hyperfl.hidden-width": 4, "data.seed": 1}
    (warning,) = without_effect(changes, "hyperfl")
    assert warning.startswith("fedrep.clip-norm has no effect on hyperfl; it is a setting of ")
    assert "fedrep" in warning
    assert without_effect({"hyperfl.hidden-width": 4}, "hyperfl-frozen") == []


def test_images_that_the_network_cannot_take(call: Call, tmp_path: Path) -> None:
    write_npz(tmp_path / "small.npz", images=np.zeros((40, 6, 6), np.uint8))
    code, _, err = call("run", "--dataset", f"npz:{tmp_path / 'small.npz'}", "--num-clients", "2")
    assert code == 2
    assert "at least 8x8 pixels, got 6x6" in err


def test_a_relative_file_is_taken_from_the_working_directory_or_else_from_the_data_root(
    call: Call, tmp_path: Path
) -> None:
    """The size of the images in the error shows which file was read."""
    words = ("run", "--dataset", "npz:small.npz", "--num-clients", "2", "--data-root", tmp_path)
    code, _, err = call(*words)
    assert code == 2
    assert f"{tmp_path / 'small.npz'}: must be an existing .npz file" in err
    write_npz(tmp_path / "small.npz", images=np.zeros((40, 6, 6), np.uint8))
    assert "got 6x6" in call(*words)[2]
    write_npz(Path("small.npz"), images=np.zeros((40, 5, 5), np.uint8))
    assert "got 5x5" in call(*words)[2]


def test_a_new_runs_file_is_not_looked_for_elsewhere(call: Call, tmp_path: Path) -> None:
    """Only the data of a run that has begun can have moved; a wrong path must not lead to other data."""
    write_npz(tmp_path / "small.npz", images=np.zeros((40, 6, 6), np.uint8))
    code, _, err = call("run", "--dataset", "npz:/nowhere/small.npz", "--num-clients", "2", "--data-root", tmp_path)
    assert code == 2
    assert "/nowhere/small.npz: must be an existing .npz file" in err


IMPOSSIBLE = {
    "a run": ("run", "--output", "/proc/run"),
    "a run below a file": ("run", "--output", "/dev/null/run"),
    "a deployment": ("deploy", "init", "/dev/null/fl", "--nodes", "1"),
    "folders of images": ("image-folders", "/proc/images"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_place_where_nothing_can_be_made(name: str, call: Call) -> None:
    """Folders that not even root can create are refused before anything is started."""
    words = IMPOSSIBLE[name]
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    (told,) = [line for line in err.splitlines() if line.strip()]
    assert told.startswith("error: ")
    assert any(word in told for word in words if word.startswith("/"))


def test_files_of_a_deployment_that_are_gone(call: Call) -> None:
    assert call("deploy", "init", "fl", "--nodes", "1")[0] == 0
    shutil.rmtree("fl/server")
    for words in (("deploy", "renew", "fl"), ("deploy", "register", "fl"), ("run", "--deployment", "fl")):
        code, _, err = call(*words)
        assert code == 2
        assert "Traceback" not in err
        told = err.splitlines()[-1]  # the progress bar of `hyperfl run` comes first
        assert re.match(r"error: .*/fl/server[\w./]* cannot be used \(No such file or directory\)", told)


def test_an_output_directory_that_is_in_use(call: Call, tmp_path: Path) -> None:
    (tmp_path / "something").write_text("mine")
    code, _, err = call("run", "--output", tmp_path)
    assert code == 2
    assert f"{tmp_path} exists and is not empty; choose one that does not exist yet" in err
    assert "--resume" not in err
    (tmp_path / "manifest.json").write_text("{}")
    assert f"hyperfl run --resume {tmp_path}" in call("run", "--output", tmp_path)[2]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--quiet", "--verbose"), "--quiet prints the run's folder only, and --verbose all logs; give one of them"),
        (("--engine", "in-process", "--ray-address", "a:1"), "the engine must be ray or auto with a Ray cluster"),
    ],
)
def test_options_that_contradict_each_other(words: tuple[str, ...], problem: str, call: Call) -> None:
    code, _, err = call("run", *words)
    assert code == 2
    assert problem in err


def test_a_torchvision_set_that_is_nowhere(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable proxy simulates a machine without a network."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    code, _, err = call("run", "--dataset", "mnist", "--data-root", tmp_path / "data")
    assert code == 2
    assert str(tmp_path / "data" / "MNIST" / "raw") in err
    assert "train-images-idx3-ubyte" in err
    assert not (tmp_path / "data").exists()


def test_resuming_with_other_settings(call: Call, federate: Federate) -> None:
    finished = federate("fedavg")
    code, _, err = call("run", "--resume", finished, "--num-rounds", "4", "--seed", "9", "--set", "momentum=0.1")
    assert code == 2
    assert "seed was 0, now 9" in err
    assert "momentum was 0.5, now 0.1" in err
    code, _, err = call("run", "--resume", finished, "--num-rounds", "4", "--num-nodes", "3")
    assert code == 2
    assert "as many nodes as before (2), got 3" in err
    code, _, err = call("run", "--resume", finished, "--output", "elsewhere")
    assert code == 2
    assert "resume or output, not both" in err


def test_resuming_from_a_damaged_checkpoint(call: Call, federate: Federate) -> None:
    finished = federate("fedavg")
    path = finished / "checkpoints" / f"round-{last_checkpoint(finished)[1].round:06d}.npz"
    path.write_bytes(path.read_bytes()[:-100])
    code, _, err = call("run", "--resume", finished, "--num-rounds", "4")
    assert code == 2
    assert f"{path} is damaged" in err


def test_listings_have_all_methods_data_sets_and_settings(call: Call) -> None:
    for command, names in (("methods", METHODS), ("datasets", DATASETS), ("settings", default_settings())):
        code, out, _ = call(command)
        assert code == 0
        for name in names:
            assert name in out


def test_an_estimate_writes_nothing(call: Call, tmp_path: Path) -> None:
    """`--dry-run` prints the estimate and creates no file.

    By hand, the download has 8 * (64 + 1 + P) + P floats for d = 64, p = 8 and the P = 21,312 weights of the 8x8
    extractor.
    """
    (tmp_path / "small.toml").write_text("num-clients = 3\n[hyperfl]\nhidden-width = 8\n")
    code, out, _ = call("run", "--config", tmp_path / "small.toml", "--num-rounds", "7", "--dry-run")
    assert code == 0
    assert f"{4 * (8 * (64 + 1 + 21_312) + 21_312) / 1e6:.2f} MB down" in out
    for word in ("disk", "memory", "time for 7 rounds"):
        assert word in out
    assert not list(Path.cwd().iterdir())


def test_a_summary_is_json(federate: Federate) -> None:
    summary = json.loads((federate("local") / "summary.json").read_text())
    assert 0 <= summary["test_accuracy_worst"] <= summary["test_accuracy"] <= 1
