"""PriFedSync: every client keeps a model of its own, which the mean of all models pulls at."""

from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class PriFedSyncConfig(Section):
    """Settings of PriFedSync; those of its noisy steps are in `dp.*`."""

    key: ClassVar[str] = "prifedsync"
    title: ClassVar[str] = "PriFedSync"

    pull: Annotated[float, Field(gt=0, le=1)] = setting(
        0.1,
        "Share of the way to the received mean by which a client's own model is moved before its local training. 1: "
        "the model is replaced by the mean, as in `fedavg`.",
    )


METHOD = Method(
    name="prifedsync",
    title="every client keeps a model, which is pulled to the mean of all; made for noisy steps",
    paper="Zheng et al., AISTATS 2021",
    sends="the client's own model",
    keeps="the model",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.prifedsync:PriFedSyncClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(PriFedSyncConfig,),
)
