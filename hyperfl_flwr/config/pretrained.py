"""Declare the settings of target networks on a pre-trained body."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator

from hyperfl_flwr.core.settings import Section, absolute, setting


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
