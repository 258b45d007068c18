"""Each method has a page in docs/methods, and the page's settings, learning rate and first command are correct."""

import re
import shlex

import pytest
from federations import Call

from hyperfl_flwr import ROOT
from hyperfl_flwr.app.methods import METHODS
from hyperfl_flwr.config.table import default_settings

FOLDER = ROOT / "docs" / "methods"
SECTIONS = [name for name in METHODS if any(key.startswith(f"{name}.") for key in default_settings())]
"""Methods with a section of settings of the same name."""


def settings_rows(method: str) -> list[tuple[str, str]]:
    """Return the rows of a page's table of settings: the keys and their meaning."""
    section = (FOLDER / f"{method}.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)


def settings_of(method: str) -> set[str]:
    return {key for keys, _ in settings_rows(method) for key in re.findall(r"`(.*?)`", keys)}


def test_every_method_has_its_page_and_its_link() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {"index", *METHODS}
    index = (FOLDER / "index.md").read_text()
    assert [name for name in METHODS if f"| [`{name}`]({name}.md) |" not in index] == []


@pytest.mark.parametrize("method", METHODS)
def test_the_settings_of_a_page_exist(method: str) -> None:
    """Every key on a page is a setting, or a section if it ends with `.*`."""
    known = {*default_settings(), *(f"{key.partition('.')[0]}.*" for key in default_settings() if "." in key)}
    assert settings_of(method)
    assert settings_of(method) <= known


@pytest.mark.parametrize("method", SECTIONS)
def test_a_page_names_all_settings_of_its_method(method: str) -> None:
    assert {key for key in default_settings() if key.startswith(f"{method}.")} <= settings_of(method)


@pytest.mark.parametrize("method", METHODS)
def test_a_page_names_the_rate_that_auto_gives(method: str) -> None:
    (meaning,) = [text for keys, text in settings_rows(method) if keys == "`learning-rate`"]
    (rate,) = re.findall(r"`auto` is ([\d.]+)", meaning)
    assert float(rate) == METHODS[method].learning_rate


@pytest.mark.parametrize("method", METHODS)
def test_the_accuracy_at_the_top_is_that_of_the_table(method: str) -> None:
    text = (FOLDER / f"{method}.md").read_text()
    tops = re.findall(r"^\| Accuracy, Fashion-MNIST, 20 rounds \| ([\d.]+) %", text, re.MULTILINE)
    table = text.partition("<!-- compared:")[2].partition("<!-- end -->")[0]
    assert tops == re.findall(r"^\| Fashion-MNIST \| \d \| [\d.]+ \| ([\d.]+)", table, re.MULTILINE)[: len(tops)]


@pytest.mark.parametrize("method", METHODS)
def test_the_first_command_of_a_page_is_right(method: str, call: Call) -> None:
    first = re.findall(r"^```bash\n(.*)\n", (FOLDER / f"{method}.md").read_text(), re.MULTILINE)[0]
    hyperfl, *command = shlex.split(first)
    assert (hyperfl, command[:3]) == ("hyperfl", ["run", "--method", method])
    code, _, err = call(*command, "--dry-run")
    assert code == 0, err
