"""The commands and settings in docs/privacy/what-to-choose.md exist, and can be used together."""

import re
import shlex
import tomllib

import pytest
from page_commands import options_of

from hyperfl_flwr import ROOT
from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.launch.console import parse_setting
from hyperfl_flwr.launch.warnings import noise_warnings

PAGE = (ROOT / "docs" / "privacy" / "what-to-choose.md").read_text()
LINES = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ").splitlines()
COMMANDS = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("hyperfl ")]

CNN_PARAMETERS = 22_602
"""Number of parameters of the default network for images of the digits."""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_is_right(words: list[str]) -> None:
    """Its options exist, and its settings are valid together, differential privacy and secure sums included."""
    options = options_of(words)
    if words[0] not in ("run", "audit", "membership"):
        return
    own = {name: options[key] for name, key in (("method", "method"), ("num-clients", "num_clients"),
                                                ("num-rounds", "num_rounds")) if options.get(key)}  # fmt: skip
    config = RunConfig.from_flat(with_defaults(own | dict(map(parse_setting, options["set_"] or ()))))
    check_run(config, (1, 28, 28), 10)
    assert noise_warnings(config, options.get("num_nodes") or 1, CNN_PARAMETERS) == []


def test_the_page_has_commands_for_all_three() -> None:
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    for title in ("A hospital", "A company with phones", "A researcher"):
        assert "hyperfl run " in sections[title], title


def test_the_owner_s_settings_of_the_page_exist() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    NodeConfig.of({"peers-file": "/srv/node-0/peers.toml", **tomllib.loads(text)})  # set when the folder is made
