"""Ditto: federated averaging, and next to it a private model that is pulled towards the received one."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class DittoConfig(Section):
    """Settings of Ditto."""

    key: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"

    pull: NonNegativeFloat = setting(
        0.1,
        "Strength λ of the pull of the private model towards the received one: λ/2 times the squared distance from it "
        "is added to the local loss. 0 trains the private model alone; the shared model does not depend on λ.",
    )


METHOD = Method(
    name="ditto",
    title="federated averaging, and a private model that is pulled towards the received one",
    paper="Li et al., ICML 2021",
    sends="the whole model",
    keeps="another whole model",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.ditto:DittoClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(DittoConfig,),
)
