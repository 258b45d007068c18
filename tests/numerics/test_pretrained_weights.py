"""Weights of pre-trained bodies: what is read, compared and refused."""

import pickle
from pathlib import Path

import pytest
import torch
from pretrained_bodies import timm_weights
from safetensors.torch import save_file

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.pretrained.names import parse
from hyperfl_flwr.models.pretrained.weights import choose, load_body

pytestmark = pytest.mark.usefixtures("resnet18_chosen")


def test_positions_are_resized_with_the_images(tmp_path: Path) -> None:
    """The weights of a transformer for images of 160 pixels fit one for 64; the hash is that of the file's values."""
    choose(str(timm_weights("test_vit", tmp_path)))
    bodies = [load_body(parse(f"lpm:timm/test_vit@{side}").body) for side in (64, 160)]
    assert bodies[0].sha256 == bodies[1].sha256
    at_64, at_160 = (body.network for body in bodies)
    shapes = [tuple(network.pos_embed.shape) for network in (at_64, at_160)]
    assert [shape[1] for shape in shapes] == [17, 101]
    assert torch.equal(at_64.patch_embed.proj.weight, at_160.patch_embed.proj.weight)


def test_weights_are_compared_by_their_values(resnet18_weights: Path, tmp_path: Path) -> None:
    """The form of the file and the classifier have no effect on the hash; each value of the body has."""
    body, values = parse("lpm-resnet18").body, torch.load(resnet18_weights, weights_only=True)
    first = load_body(body).sha256
    without = {name: value for name, value in values.items() if not name.startswith("fc.")}
    save_file(without, tmp_path / "body.safetensors")
    torch.save({"state_dict": values}, tmp_path / "training.pth")
    for name in ("body.safetensors", "training.pth"):
        choose(str(tmp_path / name))
        assert load_body(body).sha256 == first
    values["layer4.1.bn2.running_var"][3] += 1e-3
    torch.save(values, tmp_path / "training.pth")
    assert load_body(body).sha256 != first  # of the changed file, although its name is the same


class Command:
    """What prints a word when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda values: values.pop("conv1.weight"), "lacks conv1.weight"),
        (lambda values: values.update(other=torch.zeros(1)), "unknown names: other"),
        (
            lambda values: values.update({"conv1.weight": torch.zeros(2, 3, 7, 7)}),
            r"conv1.weight has \(2, 3, 7, 7\) instead of \(64, 3, 7, 7\)",
        ),
        (lambda values: values.update(epoch=3), "it is not a state dict"),
        (lambda values: values["conv1.weight"].fill_(float("nan")), "conv1.weight has values that are no finite"),
        (lambda values: values.update(epoch=Command()), "holds more than tensors"),
    ],
)
def test_other_files_are_refused(change, problem: str, resnet18_weights: Path, tmp_path: Path, capsys) -> None:
    values = dict(torch.load(resnet18_weights, weights_only=True))
    change(values)
    path = tmp_path / "other.pth"
    torch.save(values, path)
    choose(str(path))
    with pytest.raises(ConfigError, match=f"lpm.weights = {path}, for torchvision/resnet18: .*{problem}"):
        load_body(parse("lpm-resnet18").body)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1])])
def test_what_is_no_file_of_torch(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    choose(str(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_body(parse("lpm-resnet18").body)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not have its weights"):
        load_body(parse("lpm-resnet18").body)
