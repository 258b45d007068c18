"""Declare the settings of target networks on a pre-trained body."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Section, absolute, setting
from hyperfl_flwr.models.pretrained.names import is_pretrained


def _weights(value: str) -> str:
    if not value:
        raise ValueError("must be auto or the absolute path of a file; got an empty text")
    return value if value == "auto" else absolute(value)


Weights = Annotated[str, AfterValidator(_weights)]
"""`auto`, or the absolute path of a file."""


class LpmConfig(Section):
    """The pre-trained body of the targets `lpm-...`."""

    key: ClassVar[str] = "lpm"
    title: ClassVar[str] = "Pre-trained bodies"

    weights: Weights = setting(
        "auto",
        "Weights of the pre-trained body of a target `lpm-...`. `auto`: those that torchvision or timm downloads. A "
        "file: a state dict with their names, with the classifier or without. All machines must have the same weights: "
        "their hash is compared.",
        values="`auto`, absolute path",
        resumable=True,
    )


def owners_weights(target: Scalar | None, *, simulated: bool) -> str:
    """Return the setting `lpm.weights` on a node whose owner has not given it.

    Args:
        target: The target network that the server names.
        simulated: Whether the node has no owner.

    Raises:
        RefusalError: If the target has a pre-trained body: a server could otherwise have a node download networks of
            any size.
    """
    if is_pretrained(str(target)) and not simulated:
        raise RefusalError(
            f"target = {target} has a pre-trained body; its owner must give lpm-weights in the node config: a file "
            f"with the weights, or auto to download them"
        )
    return "auto"
