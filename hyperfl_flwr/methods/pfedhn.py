"""pFedHN: a hypernetwork on the server generates every client's model."""

from collections.abc import Sequence
from typing import ClassVar

from hyperfl_flwr.core.method import Method, Settings, Upload
from hyperfl_flwr.core.setting_types import Combine
from hyperfl_flwr.core.settings import (
    Auto,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    ShareBelowOne,
    setting,
)
from hyperfl_flwr.core.tasks import ALL_TASKS


class PFedHNConfig(Section):
    """Settings of pFedHN and pFedHN-PC, and of the hypernetwork of IT-PFL-HN."""

    key: ClassVar[str] = "pfedhn"
    title: ClassVar[str] = "pFedHN"

    embedding_dim: Auto | Positive = setting(
        "auto", "Length of a client's embedding on the server. `auto`: 1 + N / 4, rounded down, for N clients."
    )
    hidden_width: Positive = setting(100, "Width of the hidden layers of the server's hypernetwork.")
    hidden_layers: NonNegative = setting(
        3, "Number of further hidden layers of the server's hypernetwork, after the first."
    )
    local_steps: NonNegative = setting(0, "Local steps of a client in a round; 0: `local-epochs` passes instead.")
    clip_norm: NonNegativeFloat = setting(50.0, "Largest gradient norm of a client's model; 0 does not clip.")
    server_learning_rate: Auto | PositiveFloat = setting(
        "auto",
        "Learning rate of the hypernetwork and of the embeddings. `auto`: 0.01, for `pfedhn-pc` 0.05, for `it-pfl` "
        "0.02.",
    )
    server_momentum: ShareBelowOne = setting(0.9, "Momentum of the server's SGD.")
    server_weight_decay: NonNegativeFloat = setting(1e-3, "Weight decay of the server's SGD.")
    server_clip_norm: NonNegativeFloat = setting(50.0, "Largest norm of the server's gradient; 0 does not clip.")
    embedding_learning_rate: Auto | PositiveFloat = setting(
        "auto", "Learning rate of the embeddings. `auto`: as the hypernetwork's, for `it-pfl` 2."
    )
    embedding_weight_decay: Auto | NonNegativeFloat = setting(
        "auto", "Weight decay of the embeddings. `auto`: as the hypernetwork's, for `it-pfl` 0."
    )
    embedding_std: Auto | PositiveFloat = setting(
        "auto", "Standard deviation of the embeddings' initial values. `auto`: 1, for `it-pfl` 0.1."
    )
    combine: Combine = setting("mean", "How the clients of a round are combined into one step of the server.")
    targets: str = setting(
        "",
        "Target networks of the clients, separated by commas: client i trains the one at position i modulo their "
        "number. Clients of one network share heads of the hypernetwork; all share its body. Empty: all clients "
        "train `target`.",
        values="names of built-in networks, as of `target`",
    )

    def dimension(self, num_clients: int) -> int:
        """Return the length of an embedding in a federation of `num_clients` clients."""
        return 1 + num_clients // 4 if self.embedding_dim == "auto" else self.embedding_dim

    @property
    def target_names(self) -> Sequence[str]:
        """The names in `targets`, in their order; empty if all clients train the run's `target`."""
        return [name.strip() for name in self.targets.split(",")] if self.targets else []


def targets(settings: Settings) -> Sequence[str]:
    """Return the names of the clients' target networks, see `hyperfl_flwr.core.method.Method.targets`."""
    return settings.section(PFedHNConfig).target_names


METHOD = Method(
    name="pfedhn",
    title="a hypernetwork on the server generates every client's model",
    paper="Shamsian et al., ICML 2021",
    sends="the change of the generated model",
    keeps="nothing",
    uploads=(Upload(part="model", form="decrease", separate_start=True),),
    learning_rate=0.03,
    client="clients.pfedhn:PFedHNClient",
    strategy="strategies.pfedhn:PFedHN",
    tasks=ALL_TASKS,
    settings=(PFedHNConfig,),
    targets=targets,
)
