"""Registry of the methods: strategy, client, paper and default learning rate of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clients.engine.base import BaseClient
from clients.fedavg import FedAvgClient
from clients.fedrep import FedRepClient
from clients.hyperfl import HyperFLClient
from clients.hyperfl_frozen import HyperFLFrozenClient
from clients.it_pfl import ITPFLClient
from clients.local import LocalClient
from clients.pfedhn import PFedHNClient, PFedHNPCClient
from clients.priv_hfl import PrivHFLClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.data.corruptions import require_corruption
from hyperfl_flwr.models.custom.checks import check_own
from hyperfl_flwr.models.custom.source import is_factory
from hyperfl_flwr.models.layers.batchnorm import has_statistics
from hyperfl_flwr.models.targets import build_target
from strategies.engine.base import BaseStrategy
from strategies.fedavg import FedAvg
from strategies.fedrep import FedRep
from strategies.hyperfl import HyperFL, HyperFLFrozen
from strategies.it_pfl import ITPFL
from strategies.local import Local
from strategies.pfedhn import PFedHN, PFedHNPC
from strategies.priv_hfl import PrivHFL


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated learning method.

    Attributes:
        title: Description in one line.
        strategy: Server's side of the method.
        client: Clients' side of the method.
        paper: Citation of the paper.
        leaves: Description of the data that a client sends in a round.
        learning_rate: Value of `learning-rate = auto`: a sound rate for all data sets, chosen on held-back training
            data (docs/results/index.md, "Rates, on validation data").
    """

    title: str
    strategy: type[BaseStrategy]
    client: type[BaseClient]
    paper: str
    leaves: str
    learning_rate: float


METHODS: Mapping[str, Method] = {
    "local": Method(
        title="local-only training",
        strategy=Local,
        client=LocalClient,
        paper="baseline",
        leaves="nothing",
        learning_rate=0.1,
    ),
    "fedavg": Method(
        title="federated averaging of the whole model",
        strategy=FedAvg,
        client=FedAvgClient,
        paper="McMahan et al., AISTATS 2017",
        leaves="the whole model",
        learning_rate=0.05,
    ),
    "fedrep": Method(
        title="averaging of the feature extractor; the classifier stays private",
        strategy=FedRep,
        client=FedRepClient,
        paper="Collins et al., ICML 2021",
        leaves="the feature extractor",
        learning_rate=0.1,
    ),
    "hyperfl": Method(
        title="averaging of a hypernetwork; classifier and embedding stay private",
        strategy=HyperFL,
        client=HyperFLClient,
        paper="Guo et al., AAAI 2025",
        leaves="the hypernetwork",
        learning_rate=0.003,
    ),
    "hyperfl-frozen": Method(
        title="HyperFL with one frozen embedding for all: the generated feature extractor is averaged",
        strategy=HyperFLFrozen,
        client=HyperFLFrozenClient,
        paper="Guo et al., AAAI 2025",
        leaves="the generated feature extractor",
        learning_rate=0.003,
    ),
    "pfedhn": Method(
        title="a hypernetwork on the server generates every client's model",
        strategy=PFedHN,
        client=PFedHNClient,
        paper="Shamsian et al., ICML 2021",
        leaves="the change of the generated model",
        learning_rate=0.03,
    ),
    "pfedhn-pc": Method(
        title="a hypernetwork on the server generates feature extractors; the classifier stays private",
        strategy=PFedHNPC,
        client=PFedHNPCClient,
        paper="Shamsian et al., ICML 2021",
        leaves="the change of the generated feature extractor",
        learning_rate=0.03,
    ),
    "it-pfl": Method(
        title="pFedHN with an encoder, which finds the embedding of a client in its data without labels",
        strategy=ITPFL,
        client=ITPFLClient,
        paper="IT-PFL, under review at ICLR 2022",
        leaves="the change of the generated model, the encoder, and a descriptor of the data",
        learning_rate=0.03,
    ),
    "priv-hfl": Method(
        title="consensus by dual variables: every client keeps a model of its own",
        strategy=PrivHFL,
        client=PrivHFLClient,
        paper="Najafi et al., PRIV-HFL",
        leaves="the change of the client's model; with distillation a gradient of the common generator, too",
        learning_rate=0.05,
    ),
}
"""All methods by name."""


def check_novel(config: RunConfig, input_shape: Sequence[int]) -> None:
    """Check that the method and the data support the settings of novel clients.

    Args:
        config: The run's settings.
        input_shape: Shape of a sample: (channels, height, width) of an image, or (D,) of a feature vector.

    Raises:
        ConfigError: If a setting is not supported, with its name and the reason.
    """
    novel, method = config.novel, METHODS[config.method]
    if not novel.clients:
        return
    if not method.strategy.ways:
        able = ", ".join(name for name, other in METHODS.items() if other.strategy.ways)
        raise ConfigError(
            f"novel.clients must be 0 with {config.method}: its clients keep {', '.join(method.client.private)} to "
            f"themselves, and a client without labels has no classifier of its own; take one of {able}"
        )
    if "descriptor" in method.strategy.ways and any(novel.budgets) and config.it_pfl.pooling != "mean":
        raise ConfigError(
            f"novel.epsilons = {novel.epsilons} needs it-pfl.pooling = mean, got {config.it_pfl.pooling}: of a maximum "
            f"over samples one sample can move the descriptor without bound, so that no noise hides it"
        )
    for name in novel.corruptions.split(","):
        if name != "none" and len(input_shape) != 3:
            raise ConfigError(f"novel.corruptions must be none, got {name}: the samples are no images")
        if name != "none":
            try:
                require_corruption(name, input_shape[0])
            except DataError as error:
                raise ConfigError(f"novel.corruptions must not have {name}: {error}") from None


def check_target(config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check that the target network can take the data, and that the method can train it.

    Args:
        config: The run's settings.
        input_shape: Shape of a sample: (channels, height, width) of an image, or (D,) of a feature vector.
        num_classes: Number of classes.

    Raises:
        ConfigError: If the target does not fit, with its name and the reason.
    """
    try:
        target = build_target(config.target, input_shape, num_classes)
    except ValueError as error:
        raise ConfigError(f"{error}; choose another target or other data") from None
    if is_factory(config.target):
        check_own(config.target, input_shape, num_classes)
    if len(input_shape) != 3 and config.method == "priv-hfl" and config.priv_hfl.distill:
        raise ConfigError(
            f"priv-hfl.distill makes images (channels, height, width), the data are vectors of the shape "
            f"{input_shape}; set it to false"
        )
    if has_statistics(target) and METHODS[config.method].client.generated:
        raise ConfigError(
            f"target = {config.target} has running statistics (BatchNorm), which no hypernetwork generates: with "
            f"{config.method} take cnn, lenet, mlp or mlp-500"
        )
