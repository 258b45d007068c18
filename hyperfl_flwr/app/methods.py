"""The methods: which strategy, client and paper belong together. The table of contents of this project."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clients.engine.base import BaseClient
from clients.fedavg import FedAvgClient
from clients.fedprox import FedProxClient
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
        title: One line.
        strategy: The server's side.
        client: The clients' side.
        paper: Citation.
        leaves: What leaves a client in a round, in words.
        learning_rate: `learning-rate` where that is `auto`: one that is sound for all data sets, chosen on held-back
            training data (docs/results/index.md, "Rates, on validation data").
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
    "fedprox": Method(
        title="federated averaging of models that are pulled to the common one in local training",
        strategy=FedAvg,
        client=FedProxClient,
        paper="Li et al., MLSys 2020",
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
    """Refuse settings of novel clients that the method or the data cannot follow.

    Args:
        config: The run's settings.
        input_shape: Of a sample: (channels, height, width) of an image.

    Raises:
        ConfigError: Naming the setting and why not.
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
    """Refuse a target network that cannot take the data, or that the method cannot train.

    Args:
        config: The run's settings.
        input_shape: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes.

    Raises:
        ConfigError: Naming the target and what is wrong with it.
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
