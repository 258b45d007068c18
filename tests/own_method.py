"""Methods as users would write them: valid ones, and ones that each break a rule."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from clients.fedavg import FedAvgClient
from clients.fedrep import FedRepClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Auto, PositiveFloat, Section, setting
from hyperfl_flwr.training.public_training import LocalSteps
from strategies.fedavg import FedAvg


class ClippedConfig(Section):
    """Settings of FedAvg with clipped gradients."""

    key: ClassVar[str] = "clipped"
    title: ClassVar[str] = "Clipped FedAvg"

    norm: PositiveFloat = setting(1.0, "Largest norm of the gradient in a local step.")
    server_share: Auto | PositiveFloat = setting("auto", "Share of the way to the mean. `auto`: 1 / `clipped.norm`.")
    note: str = setting('a "quoted" text', "A text.", values="any text", resumable=True)


class ClippedClient(FedAvgClient):
    """Limits the norm of the gradient in every local step."""

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return FedAvg's steps with the largest gradient norm that the settings ask for."""
        return replace(super().local_steps(config), clip_norm=config.section(ClippedConfig).norm)


class ClippedStrategy(FedAvg):
    """Chooses `clipped.server-share`."""

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the share that the norm determines."""
        return {**super().automatic(config), "clipped.server-share": 1 / config.section(ClippedConfig).norm}


CLIPPED = Method(
    name="clipped",
    title="federated averaging with clipped gradients",
    paper="none",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="own_method:ClippedClient",
    strategy="own_method:ClippedStrategy",
    settings=(ClippedConfig,),
)


class PrivateHeadClient(FedRepClient):
    """FedRep's client under another name."""


PRIVATE_HEAD = Method(
    name="private-head",
    title="FedRep by another name",
    paper="none",
    sends="the extractor",
    keeps="the classifier",
    uploads=(Upload(part="extractor", form="values"),),
    learning_rate=0.1,
    client="own_method:PrivateHeadClient",
    strategy="strategies.fedrep:FedRep",
    private_classifier=True,
)


def _with_key(name: str) -> type[Section]:
    return type("Keyed", (Section,), {"__doc__": "Settings.", "key": name, "__annotations__": {"key": ClassVar[str]}})


class Undeclared(Section):
    """Settings without `setting`."""

    key: ClassVar[str] = "undeclared"

    norm: float = 1.0


class Listed(Section):
    """A setting that Flower cannot pass on."""

    key: ClassVar[str] = "listed"

    norms: tuple[float, ...] = setting((1.0,), "Norms.")


class OtherFedProx(Section):
    """A key of a built-in method."""

    key: ClassVar[str] = "fedprox"


NOT_A_METHOD = {"name": "clipped"}
NO_CLIENT = replace(CLIPPED, client="own_method:NoClient")
NO_MODULE = replace(CLIPPED, client="own_method_parts:Client")
NO_PATH = replace(CLIPPED, strategy="strategies.fedavg")
WRONG_CLASS = replace(CLIPPED, client="own_method:ClippedStrategy")
NO_RATE = replace(CLIPPED, learning_rate=0.0)
TAKEN_KEY = replace(CLIPPED, settings=(OtherFedProx,))
SHADOWING_KEY = replace(CLIPPED, settings=(_with_key("seed"),))
FORGED_KEY = replace(CLIPPED, settings=(_with_key("a]\n[tool.flwr.app"),))
UNDECLARED = replace(CLIPPED, settings=(Undeclared,))
LISTED = replace(CLIPPED, settings=(Listed,))


class NotANumber(Section):
    """A default that does not equal itself."""

    key: ClassVar[str] = "nan"

    rate: float = setting(math.nan, "A rate.")


class Umlaut(Section):
    """A name that TOML does not take without quotes."""

    key: ClassVar[str] = "umlaut"

    größe: float = setting(1.0, "A size.")


NOT_FINITE = replace(CLIPPED, settings=(NotANumber,))
UMLAUT = replace(CLIPPED, settings=(Umlaut,))
TWICE = replace(CLIPPED, settings=(ClippedConfig, type("Other", (ClippedConfig,), {"__doc__": "Settings."})))
NO_TUPLE = replace(CLIPPED, settings=ClippedConfig)  # type: ignore[arg-type]
NO_CLIENT_PATH = replace(CLIPPED, client=5)  # type: ignore[arg-type]
NO_UPLOADS = replace(CLIPPED, uploads=("model",))  # type: ignore[arg-type]
NO_PART = replace(CLIPPED, uploads=(Upload(part="modell", form="values"),))  # type: ignore[arg-type]
NO_FORM = replace(CLIPPED, uploads=(Upload(part="model", form=5),))  # type: ignore[arg-type]
NO_FUNCTION = replace(CLIPPED, weight_epsilon=5)  # type: ignore[arg-type]
