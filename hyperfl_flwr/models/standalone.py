"""A model as files that need nothing of this package: its parameters, what they are, and a script of plain torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from hyperfl_flwr.models.dropout import Dropout
from hyperfl_flwr.models.recipe import Recipe
from hyperfl_flwr.models.targets import ChannelsLast, Target
from hyperfl_flwr.storage import write_atomically

PARAMETERS, FACTS, SCRIPT = "model.safetensors", "model.json", "use_model.py"
"""Names of the files."""

_SCRIPT = '''"""A {target} network in plain torch. It needs torch and safetensors, and {parameters} beside it.

    from use_model import load_model, predict
    classes, confidences = predict(load_model(), samples)
"""

from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

INPUT_SHAPE = {shape}
MEAN = {mean}
STD = {std}
CLASSES = {classes}


def build_model():
    """Return the network with parameters of no meaning."""
    extractor = nn.Sequential(
        OrderedDict(
            [
{layers}
            ]
        )
    )
    return nn.Sequential(OrderedDict(extractor=extractor, classifier=nn.{classifier}))


def load_model(path=Path(__file__).with_name("{parameters}")):
    """Return the network with its parameters."""
    model = build_model()
    model.load_state_dict(load_file(path))
    return model.eval()


@torch.no_grad()
def predict(model, samples):
    """Return the classes' names and the confidences of samples [n, *INPUT_SHAPE]{range}."""
    wanted = [-1] + [1] * (len(INPUT_SHAPE) - 1)
    normalised = (samples - torch.tensor(MEAN).reshape(wanted)) / torch.tensor(STD).reshape(wanted)
    confidences, labels = model(normalised).softmax(dim=1).max(dim=1)
    return [CLASSES[label] for label in labels], confidences.tolist()
'''


def write_model(folder: Path, tensors: Mapping[str, Tensor], recipe: Recipe, about: Mapping[str, Any]) -> None:
    """Write a model's three files, atomically each, readable by their owner alone.

    Args:
        folder: Where to; it exists.
        tensors: The target network's parameters by name.
        recipe: What they are.
        about: What else model.json is to tell.
    """
    facts = {name: value for name, value in recipe.values().items() if name not in ("pooling", "descriptor_length")}
    metadata = {"format": "pt"} | {name: json.dumps(value) for name, value in facts.items()}
    document = {
        "parameters": PARAMETERS,
        "script": SCRIPT,
        "samples": _range(recipe).strip(" ,") or "feature vectors",
        **facts,
        **about,
    }
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(folder / PARAMETERS, save(plain, metadata=metadata), mode=0o600)
    write_atomically(folder / FACTS, (json.dumps(document, indent=2) + "\n").encode(), mode=0o600)
    write_atomically(folder / SCRIPT, script(recipe).encode(), mode=0o600)


def script(recipe: Recipe) -> str:
    """Return the text of a script of plain torch that builds, loads and uses the target network.

    Raises:
        ValueError: If the network has a layer that torch has not.
    """
    target: Target = recipe.new_target()
    layers = [f'                ("{name}", {_source(layer)}),' for name, layer in target.extractor.named_children()]
    return _SCRIPT.format(
        target=recipe.target,
        parameters=PARAMETERS,
        shape=recipe.input_shape,
        mean=list(recipe.mean),
        std=list(recipe.std),
        classes=list(recipe.classes),
        layers="\n".join(layers),
        classifier=target.classifier,
        range=_range(recipe),
    )


def _range(recipe: Recipe) -> str:
    return ", pixels from 0 to 1" if len(recipe.input_shape) == 3 else ""


def _source(layer: nn.Module) -> str:
    """Return Python's text for a layer without layers in it; torch prints its own as they are made."""
    if isinstance(layer, (ChannelsLast, Dropout)):  # how memory is laid out; nothing after training
        return "nn.Identity()"
    if type(layer).__module__.startswith("torch.nn.") and not list(layer.children()):
        return f"nn.{layer}"
    raise ValueError(f"no plain torch is known for a layer {layer}")
