"""What a node's owner writes in node.toml reaches Flower as it is meant, and what is wrong is told."""

import shlex
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.deploy_owner import NodeSettings, Place, as_toml, node_arguments, node_config
from experiments.deploy_texts import render
from hyperfl_flwr.errors import ConfigError


def node_folder(folder: Path, text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "node.toml").write_text(text)
    (folder / "place.toml").write_bytes(Place(number=1, nodes=3, host="fl.example.org", port=8000).text())
    return folder


def test_what_is_written_at_first_sets_nothing_but_the_place_and_the_state(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", render("node.toml"))
    expected = {"partition-id": 1, "num-partitions": 3, "state-dir": str(folder / "state")}
    assert node_config(folder) == expected
    assert node_config(node_folder(tmp_path / "bare")) == {**expected, "state-dir": str(tmp_path / "bare" / "state")}


def test_the_comments_show_every_key() -> None:
    names = {str(field.alias) for field in NodeSettings.model_fields.values()}
    assert names == {line.lstrip("# ").split(" = ")[0] for line in render("node.toml").splitlines() if " = " in line}


def test_paths_begin_at_the_folder(tmp_path: Path) -> None:
    text = 'data = "folder:my scans"\nstate-dir = "/var/lib/x"\nmixing-key-file = "secret"\nthreads = 2\n'
    config = node_config(node_folder(tmp_path / "node", text + "keep-model = false\n"))
    assert config["keep-model"] is False
    assert config["data"] == f"folder:{tmp_path}/node/my scans"
    assert (config["state-dir"], config["threads"]) == ("/var/lib/x", 2)
    assert config["mixing-key-file"] == f"{tmp_path}/node/secret"
    assert node_config(node_folder(tmp_path / "node", 'data = "npz:/d/x.npz"'))["data"] == "npz:/d/x.npz"
    assert node_config(node_folder(tmp_path / "node", 'data = "mnist"'))["data"] == "mnist"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the tables of Unicode are read once
@given(st.dictionaries(st.sampled_from(["a", "b-c"]), st.text() | st.integers(-9, 9) | st.booleans() | st.floats(0, 9)))
def test_flower_reads_the_values_that_were_meant(values: dict[str, str | int | float | bool]) -> None:
    line = " ".join(f"{key}={as_toml(value)}" for key, value in values.items())
    read = parse_config_args([line])
    assert read == values
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in values.items()}


def test_the_shell_reads_the_arguments_that_were_meant(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "it's a $HOME", 'data = "npz:a \\"b\\" `c`.npz"')
    (folder / 'a "b" `c`.npz').touch()
    link, address, port, number, option, config = shlex.split(node_arguments(folder))
    assert (link, address, port, option) == ("--superlink", "fl.example.org:8000", "--port", "--node-config")
    assert 1024 <= int(number) <= 65535
    assert parse_config_args([config]) == node_config(folder)


@pytest.mark.parametrize("line", ['data = "npz:scans.npz"', 'data = "folder:scans"', 'novel-data = "scans"'])
def test_data_that_are_not_there_are_told_at_the_start(tmp_path: Path, line: str) -> None:
    folder = node_folder(tmp_path / "node", line)
    key = line.split()[0]
    with pytest.raises(ConfigError, match=rf"node\.toml: {key}: {folder}/scans.* does not exist"):
        node_arguments(folder)
    node_folder(folder, 'data = "mnist"')  # where the name of a data set is looked up is not the shell's to know
    assert "mnist" in node_arguments(folder)


def test_all_that_is_wrong_is_told_together(tmp_path: Path) -> None:
    text = 'dvice = "cpu"\nthreads = 0\ndevice = "gpu"\nmax-message-mb = "1"\n'
    with pytest.raises(ConfigError) as caught:
        NodeSettings.read(node_folder(tmp_path / "node", text))
    told = str(caught.value)
    assert "the key dvice is unknown (do you mean device?)" in told
    assert "got 0" in told
    assert "got 'gpu'" in told
    assert "got '1'" in told
    assert told.count("threads") == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", "data = ")
    with pytest.raises(ConfigError, match=r"node\.toml is no TOML"):
        NodeSettings.read(folder)
    (folder / "node.toml").write_bytes(b'data = "\xff"')
    with pytest.raises(ConfigError, match=r"node\.toml is no TOML"):
        NodeSettings.read(folder)
    (folder / "node.toml").unlink()
    with pytest.raises(ConfigError, match=r"node\.toml cannot be read"):
        NodeSettings.read(folder)
    (folder / "place.toml").write_text("number = 1\n")
    with pytest.raises(ConfigError, match="the key nodes is missing"):
        Place.read(folder)
