"""The documentation of settings: generated files are current, and `hyperfl settings` prints all of it."""

import importlib.util
import tomllib
from types import ModuleType

import pytest
from federations import Call

from hyperfl_flwr import ROOT
from hyperfl_flwr.cli.settings import described
from hyperfl_flwr.config.table import all_settings, default_settings, resumable_changes, topics
from hyperfl_flwr.core.files.toml_files import flatten
from hyperfl_flwr.core.settings import Setting, declared
from hyperfl_flwr.data.corruptions import CORRUPTIONS
from hyperfl_flwr.data.partition.registry import PARTITIONS
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.models.names import TARGETS

SCRIPT = ROOT / "scripts" / "generate_settings.py"

needs_checkout = pytest.mark.skipif(not SCRIPT.is_file(), reason="needs a checkout of the project")


@pytest.fixture
def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate_settings", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@needs_checkout
def test_generated_files_are_current(generator: ModuleType) -> None:
    """If this fails, run `python scripts/generate_settings.py`."""
    assert generator.PROJECT.read_text() == generator.project_text()
    assert generator.PAGE.read_text() == generator.settings_page()


@needs_checkout
def test_flower_takes_the_defaults_that_are_declared() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert flatten(table) == default_settings()


@needs_checkout
def test_pages_are_of_settings_that_exist(generator: ModuleType) -> None:
    owned = {each.key for each in declared(generator.NodeConfig)}
    assert set(generator.MORE) <= set(default_settings()) | owned
    for key in default_settings():
        assert f"### `{key}`\n" in generator.settings_page()


@pytest.mark.parametrize("setting", all_settings().values(), ids=all_settings())
def test_every_setting_says_what_it_may_be_and_what_it_means(setting: Setting) -> None:
    assert setting.values
    assert setting.meaning.endswith(".")
    if setting.default == "auto":
        assert "`auto`" in setting.values
        assert "`auto`: " in setting.meaning


def test_meanings_name_all_choices() -> None:
    found = all_settings()
    for names, key in ((TARGETS, "target"), (PARTITIONS, "data.partition"), (CORRUPTIONS, "novel.corruptions")):
        assert all(f"`{name}`" in found[key].values for name in names), key
    assert all(f"`{name}`: " in found["data.partition"].meaning for name in PARTITIONS)


def test_ranges_are_read_off_the_types() -> None:
    """Expected texts are written by hand."""
    found = {key: each.values for key, each in all_settings().items()}
    assert found["num-clients"] == "whole number in [1, 1000000]"
    assert found["num-rounds"] == "whole number ≥ 1"
    assert found["priv-hfl.pseudo-samples"] == "whole number ≥ 2"
    assert found["momentum"] == "number in [0, 1)"
    assert found["fraction-train"] == "number in (0, 1]"
    assert found["node-timeout"] == "number > 0"
    assert found["threads"] == "`auto` or whole number ≥ 1"
    assert found["pfedhn.embedding-weight-decay"] == "`auto` or number ≥ 0"
    assert found["ledger"] == "`true`, `false`"
    assert found["data.augmentation"] == "`auto`, `none`"


def test_no_two_groups_of_settings_have_one_key() -> None:
    keys = [topic.key for topic in topics() if topic.key]
    assert len(keys) == len(set(keys))
    assert {section for method in METHODS.values() for section in method.settings} == set(method_sections())


def test_the_command_line_prints_meanings(call: Call) -> None:
    code, out, _ = call("settings")
    assert code == 0
    for key, setting in all_settings().items():
        assert f"\n{key} = " in out
        assert setting.meaning.split()[-1] in out
    assert out.count("may change when a run is resumed") == len(resumable_changes())


def test_the_command_line_prints_some_settings(call: Call) -> None:
    code, out, _ = call("settings", "fedrep.classifier-e")
    assert (code, out) == (
        0,
        "FedRep\n\n"
        "fedrep.classifier-epochs = 1\n"
        "    (whole number ≥ 1)\n"
        "    Passes over the data that train the classifier, before `local-epochs` passes that train the\n"
        "    extractor.\n\n",
    )
    code, _, err = call("settings", "momentun")
    assert code == 2
    assert "no setting has 'momentun' in its key; did you mean momentum?" in err


def test_texts_are_wrapped() -> None:
    for setting in all_settings().values():
        assert all(len(line) <= 72 for line in described(setting, 72).splitlines()[1:])
