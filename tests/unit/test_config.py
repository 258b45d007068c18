"""Settings: every problem is found and named, and all of them are reported together."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hyperfl_flwr import ROOT
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.toml_files import flatten
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.methods.pfedhn import PFedHNConfig


def read(**changes: Any) -> RunConfig:
    return RunConfig.from_flat(default_settings() | changes)


def problem(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    return str(caught.value)


def test_the_defaults_are_valid_and_complete() -> None:
    config = read()
    assert config.method in METHODS
    assert default_settings().keys() >= resumable_changes()


@pytest.mark.parametrize("method", METHODS)
def test_flat_is_the_inverse_of_from_flat(method: str) -> None:
    changes = {"method": method, "learning-rate": 0.5, "data.train-samples": 7, "output": "/runs/a"}
    settings = default_settings() | changes
    flat = RunConfig.from_flat(settings).flat()
    assert flat == settings
    assert RunConfig.from_flat(flat).flat() == flat


def test_values_arrive_where_they_are_read() -> None:
    config = read(**{"seed": 5, "num-clients": 7, "data.seed": 6, "data.partition": "iid", "hyperfl.clip-norm": 0.0})
    assert (config.seed, config.num_clients, config.data.seed, config.section(HyperFLConfig).clip_norm) == (
        5,
        7,
        6,
        0.0,
    )
    data = config.data_settings()
    assert (data.num_clients, data.seed, data.partition) == (7, 6, "iid")
    assert data.novel_clients == config.novel.clients
    for field in dataclasses.fields(data):
        if field.name in ("keeps_test", "novel_clients", "sample_format", "distinct"):
            continue
        owner = config if hasattr(config, field.name) and field.name != "seed" else config.data
        assert getattr(data, field.name) == getattr(owner, field.name)
    agreed = {"classes": "a, b", "input-shape": "1x28x20", "normalisation": "0.5/0.25", "seed": 4}
    sample_format = read(**{f"data.{key}": value for key, value in agreed.items()}).data_settings().sample_format
    assert sample_format == SampleFormat(
        input_shape=(1, 28, 20), classes=("a", "b"), normalisation=((0.5,), (0.25,)), seed=4
    )
    assert data.sample_format == SampleFormat(seed=6)
    with_novel = read(**{"num-clients": 7, "novel.clients": 2, "method": "fedavg"}).data_settings()
    assert (with_novel.num_clients, with_novel.novel_clients) == (9, 2)


def test_equal_values_of_another_type_are_another_setting() -> None:
    """Parsed settings are kept for the next time: True, 1 and 1.0 are equal, and only one of them is a seed."""
    settings = default_settings()
    assert RunConfig.from_flat(settings | {"seed": 1}) is RunConfig.from_flat(settings | {"seed": 1})
    for value in (True, 1.0):
        with pytest.raises(ConfigError, match="seed must be"):
            RunConfig.from_flat(settings | {"seed": value})


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().seed = 3  # type: ignore[misc]


def test_all_problems_are_told_together() -> None:
    """Five settings that are wrong in five ways are each named once, with the given value or a suggestion."""
    text = problem(
        **{"num-clients": 0, "methud": "fedavg", "data.partition": "random", "momentum": "big", "output": "here"}
    )
    lines = text.splitlines()
    assert lines[0] == "5 settings are wrong:"
    assert len(lines) == 6
    for start, parts in {
        "  - num-clients must be greater than or equal to 1": ["got 0"],
        "  - methud is unknown": ["did you mean method?"],
        "  - data.partition must be": ["'similarity'", "'natural'", "got 'random'"],
        "  - momentum must be a valid number": ["got 'big'"],
        "  - output must be an absolute path": ["got 'here'"],
    }.items():
        (line,) = [line for line in lines if line.startswith(start)]
        assert all(part in line for part in parts), line


def test_every_missing_setting_is_told() -> None:
    settings = default_settings()
    del settings["seed"], settings["data.seed"]
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_flat(settings)
    assert sorted(str(caught.value).splitlines()[1:]) == ["  - data.seed is missing", "  - seed is missing"]
    with pytest.raises(ConfigError, match=f"^{len({key.partition('.')[0] for key in default_settings()})} settings"):
        RunConfig.from_flat({})


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("num-client", "num-clients"),
        ("num_rounds", "num-rounds"),
        ("hyperfl.hiden-width", "hyperfl.hidden-width"),
        ("iid-fraction", "data.iid-fraction"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_one(key: str, suggestion: str) -> None:
    assert problem(**{key: 1}) == f"{key} is unknown; did you mean {suggestion}?"


def test_an_unknown_key_that_is_near_to_nothing() -> None:
    assert problem(qqqqqq=1) == "qqqqqq is unknown; `hyperfl settings` lists all"
    assert nearest("qqqqqq", ["seed"]) == ""


@pytest.mark.parametrize("key", ["data", "hyperfl"])
def test_a_section_is_no_setting(key: str) -> None:
    """A value for a section's name is refused, whether it comes before or after the section's settings."""
    assert key in problem(**{key: 5})
    with pytest.raises(ConfigError, match=key):
        RunConfig.from_flat({key: 5} | default_settings())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1), ("seed", 2**63), ("seed", 1.0), ("seed", True), ("seed", "1"),
        ("num-clients", 0), ("num-clients", 5.0), ("num-clients", True), ("num-rounds", 0), ("local-epochs", -1),
        ("batch-size", 0), ("threads", 0), ("cohort", 0), ("cohort", "all"), ("checkpoint-every", 0),
        ("max-failed-rounds", 0),
        ("fraction-train", 0.0), ("fraction-train", 1.1), ("fraction-train", float("nan")), ("fraction-train", True),
        ("failure-budget", -0.1), ("failure-budget", 1.1), ("failure-budget", float("nan")),
        ("learning-rate", 0.0), ("learning-rate", "automatic"), ("learning-rate", float("inf")),
        ("learning-rate", float("nan")), ("learning-rate", True), ("learning-rate", "0.1"),
        ("momentum", 1.0), ("momentum", -0.1), ("momentum", float("nan")), ("weight-decay", -1e-9),
        ("weight-decay", float("inf")), ("node-timeout", 0.0), ("round-timeout", float("inf")),
        ("method", "fedavgg"), ("method", 3), ("dataset", "mnits"), ("dataset", "npz:"), ("dataset", "npz:PATH"),
        ("target", "vgg"), ("data-root", "data"), ("output", "./runs"), ("resume", "~/runs"),
        ("data.partition", "IID"), ("data.seed", -1), ("data.train-samples", 0), ("data.train-samples", "all"),
        ("data.test-samples", 1.5), ("data.iid-fraction", 1.01), ("data.dirichlet-alpha", 0.0),
        ("data.shards-per-client", 0), ("dataset", "folder:"), ("dataset", "folder:PATH"), ("data.classes", "cat"),
        ("data.classes", "a,,b"), ("data.classes", "a,b,a"), ("data.input-shape", "28x28"),
        ("data.input-shape", "2x28x28"), ("data.input-shape", "1x0x28"), ("data.normalisation", "0.5"),
        ("data.normalisation", "0.5/0"), ("data.normalisation", "0.5,0.5/0.2"),
        ("hyperfl.initialisation", "zero"), ("hyperfl.embedding", "none"),
        ("hyperfl.embedding-dim", 0), ("hyperfl.hidden-width", False), ("hyperfl.clip-norm", -1.0),
        ("hyperfl.classifier-learning-rate", "auto"), ("hyperfl.embedding-learning-rate", 0.0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_key_and_what_was_got(key: str, value: Any) -> None:
    text = problem(**{key: value})
    assert text.startswith(f"{key} must ")
    assert "\n" not in text
    assert repr(value) in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction-train", 1), ("learning-rate", 1), ("learning-rate", "auto"), ("momentum", 0), ("weight-decay", 0),
        ("failure-budget", 0), ("failure-budget", 1), ("seed", 2**63 - 1), ("data.train-samples", 1),
        ("node-timeout", 10), ("hyperfl.clip-norm", 0), ("dataset", "npz:/data/a.npz"), ("dataset", "npz:a.npz"),
        ("dataset", "folder:/data/a"), ("dataset", "folder:a b"), ("data.classes", "0,1"), ("data.input-shape", "auto"),
        ("data.normalisation", "0.49,0.48,0.45/2e-1,1,0.2"),
        ("output", ""), ("output", "/runs/a b"), ("data.iid-fraction", 0), ("device", "cuda:1"),
    ],
)  # fmt: skip
def test_a_right_value_is_taken(key: str, value: Any) -> None:
    """Integers are accepted where numbers are expected, and so are the ends of closed ranges."""
    assert read(**{key: value}).flat()[key] == value


def test_the_message_of_a_choice_with_auto_tells_both_ways() -> None:
    text = problem(**{"learning-rate": -1.0})
    assert "'auto'" in text
    assert "greater than 0" in text
    assert text.count("got -1.0") == 1


def test_a_wrong_method_is_told_with_the_nearest_one() -> None:
    assert problem(method="hyprfl").endswith("got 'hyprfl'; did you mean hyperfl?")


def test_nested_tables_become_keys_with_dots() -> None:
    """Nested tables become keys with dots."""
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": "f"}}}) == {"a": 1, "b.c": 2, "b.d.e": "f"}


@pytest.mark.parametrize("file", sorted((ROOT / "experiments" / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_configuration_files_are_valid(file: Path) -> None:
    """Every key is a setting and every value is allowed; pFedHN's original protocol trains one client per round."""
    changes = flatten(tomllib.loads(file.read_text()))
    config = RunConfig.from_flat(default_settings() | changes)
    if file.stem == "pfedhn-original":
        assert round(config.fraction_train * config.num_clients) == 1
        assert (config.section(PFedHNConfig).local_steps, config.batch_size, config.target) == (50, 64, "lenet")


@pytest.mark.parametrize("value", ["", "all", "0", "3,12", 7])
def test_audited_clients_are_numbers_or_all(value):
    """Clients are numbers, "all" or none; a single number may be an integer, as which the command line parses it."""
    config = RunConfig.from_flat(default_settings() | {"audit.clients": value, "audit.rounds": "all"})
    assert config.audit.covers(12, 1) == (value in ("all", "3,12"))
    for wrong in ("x", "1,", "1 2", "-1", True):
        with pytest.raises(ConfigError, match=r"audit\.rounds"):
            RunConfig.from_flat(default_settings() | {"audit.rounds": wrong})
