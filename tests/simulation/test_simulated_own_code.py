"""The network and the method of their how-to pages, with their commands and with Flower's engine on Ray."""

import json
import re
from pathlib import Path

import pytest
from console import Follow, commands
from federations import Call

import hyperfl_flwr as hyperfl
from hyperfl_flwr import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "own-network.md"
METHOD_PAGE = PAGE.with_name("own-method.md")


def example(page: Path = PAGE) -> str:
    """Return a page's network or method."""
    return re.findall(r"```python.*?\n(.*?)```", page.read_text(), re.DOTALL)[0]


def test_the_page_s_example_is_trained(follow: Follow, own_code: Path) -> None:
    (own_code / "mynet.py").write_text(example())
    (command,) = commands(PAGE)
    follow([command])
    manifest = json.loads((own_code / "runs" / "mynet" / "manifest.json").read_text())
    assert manifest["model"]["factory"] == manifest["settings"]["target"] == "mynet:build"


@pytest.mark.extended
def test_both_on_ray(call: Call, own_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors train the network with the method; changed sources cannot resume the run, the kept ones can.

    The run is started in Python, in a process that has imported torch.
    """
    (own_code / "mynet.py").write_text(example())
    (own_code / "damped.py").write_text(example(METHOD_PAGE))
    heard: list[tuple[int, int]] = []
    run = hyperfl.run(
        method="damped:METHOD", output="both", engine="ray", num_nodes=2, num_rounds=2, num_clients=4,
        settings={"target": "mynet:build", "local-epochs": 1, "damped.share": 0.75},
        progress=hyperfl.RunCallbacks(on_round=lambda finished, total, _: heard.append((finished, total))),
    )  # fmt: skip
    assert (heard[0], heard[-1]) == ((0, 2), (2, 2))
    assert run.folder == own_code / "both"
    assert run.manifest["model"]["factory"] == run.manifest["settings"]["target"] == "mynet:build"
    assert (run.folder / "model" / "mynet.py").read_text() == example()
    assert run.manifest["method"]["name"] == run.manifest["settings"]["method"] == "damped:METHOD"
    assert run.manifest["settings"]["damped.share"] == 0.75
    assert (run.folder / "method" / "damped.py").read_text() == example(METHOD_PAGE)
    assert run.summary["test_accuracy"] > 0.1  # ten classes

    resume = ("run", "--resume", run.folder, "--num-rounds", "3", "--dry-run")
    with (own_code / "mynet.py").open("a") as file:
        file.write("\n# a change\n")
    code, _, errors = call(*resume)
    assert code == 2
    assert "the source of mynet:build has changed" in errors
    monkeypatch.chdir(tmp_path)
    code, _, errors = call(*resume)
    assert code == 0, errors


@pytest.mark.extended
def test_the_commands_of_the_methods_page(follow: Follow, own_code: Path) -> None:
    page = METHOD_PAGE.read_text()
    (own_code / "damped.py").write_text(example(METHOD_PAGE))
    settings, run, check = commands(METHOD_PAGE)
    assert 'damped.share = "auto"' in follow([settings])
    follow([run])
    assert json.loads(Path("runs/damped/manifest.json").read_text())["settings"]["damped.share"] == 0.8
    parts = re.findall(r"^\| ([a-z ]+) \| [a-z]", page, re.MULTILINE)
    said = re.findall(r"^ok +([a-z ]+):", follow([check]), re.MULTILINE)
    assert [part for part in parts if part != "part"] == said
    (own_code / "damped.py").unlink()
    follow(["hyperfl report runs/damped"])
