"""FedProx: FedAvg with a proximal term that pulls local training towards the received model."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class FedProxConfig(Section):
    """Settings of FedProx."""

    key: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"

    mu: NonNegativeFloat = setting(
        0.01,
        "Strength μ of the pull towards the received model: μ/2 times the squared distance from it is added to the "
        "local loss. 0 is `fedavg`; the paper uses 0.001 to 1.",
    )


METHOD = Method(
    name="fedprox",
    title="federated averaging; local training is pulled towards the received model",
    paper="Li et al., MLSys 2020",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.fedprox:FedProxClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(FedProxConfig,),
)
