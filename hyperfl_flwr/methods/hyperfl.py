"""HyperFL: a hypernetwork is averaged, embeddings and classifiers stay on the clients."""

from typing import ClassVar, Literal

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.setting_types import Initialisation
from hyperfl_flwr.core.settings import Auto, NonNegativeFloat, Positive, PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS

KEPT_UP_TO = 1000
"""Largest number of clients of which `hyperfl.keep-last = auto` keeps the generated weights, 463 KB for `cnn` each."""


class HyperFLConfig(Section):
    """Settings of HyperFL and of its variant with a frozen embedding, `hyperfl-frozen`."""

    key: ClassVar[str] = "hyperfl"
    title: ClassVar[str] = "HyperFL"

    initialisation: Initialisation = setting(
        "hyperfan-bias",
        "How the hypernetwork is initialised. `hyperfan-bias`: generated weights have the variance of an ordinary "
        "initialisation, which the bias of the output layer carries. `hyperfan-weight`: the weights of the output "
        "layer carry it. `torch`: PyTorch's defaults, as in the paper's public code.",
    )
    embedding: Literal["trained", "per-client", "common-frozen"] = setting(
        "trained",
        "The clients' embeddings v. `trained`: all start from one v. `per-client`: each starts from a different one. "
        "`common-frozen`: one constant v for all; the method `hyperfl-frozen` computes the same and exchanges "
        "the generated weights θ instead of the hypernetwork.",
    )
    embedding_dim: Positive = setting(64, "Length of the embedding; 64 in the paper.")
    hidden_width: Positive = setting(128, "Width of the hypernetwork's hidden layer; 128 in the paper.")
    classifier_learning_rate: PositiveFloat = setting(0.1, "Learning rate η_g of the private classifier.")
    embedding_learning_rate: Auto | PositiveFloat = setting(
        "auto", "Learning rate η_v of the private embedding. `auto`: as `learning-rate`."
    )
    clip_norm: NonNegativeFloat = setting(
        50.0, "Largest gradient norm of the hypernetwork, and of the embedding; 0 does not clip."
    )
    head_optimiser: Literal["factored", "plain"] = setting(
        "factored",
        "Optimiser of the hypernetwork's output layer. `factored`: SGD without forming the gradient, which is faster. "
        "`plain`: autograd and torch.optim.SGD. The results are the same up to rounding.",
    )
    keep_last: Auto | bool = setting(
        "auto",
        "Whether each client keeps the generated weights θ of its last round, nearly all of its private state: for "
        "`theta_change`, and for `hyperfl export --state personalized`. The training does not need them. `auto`: up to "
        f"{KEPT_UP_TO} clients.",
    )

    def keeps_last(self, num_clients: int) -> bool:
        """Return whether the clients keep their generated weights; `num_clients` is the number of trained clients."""
        return num_clients <= KEPT_UP_TO if self.keep_last == "auto" else self.keep_last


METHOD = Method(
    name="hyperfl",
    title="averaging of a hypernetwork; classifier and embedding stay private",
    paper="Guo et al., AAAI 2025",
    sends="the hypernetwork",
    keeps="the classifier and the embedding",
    uploads=(Upload(part="hypernetwork", form="values"),),
    learning_rate=0.003,
    client="clients.hyperfl:HyperFLClient",
    strategy="strategies.hyperfl:HyperFL",
    tasks=ALL_TASKS,
    settings=(HyperFLConfig,),
)
