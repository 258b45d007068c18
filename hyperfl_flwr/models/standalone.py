"""Export a model to files that do not need this package: parameters, metadata, and a script in plain torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.packages.source_files import copy
from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code
from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, TASKS
from hyperfl_flwr.models.custom.network import CustomTarget
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.pretrained.network import PretrainedExtractor, PretrainedTarget
from hyperfl_flwr.models.pretrained.script import ARGUMENT, constants, extractor_source
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import ChannelsLast

STEM = "model"
"""Default stem of the files' names."""

NAMES = tuple(field.name for field in fields(TargetRecipe))
"""Keys of the metadata in the parameters' file; each value is in JSON."""

PARAMETERS, FACTS, SCRIPT = "model.safetensors", "model.json", "use_model.py"  # default names of the files

_SCRIPT = '''"""A {target} network in plain torch. It needs torch, safetensors, and {parameters} in the same folder.

    from {script} import load_model, predict
    {usage} = predict(load_model(), samples)
"""

from collections import OrderedDict
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

{constants}INPUT_SHAPE = {shape}
MEAN = {mean}
STD = {std}
CLASSES = {classes}
{scale}

def build_model():
    """Return the network with arbitrary parameters."""
{extractor}
    return nn.Sequential(OrderedDict(extractor=extractor, classifier=nn.{classifier}))


def load_model(path=Path(__file__).with_name("{parameters}")):
    """Return the network with the trained parameters."""
    model = build_model()
    model.load_state_dict(load_file(path){strict})
    return model.eval()


@torch.no_grad()
def predict(model, samples):
    """Return {returns}, for samples [n, *INPUT_SHAPE]{range}."""
    if tuple(samples.shape[1:]) != INPUT_SHAPE:
        raise ValueError(f"samples must have the shape {{['n', *INPUT_SHAPE]}}, got {{list(samples.shape)}}")
{checked}    samples, shape = samples.to(next(model.parameters())), [-1] + [1] * (len(INPUT_SHAPE) - 1)
    normalised = (samples - samples.new_tensor(MEAN).reshape(shape)) / samples.new_tensor(STD).reshape(shape)
{predicted}


if __name__ == "__main__":
{argument}    if len(sys.argv) > 1:
        import numpy

        try:
            array = numpy.load(sys.argv[1], allow_pickle=False)
{printed}
        except (OSError, ValueError) as error:
            sys.exit(f"error: {{error}}")
    else:
        numbers = sum(value.numel() for value in load_model().state_dict().values())
        print("{target}:", numbers, "numbers, samples of the shape", INPUT_SHAPE, "in", len(CLASSES), "{outputs}")
        print("pass a .npy file of samples to predict their {outputs}")
'''

_PIXEL_CHECK = """    if len(samples) and not 0 <= float(samples.min()) <= float(samples.max()) <= 1:
        raise ValueError("pixels must be from 0 to 1; divide those from 0 to 255 by 255")
"""

_USES: dict[str, dict[str, str]] = {
    CLASSIFICATION.name: {
        "usage": "classes, confidences",
        "returns": "the names of the predicted classes and their confidences",
        "predicted": """    confidences, labels = model(normalised).softmax(dim=1).max(dim=1)
    return [CLASSES[label] for label in labels], confidences.tolist()""",
        "printed": """            for name, confidence in zip(*predict(load_model(), torch.tensor(array).float())):
                print(name, f"{confidence:.6f}")""",
    },
    MULTI_LABEL.name: {
        "usage": "labels, probabilities",
        "returns": "the names of each sample's labels above 0.5, and the probabilities of all labels",
        "predicted": """    shares = model(normalised).sigmoid().tolist()
    return [[name for name, share in zip(CLASSES, row) if share > 0.5] for row in shares], shares""",
        "printed": """            for names, shares in zip(*predict(load_model(), torch.tensor(array).float())):
                print(";".join(names) or "none", *(f"{share:.6f}" for share in shares))""",
    },
    REGRESSION.name: {
        "usage": "numbers",
        "returns": "the predicted numbers [n][len(CLASSES)]",
        "predicted": """    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (TARGET_MEAN, TARGET_STD))
    return (model(normalised).cpu().double() * std + mean).tolist()""",
        "printed": """            for numbers in predict(load_model(), torch.tensor(array).float()):
                print(*(f"{number:.6g}" for number in numbers))""",
    },
}
"""Parts of the script that depend on the task."""

_SEQUENCE = """    extractor = nn.Sequential(
        OrderedDict(
            [
{layers}
            ]
        )
    )"""

_IMPORT_FACTORY = """    sys.path.insert(0, str(Path(__file__).with_name("{folder}")))
    from {module} import {factory}

    network = {factory}(INPUT_SHAPE, len(CLASSES))
    setattr(network.get_submodule("{parent}"), "{leaf}", nn.Identity())
    extractor = nn.Sequential(OrderedDict(network=network))"""

_RESNET = """    from torchvision.models import resnet18

    extractor = resnet18()
    extractor.conv1 = nn.{first}
    extractor.maxpool, extractor.fc = nn.Identity(), nn.Identity()"""


def write_model(
    folder: Path, tensors: Mapping[str, Tensor], recipe: TargetRecipe, about: Mapping[str, Any], stem: str = STEM
) -> list[Path]:
    """Write a model's files STEM.safetensors, STEM.json and use_STEM.py, and return their paths.

    Each is written atomically and readable by its owner only. No script is written for a network that plain torch
    cannot build. The source of a user-supplied network is copied to the folder STEM_network, unless it is installed.

    Args:
        folder: An existing folder.
        tensors: The target network's values by name.
        recipe: Specification of the network.
        about: Further entries of STEM.json.
        stem: Stem of the files' names.
    """
    parameters, document, code = (folder / name for name in file_names(stem))
    usual = {field.name: field.default for field in fields(TargetRecipe)}
    facts = {name: getattr(recipe, name) for name in NAMES}
    facts = {name: value for name, value in facts.items() if value != usual[name]}
    metadata = {"format": "pt"} | {name: json.dumps(value) for name, value in facts.items()}
    text = script(recipe, parameters.name) if has_script(recipe) else None
    description = {
        "parameters": parameters.name,
        "script": code.name if text else None,
        "samples": _range(recipe).strip(" ,") or "feature vectors",
        **facts,
        **about,
    }
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(parameters, save(plain, metadata=metadata), mode=0o600)
    write_atomically(document, (json.dumps(description, indent=2) + "\n").encode(), mode=0o600)
    if text:
        write_atomically(code, text.encode(), mode=0o600)
    source = UserCode("target", recipe.target).travelling if is_user_code(recipe.target) else None
    if source is not None:
        copy(source, folder / source_folder(stem))
    return [parameters, document, *([code] if text else [])]


def read_model(path: Path) -> tuple[TargetRecipe, dict[str, Tensor]]:
    """Read a parameters' file of `write_model`; a user-supplied network is imported from the same folder.

    Raises:
        StateError: If the file is missing, damaged or not a model of this project.
        ConfigError: If the source of a user-supplied network is not found or does not work.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        facts = {name: json.loads(metadata[name]) for name in NAMES if name in metadata}
        if is_user_code(str(facts["target"])):
            UserCode("target", facts["target"]).find([path.parent / source_folder(path.stem), Path.cwd()])
        recipe = TargetRecipe.of(facts)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}; name a file written by `hyperfl export`") from None
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise StateError(
            f"{path} is damaged or not a model of this project ({type(error).__name__}: {error}); export it again"
        ) from None
    expected = {name: (value.shape, value.dtype) for name, value in recipe.new_target().state_dict().items()}
    if {name: (value.shape, value.dtype) for name, value in tensors.items()} != expected:
        raise StateError(f"{path} does not hold the values of a {recipe.target} network; export it again")
    return recipe, tensors


def file_names(stem: str) -> tuple[str, str, str]:
    """Return the names of a model's files: parameters, metadata and script, which Python can import by its name."""
    return f"{stem}.safetensors", f"{stem}.json", f"use_{re.sub('[^0-9a-zA-Z]', '_', stem)}.py"


def source_folder(stem: str) -> str:
    """Return the name of the folder, next to a model's files, with the source of a user-supplied network."""
    return f"{stem}_network"


def has_script(recipe: TargetRecipe) -> bool:
    """Return whether `script` can express the target network in plain torch."""
    try:
        _extractor(recipe.target, recipe.new_target(), STEM)
    except ValueError:
        return False
    return True


def script(recipe: TargetRecipe, parameters: str = PARAMETERS) -> str:
    """Return a script in plain torch that builds, loads and uses the target network.

    Args:
        recipe: Specification of the network.
        parameters: Name of the parameters' file, in the script's folder.

    Raises:
        ValueError: If the network has a layer that plain torch does not provide.
    """
    target: Target = recipe.new_target()
    return _SCRIPT.format(
        target=recipe.target,
        parameters=parameters,
        script=Path(file_names(Path(parameters).stem)[2]).stem,
        shape=tuple(recipe.input_shape),
        mean=list(recipe.mean),
        std=list(recipe.std),
        classes=list(recipe.classes),
        extractor=_extractor(recipe.target, target, Path(parameters).stem),
        strict=", strict=False" if isinstance(target, CustomTarget) else "",  # the file lacks counters and constants
        classifier=f"Linear({target.classifier.extra_repr()})",
        range=_range(recipe),
        checked=_PIXEL_CHECK if len(recipe.input_shape) == 3 else "",
        constants=constants(target.extractor.name.body, recipe.body) if isinstance(target, PretrainedTarget) else "",
        argument=ARGUMENT if isinstance(target, PretrainedTarget) else "",
        outputs=TASKS[recipe.task].outputs,
        scale=_scale(recipe),
        **_USES[recipe.task],
    )


def _scale(recipe: TargetRecipe) -> str:
    """Return the lines with the scale of the targets of a regression."""
    lines = f"TARGET_MEAN = {list(recipe.target_mean)}\nTARGET_STD = {list(recipe.target_std)}\n"
    return lines if recipe.target_std else ""


def _extractor(name: str, target: Target, stem: str) -> str:
    """Return the Python source that builds a target's extractor."""
    extractor = target.extractor
    if isinstance(target, CustomTarget):
        module, _, factory = name.partition(":")
        parent, _, leaf = target.classifier_name.rpartition(".")
        return _IMPORT_FACTORY.format(
            folder=source_folder(stem), module=module, factory=factory, parent=parent, leaf=leaf
        )
    if isinstance(extractor, PretrainedExtractor):
        return extractor_source(extractor)
    if name == "resnet18":
        return _RESNET.format(first=extractor.get_submodule("conv1"))
    if not isinstance(extractor, nn.Sequential):
        raise ValueError(f"no plain torch is known for {type(extractor).__name__}, which is not a sequence of layers")
    layers = [f'                ("{part}", {_source(layer)}),' for part, layer in extractor.named_children()]
    return _SEQUENCE.format(layers="\n".join(layers))


def _range(recipe: TargetRecipe) -> str:
    return ", pixels from 0 to 1" if len(recipe.input_shape) == 3 else ""


def _source(layer: nn.Module) -> str:
    """Return the Python source of a layer without sublayers."""
    if isinstance(layer, (ChannelsLast, Dropout)):  # a memory layout only, and inactive after training
        return "nn.Identity()"
    # The repr of torch's layers is a call that builds them.
    if type(layer).__module__.startswith("torch.nn.") and not list(layer.children()):
        return f"nn.{layer}"
    raise ValueError(f"no plain torch is known for a layer {layer}")
