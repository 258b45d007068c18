"""MOON: FedAvg with a contrastive term that compares features with those of the received and the previous model."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class MoonConfig(Section):
    """Settings of MOON."""

    key: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"

    mu: NonNegativeFloat = setting(
        1.0,
        "Weight μ of the contrastive term in the local loss. 0 is `fedavg`; the paper takes 5 for CIFAR-10 and 1 for "
        "its other data sets.",
    )
    temperature: PositiveFloat = setting(
        0.5, "Temperature τ, which divides the cosine similarities of features in the contrastive term."
    )


METHOD = Method(
    name="moon",
    title="federated averaging; a contrastive term pulls features towards those of the received model",
    paper="Li et al., CVPR 2021",
    sends="the whole model",
    keeps="the model of its last round",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.moon:MoonClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(MoonConfig,),
)
