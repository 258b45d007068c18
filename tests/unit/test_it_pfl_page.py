"""The commands in docs/methods/it-pfl.md for a model for your own data run, and print what the page shows."""

import re
import shlex
from pathlib import Path

import numpy as np
from federations import Call, small_settings, trained
from flwr.common.config import parse_config_args
from PIL import Image

from hyperfl_flwr import ROOT
from hyperfl_flwr.config.node_config import NOVEL_DATA, NOVEL_DELTA, NOVEL_EPSILON, NOVEL_OUTPUT
from hyperfl_flwr.config.table import default_settings

PAGE = ROOT / "docs" / "methods" / "it-pfl.md"
SECTION = PAGE.read_text().split("\n## A model for your own data\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"^```\w+\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
LINES = "".join(BLOCKS).replace("\\\n", " ").splitlines()


def commands(beginning: str) -> list[list[str]]:
    return [shlex.split(line) for line in LINES if line.startswith(beginning)]


def prepare() -> None:
    """Create the files that the page refers to in the working folder: a run (of two rounds) and images."""
    changes = {"num-clients": 12, "it-pfl.pooling": "mean", "output": str(Path.cwd() / "runs" / "it-pfl")}
    trained(small_settings(method="it-pfl", **changes))
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    np.savez("my-images.npz", images=images)
    Path("my-images").mkdir()
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(f"my-images/{number:02d}.png")


def test_the_commands_and_what_they_print(call: Call) -> None:
    """The run is only planned; commands to personalize run in full. The page has no commands that are not tested."""
    ((_, *run),) = commands("hyperfl run")
    code, _, err = call(*run, "--dry-run")
    assert code == 0, err
    prepare()
    (seen,) = [line for line in LINES if line.startswith("the server received")]
    for command in commands("hyperfl personalize"):
        if "--deployment" in command:
            continue  # tests/deployment/test_deployed_personalize.py
        code, out, err = call(*command[1:])
        assert code == 0, err
        assert out.splitlines()[0].startswith(seen)
    written = {path.name for path in Path("runs", "mine").iterdir()}
    assert written == set(re.findall(r"^\| `([\w.]+)`", SECTION, re.MULTILINE))
    assert {line.split()[0] for line in LINES} == {"hyperfl", "the", "flower-supernode", "flwr"}


def test_what_is_given_to_flowers_commands_exists() -> None:
    """Flower's parser reads the page's node config and run configs, and their keys exist."""
    ((*_, node),) = commands("flower-supernode")
    assert set(parse_config_args([node])) == {
        "partition-id",
        "num-partitions",
        NOVEL_DATA,
        NOVEL_OUTPUT,
        NOVEL_EPSILON,
        NOVEL_DELTA,
    }
    runs = commands("flwr run")
    assert len(runs) == 2
    for command in runs:
        keys = parse_config_args([command[command.index("--run-config") + 1]])
        assert keys
        assert set(keys) <= set(default_settings())
