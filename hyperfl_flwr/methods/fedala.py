"""FedALA: federated averaging; local training starts between the client's last model and the received one."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, Positive, Section, Share, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class FedALAConfig(Section):
    """Settings of FedALA."""

    key: ClassVar[str] = "fedala"
    title: ClassVar[str] = "FedALA"

    layers: Positive = setting(
        1,
        "Number of last layers, of those with parameters, that are mixed; those before them start from the received "
        "model.",
    )
    rate: NonNegativeFloat = setting(1.0, "Step size of the weights of the mixture; 0 is `fedavg`.")
    share: Share = setting(0.8, "Share of the client's training samples that a round learns the weights from.")


METHOD = Method(
    name="fedala",
    title="federated averaging; local training starts between the client's last model and the received one",
    paper="Zhang et al., AAAI 2023",
    sends="the whole model",
    keeps="the model of its last round, and weights between models",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.fedala:FedALAClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(FedALAConfig,),
)
