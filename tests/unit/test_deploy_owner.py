"""An owner's values in node.toml reach Flower unchanged, and errors in the file are reported."""

import shlex
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.deploy.node_settings import NodeAddress, as_toml, node_arguments, read_node_config, read_settings
from hyperfl_flwr.deploy.render import render


def node_folder(folder: Path, text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "node.toml").write_text(text)
    (folder / "place.toml").write_bytes(NodeAddress(number=1, nodes=3, host="fl.example.org", port=8000).text())
    return folder


def test_what_is_written_at_first_sets_nothing_but_the_place_the_state_and_the_keys(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", render("node.toml"))
    expected = {"partition-id": 1, "num-partitions": 3, "state-dir": str(folder / "state")}
    keys = {"peers-file": str(folder / "peers.toml"), "identity-key-file": str(folder / "node.key")}
    assert read_node_config(folder).flat() == {**expected, **keys, "keep-model": True}
    bare = node_folder(tmp_path / "bare")
    assert read_node_config(bare).flat() == {**expected, "state-dir": str(bare / "state")}
    empty = node_folder(tmp_path / "empty", 'state-dir = ""')
    assert read_node_config(empty).flat() == {**expected, "state-dir": str(empty / "state")}


def test_the_comments_show_every_key() -> None:
    names = {str(field.alias) for field in NodeConfig.model_fields.values()}
    names -= {"partition-id", "num-partitions", "simulated"}
    assert names == {line.lstrip("# ").split(" = ")[0] for line in render("node.toml").splitlines() if " = " in line}


def test_paths_begin_at_the_folder(tmp_path: Path) -> None:
    text = 'data = "folder:my scans"\nstate-dir = "/var/lib/x"\nmixing-key-file = "secret"\nthreads = 2\n'
    node = read_node_config(node_folder(tmp_path / "node", text + "keep-model = false\n"))
    assert node.keep_model is False
    assert node.data == f"folder:{tmp_path}/node/my scans"
    assert (node.state_dir, node.threads) == ("/var/lib/x", 2)
    assert node.mixing_key_file == f"{tmp_path}/node/secret"
    assert read_node_config(node_folder(tmp_path / "node", 'data = "npz:/d/x.npz"')).data == "npz:/d/x.npz"
    assert read_node_config(node_folder(tmp_path / "node", 'data = "mnist"')).data == "mnist"


@pytest.mark.parametrize("line", ['state-dir = "~nobody-of-this-name/x"', 'data = "npz:~nobody-of-this-name/x.npz"'])
def test_the_home_of_an_unknown_user_is_an_error_in_the_settings(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"'~nobody-of-this-name/x.*' begins with the home folder of an unknown user"):
        read_settings(node_folder(tmp_path / "node", line))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first example reads the tables of Unicode
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
    assert parse_config_args([config]) == read_node_config(folder).flat()


def test_the_node_reads_at_run_time_what_was_checked(tmp_path: Path) -> None:
    """Every key keeps its value on the way through node.toml, the shell and Flower's parser."""
    text = """
        data-root = "sets"
        group-by = "(p[0-9]+)_"
        lpm-weights = "body.pth"
        device = "cuda:1"
        threads = 3
        keep-model = false
        cross-site = false
        max-message-mb = 2
        mixing-key-file = "secret"
        min-cohort = 2
        max-colluding = 0
        peers-file = "peers.toml"
        identity-key-file = "node.key"
        secure-sum-only = true
        max-epsilon = 4
        max-epsilon-delta = 1e-6
        check-change = "off"
        max-change = 2
        check-duplicates = "refuse"
        max-duplicates = 0.25
        check-dead = "off"
        max-dead = 0.25
        check-nested = "refuse"
        max-nested = 0.25
        check-rare = "off"
        max-rare = 0.25
        check-loss-jump = "refuse"
        max-loss-jump = 1
        min-samples = 20
        min-steps = 5
        min-test-samples = 4
        novel-output = "~/out"
    """
    kinds = (
        'data = "npz:mine.npz"',
        'novel-data = "scans"\nnovel-epsilon = 10\nnovel-delta = 1e-5',
        'join-data = "folder:scans"',
    )
    seen: set[str] = set()
    for number, kind in enumerate(kinds):  # a node has one kind of data
        folder = node_folder(tmp_path / f"node-{number}", f"{text}\n{kind}\n")
        for name in ("mine.npz", "body.pth", "secret", "peers.toml", "node.key"):
            (folder / name).touch()
        (folder / "scans").mkdir()
        checked = read_node_config(folder)
        seen |= checked.model_fields_set
        assert NodeConfig.of(parse_config_args([shlex.split(node_arguments(folder))[-1]])) == checked
    assert seen == set(NodeConfig.model_fields) - {"simulated", "worker"}  # for start.sh


@pytest.mark.parametrize("name", ["scans", "folder:scans", "npz:scans", "csv:scans"])
def test_data_of_a_novel_client_may_have_a_prefix(tmp_path: Path, name: str) -> None:
    """As `hyperfl personalize --data` takes it; a prefix alone names no data."""
    folder = node_folder(tmp_path / "node", f'novel-data = "{name}"\n')
    assert read_node_config(folder).novel_data == str(folder / "scans")
    folder = node_folder(tmp_path / "other", 'novel-data = "npz:"\n')
    with pytest.raises(ConfigError, match="novel-data must name a file after npz: or csv:"):
        read_node_config(folder)


@pytest.mark.parametrize(
    "line",
    [
        'data = "npz:scans.npz"', 'data = "folder:scans"', 'novel-data = "scans"', 'peers-file = "scans"',
        'identity-key-file = "scans"', 'lpm-weights = "scans"', 'mixing-key-file = "scans"',
    ],
)  # fmt: skip
def test_files_that_are_not_there_are_named_at_the_start(tmp_path: Path, line: str) -> None:
    folder = node_folder(tmp_path / "node", line)
    key = line.split()[0]
    with pytest.raises(ConfigError, match=rf"node\.toml: {key}: {folder}/scans.* does not exist"):
        node_arguments(folder)
    node_folder(folder, 'data = "mnist"')  # the start script cannot know where a named data set is looked up
    assert "mnist" in node_arguments(folder)


def test_all_that_is_wrong_is_told_together(tmp_path: Path) -> None:
    text = (
        'dvice = "cpu"\nthreads = 0\ndevice = "gpu"\nmax-message-mb = "1"\ndata = "npz:"\nnovel-delta = 1.0\n'
        "novel-epsilon = 0\nqqqq = 1\n"
    )
    folder = node_folder(tmp_path / "node", text)
    with pytest.raises(ConfigError) as caught:
        read_settings(folder)
    first, *lines = str(caught.value).splitlines()
    assert first == f"in {folder}/node.toml, 8 settings are wrong:"
    assert sorted(lines) == [
        "  - data must name a file after npz: or csv:, or a folder after folder:; got 'npz:'",
        "  - device must be auto, cpu, cuda or cuda:NUMBER, others (mps) are not tested; got 'gpu'",
        "  - dvice is unknown; did you mean device?",
        "  - max-message-mb must be a valid number; got '1'",
        "  - novel-delta must be less than 1; got 1.0",
        "  - novel-epsilon must be greater than 0; got 0",
        "  - qqqq is unknown; known are data, data-root, group-by, lpm-weights, device, threads, worker, state-dir, "
        "keep-model, cross-site, max-message-mb, mixing-key-file, min-cohort, max-colluding, peers-file, "
        "identity-key-file, secure-sum-only, max-epsilon, max-epsilon-delta, check-change, max-change, "
        "check-duplicates, max-duplicates, check-dead, max-dead, check-nested, max-nested, check-rare, max-rare, "
        "check-loss-jump, max-loss-jump, min-samples, min-steps, min-test-samples, novel-data, novel-output, "
        "novel-epsilon, novel-delta, join-data",
        "  - threads must be 'auto' or greater than 0; got 0",
    ]


NOISE = "novel-epsilon = 10.0\nnovel-delta = 1e-5\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('data = "digits"\nnovel-data = "d"\n', "novel-data cannot be given together with data = 'digits'"),
        ('data = "digits"\njoin-data = "folder:d"\n', "join-data cannot be given together with data = 'digits'"),
        ('novel-data = "/d"\njoin-data = "folder:d"\n', "join-data cannot be given together with novel-data = '/d'"),
        ('novel-data = "d"\nnovel-epsilon = 10.0\n', "novel-delta goes with novel-epsilon.* got novel-epsilon = 10.0 "),
        ('novel-data = "d"\nnovel-delta = 1e-5\n', "novel-delta goes with novel-epsilon.* got novel-delta = 1e-05 "),
        (f'data = "digits"\n{NOISE}', "novel-epsilon needs novel-data"),
    ],
)
def test_settings_that_exclude_or_need_each_other(tmp_path: Path, text: str, told: str) -> None:
    """They are refused before the node starts, from either side; a node would ignore one of them, or fail later."""
    with pytest.raises(ConfigError, match=rf"node\.toml, {told}"):
        read_settings(node_folder(tmp_path / "node", text))
    read_settings(node_folder(tmp_path / "node", f'data = ""\njoin-data = ""\nnovel-data = "d"\n{NOISE}'))


def test_one_wrong_setting_is_not_told_as_two(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", "novel-data = 3\nnovel-epsilon = 0\n")
    with pytest.raises(ConfigError, match="2 settings are wrong") as caught:
        read_settings(folder)
    assert "novel-delta" not in str(caught.value)
    folder = node_folder(tmp_path / "node", f"novel-data = 3\n{NOISE}")
    with pytest.raises(ConfigError, match=r"node\.toml, novel-data must be"):
        read_settings(folder)


@pytest.mark.parametrize("key", ["partition-id", "num-partitions", "simulated"])
def test_an_owner_cannot_change_the_node_s_place(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"node\.toml: {key} cannot be set by a node's owner"):
        read_settings(node_folder(tmp_path / "node", f"{key} = 1\n"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", "data = ")
    with pytest.raises(ConfigError, match=r"node\.toml is not valid TOML"):
        read_settings(folder)
    (folder / "node.toml").write_bytes(b'data = "\xff"')
    with pytest.raises(ConfigError, match=r"node\.toml is not valid TOML"):
        read_settings(folder)
    (folder / "node.toml").unlink()
    with pytest.raises(ConfigError, match=r"node\.toml cannot be read"):
        read_settings(folder)
    (folder / "place.toml").write_text("number = 1\n")
    with pytest.raises(ConfigError, match=r"place\.toml, 3 settings are wrong:\n  - nodes is missing"):
        NodeAddress.read(folder)
