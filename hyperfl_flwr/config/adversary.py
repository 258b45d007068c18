"""Settings of malicious nodes, in simulations only: what they do, and which nodes they are."""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.settings import (
    Auto,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    ShareBelowOne,
    setting,
)

FORGING = ("sign-flip", "alie", "ipm", "backdoor")
"""Attacks that replace what a malicious node sends; `label-flip` and `backdoor` change what its clients train on."""


def _numbers(text: str) -> str:
    if not re.fullmatch(r"auto|\d+(,\d+)*", text):
        raise ValueError(f"must be auto, or numbers of nodes with commas between them; got {text!r}")
    return text


Nodes = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_numbers),
]
"""`auto`, or numbers of nodes separated by commas; a single number may be given as an int."""


class AdversaryConfig(Section):
    """Simulated malicious nodes, which send harmful updates, to measure how far a method and its defences resist."""

    key: ClassVar[str] = "adversary"
    title: ClassVar[str] = "Malicious nodes"

    attack: Literal["none", "label-flip", "sign-flip", "alie", "ipm", "backdoor"] = setting(
        "none",
        "What malicious nodes do, in a simulation; a deployment refuses it. All numbers of the run's records are then "
        "of the honest nodes' clients.\n\n"
        "`label-flip`: their clients train with class K - 1 - c in the place of class c. `sign-flip`: they send the "
        "opposite of their change. `alie`: they all send the mean of their changes, moved by a multiple of their "
        "standard deviation (A Little Is Enough). `ipm`: they send the opposite of a multiple of the honest nodes' "
        "mean change (inner product manipulation). `backdoor`: their clients learn to take images with a trigger for "
        "`adversary.target-class`, and they send a multiple of the change (model replacement).",
    )
    share: ShareBelowOne = setting(
        0.0,
        "Share of the nodes that are malicious, for all clients that they host: `seed` puts the P nodes in an order, "
        "and the first round(share * P) are malicious, so that those of a smaller share are among those of a larger "
        "one.",
    )
    nodes: Nodes = setting(
        "auto",
        "Numbers of the malicious nodes. `auto`: those of `adversary.share`.",
        values="`auto`, numbers with commas between them",
    )
    scale: Auto | PositiveFloat = setting(
        "auto",
        "Strength of the attack: factor of the opposite change (`sign-flip`), z (`alie`), ε (`ipm`) or γ (`backdoor`) "
        "of the papers. `auto`: 1 with `sign-flip`; with `alie` the paper's largest z for the number of nodes and of "
        "malicious nodes among them; 0.5 with `ipm`; with `backdoor` the weight of all clients divided by that of the "
        "malicious nodes' (n/η of the paper for one node), so that their mean model replaces the global one.",
    )
    target_class: NonNegative = setting(0, "Class for which images with the trigger are to be taken, with `backdoor`.")
    trigger_size: Positive = setting(
        3, "Side in pixels of the trigger, a white square in the lower right corner, with `backdoor`."
    )
    poisoned_share: Annotated[float, Field(gt=0, le=1)] = setting(
        0.3125,
        "Share of a malicious client's training samples that get the trigger and the class `adversary.target-class`, "
        "with `backdoor`. The default is the paper's 20 of 64 in a batch.",
    )

    @field_validator("share", "nodes")
    @classmethod
    def _needs_attack(cls, value: float | str, info: ValidationInfo) -> float | str:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and info.data.get("attack") == "none":
            raise ValueError(f"must be {default} with adversary.attack = none; got {value}")
        return value

    @field_validator("nodes")
    @classmethod
    def _instead_of_share(cls, value: str, info: ValidationInfo) -> str:
        if value != "auto" and info.data.get("share"):
            raise ValueError(f"must be auto with adversary.share = {info.data['share']:g}; got {value}")
        return value

    @field_validator("scale")
    @classmethod
    def _needs_forgery(cls, value: float | str, info: ValidationInfo) -> float | str:
        if value != "auto" and (attack := info.data.get("attack")) not in FORGING:
            raise ValueError(f"must be auto with adversary.attack = {attack}, on which it has no effect; got {value}")
        return value

    @field_validator("target_class", "trigger_size", "poisoned_share")
    @classmethod
    def _needs_backdoor(cls, value: float, info: ValidationInfo) -> float:
        default, attack = cls.model_fields[str(info.field_name)].default, info.data.get("attack")
        if value != default and attack != "backdoor":
            raise ValueError(
                f"must be {default:g} with adversary.attack = {attack}, on which it has no effect; got {value:g}"
            )
        return value

    @property
    def forges(self) -> bool:
        """Whether malicious nodes send something else than what their clients have trained."""
        return self.attack in FORGING

    def malicious_nodes(self, seed: int, num_nodes: int) -> Sequence[int]:
        """Return the numbers of the malicious nodes, ascending; server and nodes draw the same ones.

        Args:
            seed: The run's seed.
            num_nodes: Number P of all nodes.

        Raises:
            ConfigError: If a share above 0 is no whole node, a number is none of the run's nodes, or all are malicious.
        """
        from hyperfl_flwr.core.rng import numpy_generator  # deferred: imports numpy

        if self.nodes != "auto":
            malicious = sorted(set(map(int, self.nodes.split(","))))
            if malicious[-1] >= num_nodes:
                raise ConfigError(
                    f"adversary.nodes must be below the number of nodes, {num_nodes}; got {malicious[-1]}"
                )
        else:
            number = round(self.share * num_nodes)
            if self.share and not number:
                raise ConfigError(
                    f"adversary.share = {self.share:g} selects no node of {num_nodes}; raise it, or the number of nodes"
                )
            malicious = sorted(numpy_generator(seed, "adversary").permutation(num_nodes)[:number].tolist())
        if len(malicious) == num_nodes:
            raise ConfigError(f"all {num_nodes} nodes would be malicious; lower adversary.share, or add nodes")
        return malicious
