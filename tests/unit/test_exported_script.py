"""The script that is written next to an exported model, used from Python."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.standalone import write_model

RECIPE = TargetRecipe(target="cnn", input_shape=(1, 8, 8), classes=("a", "b"), mean=(0.3,), std=(0.4,))

VALUES = {
    name: torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    for name, value in RECIPE.new_target().state_dict().items()
}


class OnMeta(nn.Module):
    """A model on another device than the samples, which needs no GPU; it records what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="meta"))
        self.received: list[torch.device] = []

    def forward(self, samples: Tensor) -> Tensor:
        """Return logits for two classes, on the CPU."""
        self.received.append(samples.device)
        return torch.zeros(len(samples), 2)


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The names that the script of an exported model defines."""
    return runpy.run_path(str(write_model(tmp_path, VALUES, RECIPE, {})[2]))


def test_samples_go_to_the_model_s_device(script: dict[str, Any]) -> None:
    """Samples on the CPU are moved to the device of the model's parameters."""
    model = OnMeta()
    assert script["predict"](model, torch.rand(3, 1, 8, 8))[0] == ["a", "a", "a"]
    assert model.received == [torch.device("meta")]


def test_samples_get_the_model_s_precision(script: dict[str, Any]) -> None:
    """NumPy's usual float64, and float32 with a model in float64, give the same classes as float32."""
    samples, model = torch.rand(5, 1, 8, 8), script["load_model"]()
    classes, confidences = script["predict"](model, samples)
    assert script["predict"](model, samples.double()) == (classes, confidences)
    assert script["predict"](model.double(), samples)[0] == classes


def test_no_samples_have_no_classes(script: dict[str, Any]) -> None:
    """An empty batch is no error."""
    assert script["predict"](script["load_model"](), torch.rand(0, 1, 8, 8)) == ([], [])


def test_the_script_can_be_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any characters in a model's name, the line that the script begins with imports it."""
    path = write_model(tmp_path, VALUES, RECIPE, {}, "ward-3.client 1")[2]
    assert path.name == "use_ward_3_client_1.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    (line,) = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("from use_")]
    names: dict[str, Any] = {}
    exec(line, names)
    assert len(names["load_model"]().state_dict()) > 0
