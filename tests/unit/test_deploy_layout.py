"""The description of a deployment: it is read as written, and invalid ones are refused."""

from pathlib import Path

import pytest

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.deploy.layout import Deployment


def test_what_is_written_is_read(tmp_path: Path) -> None:
    deployment = Deployment(folder=tmp_path, host="fl.example.org", port=8123, num_nodes=3)
    deployment.write()
    assert Deployment.read(tmp_path) == deployment


@pytest.mark.parametrize("host", ["a", "fl.example.org", "127.0.0.1", "3com.example", "xn--bcher-kva.example"])
def test_names_and_addresses_are_taken(host: str, tmp_path: Path) -> None:
    Deployment(folder=tmp_path, host=host, port=1, num_nodes=1)


@pytest.mark.parametrize(
    "host",
    ["", "999.1.1.1", "1.2.3", "a..b", "a.", "-a", "a-.b", "a_b", "::1", f"{'a' * 64}.b", ".".join(["a" * 60] * 5)],
)
def test_what_is_no_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host must be a host name or an IPv4 address"):
        Deployment(folder=tmp_path, host=host, port=1, num_nodes=1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "create one with `hyperfl deploy init`"),
        ("host = ", "is damaged"),
        ('host = "a"\nport = 1', "nodes"),
        ('host = "a"\nport = "1"\nnodes = 2', "whole numbers"),
        ('host = "a b"\nport = 70000\nnodes = 0', "got 'a b'; port must be 1 to 65535; got 70000; nodes must be 1"),
    ],
)
def test_what_is_no_deployment_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "deployment.toml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        Deployment.read(tmp_path)
