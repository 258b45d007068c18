"""Names of the target networks on a pre-trained body, such as `lpm-resnet18` and `lpm:timm/convnext_tiny@64`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Library = Literal["torchvision", "timm"]
"""Libraries whose image classifiers can be bodies."""

LARGEST_SIDE = 1024
"""Largest side of the images that a name may ask for."""

_FORM = re.compile(
    r"lpm(?P<fixed>-fixed)?:(?P<library>torchvision|timm)/(?P<model>\w[\w.-]*)(@(?P<side>[1-9]\d{1,3}))?", re.ASCII
)

FORM = "lpm:torchvision/NAME, lpm:timm/NAME, with @SIDE or not"
"""Description of the names that are not in `NAMED`, for error messages."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """A pre-trained image classifier without its last layer.

    Attributes:
        library: The library that defines it.
        model: Its name there.
        side: Images are resized to this number of pixels per side. `model`: to the size that the body was trained
            with. None: they are not resized.
    """

    library: Library
    model: str
    side: int | Literal["model"] | None = "model"

    def __str__(self) -> str:
        return f"{self.library}/{self.model}{f'@{self.side}' if isinstance(self.side, int) else ''}"


@dataclass(frozen=True, kw_only=True)
class PretrainedName:
    """What the name of a target network on a pre-trained body means.

    Attributes:
        body: The body.
        adapters: Whether there are adapters; without them the body's features are constants.
        projection: Width of a linear layer on the body's features; 0 for none.
        trains_projection: Whether this layer is trained; otherwise it keeps its random values.
    """

    body: Body
    adapters: bool = True
    projection: int = 0
    trains_projection: bool = False


RESNET18 = Body(library="torchvision", model="resnet18", side=None)
VIT_S16 = Body(library="timm", model="vit_small_patch16_384")

PROJECTION = 128
"""Width of the layer on the ResNet's features in HyperFL's experiments."""

NAMED: Mapping[str, PretrainedName] = {
    "lpm-resnet18": PretrainedName(body=RESNET18, projection=PROJECTION),
    "lpm-resnet18-projection": PretrainedName(body=RESNET18, projection=PROJECTION, trains_projection=True),
    "lpm-resnet18-fixed": PretrainedName(body=RESNET18, adapters=False, projection=PROJECTION, trains_projection=True),
    "lpm-vit-s16": PretrainedName(body=VIT_S16),
    "lpm-vit-s16-fixed": PretrainedName(body=VIT_S16, adapters=False),
}
"""The bodies of HyperFL's experiments (Guo et al., AAAI 2025, section 4.1 and appendix D.1).

The `-fixed` ones are those of the baselines with a fixed extractor. `lpm-resnet18-projection` is that of the baselines
with adapters: they train the layer on the body's features, which HyperFL-LPM leaves at its initial values.
"""


def is_pretrained(name: str) -> bool:
    """Return whether a target's name has the form of those on a pre-trained body."""
    return name in NAMED or name.startswith(("lpm:", "lpm-fixed:"))


def parse(name: str) -> PretrainedName:
    """Return what the name of a target on a pre-trained body means; the libraries are not asked.

    Raises:
        ValueError: If the name has another form.
    """
    if name in NAMED:
        return NAMED[name]
    found = _FORM.fullmatch(name)
    side = int(found["side"]) if found and found["side"] else None
    if found is None or (side or 0) > LARGEST_SIDE:
        raise ValueError(f"must be one of {', '.join(NAMED)}, or {FORM} up to {LARGEST_SIDE}; got {name!r}")
    library: Library = "timm" if found["library"] == "timm" else "torchvision"
    return PretrainedName(
        body=Body(library=library, model=found["model"], side=side or "model"), adapters=not found["fixed"]
    )
