"""Where everything of a deployment lies."""

from pathlib import Path

import pytest

from experiments.deploy_layout import Deployment
from hyperfl_flwr.errors import ConfigError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    deployment = Deployment(folder=tmp_path, host="fl.example.org", port=8123, num_nodes=3)
    deployment.write()
    assert Deployment.read(tmp_path) == deployment


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "make one with `hyperfl deploy init`"),
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
